"""Determine the targets of a batch, which of them count, and which input positions count.

This module also checks inputs, outputs and targets. `engine.batches` splits batches.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from kfac_backend.engine.batches import detached, examples, splits_by_example
from kfac_backend.engine.model_calls import (
    call_with,
    forked_random_numbers,
    own_loss,
    preserve_state,
    takes_labels,
    try_twice,
)
from kfac_backend.likelihoods import (
    IGNORED,
    Likelihood,
    Weighted,
    check_targets,
    likelihood_of,
    loss_sum,
    num_counted_terms,
)
from kfac_backend.options import TargetOptions
from kfac_backend.precision import at_least_float32
from kfac_backend.sharding import is_sharded, local_part

MOST_ROWS = 64
"""Number of output rows that suffice to recognise probabilities."""
FEWEST_OUTPUTS = 32
"""Number of outputs below which values in [0, 1] do not suffice: an untrained network has such
logits."""


class Task:
    """Interpretation of a model's batches by a likelihood and options.

    `targets` returns the targets of the outputs, position by position. The other methods check and
    count them. Passes, the learner, calibration and metrics share it. A batch's labels may differ
    from the targets in two ways:

    - Causal language models of Hugging Face take the label of each position's own token and shift
      the labels inside: the output at a position predicts the label of the next one.
      shift_labels="auto" detects this on the first batch that shows it. If the model computes a
      loss from labels, it must equal ours, either with these labels or with shifted ones. As in
      these models, a label of -100 then does not count.
    - A position that a mapping's mask hides is no target and predicts none.

    Raises:
        ValueError: options that the likelihood does not support.
    """

    def __init__(
        self,
        likelihood: Likelihood | str,
        options: TargetOptions = TargetOptions(),  # noqa: B008
    ) -> None:
        self.options, self.likelihood = options, likelihood_of(likelihood)
        options.check(self.likelihood)
        self.may_ignore = options.ignore_index is not None
        """Whether some targets do not count, as far as known."""
        self.shifts = None if options.shift_labels == "auto" else bool(options.shift_labels)
        """Whether labels are shifted, in all batches. None until a batch shows it; until then
        `targets` needs the model."""
        self._has_warned = False
        self.knows_outputs = False
        self.knows_axis = self.shifts is True or self.likelihood.kind != "classes"
        """Whether the last axis of outputs is known to be the class axis."""
        self._is_unproved = False  # True for a sharded model, where only sizes can show the axis

    def mask(self, x: Any) -> Tensor | None:
        """Return which positions of a mapping's examples count (N, R); None means all.

        A mask with other axes, such as an attention mask for pairs of positions, hides none.
        """
        key = self.options.dict_key_mask
        mask = x.get(key) if key and isinstance(x, Mapping) else None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return None
        counted = mask != 0
        if mask.is_floating_point() and not torch.equal(counted.to(mask), mask):
            raise ValueError(
                f"'{key}' has entries other than 0 (hidden) and 1 (counts). Pass a boolean mask, "
                "or let all positions count (dict_key_mask=None)."
            )
        return None if counted.all() else counted

    def targets(
        self, model: nn.Module | None, x: Any, y: Any, mask: Tensor | Literal["ask"] | None = "ask"
    ) -> Any:
        """Return the targets of a batch in the labels' shape, with `IGNORED` if they do not count.

        ``mask`` is the `mask` of x, if it is known already: computing it waits for a GPU.

        Raises:
            ValueError: the model's own loss equals ours neither with these labels nor with shifted
                ones; continuous targets at positions that a mask hides.
        """
        if not isinstance(y, Tensor):
            return y  # reported with the outputs
        mark = self.options.ignore_index
        if mark is not None and mark != IGNORED:
            if (y == IGNORED).any():
                raise ValueError(
                    f"Some labels are {IGNORED} although ignore_index={mark}. Use one label for "
                    "all targets that do not count."
                )
            y = y.masked_fill(y == mark, IGNORED)
        if self.shifts is None and model is not None:
            self.shifts = takes_labels(model, x) and self._shifts_inside(model, x, y)
        hidden, mask = None, self.mask(x) if isinstance(mask, str) else mask
        if not self.likelihood.has_labels:
            self._check_hidden(y, mask)
        else:
            hidden = None if mask is None or mask.shape != y.shape else ~mask.to(y.device)
        if hidden is None and not self.shifts:
            return y
        if self.shifts and y.dim() < 2:
            raise ValueError(
                "shift_labels=True needs labels (N, R) with several positions per example, but "
                f"these have shape {tuple(y.shape)}. Pass shift_labels=False."
            )
        self.may_ignore = True
        if hidden is not None:
            self._warn_of_hidden(y, hidden)
            y = y.masked_fill(hidden, IGNORED)
        if self.shifts:
            y = _shifted(y)
            # Before the shift the mask hides labels; after it, it hides positions that would
            # predict one.
            y = y if hidden is None else y.masked_fill(hidden, IGNORED)
        return y

    def _check_hidden(self, y: Tensor, mask: Tensor | None) -> None:
        """Raise a ValueError if continuous targets at hidden positions would count in the loss."""
        if mask is None or y.dim() != 3 or y.shape[:-1] != mask.shape:
            return
        if isinstance(self.likelihood, Weighted) and not y[..., -1][~mask.to(y.device)].any():
            return
        raise ValueError(
            f"'{self.options.dict_key_mask}' hides positions, but likelihood '{self.likelihood}' "
            "counts all targets, because only labels can be left out. Give each position a "
            f"weight, 0 where it is hidden (\"weighted(of='{self.likelihood}')\"), or let all "
            "positions count (dict_key_mask=None)."
        )

    def telling_examples(self, y: Tensor) -> Tensor:
        """Return the first two examples whose labels can show whether the model shifts them."""
        counted = torch.ones_like(y, dtype=torch.bool)
        if self.likelihood.has_labels:
            mark = self.options.ignore_index
            counted = (y != IGNORED) & (y != (IGNORED if mark is None else mark))
        if y.dim() > 1 and y.shape[-1] > 1:
            counted = counted[..., 1:]  # with shifted labels no output predicts the first one
        return counted.reshape(len(y), -1).any(1).nonzero().flatten()[:2]

    def check(self, f: Any, y: Any) -> None:
        """Raise an error unless targets fit the model's outputs, see `check_targets`."""
        check_targets(f, y, self.likelihood, may_ignore=self.may_ignore)
        if self._is_unproved:
            self.check_sizes(f)

    def check_sizes(self, f: Tensor) -> None:
        """Raise a ValueError, once, if a sharded model's outputs may have the classes second.

        Only the sizes decide, because its layers are not run on one example.
        """
        if self._is_unproved and not self.knows_axis and f.dim() > 2 and len(f):
            if _has_equal_sizes(f):
                raise ValueError(
                    f"An example has outputs {tuple(f.shape[1:])}, whose classes may be second or "
                    "last. The layers of a model under fully_shard cannot show which. Add an "
                    "axis: pass y.unsqueeze(1), and return f.unsqueeze(1) if the classes are "
                    "last, or f.movedim(1, -1).unsqueeze(1) if they are second."
                )
            self.knows_axis = True

    def check_axis(self, model: nn.Module | None, x: Any, y: Any) -> None:
        """Check once that the classes are on the outputs' last axis, or raise a ValueError.

        For labels (N, H, W), outputs (N, C, H, W) with C = H = W have the same shape as with
        classes last. Then the layer that returns them decides, in a run on one example: its
        features are last if it is linear, and second if it is a convolution. A model under
        `fully_shard` is not run: `check_sizes` refuses such outputs later.
        """
        may_be_wrong = isinstance(y, Tensor) and y.dim() > 1 and len(y)
        if self.knows_axis or model is None or not may_be_wrong:
            return
        if is_sharded(model):
            self._is_unproved = True
            return
        index = torch.arange(1)
        x, y = (examples(x, index), y[index]) if splits_by_example(x, y) else (x, y)

        def run() -> tuple[Tensor, bool | None]:
            with preserve_state(model), forked_random_numbers(model), torch.no_grad():
                return _run_with_axis(model, detached(x, next(model.parameters()).device))

        result = try_twice(run)
        if isinstance(result, Exception):
            return  # reported in the pass itself
        f, is_last = result
        if f.dim() < 3:
            return
        is_ambiguous = _has_equal_sizes(f)
        if is_ambiguous and not is_last:
            shape = tuple(f.shape[1:])
            words = "are second, but must be" if is_last is False else "may be second or"
            raise ValueError(
                f"An example has outputs {shape} and labels {tuple(y.shape[1:])}. The classes "
                f"{words} last. If they are second, return f.movedim(1, -1). If they are last, "
                "add an axis to show it: return f.unsqueeze(1), and pass y.unsqueeze(1)."
            )
        self.knows_axis = is_ambiguous or y.shape[1:2] == f.shape[1:2]

    def look_at(self, f: Tensor) -> None:
        """Warn once if the outputs are probabilities, but the likelihood takes logits.

        Class probabilities lie in [0, 1] and sum to 1, unlike logits. Bernoulli probabilities all
        lie in [0, 1]. Logits of an untrained network often do, too, but are close to each other. So
        a sigmoid must have made the outputs, or they must differ by more than a half. The first
        batch with enough outputs decides.
        """
        if self.knows_outputs:
            return
        likelihood, reason = self.likelihood, None
        name = (likelihood.of if isinstance(likelihood, Weighted) else likelihood).name
        if name in ("classification", "noisy_classification"):
            rows = at_least_float32(f.detach().flatten(0, -2)[:MOST_ROWS])
            tolerance = max(1e-4, torch.finfo(f.dtype).eps)
            if len(rows) < 2:
                return
            if ((rows >= 0).all(-1) & ((rows.sum(-1) - 1).abs() < tolerance)).all():
                reason = "each row lies in [0, 1] and sums to 1", "softmax, or return the logarithm"
        if name == "bernoulli":
            is_sigmoid = _is_made_by_sigmoid(f)
            if f.numel() < FEWEST_OUTPUTS and not is_sigmoid:
                return
            smallest, largest = torch.aminmax(f.detach())
            if smallest >= 0 and largest <= 1 and (is_sigmoid or largest - smallest > 0.5):
                reason = "all lie in [0, 1]", "sigmoid, or return torch.logit"
        self.knows_outputs = True
        if reason is not None:
            warnings.warn(
                f"The model's outputs are probabilities: {reason[0]}. Likelihood '{likelihood}' "
                f"takes logits. Omit the {reason[1]} of its result.",
                stacklevel=3,
            )

    def _warn_of_hidden(self, y: Tensor, hidden: Tensor) -> None:
        """Warn once about labels that would count without the mask."""
        if self._has_warned or not (y[hidden] != IGNORED).any():
            return
        self._has_warned = True
        mark = IGNORED if self.options.ignore_index is None else self.options.ignore_index
        warnings.warn(
            f"Labels at positions that '{self.options.dict_key_mask}' hides do not count. Set "
            f"them to {mark} to turn this warning off, or pass dict_key_mask=None to let them "
            "count.",
            stacklevel=3,
        )

    def _shifts_inside(self, model: nn.Module, x: Any, y: Tensor) -> bool | None:
        """Return whether a model's own loss equals ours with shifted labels.

        False if the model computes no loss; None if this batch does not show it. It is an error if
        the loss equals ours with both labels or with neither.
        """
        are_labels = self.likelihood.has_labels
        may_shift = are_labels and y.dim() > 1
        device = next(model.parameters()).device
        x, y = detached(x, device), y.to(device)
        # Step 1: two examples whose labels distinguish both cases.
        if splits_by_example(x, y):
            index = self.telling_examples(y)
            x, y = examples(x, index), y[index]
            if not len(index):
                return None

        def fits() -> None:
            check_targets(call_with(model, {}, x), y, self.likelihood, may_ignore=True)

        with torch.no_grad(), forked_random_numbers(model):
            # Check labels first, without the model's own loss: on a GPU, a label out of range
            # inside it would end the process.
            if isinstance(try_twice(fits), Exception):
                return None  # reported with its name in the pass itself
            own_output = own_loss(model, x, y)
        if own_output is None:
            return False
        # Step 2: compare the model's own loss, which has no label noise, with ours, for these
        # labels and for shifted ones.
        likelihood = self.likelihood
        likelihood = likelihood.replace(noise=0.0) if likelihood.has_label_noise else likelihood
        f, loss = own_output
        if not torch.isfinite(loss) or not torch.isfinite(f).all():
            return None  # reported with its name in the pass itself
        labels_of_shift = {False: y} | ({True: _shifted(y)} if may_shift else {})
        means, fitting = [], []
        for shifts, labels in labels_of_shift.items():
            ours = float(loss_sum(at_least_float32(f), labels, likelihood))
            terms = max(int(num_counted_terms(f, labels, likelihood)), 1)
            means.append(f"{ours / terms:.6g}")
            if _is_our_loss(loss, ours, terms, f, likelihood.kind):
                fitting.append(shifts)
        # Step 3: exactly one case must fit. With both or none, a guess would give wrong numbers.
        if len(fitting) == 1:
            self.knows_axis = True  # with classes on another axis the loss would differ
            self.may_ignore = self.may_ignore or may_shift
            return fitting[0]
        raise ValueError(
            f"{type(model).__name__} computes its own loss from labels: {float(loss):.6g} for the "
            "first examples. Our loss per term is "
            f"{' or, with labels shifted by one, '.join(means)}."
            + (" Both fit. " if fitting else " None fits (label smoothing, class weights?). ")
            + "Pass shift_labels=False if the output at a position predicts its own label, True if "
            "it predicts the next one."
        )


