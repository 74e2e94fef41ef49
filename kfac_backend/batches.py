"""Batches: input and targets apart, what of them counts, and parts that suit the memory."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from kfac_backend.calls import (
    call_with,
    forked_random_numbers,
    num_examples,
    own_loss,
    takes_labels,
)
from kfac_backend.comparison import close
from kfac_backend.loss_hessian import (
    check_ignore_index,
    check_targets,
    loss_sum,
    num_counted_terms,
)
from kfac_backend.memory import is_out_of_memory
from kfac_backend.options import Likelihood, ShiftLabels
from kfac_backend.rows import counted_positions
from kfac_backend.weight_sharing import at_least_float32

__all__ = [
    "Plan",
    "Targets",
    "counting",
    "detached",
    "each_batch",
    "example_shapes",
    "examples",
    "make_plan",
    "mask_of",
    "parts",
    "split_batch",
    "splits_by_example",
    "to_device",
]

LARGEST_ACTIVATION = 16 * 2**20
"""Bytes of the largest activation of a part of a batch, on a CPU.

Larger ones come from fresh pages each time, whose faults cost more than their arithmetic. Measured
on two x86-64 cores with WRN-16-4, exact reduce pass over 128 images, in parts whose largest
activation has 2, 4, 8, 16 and 32 MiB: 4.4, 3.9, 3.7, 3.7 and 4.6 s.
"""


IGNORED = -100
"""What marks a label that does not count, in PyTorch's losses and Hugging Face's models."""


def each_batch(loader: Iterable[Any], description: str, progress: bool = False) -> Iterator[Any]:
    """The batches of one pass over a loader, with a progress bar on a terminal if asked for.

    The loader is iterated once. (``tqdm.auto.tqdm(loader)`` calls ``iter`` twice: a DataLoader then
    starts its workers twice, and draws two seeds, more with workers than without.)

    Args:
        loader: the batches.
        description: what the bar says.
        progress: whether to show it.
    """
    try:
        total = len(loader)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):  # a generator, a dataset without a length
        total = None
    hidden = None if progress else True  # None: shown on a terminal only
    bar = tqdm(iter(loader), description, total, leave=False, unit="batch", disable=hidden)
    return iter(bar)


def split_batch(batch: Any, dict_key_y: str) -> tuple[Any, Any]:
    """A batch's input and targets; a mapping is the input itself, with targets under the key."""
    if isinstance(batch, Mapping):
        if dict_key_y not in batch:
            raise KeyError(
                f"A batch has keys {', '.join(map(str, batch))}, but no '{dict_key_y}'; pass the "
                "targets' key as dict_key_y."
            )
        return batch, batch[dict_key_y]
    try:
        x, y = batch
    except (TypeError, ValueError):
        raise TypeError(
            f"A batch is {type(batch).__name__}; expected (x, y) or a mapping with '{dict_key_y}'."
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
    """The targets that belong to a model's outputs, of batches whose labels may be otherwise.

    - Causal language models of Hugging Face take labels that stand with their own tokens, and
      shift them inside: the output at a position predicts the label of the next. "auto" finds out
      on the first batch whose labels tell: where the model computes a loss of labels, it must be
      ours, of these labels or of shifted ones. A label of -100 then does not count, as there.
    - A position that a mapping's mask hides neither counts as a target nor predicts one.

    Args:
        likelihood: of the targets.
        ignore_index: the label of targets that do not count; None: all count, but for the above.
        shift_labels: whether labels (N, R) stand one position behind the outputs that predict
            them; "auto" asks the model's own loss, and takes them as they are if it has none.
        dict_key_mask: the key of the mask (N, R) in inputs that are mappings; None: all count.

    Raises:
        ValueError: an option that is not supported, or not for the likelihood.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        ignore_index: int | None = None,
        shift_labels: ShiftLabels = "auto",
        dict_key_mask: str | None = "attention_mask",
    ) -> None:
        check_ignore_index(ignore_index, likelihood)
        if shift_labels not in (True, False, "auto"):
            raise ValueError(
                f"shift_labels={shift_labels!r} is not supported; choose one of True, False, "
                "'auto'."
            )
        if shift_labels is True and likelihood != "classification":
            raise ValueError(
                f"shift_labels=True is for the labels of likelihood 'classification', not "
                f"{likelihood!r}; shift the targets in the data."
            )
        self.ignore_index = ignore_index
        """The label of targets that do not count, as far as is known by now; None: all count."""
        self._likelihood: Likelihood = likelihood
        self._shifts = None if shift_labels == "auto" else bool(shift_labels)
        self._dict_key_mask = dict_key_mask
        self._hidden_are_told = False

    def __call__(self, model: nn.Module | None, x: Any, y: Any) -> Any:
        """The targets of a batch, in the shape that they have.

        Raises:
            ValueError: a loss of the model's own that is neither ours nor that of shifted labels.
        """
        if not isinstance(y, Tensor):
            return y  # reported with the outputs
        if self._shifts is None and model is not None:
            self._shifts = self._shifts_inside(model, x, y)
        mask = mask_of(x, self._dict_key_mask) if self._likelihood == "classification" else None
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
        self.ignore_index = self._ignored
        if hidden is not None:
            self._tell_hidden(y, hidden)
            y = y.masked_fill(hidden, self._ignored)
        if self._shifts:
            y = F.pad(y[..., 1:], (0, 1), value=self._ignored)
            y = y if hidden is None else y.masked_fill(hidden, self._ignored)
        return y

    @property
    def _ignored(self) -> int:
        return IGNORED if self.ignore_index is None else self.ignore_index

    def _tell_hidden(self, y: Tensor, hidden: Tensor) -> None:
        """Warn, once, of labels that would count if the mask did not hide them."""
        if self._hidden_are_told or not (y[hidden] != self._ignored).any():
            return
        self._hidden_are_told = True
        warnings.warn(
            f"Labels at positions that '{self._dict_key_mask}' hides do not count. Mark them with "
            f"{self._ignored} to say the same, or pass dict_key_mask=None to let all count.",
            stacklevel=3,
        )

    def _shifts_inside(self, model: nn.Module, x: Any, y: Tensor) -> bool | None:
        """Whether the model shifts labels in the loss that it computes of them.

        False if it has none; None if that cannot be told from this batch.

        Raises:
            ValueError: another loss, or one that fails.
        """
        if not takes_labels(model, x):
            return False
        ignored = self._ignored if self._likelihood == "classification" else None
        counted = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
        if counted.dim() > 1 and counted.shape[-1] > 1:
            counted[..., 0] = False  # what no output predicts, if labels are shifted
        device = next(model.parameters()).device
        x = detached(x, device)
        if splits_by_example(x, y):
            telling = counted.flatten(1).any(1) if counted.dim() > 1 else counted
            which = telling.nonzero().flatten()[:2]
            x, y = examples(x, which.to(device)), y[which]
            if not len(which):
                return None
        y = y.to(device)
        with torch.no_grad(), forked_random_numbers(model):
            try:
                # Without labels first: the model's own loss must not see any that are out of range.
                check_targets(call_with(model, {}, x), y, self._likelihood, ignored)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                return None  # reported by name, in the pass itself
            try:
                # In its own loss -100 alone does not count.
                own = own_loss(
                    model, x, y if ignored is None else y.masked_fill(y == ignored, IGNORED)
                )
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise ValueError(
                    f"{type(model).__name__} takes labels, but fails to compute a loss of them "
                    f"({type(error).__name__}: {error}), so that it cannot be told how they stand "
                    "for its outputs. Say so: pass shift_labels=False if the output at a position "
                    "predicts its own label, True if the next one."
                ) from error
        if own is None:
            return False
        f, loss = own
        if not torch.isfinite(loss) or not torch.isfinite(f).all():
            return None  # reported by name, in the pass itself
        ways = {False: y}
        if ignored is not None and y.dim() > 1:
            ways[True] = F.pad(y[..., 1:], (0, 1), value=ignored)
        fitting = [
            shifts
            for shifts, labels in ways.items()
            if _is_our_loss(loss, f, labels, self._likelihood, ignored)
        ]
        if len(fitting) == 1:
            if y.dim() > 1:
                self.ignore_index = ignored
            return fitting[0]
        means = [
            float(loss_sum(at_least_float32(f), labels, self._likelihood, ignored))
            / max(num_counted_terms(f, labels, ignored), 1)
            for labels in ways.values()
        ]
        its = f"{type(model).__name__} computes a loss of labels itself, {float(loss):.6g} for the "
        its += "first examples"
        ours = f"ours is {means[0]:.6g} a term"
        if len(means) > 1:
            ours += f", or {means[1]:.6g} with labels shifted by one position"
        if fitting:
            raise ValueError(
                f"{its}, which does not tell whether it shifts them: {ours}. Say so: pass "
                "shift_labels=True if the output at a position predicts the next label, False if "
                "its own."
            )
        raise ValueError(
            f"{its}, which is another loss: {ours}. Likely causes: label smoothing, class weights, "
            "a further term. Switch these off, or take ours all the same: pass shift_labels=False "
            "if the output at a position predicts its own label, True if the next one."
        )


def _is_our_loss(
    loss: Tensor, f: Tensor, y: Tensor, likelihood: Likelihood, ignored: int | None
) -> bool:
    """Whether a model's loss is ours: a sum, or the mean over examples, loss terms or outputs.

    That of regression may be the squared error itself, without our ½.
    """
    f = at_least_float32(f)
    ours = loss_sum(f, y, likelihood, ignored).double()
    sizes = {1, len(f), max(num_counted_terms(f, y, ignored), 1)}
    if likelihood != "classification":
        sizes.add(f.numel())
    relative = 1e-4 if loss.dtype in (torch.float32, torch.float64) else 0.02
    # log Σ exp of large outputs is rounded as they are.
    rounding = 4 * torch.finfo(torch.float32).eps * float(f.abs().max())
    readings = [
        ours * factor / size
        for size in sizes
        for factor in (1, 2)[: 1 + (likelihood == "regression")]
    ]
    return any(
        abs(float(loss) - float(reading)) <= relative * abs(float(reading)) + rounding
        for reading in readings
    )


def to_device(value: Any, device: torch.device) -> Any:
    """The value, or the tensors of a mapping, on the device; whatever has a method ``to`` moves."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(entry, device) for key, entry in value.items()}
    return value


def examples(x: Any, which: slice | Tensor) -> Any:
    """Some examples of an input that has them in front, or can be sliced by examples."""
    if isinstance(x, Mapping):
        return {key: tensor[which] for key, tensor in x.items()}
    return x[which]


def example_shapes(x: Any) -> Any:
    """The shapes of one example, to be compared."""
    if isinstance(x, Mapping):
        return tuple((key, example_shapes(value)) for key, value in x.items())
    return x.shape[1:] if isinstance(x, Tensor) else None


def detached(x: Any, device: torch.device) -> Any:
    """The input on the device, as tensors that a graph may hold: none of inference mode."""
    x = to_device(x, device)
    if isinstance(x, Mapping):
        return {key: detached(value, device) for key, value in x.items()}
    if not isinstance(x, Tensor):
        return x
    return x.clone() if x.is_inference() else x.detach()


def splits_by_example(x: Any, y: Any) -> bool:
    """Whether the input has an entry per target."""
    targets = len(y) if isinstance(y, Tensor) and y.dim() > 0 else None
    return targets is not None and num_examples(x) == targets


def parts(x: Any, y: Any, size: int | None) -> Iterator[tuple[Any, Any]]:
    """The batch in even parts of at most ``size`` examples; whole if that is None."""
    if size is None or not splits_by_example(x, y):
        yield x, y
        return
    size = math.ceil(len(y) / math.ceil(len(y) / size))
    for start in range(0, len(y), size):
        which = slice(start, start + size)
        yield examples(x, which), y[which]


@dataclass(frozen=True)
class Plan:
    """How a model's batches run fastest, without any change of numbers but rounding."""

    part_size: int | None = None
    """How many examples at once; None: batches stay whole."""
    channels_last: bool = False
    """Whether convolutions run in that memory format."""
    splits: bool = False
    """Whether the first example alone gives the same output as in company."""


def make_plan(model: nn.Module, x: Any, device: torch.device) -> Plan:
    """How to run batches like this one, tried out on its first examples.

    Batches whose rows are no examples of their own stay whole, and a model that depends on the
    memory format keeps its own. On a GPU memory is fast and small batches are slow: nothing
    changes there.
    """
    N = num_examples(x)
    if not N:
        return Plan()
    on_cpu = device.type == "cpu"
    largest = 0

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.nbytes)

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        # Dropout that is on must not use up the user's random numbers.
        with torch.no_grad(), forked_random_numbers(model):
            one = call_with(model, {}, examples(x, slice(1)))
            by_example = largest
            two = call_with(model, {}, examples(x, slice(2)))
            channels_last = on_cpu and _takes_channels_last(model, examples(x, slice(2)), two)
        splits = N > 1 and by_example > 0 and len(two) == 2 and close(two[:1], one)
    except Exception:  # whatever it is, the whole batch will show it, if it is wrong, too
        return Plan()
    finally:
        for handle in handles:
            handle.remove()
    size = max(1, LARGEST_ACTIVATION // by_example) if splits and on_cpu else None
    return Plan(size, channels_last, splits)


def _takes_channels_last(model: nn.Module, x: Any, f: Tensor) -> bool:
    try:
        return close(f, call_with(model, {}, x, channels_last=True))
    except RuntimeError:
        return False
