"""`KfacPreconditioner`: natural gradients for any optimiser of torch.

Between ``loss.backward()`` and the optimiser's step it replaces each gradient g by (F + λI)⁻¹ g,
where F is the parameter's block of the K-FAC curvature of the mean loss.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.blocks.eigen import map_on_cores
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.model.checks import check_module
from kfac_backend.optimizer.damped_inverse import (
    Inverse,
    clip_factor,
    damped_inverse,
    diverging,
    empty_inverse,
    kl_clip_factor,
    precondition,
)
from kfac_backend.optimizer.options import PreconditionerOptions, interval_at
from kfac_backend.optimizer.training_pass import MeanOver, TrainingPass
from kfac_backend.options import (
    CurvatureOptions,
    Likelihood,
    check_option,
    check_positive,
)
from kfac_backend.precision import at_least_float32
from kfac_backend.ranks import ProcessGroupOption, Ranks

__all__ = ["KfacPreconditioner"]

KL_CLIPS = ("kl_clip", "peak_kl_clip")


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

    The loss is taken to be a mean of −log p(y|f) (``mean_over``), plus any further terms. Another
    constant factor of the loss changes only the meaning of λ. With gradient accumulation call
    `step` after the last backward pass: the curvature is that of all batches since the last step.

    In a step with new factors (``factor_every``) the training's own forward pass shows the layers'
    inputs. Before the training's backward pass the vectors of the curvature go back through the
    same graph: a single one for fisher="mc" with one sample, the default here. The first batch is
    proved on as in `kronecker_factors`. fisher="empirical" takes the training's own gradients and
    costs no backward pass; it does not approximate the Hessian, and it mixes an example's loss
    terms.

    Checkpoints (`torch.utils.checkpoint`, not reentrant, in train mode only) change no number, and
    neither does `torch.compile` of the model that is given here, or of its parts: steps with new
    factors run as Python.

    With a `torch.amp.GradScaler` the gradients may stay scaled, unless ``norm_control`` clips: then
    call ``scaler.unscale_(optimizer)`` before. Use fisher="mc" with a scaler, since factors of
    "empirical" would be those of the scaled loss. In all cases pass error_if_nonfinite=False, as
    the scaler itself skips steps with such gradients.

    Source: Eschenhagen et al. 2023 (arXiv:2311.00636), section 4 and the appendix on optimisation;
    Martens & Grosse 2015 (arXiv:1503.05671).

    Args:
        model: the model; see `kronecker_factors`, except that BatchNorm may be in train mode
            unless fisher="exact"; gradients then go back through its batch statistics.
            Parameters without a rule keep their plain gradients, and one warning names them.
        likelihood: "classification", "regression" or "bernoulli", as of `kronecker_factors`.
        options: how factors become a preconditioner; damping first.
        curvature: how factors are made; fisher="mc" by default. If examples have several loss terms
            or the options name a label that does not count, terms with gradient zero are taken
            for such.
        exclude: names of parameters, or patterns of them, that keep their plain gradients.
        mean_over: "terms", as torch's losses are, or "examples", whose several terms are summed.
        seed: the seed of the labels that fisher="mc" draws. It must be the same on all ranks, each
            of which draws its own labels from it.
        error_if_nonfinite: whether gradients with NaN or infinity are an error.
        process_group: the ranks of `torch.distributed` that each have a part of a step's data and
            average their gradients, as `DistributedDataParallel` does. All must call `step`, and
            get the same result. Except for the labels that are drawn, it equals that of one process
            with all the data; for fisher="empirical" the average of the ranks' losses must then be
            the mean over all terms. Pass the model itself, not its wrapper.
        keywords: single options of the curvature, in place of those of ``curvature``.

    Raises:
        ValueError: an option that is not supported, a pattern that fits no parameter.
        NotImplementedError: a layer with an option that its rule does not know; in the first
            forward pass, layers that hooks cannot follow.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        options: PreconditionerOptions = PreconditionerOptions(),  # noqa: B008
        curvature: CurvatureOptions = CurvatureOptions(kfac_approx="expand", fisher="mc"),  # noqa: B008
        *,
        exclude: Sequence[str] = (),
        mean_over: MeanOver = "terms",
        seed: int = 0,
        error_if_nonfinite: bool = True,
        process_group: ProcessGroupOption = "default",
        **keywords: Any,
    ) -> None:
        check_module(model)
        check_option("mean_over", mean_over, MeanOver)
        curvature = curvature.but(**keywords)
        self.options = options
        """As given."""
        self.error_if_nonfinite = error_if_nonfinite
        """As given."""
        parameters = dict(model.named_parameters())
        device = next(iter(parameters.values())).device if parameters else "cpu"
        self._generator = torch.Generator(device).manual_seed(seed)
        self._pass = TrainingPass(
            model,
            likelihood,
            curvature,
            self._generator,
            _matching(exclude, parameters),
            mean_over,
            process_group,
        )
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._tell_plain(exclude)
        self._step = 0
        self._damping: float | dict[str, float] = options.damping
        self._blocks: dict[str, KroneckerBlock] = {}
        # The sum of the weights in the moving average, 1 − ρᵏ after k batches. Dividing by it
        # corrects for the start at zero.
        self._weight = 0.0
        self._inverses: dict[str, Inverse] = {}
        # What a state must have in common with this preconditioner. It is taken before the first
        # batch, which may show that a parameter has no block.
        self._made_with = {
            "the likelihood": likelihood,
            "mean_over": mean_over,
            "damping_on": options.damping_on,
            **{f.name: repr(getattr(curvature, f.name)) for f in fields(curvature)},
            **{
                f"parameter '{n}'": f"{tuple(parameters[n].shape)}, {parameters[n].dtype}"
                for n in self.names
            },
        }

    @property
    def ranks(self) -> Ranks:
        """The ranks that have a part of each step's data."""
        return self._pass.ranks

    @property
    def damping(self) -> float | Mapping[str, float]:
        """λ, one for all or one for each of `names`; a new value holds from the next update on.

        With ``damping_on="product"`` a prior of precision δ adds λ = T δ/N to the curvature of the
        mean loss. If the loss includes the prior, a step is then a natural gradient step on the
        posterior, and λ need not be tuned.
        """
        return self._damping

    @damping.setter
    def damping(self, damping: float | Mapping[str, float]) -> None:
        if isinstance(damping, Mapping):
            missing = [name for name in self.names if name not in damping]
            if missing:
                raise ValueError(
                    f"There is no damping for '{missing[0]}'; give one number, or one for each of "
                    f"the {len(self.names)} preconditioned parameters (names)."
                )
            for name in self.names:
                check_positive(f"damping['{name}']", damping[name])
            self._damping = {name: float(damping[name]) for name in self.names}
        else:
            check_positive("damping", damping)
            self._damping = float(damping)

    @property
    def names(self) -> list[str]:
        """The parameters whose gradients are preconditioned."""
        return self._pass.names

    @property
    def blocks(self) -> Mapping[str, KroneckerBlock]:
        """Parameter name -> block of the mean loss, in its moving average; empty at first."""
        return self._blocks

    def factors(self, num_data: int, loss: float) -> KroneckerFactors:
        """The moving averages as the curvature of a data set: A, and N times the mean B.

        They equal those of `kronecker_factors` only if the parameters did not change. During
        training they average over the parameters of past steps, with the model in train mode.

        Args:
            num_data: N, the examples of the data set.
            loss: Σ ℓ (nats) over it, for the evidence.

        Raises:
            RuntimeError: before the first step.
        """
        if not self._blocks:
            raise RuntimeError("There are no factors before the first step.")
        return self._pass.of_data(self._blocks, num_data, loss)

    def step(self, lr: float | None = None) -> None:
        """Replace the gradients; once per step of the optimiser, before it.

        Args:
            lr: the optimiser's learning rate, which norm_control="kl_clip" needs; for
                "peak_kl_clip" the highest of its schedule, the same in all steps.

        Raises:
            RuntimeError: new factors are due, and no backward pass was seen.
            FloatingPointError: factors or gradients that are not finite, with the parameter's name.
            ValueError: no learning rate, though it is needed.
        """
        options = self.options
        if options.norm_control in KL_CLIPS and lr is None:
            which = "the learning rate: step(lr=...), for example optimizer.param_groups[0]['lr']"
            if options.norm_control == "peak_kl_clip":
                which = "the highest learning rate of the schedule: step(lr=...)"
            raise ValueError(f"norm_control={options.norm_control!r} needs {which}.")
        # Factors first, since inverses that are due in the same step are made from them.
        if self._pass.is_due:
            self._average(self._pass.mean_blocks())
        if self._every(options.update_every, "update_every"):
            self._inverses = self._new_inverses()
        with torch.no_grad():
            self._precondition(lr)
        self._step += 1
        self._pass.is_due = self._every(options.factor_every, "factor_every")
        if self._pass.is_due and not options.ema_decay:
            self._blocks = {}  # without a moving average the next factors replace them

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose forward passes do not belong to the training."""
        was, self._pass.is_due = self._pass.is_due, False
        try:
            yield
        finally:
            self._pass.is_due = was

    def detach(self) -> None:
        """Take all hooks off the model; `step` cannot be used from then on."""
        self._pass.detach()

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on to the bit: tensors, numbers and strings only.

        Call it between steps, not between the backward passes of one. It is the same on all ranks,
        and for any number of ranks.
        """
        return {
            "made_with": self._made_with,
            "step": self._step,
            "weight": self._weight,
            "damping": self._damping,
            "seen": self._pass.seen,
            "generator": self._generator.get_state(),
            "blocks": {
                name: {"B": block.B} if block.A is None else {"B": block.B, "A": block.A}
                for name, block in self._blocks.items()
            },
            "inverses": self._inverses,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless `load_state_dict` can take the state; nothing is changed."""
        expected = self.state_dict()
        if state.keys() != expected.keys():
            raise ValueError(
                "This is no state of a K-FAC preconditioner of this version: its keys are "
                f"{', '.join(map(str, state)) or 'none'}, expected {', '.join(expected)}."
            )
        theirs = state["made_with"]
        for what in dict.fromkeys([*self._made_with, *theirs]):
            if theirs.get(what) != self._made_with.get(what):
                raise ValueError(
                    f"The state is of another K-FAC: {what} is {theirs.get(what)} there and "
                    f"{self._made_with.get(what)} here. Load it with the model and the options "
                    "that it was saved with."
                )
        step, weight, blocks, inverses = (
            state[key] for key in ("step", "weight", "blocks", "inverses")
        )
        # Every step but the first has inverses. The blocks are dropped before new ones are due if
        # there is no moving average.
        if not (
            step >= 0
            and 0 <= weight <= 1
            and set(blocks) in (set(), set(inverses))
            and bool(inverses) == (step > 0)
            and set(inverses) <= set(self.names)
        ):
            raise ValueError(
                f"The state of K-FAC is damaged: step {step}, weight {weight} of the moving "
                f"average, {len(blocks)} blocks and {len(inverses)} inverses do not go together."
            )
        for name, tensors in [*blocks.items(), *inverses.items()]:
            fault = _fault(tensors, self._parameters[name])
            if fault:
                raise ValueError(f"The state of K-FAC is damaged: the factors of '{name}' {fault}.")
        own, generator = self._generator.get_state(), state["generator"]
        if (generator.dtype, generator.shape) != (own.dtype, own.shape):
            raise ValueError(
                "The state's random numbers are those of another kind of device than "
                f"{self._generator.device}. Load it on a device of the kind it was saved on."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same model and options.

        The next steps are those of the uninterrupted run to the bit. The damping is the state's.

        Raises:
            ValueError: a state of another model or other options, or a damaged one; nothing is
                changed then.
        """
        self.check_state(state)
        device = self._generator.device
        self._step, self._weight = int(state["step"]), float(state["weight"])
        self._pass.seen = tuple(state["seen"])
        damping = state["damping"]
        self._damping = dict(damping) if isinstance(damping, Mapping) else float(damping)
        self._generator.set_state(state["generator"].cpu())
        self._blocks = {
            name: KroneckerBlock(name, tensors["B"], tensors.get("A"))
            for name, tensors in _copies(state["blocks"], device).items()
        }
        self._inverses = _copies(state["inverses"], device)
        self._pass.reset()
        self._pass.is_due = self._every(self.options.factor_every, "factor_every")

    def _every(self, interval: Any, name: str) -> bool:
        return self._step % interval_at(interval, self._step, name) == 0

    def _new_inverses(self) -> dict[str, Inverse]:
        """Parameter name -> the damped inverse of its block."""
        blocks, on = self._blocks, self.options.damping_on
        once = interval_at(self.options.update_every, self._step, "update_every") == 1
        if self.ranks.size == 1:
            return self._inverses_of(blocks, once)
        # Each rank inverts some of the blocks and sends the results to the others, which need no
        # communication in the steps in between.
        owners = dict(
            zip(blocks, self.ranks.owners([b.cost for b in blocks.values()]), strict=True)
        )
        own = {name: b for name, b in blocks.items() if owners[name] == self.ranks.rank}
        computed = self._inverses_of(own, once)
        inverses = {n: computed.get(n) or empty_inverse(b, on, once) for n, b in blocks.items()}
        sent = [(t, owners[name]) for name, inverse in inverses.items() for t in inverse.values()]
        self.ranks.exchange_([t for t, _ in sent], [owner for _, owner in sent], "inverses")
        return inverses

    def _inverses_of(self, blocks: Mapping[str, KroneckerBlock], once: bool) -> dict[str, Inverse]:
        """The damped inverses of these blocks, computed at once on several cores of a CPU."""
        on, damping = self.options.damping_on, self._damping

        def invert(block: KroneckerBlock) -> Inverse:
            own = damping[block.name] if isinstance(damping, dict) else damping
            return damped_inverse(block, own, on, once)

        with torch.no_grad():
            if self._generator.device.type != "cpu":
                return {name: invert(block) for name, block in blocks.items()}
            # The largest first: as the last one it would leave the other cores idle.
            largest = sorted(blocks.values(), key=lambda block: -_size(block))
            inverses = map_on_cores(invert, largest)
        by_name = {block.name: inverse for block, inverse in zip(largest, inverses, strict=True)}
        return {name: by_name[name] for name in blocks}

    def _average(self, new: dict[str, KroneckerBlock]) -> None:
        """F ← ρF + (1 − ρ)F_batch for B and A, divided by the sum of the weights; in place."""
        rho = self.options.ema_decay
        self._weight = rho * self._weight + 1 - rho
        if not rho or not self._blocks:
            self._blocks = new
            return
        assert set(new) == set(self._blocks)
        # The stored average is divided by the sum of weights already. With this share of the new
        # factors it stays so.
        share = (1 - rho) / self._weight
        for name, block in self._blocks.items():
            pairs = zip(block.named_factors(), new[name].named_factors(), strict=True)
            for (F, _), (of_batch, _) in pairs:
                F.lerp_(of_batch, share)
            del new[name]  # frees the batch's factors one by one

    def _precondition(self, lr: float | None) -> None:
        with_gradient = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        if self.error_if_nonfinite:
            _check_finite(with_gradient)
        control, limit = self.options.norm_control, self.options.limit
        clips = control in KL_CLIPS
        before, after = [], []
        for name, inverse in self._inverses.items():
            if name not in with_gradient:
                continue
            g = with_gradient[name]
            p = precondition(inverse, g)  # (F + λI)⁻¹ g
            if clips:
                before.append((p * g).sum(dtype=torch.float32))
            elif control == "graft":
                norm = torch.linalg.vector_norm(p)
                p *= torch.linalg.vector_norm(g) / norm.clamp(min=torch.finfo(p.dtype).tiny)
            g.copy_(p)
            after.append(g)
        # One factor for all parameters, so that the direction of the step stays.
        if clips and before and lr is not None:
            torch._foreach_mul_(after, kl_clip_factor(torch.stack(before), lr, limit))
        elif control == "gradient_clip" and with_gradient:
            every = list(with_gradient.values())
            torch._foreach_mul_(every, clip_factor(every, limit))

    def _tell_plain(self, exclude: Sequence[str]) -> None:
        left_out = _matching(exclude, self._parameters)
        plain = [n for n in self._parameters if n not in self.names and n not in left_out]
        if plain:
            warnings.warn(
                f"No K-FAC rule for {', '.join(plain)}: trained with the plain gradient. Exclude "
                "them to say the same.",
                stacklevel=3,
            )


def _matching(patterns: Sequence[str], names: Mapping[str, object]) -> frozenset[str]:
    """The names that any pattern fits."""
    if isinstance(patterns, str):
        patterns = [patterns]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"exclude: no parameter fits {pattern!r}; there are {', '.join(names)}."
            )
    return frozenset(n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns))