def _shifted(y: Tensor) -> Tensor:
    """Shift labels, so that each position has the label of the next; the last one has none."""
    return F.pad(y[..., 1:], (0, 1), value=IGNORED)


def _is_our_loss(loss: Tensor, ours: float, terms: int, f: Tensor, kind: str) -> bool:
    """Return whether a model's loss is our sum, or its mean over examples, terms or outputs.

    For regression it may also be the squared error, without our factor ½.
    """
    sizes = {1, len(f), terms} | (set() if kind == "classes" else {f.numel()})
    factors = (1, 2) if kind == "continuous" else (1,)
    relative = 1e-4 if loss.dtype in (torch.float32, torch.float64) else 0.02
    # The rounding error of log Σ exp grows with the outputs.
    rounding = 4 * torch.finfo(torch.float32).eps * float(f.abs().max())
    readings = [ours * factor / size for size in sizes for factor in factors]
    return any(abs(float(loss) - r) <= relative * abs(r) + rounding for r in readings)


def _is_made_by_sigmoid(f: Tensor) -> bool:
    """Return whether a sigmoid or softmax made the outputs, up to operations that move numbers."""
    node: Any = f.grad_fn
    while node is not None:
        if any(name in node.name().lower() for name in ("sigmoid", "softmax")):
            return True
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return False


