"""`Laplace`: what users of laplace-torch call, by the same names, without laplace-torch.

It returns a `Posterior` with these calls: of Kronecker factors (`KronLaplace`), or of the
whole GGN, its diagonal or its largest eigenpairs (`JacobianLaplace`), for small networks, last
layers and subnetworks. Where a call means the same, its numbers are laplace-torch's;
docs/laplace-torch.md is a table of the calls, each of which is tested on both.
"""

import math
from collections.abc import Collection, Iterable
from copy import deepcopy
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import jacrev

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.engine.batches import detached, each_batch
from kfac_backend.engine.calls import call_with, plain_attention
from kfac_backend.engine.checks import check_finite
from kfac_backend.engine.padding import padding_rows
from kfac_backend.engine.task import Task, split_batch
from kfac_backend.likelihoods import Likelihood
from kfac_backend.loss import counted_terms, loss_sum
from kfac_backend.options import CurvatureOptions, PassOptions, check_keys, check_option
from kfac_backend.precision import at_least_float32
from marglik.eval_mode import in_eval_mode
from marglik.posterior.evidence import log_likelihood
from marglik.posterior.posterior import (
    NOT_FITTED,
    Posterior,
    last_layer,
    parameter_vector,
    trainable_layers,
)
from marglik.posterior.prior import Hyperparameters, PriorGroups
from marglik.prediction.links import probit_outputs

__all__ = ["JacobianLaplace", "KronLaplace", "Laplace"]

Structure = Literal["kron", "diag", "full", "lowrank"]
Subset = Literal["all", "last_layer", "subnetwork"]
PredType = Literal["glm", "nn"]
LinkApprox = Literal["probit", "mc", "bridge", "bridge_norm"]


def Laplace(  # noqa: N802  # as laplace-torch's function
    model: nn.Module,
    likelihood: Likelihood | str,
    subset_of_weights: Subset = "last_layer",
    hessian_structure: Structure = "kron",
    *,
    sigma_noise: float | Tensor = 1.0,
    prior_precision: float | Tensor = 1.0,
    temperature: float = 1.0,
    last_layer_name: str | None = None,
    subnetwork_indices: Collection[str] | Tensor = (),
    rank: int = 100,
    **options: Any,
) -> "KronLaplace":
    """A Laplace approximation with the calls of laplace-torch's; a `Posterior` in all else.

    What differs: N is the number of examples that were seen, not the length of the loader's data
    set; the model keeps its mode and its parameters through every call; a temperature T divides the
    whole log-likelihood, including regression's normaliser.

    Args:
        model: the network at its MAP parameters, which it shares; frozen ones have no posterior.
        likelihood: "classification" or "regression".
        subset_of_weights: "last_layer", "all" trainable parameters, or a "subnetwork" of these; the
            others are constants.
        hessian_structure: "kron", or from Jacobians "diag", "full" (P, P) and "lowrank".
        sigma_noise: σ of regression.
        prior_precision: δ, a scalar or one per trainable tensor; includes N.
        temperature: T of the likelihood.
        last_layer_name: of the last layer; None takes the last one that the model lists, and `fit`
            raises an error if another one runs last.
        subnetwork_indices: the subnetwork: names of its modules or parameters; or, except for
            "kron", indices of its weights in the vector of all trainable parameters.
        rank: number of eigenpairs of "lowrank".
        options: fields of `CurvatureOptions`, such as ``kfac_approx="reduce"``, of which those of
            `PassOptions` are for "kron"; ``kfac_approx`` is "expand" by default, as in
            laplace-torch.

    Raises:
        ValueError: an option that is not supported.
    """
    check_option("subset_of_weights", subset_of_weights, Subset)
    check_option("hessian_structure", hessian_structure, Structure)
    check_option("likelihood", str(likelihood), Literal["classification", "regression"])
    names, last = subnetwork_indices, ""
    if subset_of_weights == "last_layer":
        listed = trainable_layers(model)
        if not listed:
            raise ValueError(
                "All parameters of the model are frozen, and have no posterior; set "
                "requires_grad_(True) on those of its last layer."
            )
        last = last_layer_name or listed[-1]
        names = [last]
    shared, chosen = model, slice(None)
    if subset_of_weights != "all":
        if isinstance(names, Tensor):
            chosen = _checked(names, model, hessian_structure)
        else:
            shared = _with_others_frozen(model, names)
    kind = KronLaplace if hessian_structure == "kron" else JacobianLaplace
    curvature = CurvatureOptions(kfac_approx="expand").replace(**options)
    if kind is JacobianLaplace:
        for name, default in vars(PassOptions()).items():
            if options.get(name, default) != default:
                raise ValueError(
                    f"{name}={options[name]!r} is for hessian_structure='kron'; "
                    f"{hessian_structure!r} computes the exact GGN."
                )
    la = kind(
        shared,
        likelihood,
        curvature,
        sigma_noise=sigma_noise,
        prior_precision=prior_precision,
        temperature=temperature,
    )
    la.structure, la.rank = hessian_structure, rank
    if isinstance(chosen, Tensor):
        la.chosen, la.n_params = chosen, len(chosen)
    if subset_of_weights == "last_layer" and last_layer_name is None:
        la.whole, la.last = model, last
    return la


