"""The prior: groups of parameters with one precision each, learned by the evidence.

`add_penalty` adds the prior's gradient in a step, the gradient of ½ Σ_g wd_g ‖θ_g‖².

The prior is θ ~ N(0, P₀⁻¹) with one precision δ per group on the diagonal of P₀. In a training loss
that is a mean over N examples, with likelihood temperature T, precision δ acts as the weight decay
T·δ/N.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from kfac_backend.blocks.spectrum import Spectra
from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.options import check_keys, check_option, check_positive
from kfac_backend.sharding import local_parts, norms_over_parts, with_local_parts, without_row
from marglik.posterior.evidence import EvidenceTerms
from marglik.posterior.posterior import Posterior

PriorStructure = Literal["per_tensor", "scalar", "per_type", "per_child"]
UpdateMethod = Literal["adam", "mackay"]
Number = TypeVar("Number", float, Tensor)

# MacKay's fixed point δ = γ/‖θ‖² is infinite for a group whose parameters are all zero, and 0 for
# one that the data ignores. These bounds are far outside the precisions of trained networks.
SMALLEST_PRECISION, LARGEST_PRECISION = 1e-6, 1e10


def weight_decay_to_precision(
    weight_decay: Number, num_data: float, temperature: float = 1.0
) -> Number:
    """Return δ = weight decay · N / T, the prior precision for a likelihood of N examples."""
    return weight_decay * num_data / temperature


def precision_to_weight_decay(
    prior_precision: Number, num_data: float, temperature: float = 1.0
) -> Number:
    """Return the weight decay T·δ/N for a loss that is a mean over examples; coupled, as in SGD."""
    return prior_precision * temperature / num_data


def add_penalty(
    parameters: list[nn.Parameter],
    weight_decays: Sequence[float],
    scale: Tensor | float,
    padding: Mapping[int, int],
    *,
    with_value: bool = False,
) -> Tensor | float | None:
    """Add scale · wd · θ to the gradients, with fewer operations than autograd.

    ``padding`` maps the index of a parameter to its constant row, which has no prior. The gradients
    do not need the value ½ Σ wd ‖θ‖², so it is returned only ``with_value``, on a GPU as a tensor.
    """
    values = local_parts(parameters)
    for i, row in padding.items():
        values[i] = without_row(parameters[i], row)
    of_parameters = [p.grad for p in parameters]
    own = iter(local_parts(g for g in of_parameters if g is not None))
    present = [None if g is None else next(own) for g in of_parameters]
    if values[0].is_cpu:
        # Like a weight decay in torch's SGD: this takes a quarter of the time of its foreach
        # functions, which are loops here. In place, unless two parameters share a gradient, as
        # after a compiled backward pass.
        addresses = [g.data_ptr() for g in present if g is not None and not g.is_sparse]
        out = torch.Tensor.add_ if len({*addresses}) == len(addresses) else torch.Tensor.add
        pulls, scale = [], float(scale)
        for g, value, wd in zip(present, values, weight_decays, strict=True):
            if g is None or g.is_sparse:  # sparse for embeddings; the prior makes it dense
                pull = value * (wd * scale)
                pulls.append(pull if g is None else pull + g)
            else:
                pulls.append(out(g, value, alpha=wd * scale))
    else:
        pulls = torch._foreach_mul(values, list(weight_decays))
        torch._foreach_mul_(pulls, scale)
        summed = [(pull, g) for pull, g in zip(pulls, present, strict=True) if g is not None]
        if summed:
            torch._foreach_add_(*map(list, zip(*summed, strict=True)))
    # A parameter that does not affect the loss still has its prior.
    gradients = with_local_parts(parameters, pulls)
    for p, former, gradient in zip(parameters, of_parameters, gradients, strict=True):
        if gradient is not former:
            p.grad = gradient
    if not with_value:
        return None
    norms = norms_over_parts(torch._foreach_norm(values), parameters)
    if norms[0].device.type == "cpu":
        return 0.5 * sum(wd * float(n) ** 2 for n, wd in zip(norms, weight_decays, strict=True))
    weighted = torch._foreach_mul(norms, [wd**0.5 for wd in weight_decays])
    return 0.5 * torch.stack(weighted).square().sum()


def parameter_kind(parameter: Tensor) -> str:
    """Return 'scalars' for one entry, else 'weights' (2+ axes) or 'biases'."""
    if parameter.numel() == 1:
        return "scalars"
    return "weights" if parameter.dim() > 1 else "biases"


@dataclass(frozen=True)
class PriorGroups:
    """The groups of parameter tensors that share a prior precision; values of groups are (G,)."""

    names: tuple[str, ...]
    """Group names, (G,)."""
    index: tuple[int, ...]
    """Index of the group of each trainable tensor, in ``parameters()`` order."""

    @classmethod
    def from_model(
        cls, model: nn.Module, structure: PriorStructure | Mapping[str, str] = "per_tensor"
    ) -> "PriorGroups":
        """Group the trainable parameters of a model.

        Args:
            model: the model.
            structure: "per_tensor", one group per tensor; "scalar", one group for all; "per_type",
                groups for weights, biases and scalars; "per_child", one group per top-level child
                of the model. Or rules, group name -> shell pattern of parameter names ("stage1.*");
                the first matching rule applies.

        Raises:
            ValueError: the structure is unknown, or a rule matches no parameter, or a parameter no
                rule.
        """
        check_module(model)
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError(
                "The model has no trainable parameter, so there is nothing to put a prior on. Set "
                "requires_grad_(True) on some."
            )
        if isinstance(structure, Mapping):
            labels = [_first_match(name, structure) for name in trainable]
            unused = [group for group in structure if group not in labels]
            if unused:
                raise ValueError(
                    f"Prior group '{unused[0]}' ({structure[unused[0]]!r}) matches no parameter, "
                    "or only parameters of earlier groups. Remove it, or change the order of the "
                    "groups."
                )
        else:
            check_option("structure", structure, PriorStructure)
            match structure:
                case "per_tensor":
                    labels = list(trainable)
                case "scalar":
                    labels = ["all"] * len(trainable)
                case "per_type":
                    labels = [parameter_kind(p) for p in trainable.values()]
                case "per_child":
                    labels = [name.split(".")[0] for name in trainable]
        names = tuple(dict.fromkeys(labels))
        return cls(names, tuple(map(names.index, labels)))

    def per_tensor(self, values: Tensor) -> Tensor:
        """Return values of groups (G,) as one value per tensor, as a posterior needs them."""
        return values[list(self.index)]

    def sum_over_tensors(self, values: Tensor) -> Tensor:
        """Return one value per tensor summed within its group: (G,)."""
        index = torch.tensor(self.index, device=values.device)
        return values.new_zeros(len(self.names)).index_add(0, index, values)

    def summary(self, values: Tensor) -> dict[str, float]:
        """Return values by group name."""
        return dict(zip(self.names, values.tolist(), strict=True))


def _first_match(name: str, rules: Mapping[str, str]) -> str:
    for group, pattern in rules.items():
        if fnmatchcase(name, pattern):
            return group
    raise ValueError(
        f"No prior group matches parameter '{name}'. Add a last group with pattern '*'."
    )


class Hyperparameters:
    """log δ of each group and log σ, in float64 on the CPU, with their optimiser.

    The object outlives the posteriors: each update fits a new posterior and continues from the
    values of the last update, with the same state of Adam.

    Args:
        groups: the groups of the tensors.
        prior_precision: initial δ, one number or one per group; includes N.
        sigma_noise: initial σ.
        learn_sigma_noise: whether σ is learned (regression).
        method: "adam", gradient steps on the logarithms; "mackay", the fixed point δ = γ / ‖θ‖², σ²
            = 2·loss / (number of targets − Σγ), of MacKay 1992, "Bayesian interpolation".
        lr: Adam's step size on the logarithms.

    Raises:
        ValueError: precisions are not positive, or their number differs from the number of groups.
    """

    def __init__(
        self,
        groups: PriorGroups,
        prior_precision: float | Sequence[float] | Tensor,
        *,
        sigma_noise: float = 1.0,
        learn_sigma_noise: bool = False,
        method: UpdateMethod = "adam",
        lr: float = 0.1,
    ) -> None:
        delta = torch.as_tensor(prior_precision, dtype=torch.float64).detach().flatten().cpu()
        if len(delta) not in (1, len(groups.names)):
            raise ValueError(
                f"prior_precision has length {len(delta)}. Pass 1 or {len(groups.names)} values, "
                "one per group "
                f"({', '.join(groups.names[:4])}{', ...' * (len(groups.names) > 4)})."
            )
        check_positive("prior_precision", delta)
        check_positive("sigma_noise", sigma_noise)
        check_positive("The hyperparameters' learning rate", lr)
        check_option("method", method, UpdateMethod)
        self.groups = groups
        self.method = method
        self.learn_sigma_noise = learn_sigma_noise
        self._log_delta = delta.expand(len(groups.names)).log()
        self._log_sigma = torch.tensor(sigma_noise, dtype=torch.float64).log()
        learned = [self._log_delta] + [self._log_sigma] * learn_sigma_noise
        self._adam = torch.optim.Adam(learned, lr=lr)
        self.lr = lr

    @property
    def prior_precision(self) -> Tensor:
        """δ per group, (G,), detached."""
        return self._log_delta.detach().exp()

    @property
    def sigma_noise(self) -> Tensor:
        """σ, a scalar, detached."""
        return self._log_sigma.detach().exp()

    def set(self, prior_precision: Tensor, sigma_noise: Tensor) -> None:
        """Replace the values; Adam's state is unchanged."""
        with torch.no_grad():
            self._log_delta.copy_(prior_precision.log())
            self._log_sigma.copy_(sigma_noise.log())

    def state_dict(self) -> dict[str, Any]:
        """Return the values and Adam's state."""
        return {
            "log_delta": self._log_delta.detach().clone(),
            "log_sigma": self._log_sigma.detach().clone(),
            "adam": self._adam.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`, for the same groups, method and step size.

        Raises:
            ValueError: the state lacks entries, has other groups, or was cast to another dtype.
        """
        check_keys("the hyperparameters", state, ("log_delta", "log_sigma", "adam"))
        own = {"log_delta": self._log_delta, "log_sigma": self._log_sigma}
        for name, value in own.items():
            there, here = (f"{tuple(t.shape)} in {t.dtype}" for t in (state[name], value))
            if there != here:
                raise ValueError(
                    f"The state's {name!r} is {there}, but here it is {here}. Load the state as it "
                    "was saved, with the same groups."
                )
        self._adam.load_state_dict(state["adam"])  # it rejects other groups
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(state[name])

    @torch.no_grad()
    def settle_noise(self, terms: EvidenceTerms, temperature: float) -> float:
        """Set σ to its fixed point at the present δ; return the evidence (nats) there.

        σ² = 2·loss / (number of targets − T Σγ(σ)), as in `update`; Adam's steps approach it. If
        the parameters determine at least half of the targets, σ is unchanged.

        Args:
            terms: evidence terms of a fitted posterior.
            temperature: T.
        """
        T, device = temperature, terms.squared_norms.device
        groups = torch.tensor(self.groups.index)[terms.tensors.cpu()]
        delta = self._log_delta.exp()[groups].to(device)
        for _ in range(100):
            gamma = terms.effective_parameters(delta, self._log_sigma.exp().to(device), T).sum()
            free = terms.num_targets - T * gamma.item()
            if free < terms.num_targets / 2:
                break
            before = self._log_sigma.item()
            self._log_sigma.fill_(math.log(2 * terms.loss / free) / 2)
            if abs(self._log_sigma.item() - before) < 1e-6:
                break
        sigma = self._log_sigma.exp().to(device)
        return terms.log_marginal_likelihood(delta, sigma, T).item()

    @torch.no_grad()
    def update(
        self,
        terms: EvidenceTerms,
        steps: int,
        temperature: float,
        largest: Tensor | None = None,
        pull: Tensor | None = None,
    ) -> list[float]:
        """Make steps that increase the evidence; return it (nats) before each step and at the end.

        Args:
            terms: evidence terms of a fitted posterior, see `Posterior.evidence_terms`.
            steps: number of steps.
            temperature: T.
            largest: upper bound on δ of each group, (G,).
            pull: addition to the gradient of −evidence in log δ of each group (nats), (G,); for
                Adam.

        Raises:
            FloatingPointError: the evidence is not finite.
        """
        evidences, T, device = [], temperature, terms.squared_norms.device
        groups = torch.tensor(self.groups.index)[terms.tensors.cpu()]  # group of each block
        zeros = torch.zeros_like(self._log_delta)
        for step in range(steps + 1):
            if largest is not None and step:
                self._log_delta.copy_(torch.minimum(self._log_delta, largest.log()))
            delta = self._log_delta.exp()[groups].to(device)  # δ of each block
            sigma = self._log_sigma.exp().to(device)
            evidences.append(terms.log_marginal_likelihood(delta, sigma, T).item())
            if step == steps:
                break
            if self.method == "adam":
                in_blocks, in_sigma = terms.gradient(delta, sigma, T)
                self._log_delta.grad = zeros.index_add(0, groups, -in_blocks.cpu())
                if pull is not None:
                    self._log_delta.grad += pull
                if self.learn_sigma_noise:
                    self._log_sigma.grad = -in_sigma.cpu()
                self._adam.step()
                continue
            gamma, norms = (
                zeros.index_add(0, groups, numbers.cpu())
                for numbers in (terms.effective_parameters(delta, sigma, T), terms.squared_norms)
            )
            fixed_point = gamma / norms.clamp(min=torch.finfo(norms.dtype).tiny)  # no 0/0
            self._log_delta.copy_(fixed_point.clamp(SMALLEST_PRECISION, LARGEST_PRECISION).log())
            if self.learn_sigma_noise:
                free = (terms.num_targets / T - gamma.sum()).clamp(min=1e-3)
                self._log_sigma.copy_((2 * terms.loss / T / free).log() / 2)
        return evidences


def update_prior(
    hyperparameters: Hyperparameters,
    posterior: Posterior,
    data: Iterable[Any],
    num_data: int | None = None,
    steps: int = 10,
    *,
    is_sample: bool = False,
    repeat_proof: bool = True,
    largest: Callable[[Posterior], Tensor | None] | None = None,
    settles_noise: bool = False,
    pull: Callable[[Posterior], Tensor | None] | None = None,
    num_vectors: float | None = None,
    progress: bool = False,
) -> tuple[list[float], dict[str, Any]]:
    """Fit a posterior, then make hyperparameter steps that increase its evidence.

    `PriorLearner` calls this function. Call it directly if your code holds the hyperparameters. It
    is collective with several ranks.

    Args:
        hyperparameters: prior precisions and noise; changed in place.
        posterior: fitted here; gets the new hyperparameters.
        data: batches for the curvature pass; with several ranks this rank's shard.
        num_data: N, the expected number of examples of all ranks; None uses the number that the
            pass has read.
        steps: number of hyperparameter steps.
        is_sample: whether the data is a sample that stands for ``num_data`` examples.
        repeat_proof: see `Posterior.fit`.
        largest: function from the fitted posterior to an upper bound on δ of each group, (G,); None
            means no bound, also as the returned value.
        settles_noise: whether σ ends at its fixed point, if it is learned.
        pull: function from the fitted posterior to an addition to the gradient of −evidence in log
            δ of each group, (G,); None means no addition, also as the returned value.
        num_vectors: number of backward vectors of the pass, to estimate the log determinants and γ
            of all data from the Kronecker factors of a sample, see
            `kfac_backend.blocks.spectrum.SampleCorrection`. The steps and the record then use these
            estimates. The posterior itself is unchanged. None uses the sample's own values.
        progress: whether to show a progress bar over the batches.

    Returns:
        The evidence (nats, a sum over the data) before each step and after the last; and the record
        of the update, with the seconds of the pass, of the eigenvalues and of the steps.

    Raises:
        ValueError: the pass read another number of examples than ``num_data``.
        FloatingPointError: the evidence is not finite.
    """
    ranks, device, T = posterior.ranks, posterior.mean.device, posterior.temperature
    start = _now(device)
    stands_for = num_data if is_sample else None
    posterior.fit(data, progress_bar=progress, stands_for=stands_for, repeat_proof=repeat_proof)
    # The weight decays T·δ/N of the steps and the evidence must use the same N.
    if num_data is not None and posterior.n_data != num_data:
        raise ValueError(
            f"The curvature pass read {posterior.n_data} examples, but the loader's length "
            f"promises {num_data}. Correct its length. A collate_fn must neither omit nor repeat "
            "examples."
        )
    num_data = int(posterior.n_data)
    fitted = _now(device)
    pulls = None if pull is None else pull(posterior)  # first: may compute eigenvalues
    terms = posterior.evidence_terms  # including the eigenvalues, which all steps share
    factors, M = posterior.factors, posterior.sample_size
    if num_vectors is not None and factors is not None and M is not None:
        spectra = Spectra.of(factors.blocks.values(), (M / num_data, num_vectors))
        terms = replace(terms, spectra=spectra)
    decomposed = _now(device)
    limits = None if largest is None else largest(posterior)
    evidences = hyperparameters.update(terms, steps, T, limits, pulls)
    if settles_noise and hyperparameters.learn_sigma_noise:
        evidences[-1] = hyperparameters.settle_noise(terms, T)
    if ranks.size > 1:
        # All ranks have taken the same steps, but another processor may round differently, and
        # ranks with different weight decays would drift apart.
        evidences, state = ranks.gather((evidences, hyperparameters.state_dict()))[0]
        hyperparameters.load_state_dict(state)
    groups, delta = hyperparameters.groups, hyperparameters.prior_precision
    posterior.prior_precision = groups.per_tensor(delta)
    posterior.sigma_noise = hyperparameters.sigma_noise
    end = _now(device)

    likelihood, factors = posterior.likelihood, posterior.factors
    weight_decay = precision_to_weight_decay(delta, num_data, T)
    names = terms.names
    block_precision = posterior.prior_precision.double()[terms.tensors]
    gamma = terms.effective_parameters(block_precision, posterior.sigma_noise, T)
    gamma = terms.sum_over_blocks(gamma, range(len(names)))
    record: dict[str, Any] = {
        "evidence_before": evidences[0],
        "evidence": evidences[-1],
        "evidence_per_example": evidences[-1] / num_data,
        "prior_precision": groups.summary(delta),
        "weight_decay": groups.summary(weight_decay),
        "effective_parameters": dict(zip(names, gamma.tolist(), strict=True)),
        "clipped_eigenvalues": 0 if factors is None else factors.num_clipped(),
        "seconds": {
            "pass": fitted - start,
            "eigenvalues": decomposed - fitted,
            "steps": end - decomposed,
        },
    }
    if likelihood.has_sigma:
        record["sigma_noise"] = hyperparameters.sigma_noise.item()
    if likelihood.parameters:
        record["likelihood"] = str(likelihood)
    return evidences, record


def _now(device: torch.device) -> float:
    """Return the seconds on a clock, after the device has finished its work so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