def _has_equal_sizes(f: Tensor) -> bool:
    """Return whether outputs (N, ...) have the same shape with any axis as the last."""
    return f.shape[-1] > 1 and len(set(f.shape[1:])) == 1


def _run_with_axis(model: nn.Module, x: Any) -> tuple[Tensor, bool | None]:
    """Return the outputs, and whether their layer's features are last (None: unknown)."""
    outputs: list[Tensor] = []

    def keep(layer: nn.Module, _: Any, z: Any) -> None:
        if isinstance(z, Tensor) and z.dim() > 2:
            outputs.append(z if isinstance(layer, nn.Linear) else z.movedim(1, -1))
        elif isinstance(z, Tensor):
            outputs.append(z)

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | _ConvNd)]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        f = call_with(model, {}, x)
    finally:
        for handle in handles:
            handle.remove()
    for z in reversed(outputs):
        if z.numel() == f.numel() and z.shape[-1] == f.shape[-1] and f.dim() > 2:
            for is_last, moved in ((True, f), (False, f.movedim(1, -1))):
                if torch.equal(z.reshape(f.shape), moved):
                    return f, is_last
    return f, None


INPUTS_NOT_FINITE = "The inputs contain NaN or infinity. Correct or remove these examples."


def check_inputs(x: Any) -> None:
    """Raise a ValueError if the inputs have NaN or infinity. Masks in a mapping may have −∞."""
    if any(not torch.isfinite(value).all() for value in numbers_of(x)):
        raise ValueError(INPUTS_NOT_FINITE)