def _with_others_frozen(model: nn.Module, names: Collection[str]) -> nn.Module:
    """A copy that shares the numbers, in which what has none of these names is frozen."""
    learned, wrong = set(), set(names)
    for name, p in model.named_parameters(remove_duplicate=False):
        found = {of for of in names if not of or f"{name}.".startswith(f"{of}.")}
        learned |= {id(p)} if found else set()
        wrong -= found
    if wrong or not learned:
        raise ValueError(
            f"The model has no parameters {sorted(wrong)}; expected names of its modules or "
            "parameters, as in model.named_parameters()."
        )
    # A copy, since the user's are to stay as they are.
    parameters = {
        id(p): nn.Parameter(p.detach(), p.requires_grad and id(p) in learned)
        for p in model.parameters()
    }
    return deepcopy(model, parameters)


def _checked(indices: Tensor, model: nn.Module, structure: Structure) -> Tensor:
    """Indices of some of the trainable parameters, on their device."""
    number = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if structure == "kron":
        raise ValueError("hessian_structure='kron' has blocks of whole tensors; pass their names.")
    if indices.dim() != 1 or not len(indices) or len(indices.unique()) != len(indices):
        raise ValueError("subnetwork_indices must be different indices, in a vector.")
    if indices.min() < 0 or indices.max() >= number:
        raise ValueError(f"subnetwork_indices must be 0 to {number - 1}.")
    return indices.to(next(model.parameters()).device)