def _check_finite(gradients: Mapping[str, Tensor]) -> None:
    """Raise a FloatingPointError that names the first gradient that is not finite."""
    if not gradients:
        return
    largest = torch._foreach_norm(list(gradients.values()), ord=float("inf"))
    if torch.stack([torch.isfinite(entry) for entry in largest]).all():
        return
    wrong = next(name for name, g in gradients.items() if not torch.isfinite(g).all())
    raise diverging(
        f"The gradient of '{wrong}'", " With a GradScaler pass error_if_nonfinite=False."
    )


def _size(block: KroneckerBlock) -> int:
    """Rows of a block's largest factor."""
    return max(F.shape[-1] for F, _ in block.named_factors())


def _fault(tensors: Mapping[str, Tensor], p: Tensor) -> str | None:
    """What is wrong with the tensors of a parameter's block or inverse, if anything is.

    A factor and its inverse are positive semidefinite, so that no entry of their diagonals is
    negative; neither is one of a Cholesky root, or of a damped spectrum.
    """
    factors = [F for kind, F in tensors.items() if kind != "spectrum"]  # over rows, over columns
    sizes = [factors[0].shape[:-1].numel(), *[F.shape[-1] for F in factors[1:]]]
    square = all(F.dim() in (2, 3) and F.shape[-1] == F.shape[-2] for F in factors)
    entries = {math.prod(sizes), tensors.get("spectrum", p).numel()}
    if not square or entries != {p.numel()}:
        return f"have shapes {[tuple(F.shape) for F in tensors.values()]}"
    for kind, F in tensors.items():
        if F.dtype != at_least_float32(p.detach()).dtype:
            return f"have dtype {F.dtype}, for a parameter of dtype {p.dtype}"
        if not torch.isfinite(F).all():
            return "are not finite"
        values = F if kind == "spectrum" else F.diagonal(dim1=-2, dim2=-1)
        if not kind.startswith("Q") and (values < 0).any():
            return "have a negative diagonal"
    return None


def _copies(
    by_name: Mapping[str, Mapping[str, Tensor]], device: torch.device
) -> dict[str, dict[str, Tensor]]:
    """Copies on the device."""
    return {
        name: {kind: tensor.to(device, copy=True) for kind, tensor in tensors.items()}
        for name, tensors in by_name.items()
    }
