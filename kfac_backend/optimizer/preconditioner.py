"""`KfacPreconditioner`: natural gradients for any optimiser of torch.

Between ``loss.backward()`` and the optimiser's step it replaces each gradient g by (F + λI)⁻¹ g,
where F is the parameter's block of the K-FAC curvature of the mean loss.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.blocks.block import KroneckerBlock, gathered_blocks
from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.likelihoods import Likelihood
from kfac_backend.optimizer.damped_inverse import (
    DampingOn,
    Inverse,
    damped_inverses,
    diverging,
    empty_inverse,
    kl_clip_factor,
    precondition,
)
from kfac_backend.optimizer.loss_check import MeanOver
from kfac_backend.optimizer.training_pass import TrainingPass
from kfac_backend.options import CurvatureOptions, Options, check_keys, check_option, check_positive
from kfac_backend.ranks import ProcessGroupOption
from kfac_backend.sharding import (
    digest,
    is_part,
    local_parts,
    local_row,
    norms_over_parts,
    part_of_whole,
    sum_over_parts,
)

STATE = (
    "made_with", "step", "covered", "weights", "damping", "generator", "constants", "blocks",
    "inverses",
)  # fmt: skip
"""Keys of `KfacPreconditioner.state_dict`."""


BATCHES = "they see the model's own calls, not the loader's batches"
UNUSED = {
    "dict_key_x": BATCHES,
    "dict_key_y": BATCHES,
    "batch": BATCHES,
    "shift_labels": "they see which outputs count by the loss's gradient",
    "unsupported": "parameters without a rule train with their plain gradients",
}
"""Options of a pass that have no effect in a training step, with the reasons."""


@dataclass(frozen=True, kw_only=True)
class PreconditionerOptions(Options):
    """Options of the preconditioner; `CurvatureOptions` has the options of the factors.

    The defaults were chosen on two small problems and compared with other optimisers on five
    (`experiments/optimizers/optimizer_comparison.py`).

    Args:
        damping: λ > 0, added to the curvature of the mean loss. Tune it first; use 0.03 or 0.1 for
            noisy factors.
        damping_on: "factors" adds √λ/π to B and π√λ to A, with π² = (tr A/d_in)/(tr B/d_out), and
            inverts both (by Cholesky, about twenty times cheaper than eigenvectors; Martens &
            Grosse 2015, section 6.3). "product" adds λ to B ⊗ A itself, exactly like a prior of
            precision N·λ.
        factor_every: number of steps between new factors.
        update_every: number of steps between new preconditioners, from the latest factors.
        ema_decay: ρ of the factors' moving average F ← ρF + (1 − ρ)F_batch, corrected for its
            start; 0 uses only the latest factors, as in the paper's experiments.
        kl_clip: κ in nats. It limits the change of the predictions by a step at the highest
            learning rate η. All preconditioned gradients p̂ of g are scaled by min(1, √(κ / (η²
            Σ⟨p̂, g⟩))) (Ba et al. 2017). `KFAC` preconditions gradients with their momentum, so κ
            applies to the whole step. None sets no limit, as in the paper. For regression the noise
            is taken as 1, so κ is in squared units of the targets.

    Raises:
        ValueError: an option is not supported.
    """

    damping: float = 0.01
    damping_on: DampingOn = "factors"
    factor_every: int = 5
    update_every: int = 5
    ema_decay: float = 0.9
    kl_clip: float | None = 0.01

    def __post_init__(self) -> None:
        check_positive("damping", self.damping)
        if self.kl_clip is not None:
            check_positive("kl_clip", self.kl_clip)
        check_option("damping_on", self.damping_on, DampingOn)
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), not {self.ema_decay}.")
        for name in ("factor_every", "update_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}.")


class KfacPreconditioner:
    """Replaces a model's gradients by natural gradients, (F + λI)⁻¹ g.

    ```python
    preconditioner = KfacPreconditioner(model, "classification", kfac_approx="reduce")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        preconditioner.step(lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
    ```

    The loss must be a mean of −log p(y|f) (``loss_mean_over``), plus any further terms. Another
    constant factor of the loss changes only the meaning of λ. With fisher="empirical" it also
    changes the factors, by its square. With gradient accumulation call `step` after the last
    backward pass: the curvature uses all batches since the last step.

    A step with new factors (``factor_every``) uses the inputs of the layers from the training's own
    forward pass. Before the training's backward pass, it propagates the vectors of the curvature
    through the same graph. By default, this is a single vector (fisher="mc" with one sample). The
    first batch is used for the proof, as in `kronecker_factors`. fisher="empirical" uses the
    training's own gradients and costs no backward pass. It does not approximate the Hessian, and it
    mixes an example's loss terms.

    Checkpoints (`torch.utils.checkpoint`, not reentrant, in train mode only) do not change the
    results. `torch.compile` of the given model, or of its parts, does not change them either; steps
    with new factors run as Python.

    With a `torch.amp.GradScaler` use `KFAC`, whose steps have unscaled gradients or are skipped,
    and fisher="mc". Factors of "empirical" would use the scaled loss: `KFAC` raises an error, but
    this class cannot detect it.

    Source: Eschenhagen et al. 2023 (arXiv:2311.00636), section 4 and the appendix on optimisation;
    Martens & Grosse 2015 (arXiv:1503.05671).

    Args:
        model: the model; see `kronecker_factors`, except that BatchNorm may be in train mode unless
            fisher="exact"; gradients then propagate through its batch statistics. Parameters
            without a rule keep their plain gradients, and one warning names them.
        likelihood: "classification", "regression" or "bernoulli", as for `kronecker_factors`.
        options: options of the preconditioner; tune damping first.
        curvature: options of the factors; fisher="mc" by default. Its options for ``unsupported``
            layers and for a loader's batches (``dict_key_x``, ``dict_key_y``, ``batch``,
            ``shift_labels``) have no effect, and raise an error as keywords. If examples have
            several loss terms or the options name a label that does not count, terms with gradient
            zero do not count.
        params: the parameters of this optimiser, if not all of the model. The gradients of all
            other parameters are unchanged, and do not count in ``kl_clip``.
        exclude: names of parameters, or patterns of them, that keep their plain gradients.
        loss_mean_over: the unit over which the loss is a mean: "terms", as in torch's losses, or
            "examples", if the terms of an example are summed.
        seed: the seed of the labels that fisher="mc" draws. It must be the same on all ranks, each
            of which draws its own labels from it.
        process_group: the ranks of `torch.distributed` that each have a part of a step's data and
            average their gradients, as `DistributedDataParallel` does. All must call `step` and
            `state_dict`, and get the same result; each stores and inverts some of the blocks.
            Except for drawn labels, the result is the same as in one process with all the data. For
            fisher="empirical" the average of the ranks' losses must then be the mean over all
            terms. Pass the model itself, not its wrapper.
        keywords: single options that override fields of ``options`` and ``curvature``:
            ``damping=0.1, kfac_approx="reduce"``.

    A parameter may be frozen or unfrozen between two steps, on all ranks alike. A frozen parameter
    has no block and does not count. After a parameter is unfrozen the next step computes new
    factors.

    Raises:
        TypeError: a keyword is not an option; the error lists all options.
        ValueError: an option is not supported, a pattern matches no parameter, or a tensor in
            ``params`` is not a parameter of the model.
        NotImplementedError: a layer has an option that its rule does not support; or, in the first
            forward pass, hooks cannot capture a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        options: PreconditionerOptions = PreconditionerOptions(),  # noqa: B008
        curvature: CurvatureOptions = CurvatureOptions(kfac_approx="expand", fisher="mc"),  # noqa: B008
        *,
        params: Iterable[nn.Parameter] | None = None,
        exclude: Sequence[str] = (),
        loss_mean_over: MeanOver = "terms",
        seed: int = 0,
        process_group: ProcessGroupOption = "default",
        **keywords: Any,
    ) -> None:
        check_module(model)
        check_option("loss_mean_over", loss_mean_over, MeanOver)
        options, curvature = with_keywords(KfacPreconditioner, options, curvature, keywords)
        self.options = options
        """Options for computing the preconditioner from factors."""
        self._model, self._exclude = model, exclude
        self._parameters = self._named(model.parameters() if params is None else params)
        preconditioned = self._not_excluded()
        if _any_trained(self._parameters) and not _any_trained(preconditioned):
            raise ValueError(
                f"exclude={exclude!r} leaves no parameter to precondition. Exclude fewer "
                "parameters, or train with another optimiser."
            )
        device = next((p.device for p in model.parameters()), "cpu")
        self._generator = torch.Generator(device).manual_seed(seed)
        self._pass = TrainingPass(
            model,
            likelihood,
            curvature,
            self._generator,
            preconditioned,
            loss_mean_over,
            process_group,
        )
        self.ranks = self._pass.driver.ranks
        """Ranks that have a part of each step's data."""
        self._step = 0
        self._damping: float | dict[str, float] = options.damping
        self._blocks: dict[str, KroneckerBlock] = {}
        # The sum of each block's weights in the moving average, 1 − ρᵏ after k batches. Division by
        # it corrects for the start at zero.
        self._weights: dict[str, float] = {}
        self._inverses: dict[str, Inverse] = {}
        self._owners: dict[str, int] = {}  # parameter -> the rank that has its inverse
        self._constants: dict[str, tuple[int, int]] = {}  # parameter -> `KroneckerBlock.constants`
        self._options_made_with = {
            "the likelihood": str(likelihood),
            "loss_mean_over": loss_mean_over,
            "damping_on": options.damping_on,
            **{f.name: repr(getattr(curvature, f.name)) for f in fields(curvature) if f.repr},
        }

    @property
    def damping(self) -> float | Mapping[str, float]:
        """λ, one for all or one for each of `names`; a new value applies from the next update on.

        With ``damping_on="product"`` a prior of precision δ adds λ = T δ/N to the curvature of the
        mean loss. If the loss includes the prior, a step is then a natural gradient step on the
        posterior, and you need not tune λ.
        """
        return self._damping

    @damping.setter
    def damping(self, damping: float | Mapping[str, float]) -> None:
        if isinstance(damping, Mapping):
            _check_has_all(damping, self.names)
            for name, value in damping.items():  # all: some may be unfrozen later
                check_positive(f"damping['{name}']", value)
            self._damping = {name: float(value) for name, value in damping.items()}
        else:
            check_positive("damping", damping)
            self._damping = float(damping)

    @property
    def names(self) -> list[str]:
        """The parameters whose gradients are preconditioned."""
        return self._pass.driver.proof.assignment.names

    @property
    def takes_loss_gradients(self) -> bool:
        """Whether factors use the training's own gradients, as with fisher="empirical"."""
        return self._pass.driver.fisher.is_loss_gradient

    @property
    def blocks(self) -> Mapping[str, KroneckerBlock]:
        """Parameter name -> block of the mean loss, in its moving average; empty at first.

        With several ranks, one of them (the owner) has the values of a block. The other ranks have
        only its shape.
        """
        return self._blocks

    def step(self, lr: float | None = None, *, checked: bool = False) -> None:
        """Replace the gradients; call it once per step of the optimiser, before it.

        Args:
            lr: the learning rate for ``kl_clip``: the highest of the schedule, the same in all
                steps. With the present rate, clipped steps would have the same length at every
                rate, and a schedule would have no effect.
            checked: whether `check_gradients` was called before, which waits for a GPU.

        Raises:
            RuntimeError: new factors are due, but there was no backward pass.
            FloatingPointError: factors or gradients are not finite; the error names the parameter.
            ValueError: the learning rate is needed but missing.
        """
        options = self.options
        if options.kl_clip is not None and lr is None:
            raise ValueError(
                f"kl_clip={options.kl_clip} needs the learning rate (the maximum of its schedule): "
                "step(lr=...). Or pass kl_clip=None."
            )
        if not checked:
            self.check_gradients()
        # Factors first, because inverses of the same step use them.
        if self._pass.is_due:
            self._average(self._pass.mean_blocks())
            constants = {name: block.constants for name, block in self._blocks.items()}
            self._constants |= {
                name: entries for name, entries in constants.items() if any(entries)
            }
        if self._step % options.update_every == 0 or self._blocks.keys() - self._owners.keys():
            self._inverses = self._new_inverses()
        with torch.no_grad():
            self._precondition(lr)
        self._step += 1
        self._pass.is_scheduled = self._step % options.factor_every == 0
        if self._pass.is_scheduled and not options.ema_decay:
            self._blocks = {}  # without a moving average the next factors replace them

    @contextmanager
    def constants_kept(self) -> Iterator[None]:
        """Context manager that restores constants, such as an embedding's padding, on exit.

        They have no gradient, but an optimiser's weight decay would change them.
        """
        rows = []
        for name, (first, _) in self._constants.items():
            p = self._parameters[name].detach()
            rows.append(local_row(p, first // p.shape[1:].numel()))
        before = [row.clone() for row in rows]
        try:
            yield
        finally:
            for row, value in zip(rows, before, strict=True):
                row.copy_(value)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager for forward passes that do not belong to the training."""
        with self._pass.paused():
            yield

    def add_params(self, params: Iterable[nn.Parameter]) -> None:
        """Precondition further parameters of the model, from the next step on.

        Raises:
            ValueError: a tensor is not a parameter of the model.
        """
        self._parameters |= self._named(params)
        self._pass.trained.parameters = self._not_excluded()

    def _named(self, params: Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return parameters by their names in the model."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        params = list(params)
        for p in params:
            if id(p) not in names:
                raise ValueError(
                    f"A tensor of shape {tuple(p.shape)} is not a parameter of the model "
                    f"({type(self._model).__name__}). K-FAC trains one model. Pass only this "
                    "model's parameters, and train others with another optimiser."
                )
        return {names[id(p)]: p for p in params}

    def _not_excluded(self) -> dict[str, nn.Parameter]:
        left_out = _matching(self._exclude, dict(self._model.named_parameters()))
        return {name: p for name, p in self._parameters.items() if name not in left_out}

    def detach(self) -> None:
        """Remove all hooks from the model; `step` cannot be used afterwards."""
        self._pass.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise a TypeError for copies, whose hooks would belong to no model."""
        raise no_copies(self)

    def __del__(self) -> None:
        # If no backward pass follows, a forward pass keeps its graph. The graph keeps the hooks,
        # and the hooks keep the model. Python's collector cannot see this cycle, because it goes
        # through C++.
        if "_pass" in vars(self):
            self._pass.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for an exact resume: only tensors, numbers and strings.

        Call it between steps, not between the backward passes of one. It is collective, brings all
        blocks and inverses to each rank, and returns the same state on all ranks, for any number of
        ranks.
        """
        device = self._generator.device
        blocks = gathered_blocks(self._blocks, self.ranks, device)
        inverses = {
            name: {
                k: torch.empty_like(t, device=device) if t.is_meta else t for k, t in one.items()
            }
            for name, one in self._inverses.items()
        }
        self.ranks.exchange_(
            (t, self._owners[n]) for n, inverse in inverses.items() for t in inverse.values()
        )
        return {
            "made_with": self._made_with(),
            "step": self._step,
            "covered": sorted(self._pass.covered),
            "weights": dict(self._weights),
            "damping": self._damping,
            "generator": self._generator.get_state(),
            "constants": dict(self._constants),
            "blocks": {
                name: {"B": block.B} if block.A is None else {"B": block.B, "A": block.A}
                for name, block in blocks.items()
            },
            "inverses": inverses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, with the same model and options; collective.

        The next steps are exactly the same as in the uninterrupted run. The damping comes from the
        state.

        Raises:
            ValueError: the state belongs to another model or other options, lacks entries or
                blocks, has another precision, or has factors that contain NaN or are not positive
                semi-definite; nothing is changed then.
            RankError: ranks have different states; nothing is changed then.
        """
        self.ranks.agree_on_state(lambda: self._check_state(state))
        self._generator.set_state(state["generator"].cpu())
        device = self._generator.device
        self._step, self._weights = int(state["step"]), dict(state["weights"])
        damping = state["damping"]
        self._damping = dict(damping) if isinstance(damping, Mapping) else float(damping)
        self._constants = {name: (first, end) for name, (first, end) in state["constants"].items()}
        self._blocks = {}
        for name, tensors in state["blocks"].items():
            own, constants = _copies(tensors, device), self._constants.get(name, (0, 0))
            self._blocks[name] = KroneckerBlock(name, own["B"], own.get("A"), constants=constants)
        costs = [sum(t.numel() for t in one.values()) for one in state["inverses"].values()]
        self._owners = dict(zip(state["inverses"], self.ranks.owners(costs), strict=True))
        self._inverses = {
            name: _copies(one, device if name in self._own else torch.device("meta"))
            for name, one in state["inverses"].items()
        }
        self._pass.reset()
        self._pass.covered = frozenset(state["covered"])
        self._pass.is_scheduled = self._step % self.options.factor_every == 0

    def _check_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Raise the error of `load_state_dict` if the state does not fit.

        It returns values that must be the same on all ranks.
        """
        check_keys("KfacPreconditioner", state, STATE)
        theirs, ours = state["made_with"], self._made_with()
        for name in dict.fromkeys([*ours, *theirs]):
            if theirs.get(name) != ours.get(name):
                raise ValueError(
                    f"The state belongs to another optimiser or K-FAC: {name} is "
                    f"{theirs.get(name)} there and {ours.get(name)} here. Load it with the same "
                    "model and options."
                )
        for name, tensors in [*state["blocks"].items(), *state["inverses"].items()]:
            dtype = torch.promote_types(self._parameters[name].dtype, torch.float32)
            for tensor in tensors.values():
                if tensor.dtype != dtype:
                    raise ValueError(
                        f"The state's factors of '{name}' are in {tensor.dtype}, but this model's "
                        f"factors are in {dtype}: the state was cast. Load it as it was saved."
                    )
        try:
            self._check_values(state)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"The state of K-FAC is damaged: {error}. Load another checkpoint, or omit the "
                "state to compute new factors in the first step."
            ) from error
        one = {"the loaded step of K-FAC": state["step"]}
        return one if self.ranks.size == 1 else one | {"the loaded state of K-FAC": digest(state)}

    def _check_values(self, state: Mapping[str, Any]) -> None:
        """Raise an error unless the blocks and inverses are complete, finite and not negative."""
        damping, blocks, inverses = (state[key] for key in ("damping", "blocks", "inverses"))
        check_positive(
            "the damping", [*damping.values()] if isinstance(damping, Mapping) else damping
        )
        check_positive("the weights of the averages", [*state["weights"].values()])
        # Without a moving average, there are no blocks before a step that makes factors.
        has_blocks = self.options.ema_decay or state["step"] % self.options.factor_every
        for name in state["weights"]:
            if name not in inverses or (has_blocks and name not in blocks):
                raise ValueError(f"'{name}' has no block or no inverse")
        for name, tensors in blocks.items():
            block = KroneckerBlock(name, tensors["B"], tensors.get("A"))
            block.check_semidefinite()
            if not block.fits(self._parameters[name].shape):
                raise ValueError(f"the block of '{name}' has another shape: {block}")
        for name, inverse in inverses.items():
            for kind, tensor in inverse.items():
                of_basis = kind.startswith("Q")
                values = tensor if kind == "spectrum" else tensor.diagonal(dim1=-2, dim2=-1)
                if not tensor.isfinite().all() or not (of_basis or (values > 0).all()):
                    raise ValueError(f"the inverse of '{name}', {kind}, is not positive and finite")

    def _made_with(self) -> dict[str, str]:
        """Return the values that a state must share with this preconditioner."""
        of_parameters = {
            f"parameter '{name}'": f"{tuple(p.shape)}, {p.dtype}"
            for name, p in self._pass.trained.parameters.items()
        }
        return self._options_made_with | of_parameters

    def _new_inverses(self) -> dict[str, Inverse]:
        """Return the damped inverse of each block by name; for other ranks' blocks only shapes."""
        blocks, on, damping = self._blocks, self.options.damping_on, self._damping
        once = self.options.update_every == 1
        # Each rank inverts the blocks that it keeps, and multiplies their gradients in each step.
        holders = self.ranks.holders([not block.is_meta for block in blocks.values()])
        owners = self.ranks.owners([block.cost for block in blocks.values()], holders)
        self._owners = dict(zip(blocks, owners, strict=True))
        own = [blocks[name] for name in self._own]
        if isinstance(damping, dict):
            _check_has_all(damping, list(blocks))
        dampings = [damping[b.name] if isinstance(damping, dict) else damping for b in own]
        with torch.no_grad():
            of_own = damped_inverses(own, dampings, on, once)
        inverses = {block.name: inverse for block, inverse in zip(own, of_own, strict=True)}
        return {n: inverses.get(n) or empty_inverse(b, on, once) for n, b in blocks.items()}

    @property
    def _own(self) -> list[str]:
        """The parameters whose inverses this rank has."""
        rank = self.ranks.rank
        return [name for name, owner in self._owners.items() if owner == rank]

    def _average(self, new: dict[str, KroneckerBlock]) -> None:
        """Update F ← ρF + (1 − ρ)F_batch for B and A, divided by the sum of the weights; in place.

        Unfrozen parameters begin with ``new``, and frozen ones are dropped.
        """
        rho, former = self.options.ema_decay, self._blocks
        self._weights = {name: rho * self._weights.get(name, 0.0) + 1 - rho for name in new}
        own = {name for name, block in new.items() if not block.is_meta}
        # With other trained parameters, blocks may have other owners.
        is_missing = any(former[name].is_meta for name in own & former.keys())
        if self.ranks.any(is_missing, self._generator.device):
            former = gathered_blocks(former, self.ranks, self._generator.device)
        self._blocks = {
            name: former.get(name, block) if rho and name in own else block
            for name, block in new.items()
        }
        by_weight = dict[float, list[str]]()
        for name, block in new.items():
            if self._blocks[name] is not block:
                by_weight.setdefault(self._weights[name], []).append(name)
        for weight, names in by_weight.items():
            averages, of_batch = (
                [F.matrix for name in names for F in blocks[name].factors.values()]
                for blocks in (self._blocks, new)
            )
            # The stored average is already divided by the sum of weights. This share of the new
            # factors preserves that.
            torch._foreach_lerp_(averages, of_batch, (1 - rho) / weight)

    def check_gradients(self) -> None:
        """Raise a FloatingPointError that names a gradient with NaN or infinity."""
        gradients = self._with_gradient()
        if not gradients:
            return
        parts = local_parts(gradients.values())
        largest = torch._foreach_norm([g for g in parts if g.numel()], ord=float("inf"))
        if not largest:  # this rank has a part of no gradient
            largest = [torch.zeros(())]
        # Use the widest dtype, because large float64 numbers would be infinite in float32.
        wide = torch.promote_types(torch.float32, max(largest, key=lambda n: n.itemsize).dtype)
        is_finite = bool(torch.stack([norm.to(wide) for norm in largest]).isfinite().all())
        if self._pass.driver.sharded:  # all ranks raise it
            is_finite = not self._pass.driver.sharded.any(not is_finite)
        if is_finite:
            return
        norms = norms_over_parts([part.norm() for part in parts], list(gradients.values()))
        finite = zip(gradients, norms, strict=True)
        wrong = next(name for name, norm in finite if not norm.isfinite())
        raise diverging(f"The gradient of '{wrong}'")

    def _with_gradient(self) -> dict[str, Tensor]:
        named = self._parameters.items()
        return {n: p.grad for n, p in named if p.requires_grad and p.grad is not None}

    def _precondition(self, lr: float | None) -> None:
        of_all, limit = self._with_gradient(), self.options.kl_clip
        by_name = {name: of_all[name] for name in self._owners if name in of_all}
        if not by_name:
            return
        if self._pass.driver.sharded:
            # One after the other, so that only one gradient is whole at a time.
            natural = []
            for name, g in by_name.items():
                gathered: Any = g.full_tensor() if is_part(g) else g  # pyright: ignore
                product = self._natural({name: gathered})[name]
                natural.append(part_of_whole(product, g) if is_part(g) else product)
        else:
            natural = list(self._natural(by_name).values())
        gradients = local_parts(by_name.values())
        # One factor for all parameters, so that the direction of the step is unchanged.
        if lr is not None and limit is not None:
            products = torch._foreach_mul(natural, gradients)
            if self._pass.driver.sharded:
                products = sum_over_parts([p.sum() for p in products], list(by_name.values()))
            products = torch.cat([product.flatten().float() for product in products])
            torch._foreach_mul_(natural, kl_clip_factor(products, lr, limit))
        torch._foreach_copy_(gradients, natural)

    def _natural(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return (F + λI)⁻¹ g of whole gradients, each from the owner of its inverse; collective.

        A step sends P numbers. Inverses would be Σ(d_in² + d_out²) ≥ 2P at each update, and would
        take this memory on each rank.
        """
        own = {name: gradients[name] for name in self._own if name in gradients}
        inverses = [self._inverses[name] for name in own]
        natural = dict(zip(own, precondition(inverses, list(own.values())), strict=True))
        if self.ranks.size > 1:
            # Send all gradients of one owner as one tensor, because most are small.
            groups: dict[tuple[int, torch.dtype], list[str]] = {}
            for name, g in gradients.items():
                groups.setdefault((self._owners[name], g.dtype), []).append(name)
            sent = {
                (owner, dtype): torch.cat([natural.get(n, gradients[n]).flatten() for n in names])
                for (owner, dtype), names in groups.items()
            }
            self.ranks.exchange_((flat, owner) for (owner, _), flat in sent.items())
            for group, names in groups.items():
                parts = sent[group].split([gradients[n].numel() for n in names])
                natural |= {
                    n: part.view_as(gradients[n]) for n, part in zip(names, parts, strict=True)
                }
        return {name: natural[name] for name in gradients}


def with_keywords(
    owner: type,
    options: PreconditionerOptions,
    curvature: CurvatureOptions,
    keywords: Mapping[str, Any],
) -> tuple[PreconditionerOptions, CurvatureOptions]:
    """Return the options with single ones changed by keywords of a class's constructor."""
    of_steps, of_curvature = ({f.name for f in fields(o)} for o in (options, curvature))
    unknown = [name for name in keywords if name not in of_steps | of_curvature]
    if unknown:
        own_options = [
            name
            for name, p in inspect.signature(owner).parameters.items()
            if p.kind is not p.VAR_KEYWORD and name not in ("model", "likelihood")
        ]
        names = own_options + [f.name for o in (options, curvature) for f in fields(o)]
        raise TypeError(f"{unknown[0]!r} is not an option; choose from {', '.join(names)}.")
    for name, why in UNUSED.items():
        if name in keywords and keywords[name] != getattr(CurvatureOptions(), name):
            raise ValueError(f"{name}={keywords[name]!r} has no effect in K-FAC's steps: {why}.")
    return (
        options.replace(**{name: v for name, v in keywords.items() if name in of_steps}),
        curvature.replace(**{name: v for name, v in keywords.items() if name in of_curvature}),
    )


def no_copies(optimizer: object) -> TypeError:
    """Return the error for copy, deepcopy and pickle."""
    name = type(optimizer).__name__
    return TypeError(
        f"{name} cannot be copied or pickled: it has hooks at its model. Make a new {name} for the "
        "copy of the model, and load this one's state_dict() into it (load_state_dict)."
    )


def _any_trained(parameters: Mapping[str, nn.Parameter]) -> bool:
    return any(p.requires_grad for p in parameters.values())


def _check_has_all(damping: Mapping[str, float], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in damping]
    if missing:
        raise ValueError(
            f"There is no damping for '{missing[0]}'. Pass one number, or one for each of the "
            f"{len(names)} preconditioned parameters (names)."
        )


def _matching(patterns: Sequence[str], names: Mapping[str, object]) -> frozenset[str]:
    """Return the names that match any pattern."""
    if isinstance(patterns, str):
        patterns = [patterns]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"exclude: no parameter matches {pattern!r}. The parameters are {', '.join(names)}."
            )
    return frozenset(n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns))


def _copies(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return copies of tensors on a device."""
    return {kind: tensor.to(device, copy=True) for kind, tensor in tensors.items()}