def numbers_of(x: Any) -> Iterator[Tensor]:
    """Return the tensors of an input that must be finite."""
    for key, value in x.items() if isinstance(x, Mapping) else [("", x)]:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            # Masks that are added to attention scores hide positions by −∞.
            value = torch.view_as_real(value) if value.is_complex() else value
            yield value.masked_fill(value == -torch.inf, 0) if "mask" in str(key) else value


def check_finite(model: nn.Module, f: Tensor, x: Any) -> None:
    """Raise a ValueError that names the tensor with NaN or infinity, if the outputs f have any."""
    # Test the sum first, which takes a fifth of the time of testing each entry. The sum of finite
    # entries may still overflow, so then test each entry.
    if math.isfinite(f.sum().item()) or torch.isfinite(f).all():
        return
    check_inputs(x)
    raise not_finite(model)


def not_finite(model: nn.Module) -> ValueError:
    """Return the error for outputs with NaN or infinity at finite inputs."""
    for name, p in model.named_parameters():
        if not torch.isfinite(local_part(p)).all():  # each rank may call this alone
            return ValueError(
                f"Parameter '{name}' contains NaN or infinity: training has diverged. Return to "
                "an earlier state, and use a smaller learning rate."
            )
    return ValueError(
        "The model's output contains NaN or infinity, although its parameters and inputs are "
        "finite: activations overflow. Normalise the inputs, or use float32 or float64."
    )
