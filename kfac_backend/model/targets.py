"""From a batch to inputs and targets: which labels belong to the outputs, and which count."""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_backend.layers.rows import counted_positions
from kfac_backend.loss import IGNORED, check_targets, loss_sum, num_counted_terms
from kfac_backend.model.batches import detached, examples, splits_by_example
from kfac_backend.model.calls import call_with, forked_random_numbers, own_loss, takes_labels
from kfac_backend.model.memory import is_out_of_memory
from kfac_backend.options import Likelihood, TargetOptions
from kfac_backend.precision import at_least_float32

__all__ = ["Targets", "counting", "mask_of", "split_batch"]

WHICH_LABEL = (
    "pass shift_labels=False if the output at a position predicts its own label, True if it "
    "predicts the next one"
)
"""The way out of errors where a model's own loss does not show whether it shifts labels."""


def split_batch(batch: Any, dict_key_y: str) -> tuple[Any, Any]:
    """A batch's input and targets. A mapping is the input as a whole; the key has the targets."""
    if isinstance(batch, Mapping):
        if dict_key_y not in batch:
            raise KeyError(
                f"A batch has keys {', '.join(map(str, batch))}, but no '{dict_key_y}'; pass the "
                "targets' key as dict_key_y."
            )
        return batch, batch[dict_key_y]
    try:
        if isinstance(batch, Tensor):  # one with two rows would unpack into x and y
            raise TypeError
        x, y = batch
    except (TypeError, ValueError):
        raise TypeError(
            f"A batch is {type(batch).__name__}; expected (x, y) or a mapping with '{dict_key_y}'. "
            "A DataLoader of them is data, or a list: of one batch [(x, y)]."
        ) from None
    return x, y