class KronLaplace(Posterior):
    """A `Posterior` of all trainable parameters with laplace-torch's calls, see `Laplace`.

    Arguments are those of `Posterior`; the factors are those of expand unless ``options`` or
    ``kfac_approx`` say otherwise. Of likelihoods other than classification and regression,
    `laplace_predictive` has the predictions.
    """

    structure: Structure = "kron"
    whole: nn.Module | None = None
    last: str = ""
    """The network, and its layer that is thought to be the last one; `fit` checks it."""
    chosen: Tensor | slice = slice(None)
    """Which parameters have a posterior; the others are constants."""
    rank: int = 100
    """Number of eigenpairs of "lowrank"."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        options: CurvatureOptions = CurvatureOptions(kfac_approx="expand"),  # noqa: B008
        **keywords: Any,
    ) -> None:
        super().__init__(model, likelihood, options, **keywords)

    def fit(self, train_loader: Iterable[Any], *args: Any, **keywords: Any) -> None:
        """Compute the curvature; arguments as `Posterior.fit`.

        Raises:
            ValueError: the last layer that the model lists does not run last.
        """
        if self.whole is not None:
            batches = iter(train_loader)
            first = next(batches)
            if batches is train_loader:  # read only once, so that the first batch must go back
                train_loader = chain([first], batches)
            x, _ = split_batch(first, self.options)
            if (ran := last_layer(self.whole, x)) != self.last:
                raise ValueError(
                    f"The model lists {self.last!r} last, but {ran!r} runs last; pass "
                    f"last_layer_name={ran!r} (or another one)."
                )
        self._fit(train_loader, *args, **keywords)

    def _fit(self, train_loader: Iterable[Any], *args: Any, **keywords: Any) -> None:
        super().fit(train_loader, *args, **keywords)

    @property
    def scatter(self) -> Tensor:
        """θ*ᵀ P₀ θ*, without entries that are constants."""
        if self.structure == "kron":
            return (self.prior_precision * self.evidence_terms.squared_norms).sum()
        return self._scatter(self.prior_precision)

    def _scatter(self, delta: Tensor) -> Tensor:
        return (self._of_parameters(delta) * self.mean[self.chosen].double().square()).sum()

    def _of_parameters(self, delta: Tensor) -> Tensor:
        """δ of each parameter that has a posterior, float64."""
        sizes = torch.tensor([p.numel() for p in self.params], device=self._device)
        delta = delta.to(self._device, torch.float64).expand(self.n_layers)
        return delta.repeat_interleave(sizes)[self.chosen]

    @property
    def log_det_ratio(self) -> Tensor:
        """Log det(H/(σ²T) + P₀) − log det P₀."""
        return 2 * (self.log_likelihood - self.log_marginal_likelihood()) - self.scatter

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: Literal["marglik", "gridsearch"] = "marglik",
        n_steps: int = 100,
        lr: float = 0.1,
        init_prior_prec: float = 1.0,
        prior_structure: Literal["scalar", "layerwise"] = "scalar",
        val_loader: Iterable[Any] | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str | None = None,
        n_samples: int = 100,
    ) -> None:
        """Set δ by Adam's steps on the evidence, or by the best of a grid on validation data.

        The grid's loss is the NLL, for regression of N(f, J Σ Jᵀ + σ²): the mean square error,
        which laplace-torch takes, is the same for all δ where the network is linearised.
        `marglik.maximize_evidence` finds the evidence's maximum instead of taking steps to it.
        """
        link_approx = _checked_link(pred_type, link_approx)
        check_option("prior_structure", prior_structure, Literal["scalar", "layerwise"])
        if method == "marglik":
            groups = PriorGroups.from_model(self.model, prior_structure)
            hyperparameters = Hyperparameters(groups, init_prior_prec, lr=lr)
            hyperparameters.update(self, n_steps)
            self.prior_precision = hyperparameters.prior_precision  # one δ, or one per tensor
            return
        if method != "gridsearch" or val_loader is None:
            raise ValueError(f"method={method!r}: 'marglik', or 'gridsearch' with a val_loader.")
        grid = torch.logspace(log_prior_prec_min, log_prior_prec_max, grid_size)
        task = Task(self.likelihood, self.options)
        losses = []
        for delta in grid:
            self.prior_precision, total, count = delta, 0.0, 0
            for batch in val_loader:
                x, y = self._input_and_targets(batch, task)
                found = self(
                    x, pred_type, link_approx=link_approx, n_samples=n_samples, diagonal_output=True
                )
                if isinstance(found, tuple):
                    variance = found[1] + self.sigma_noise.square()
                    errors = 0.5 * ((found[0] - y).square() / variance + variance.log())
                else:
                    counted = counted_terms(y, self.likelihood)
                    errors = -found[counted].log().gather(1, y[counted][:, None])
                total, count = total + errors.sum().item(), count + len(y)
            losses.append(total / count)
        self.prior_precision = grid[int(torch.tensor(losses).nan_to_num(math.inf).argmin())]

    def _input_and_targets(self, batch: Any, task: Task) -> tuple[Any, Tensor]:
        """A batch's input and the targets of its outputs, on the model's device."""
        x, y = task.split(batch)
        x, y = detached(x, self._device), detached(y, self._device)
        return x, in_eval_mode(self.model, task.targets)(self.model, x, y)

    # Predictions

    @torch.no_grad()
    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        *,
        link_approx: str | None = None,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Class probabilities (N, C); for regression means (N, C) and variances without the noise.

        Outputs (N, ..., C) have a prediction at each position.

        Args:
            x: inputs.
            pred_type: "glm", the linearised network, or "nn", the network at samples.
            link_approx: "probit", "mc", "bridge" or "bridge_norm" (Laplace bridge), for classes;
                None is "probit", and "mc" of "nn", for which there is no other.
            n_samples: number of samples, where some are drawn.
            diagonal_output: whether covariances (N, C, C) are cut down to their diagonals.
            generator: of the samples.

        Raises:
            ValueError: a prediction or a link that is not supported.
            NotImplementedError: another likelihood than classification and regression.
        """
        link_approx = _checked_link(pred_type, link_approx)
        self._check_predicts()
        is_classes = self.likelihood.name == "classification"
        if pred_type == "nn" or (is_classes and link_approx == "mc"):
            options = n_samples, diagonal_output, generator
            samples = self.predictive_samples(x, pred_type, *options)
            return samples.mean(0) if is_classes else (samples.mean(0), samples.var(0))
        f, covariance = self.output_distribution(x)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        if not is_classes:
            return f, variance if diagonal_output else covariance
        if link_approx == "probit":
            return probit_outputs(f, variance).softmax(-1)
        return _bridge(f, covariance, normalised=link_approx == "bridge_norm")

    @torch.no_grad()
    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Samples of the network's outputs, (S, N, ..., C)."""
        check_option("pred_type", pred_type, PredType)
        if pred_type == "nn":
            return self.network_outputs(self.sample(n_samples, generator), x)
        f, covariance = self.output_distribution(x)
        f = f.to(covariance)  # at least float32
        noise = torch.randn(
            f.shape[-1], n_samples, generator=generator, device=f.device, dtype=f.dtype
        )
        root = torch.linalg.cholesky(covariance)
        if diagonal_output:
            root = covariance.diagonal(dim1=-2, dim2=-1).sqrt().diag_embed()
        return f + (root @ noise).movedim(-1, 0)

    def predictive_samples(self, *args: Any, **keywords: Any) -> Tensor:
        """Samples of class probabilities, or of regression's outputs; arguments as above."""
        self._check_predicts()
        samples = self.functional_samples(*args, **keywords)
        return samples.softmax(-1) if self.likelihood.name == "classification" else samples

    def _check_predicts(self) -> None:
        if self.likelihood.name not in ("classification", "regression"):
            raise NotImplementedError(
                f"laplace-torch's predictions do not know likelihood '{self.likelihood}'; use "
                "marglik.laplace_predictive(la)(x)."
            )

    def state_dict(self) -> dict[str, Any]:
        """All of the fit but the network, for `torch.save`; `torch.load` reads it by default."""
        names = ("prior_precision", "sigma_noise", "mean")
        names = *names, "structure"
        return {name: getattr(self, name) for name in names} | {"fit": self._fit_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the network at the same parameters.

        Raises:
            ValueError: the network's parameters or the likelihood are others, or the parameters are
                in another precision; a state of another structure, or that lacks entries. Nothing
                is changed then.
        """
        keys = "prior_precision", "sigma_noise", "mean", "structure", "fit"
        check_keys("Laplace", state, keys)
        if state["structure"] != self.structure:
            raise ValueError(
                f"The state has hessian_structure={state['structure']!r}, and this Laplace "
                f"{self.structure!r}; make it with that of the state."
            )
        here, there = parameter_vector(self.params).detach(), state["mean"]
        if here.dtype != there.dtype:
            raise ValueError(
                f"The state is of a model in {there.dtype}, and this one is in {here.dtype}; "
                "convert the model first (model.to(dtype))."
            )
        if here.shape != there.shape or not torch.equal(here, there.to(here)):
            raise ValueError(
                "The state is of other parameters than the model has; load them first."
            )
        self._restore_fit(state["fit"])  # which refuses what is not whole
        self.prior_precision, self.sigma_noise = state["prior_precision"], state["sigma_noise"]
        self._take_weights()

    def _fit_state(self) -> dict[str, Any]:
        return self.fitted_factors().state_dict()

    def _restore_fit(self, state: dict[str, Any]) -> None:
        factors = KroneckerFactors.from_state_dict(state).to(self._device)
        likelihood = factors.likelihood  # with the parameters of the fit
        if likelihood.name != self.likelihood.name:
            raise ValueError(
                f"The state is of likelihood '{likelihood}', and this is of '{self.likelihood}'; "
                "create it with the same."
            )
        self.likelihood = likelihood
        self.restore(factors)


OF_FIT = ("H", "loss", "n_data", "n_targets", "n_outputs", "mean", "n_params")
"""What a fit of `JacobianLaplace` has found, besides which entries have a posterior."""


class JacobianLaplace(KronLaplace):
    """The same with the GGN H = Σ_n J_nᵀ Λ_n J_n (P, P), its diagonal, or its largest eigenpairs.

    From Jacobians J_n (C, P), so that P is a few thousand at the most for the whole GGN. "lowrank"
    holds rows R (K, P) with Rᵀ R ≈ H, which batches are added to, and cut to the K largest
    eigenpairs after each: H itself if it has no more, and otherwise less than it, so that variances
    and evidence are too large. Source: Ross et al. 2008, "Incremental learning for robust visual
    tracking".
    """

    H: Tensor | None = None
    """The GGN at σ = T = 1, a sum over the data: (P, P); (P,) for "diag"; R for "lowrank"."""
    n_targets: int = 0
    """Number of scalars in all targets, N·C with one loss term per example."""

    def _fit(
        self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool = False
    ) -> None:
        """Compute H at the model's current parameters; N is the number of examples seen."""
        if not override:
            raise ValueError(
                "override=False is for hessian_structure='kron'; fit all data at once."
            )
        self.mean, self.loss = parameter_vector(self.params).detach(), 0.0
        self.n_data = self.n_targets = 0
        H = torch.zeros((), device=self._device, dtype=torch.float64)
        x: Any = None
        if self.structure == "lowrank":
            H = H.new_zeros(0, self.n_params)
        task = Task(self.likelihood, self.options)
        for batch in each_batch(train_loader, "Fitting", progress_bar):
            x, y = self._input_and_targets(batch, task)
            f, J = self._jacobians(x)  # (N, ..., C), (N, ..., C, P)
            task.check(f, y)
            task.look_at(f)
            self.n_data, self.n_outputs = self.n_data + len(f), f.shape[-1]
            # From here on (M, C), (M, ...) and (M, C, P) of the M loss terms that count: the loss
            # is a sum over them, and so is the GGN.
            f, y, J = f.flatten(0, -2), y.flatten(0, f.dim() - 2), J.flatten(0, -3)
            counted = counted_terms(y, self.likelihood)
            if counted is not None:
                f, y, J = f[counted], y[counted], J[counted]
            S = torch.stack([*self.likelihood.root(at_least_float32(f), y)])  # (V, M, C)
            G = torch.einsum("vmc,mcp->vmp", S, J.to(S)).flatten(0, 1).double()
            if self.structure == "lowrank":
                rows = torch.cat([H, G])
                H = torch.linalg.eigh(rows @ rows.mT)[1].mT[-self.rank :] @ rows
            else:
                H = H + (G.mT @ G if self.structure == "full" else G.square().sum(0))
            self.loss += loss_sum(f, y, self.likelihood).item()
            self.n_targets += f.numel()
        if not self.n_data:
            raise ValueError("The data is empty: the loader yields no batch.")
        # Padding of an embedding is a constant, and so has neither curvature nor prior.
        padding = in_eval_mode(self.model, padding_rows)(self.model, x)
        if padding:
            keep = self._are_parameters(padding)
            H = H[keep][:, keep] if self.structure == "full" else H[..., keep]
            self.chosen = self._indices()[keep]
            self.n_params = len(self.chosen)
        self.H = H
        self._take_weights()
        self.calibrations = {}

    def _indices(self) -> Tensor:
        """Of the entries that have a posterior, in the vector of all trainable ones."""
        return torch.arange(len(self.mean), device=self._device)[self.chosen]

    def _are_parameters(self, padding: dict[str, int]) -> Tensor:
        """A mask of the entries that have a posterior: those that are no padding."""
        trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        masks = {n: torch.ones_like(p, dtype=torch.bool) for n, p in trainable.items()}
        for name, row in padding.items():
            masks[name][row] = False
        return parameter_vector(masks.values())[self.chosen]

    def fitted_factors(self) -> KroneckerFactors:
        """There are none.

        Raises:
            NotImplementedError: always; it says which calls there are.
        """
        raise NotImplementedError(
            f"hessian_structure={self.structure!r} has no Kronecker factors, and laplace-torch's "
            "calls alone; for marglik's (laplace_predictive, calibrate, save_posterior) take "
            "'kron'."
        )

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """The log marginal likelihood (nats, a sum over the data), as `Posterior`'s."""
        if prior_precision is not None:
            self.prior_precision = prior_precision.detach()
        if sigma_noise is not None:
            self.sigma_noise = sigma_noise.detach()
        sigma = self.sigma_noise if sigma_noise is None else sigma_noise
        delta = self.prior_precision if prior_precision is None else prior_precision
        found = self._log_det_ratio(self._of_parameters(delta), sigma) + self._scatter(delta)
        return self._log_likelihood(sigma) - 0.5 * found

    @property
    def log_likelihood(self) -> Tensor:
        """Log p(D|θ*) / T (nats, a sum over the data)."""
        return self._log_likelihood(self.sigma_noise)

    def _log_likelihood(self, sigma: Tensor) -> Tensor:
        of_data = self.loss, self.n_targets, self.likelihood
        return log_likelihood(*of_data, sigma, self.temperature)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Samples θ of the posterior, parameter vectors (S, P)."""
        H, delta = self._scaled()
        eps = torch.randn(
            n_samples, self.n_params, device=self._device, dtype=self._dtype, generator=generator
        )
        if self.structure == "diag":
            changes = eps * (H + delta).rsqrt().to(eps)
        elif self.structure == "full":
            covariance = self._times_covariance(torch.eye(self.n_params).to(eps))
            changes = eps @ torch.linalg.cholesky(covariance).mT
        else:  # Σ x of vectors x whose covariance is the precision Rᵀ R + P₀
            more = torch.randn(
                n_samples, len(H), device=self._device, dtype=self._dtype, generator=generator
            )
            changes = self._times_covariance(eps * delta.sqrt().to(eps) + more @ H.to(eps))
        samples = self.mean.repeat(n_samples, 1)
        samples[:, self.chosen] += changes
        return samples

    def output_distribution(  # pyright: ignore[reportIncompatibleMethodOverride]  # of all layers
        self, x: Any
    ) -> tuple[Tensor, Tensor]:
        """Outputs f (N, ..., C) and covariances J Σ Jᵀ (N, ..., C, C) of the linearised network."""
        f, J = self._jacobians(x)
        return f, self._times_covariance(J) @ J.mT

    def _jacobians(self, x: Any) -> tuple[Tensor, Tensor]:
        """Outputs f (N, ..., C) and their Jacobians J (N, ..., C, P)."""
        x = detached(x, self._device)

        def outputs(vector: Tensor) -> tuple[Tensor, Tensor]:
            f = call_with(self.model, self.named(vector), x)
            return f, f

        at = parameter_vector(self.params).detach()
        with plain_attention():
            J, f = in_eval_mode(self.model, jacrev(outputs, has_aux=True))(at)
        check_finite(self.model, f, x)
        return f.detach(), J.detach()[..., self.chosen]

    def _scaled(self, sigma: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """H/(σ²T), of "lowrank" its rows, and δ of each parameter."""
        if self.H is None:
            raise AttributeError(NOT_FITTED)
        self.check_weights()
        sigma = self.sigma_noise if sigma is None else sigma
        scale = 1 / (sigma.double().square() * self.temperature)
        scale = scale.sqrt() if self.structure == "lowrank" else scale
        return scale * self.H, self._of_parameters(self.prior_precision)

    def _log_det_ratio(self, delta: Tensor, sigma: Tensor) -> Tensor:
        """Log det(H/(σ²T) + P₀) − log det P₀."""
        H, _ = self._scaled(sigma)
        if self.structure == "diag":
            return (H / delta).log1p().sum()
        if self.structure == "full":
            return torch.linalg.slogdet(H + torch.diag(delta))[1] - delta.log().sum()
        return torch.linalg.slogdet(torch.eye(len(H)).to(H) + (H / delta) @ H.mT)[1]

    def _times_covariance(self, J: Tensor) -> Tensor:
        """J Σ of rows (..., P), with Σ = (H/(σ²T) + P₀)⁻¹."""
        H, delta = self._scaled()
        if self.structure == "diag":
            return J / (H + delta).to(J)
        if self.structure == "full":
            return J @ torch.linalg.inv(H + torch.diag(delta)).to(J)
        # Woodbury's identity, with (K, K) systems.
        right = torch.linalg.solve(torch.eye(len(H)).to(H) + (H / delta) @ H.mT, H / delta)
        rows = J.double() / delta
        return (rows - (rows @ H.mT) @ right).to(J)

    def _fit_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OF_FIT} | {"chosen": self._indices()}

    def _restore_fit(self, state: dict[str, Any]) -> None:
        check_keys("Laplace's fit", state, [*OF_FIT, "chosen"])
        for name, value in state.items():
            setattr(self, name, value)


def _checked_link(pred_type: str, link_approx: str | None) -> str:
    """The link of predictions; "nn" has only "mc".

    Raises:
        ValueError: a prediction or a link that is not supported.
    """
    check_option("pred_type", pred_type, PredType)
    if link_approx is None:
        return "mc" if pred_type == "nn" else "probit"
    links = Literal["mc"] if pred_type == "nn" else LinkApprox
    check_option(f"pred_type={pred_type!r} with link_approx", link_approx, links)
    return link_approx


def _bridge(f: Tensor, covariance: Tensor, normalised: bool) -> Tensor:
    """Class probabilities by the Laplace bridge: the mean of a Dirichlet with these logits.

    Source: Hobbhahn, Kristiadi & Hennig 2022 (arXiv:2003.01227); ``normalised`` is laplace-torch's
    correction of the variance.
    """
    C, rows = f.shape[-1], covariance.sum(-1)  # (N, ..., C)
    total = rows.sum(-1, keepdim=True)  # (N, ..., 1)
    # Step 1: condition on Σ_c f_c = 0, which the softmax does not see.
    f = f - rows * f.sum(-1, keepdim=True) / total
    variance = covariance.diagonal(dim1=-2, dim2=-1) - rows.square() / total
    if normalised:
        scale = variance.mean(-1, keepdim=True) / (C / 2) ** 0.5
        f, variance = f / scale.sqrt(), variance / scale
    # Step 2: the Dirichlet's parameters.
    alpha = (1 - 2 / C + f.exp() / C**2 * (-f).exp().sum(-1, keepdim=True)) / variance
    return (alpha / alpha.sum(-1, keepdim=True)).nan_to_num(1.0)