def mask_of(x: Any, dict_key_mask: str | None) -> Tensor | None:
    """Which positions of a mapping's examples count (N, R); None if it hides none.

    A mask of other axes, as attention takes for each pair of positions, hides none.

    Raises:
        ValueError: a mask of floating point that is not of zeros and ones.
    """
    mask = x.get(dict_key_mask) if dict_key_mask and isinstance(x, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    counted = mask != 0
    if mask.is_floating_point() and not torch.equal(counted.to(mask), mask):
        raise ValueError(
            f"'{dict_key_mask}' has entries other than 0 (hidden) and 1 (counts). Give it truth "
            "values, or let all positions count (dict_key_mask=None)."
        )
    return None if counted.all() else counted


def counting(mask: Tensor | None) -> AbstractContextManager[None]:
    """A context in which the positions that a mask (of `mask_of`) hides do not count."""
    return nullcontext() if mask is None else counted_positions(mask)


class Targets:
    """A function from a batch to the targets of its outputs, position by position.

    A batch's labels may differ from these targets in two ways:

    - Causal language models of Hugging Face take the label of each position's own token and shift
      the labels inside: the output at a position predicts the label of the next one.
      shift_labels="auto" finds that out from the first batch that shows it: if the model computes a
      loss from labels, the loss must equal ours, either with these labels or with shifted ones. As
      in these models, a label of -100 then does not count.
    - A position that a mapping's mask hides is no target and predicts none.

    Args:
        likelihood: of the targets.
        options: how batches give their targets.

    Raises:
        ValueError: options that are not for the likelihood.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        options: TargetOptions = TargetOptions(),  # noqa: B008
    ) -> None:
        options.check(likelihood)
        self.options = options
        self.may_ignore = options.marks_ignored
        """Whether some targets do not count, as far as it is known so far."""
        self._likelihood: Likelihood = likelihood
        # None until a batch shows it; from then on the same for all batches.
        self._shifts = None if options.shift_labels == "auto" else bool(options.shift_labels)
        self._has_warned = False

    def __call__(self, model: nn.Module | None, x: Any, y: Any) -> Any:
        """The targets of a batch, in the labels' shape; `IGNORED` where they do not count.

        Raises:
            ValueError: the model's own loss equals ours neither with these labels nor with shifted
                ones.
        """
        if not isinstance(y, Tensor):
            return y  # reported with the outputs
        mark = self.options.ignore_index
        if mark is not None and mark != IGNORED:
            if (y == IGNORED).any():
                raise ValueError(
                    f"There are labels {IGNORED} beside ignore_index={mark}. Give all that do not "
                    "count one label."
                )
            y = y.masked_fill(y == mark, IGNORED)
        if self._shifts is None and model is not None:
            self._shifts = self._shifts_inside(model, x, y)
        mask = (
            mask_of(x, self.options.dict_key_mask) if self._likelihood == "classification" else None
        )
        if mask is not None and mask.shape == y.shape:
            hidden = ~mask.to(y.device)
        else:
            hidden = None
        if hidden is None and not self._shifts:
            return y
        if self._shifts and y.dim() < 2:
            raise ValueError(
                f"shift_labels=True needs labels (N, R), several an example; these have shape "
                f"{tuple(y.shape)}. Pass shift_labels=False."
            )
        self.may_ignore = True
        if hidden is not None:
            self._warn_of_hidden(y, hidden)
            y = y.masked_fill(hidden, IGNORED)
        if self._shifts:
            y = _shifted(y)
            # Before the shift the mask hides labels, after it the positions that would predict one.
            y = y if hidden is None else y.masked_fill(hidden, IGNORED)
        return y

    def _warn_of_hidden(self, y: Tensor, hidden: Tensor) -> None:
        """Warn once of labels that would count if the mask did not hide them."""
        if self._has_warned or not (y[hidden] != IGNORED).any():
            return
        self._has_warned = True
        mark = IGNORED if self.options.ignore_index is None else self.options.ignore_index
        warnings.warn(
            f"Labels at positions that '{self.options.dict_key_mask}' hides do not count. Mark "
            f"them with {mark} to say the same, or pass dict_key_mask=None to let all count.",
            stacklevel=3,
        )

    def _shifts_inside(self, model: nn.Module, x: Any, y: Tensor) -> bool | None:
        """Whether the loss that a model computes from labels equals ours with shifted labels.

        False if it computes no loss; None if this batch does not show it.

        Raises:
            ValueError: it equals ours with both labels or with neither, or cannot be computed.
        """
        if not takes_labels(model, x):
            return False
        are_labels = self._likelihood == "classification"
        may_shift = are_labels and y.dim() > 1
        device = next(model.parameters()).device
        x, y = detached(x, device), y.to(device)
        if splits_by_example(x, y):
            counted = y != IGNORED if are_labels else torch.ones_like(y, dtype=torch.bool)
            if counted.dim() > 1 and counted.shape[-1] > 1:
                counted[..., 0] = False  # with shifted labels no output predicts the first one
            telling = counted.flatten(1).any(1) if counted.dim() > 1 else counted
            which = telling.nonzero().flatten()[:2]
            x, y = examples(x, which), y[which]
            if not len(which):
                return None
        with torch.no_grad(), forked_random_numbers(model):
            try:
                # Without labels first, to check these: on a GPU, a label out of range inside the
                # model's own loss would end the process.
                check_targets(call_with(model, {}, x), y, self._likelihood, may_ignore=True)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                return None  # reported by name, in the pass itself
            own = own_loss(model, x, y)
        if own is None:
            return False
        f, loss = own
        if not torch.isfinite(loss) or not torch.isfinite(f).all():
            return None  # reported by name, in the pass itself
        ways = {False: y} | ({True: _shifted(y)} if may_shift else {})
        ours = {
            shifts: float(loss_sum(at_least_float32(f), labels, self._likelihood))
            for shifts, labels in ways.items()
        }
        counts = {
            shifts: max(num_counted_terms(f, labels, self._likelihood), 1)
            for shifts, labels in ways.items()
        }
        fitting = [
            shifts
            for shifts in ways
            if _is_our_loss(loss, ours[shifts], counts[shifts], f, self._likelihood)
        ]
        if len(fitting) == 1:
            self.may_ignore = self.may_ignore or may_shift
            return fitting[0]
        means = [f"{ours[shifts] / counts[shifts]:.6g}" for shifts in ways]
        raise ValueError(
            f"{type(model).__name__} computes a loss from labels itself, {float(loss):.6g} for the "
            f"first examples. Per term ours is {' or, with labels shifted by one, '.join(means)}: "
            + ("both fit. " if fitting else "another loss (label smoothing, class weights?). ")
            + f"Say which label belongs to which output: {WHICH_LABEL}."
        )


def _shifted(y: Tensor) -> Tensor:
    """Each position's label is that of the next one; the last position has none."""
    return F.pad(y[..., 1:], (0, 1), value=IGNORED)


def _is_our_loss(loss: Tensor, ours: float, terms: int, f: Tensor, likelihood: Likelihood) -> bool:
    """Whether a model's loss is our sum, or its mean over examples, loss terms or outputs.

    For regression it may also be the squared error, without our factor ½.
    """
    sizes = {1, len(f), terms} | (set() if likelihood == "classification" else {f.numel()})
    factors = (1, 2) if likelihood == "regression" else (1,)
    relative = 1e-4 if loss.dtype in (torch.float32, torch.float64) else 0.02
    # The rounding of log Σ exp grows with the outputs.
    rounding = 4 * torch.finfo(torch.float32).eps * float(f.abs().max())
    readings = [ours * factor / size for size in sizes for factor in factors]
    return any(abs(float(loss) - r) <= relative * abs(r) + rounding for r in readings)
