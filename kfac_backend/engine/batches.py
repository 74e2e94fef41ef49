"""Batches: their inputs and targets, on a device, some of their examples, parts that fit memory.

`Targets` says which labels belong to which outputs, and which of them count.
"""

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

from kfac_backend.engine.calls import (
    attempt,
    call_with,
    close,
    forked_random_numbers,
    in_channels_last,
    num_examples,
    own_loss,
    takes_labels,
)
from kfac_backend.engine.checks import warn_of_probabilities
from kfac_backend.layers.rows import counted_positions
from kfac_backend.likelihoods import likelihood_of
from kfac_backend.loss import IGNORED, check_targets, loss_sum, num_counted_terms
from kfac_backend.options import TargetOptions
from kfac_backend.precision import at_least_float32

LARGEST_ACTIVATION = 8 * 2**20
"""Bytes of the largest activation of a part of a batch, on a CPU.

Larger ones leave the cache, and get fresh pages from the system each time. Exact reduce passes over
128 images, WRN-16-4, in parts whose largest activation has 2, 4, 8, 16 and 32 MiB take 4.4, 3.9,
3.7, 3.7 and 4.6 s (two x86-64 cores), and 12.2, 11.0, 10.4, 11.2 and 12.7 s (a core of another).
"""


def each_batch(
    loader: Iterable[Any], description: str, progress: bool = False, unit: str = "batch"
) -> Iterator[Any]:
    """The batches of one pass over a loader, with a progress bar on a terminal if asked for.

    The loader is iterated once. ``tqdm.auto.tqdm(loader)`` would call ``iter`` twice, so that a
    DataLoader would start its workers twice and draw more seeds.
    """
    total = length(loader)
    hidden = None if progress else True  # None: shown on a terminal only
    bar = tqdm(iter(loader), description, total, leave=False, unit=unit, disable=hidden)
    return iter(bar)


def length(loader: Any) -> int | None:
    """The number of a loader's batches; None of a generator, or of a dataset without a length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def to_device(value: Any, device: torch.device) -> Any:
    """The value on the device: objects with a method ``to``, and those that a mapping holds.

    Raises:
        TypeError: an array of NumPy.
    """
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        raise TypeError(
            f"A batch has {type(value).__name__}; tensors are needed: torch.from_numpy(array)."
        )
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(entry, device) for key, entry in value.items()}
    return value


def examples(x: Any, which: slice | Tensor | None) -> Any:
    """Some examples of an input whose first axis they are, or that is indexed by examples.

    None adds the first axis to a single example.
    """
    if isinstance(x, Mapping):
        return {key: tensor[which] for key, tensor in x.items()}
    return x[which]


def example_shapes(x: Any) -> Any:
    """The shapes of one example, as a value that can be compared."""
    if isinstance(x, Mapping):
        return tuple((key, example_shapes(value)) for key, value in x.items())
    return x.shape[1:] if isinstance(x, Tensor) else None


def detached(x: Any, device: torch.device) -> Any:
    """The input on the device, detached; inference tensors, which no graph takes, are copied."""
    x = to_device(x, device)
    if isinstance(x, Mapping):
        return {key: detached(value, device) for key, value in x.items()}
    if not isinstance(x, Tensor):
        return x
    return x.clone() if x.is_inference() else x.detach()


def splits_by_example(x: Any, y: Any) -> bool:
    """Whether the input has as many examples as there are targets."""
    targets = len(y) if isinstance(y, Tensor) and y.dim() > 0 else None
    return targets is not None and num_examples(x) == targets


def parts(x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batch in even parts of at most ``size`` examples."""
    size = math.ceil(len(y) / math.ceil(len(y) / size))
    for start in range(0, len(y), size):
        yield x[start : start + size], y[start : start + size]


def first_and_last(x: Any) -> Any:
    """The first and the last example of an input: in a sorted batch they differ most."""
    N = num_examples(x)
    if not isinstance(x, Tensor | Mapping) or not N:  # of a user's objects only slices are known
        return examples(x, slice(2))
    return examples(x, slice(None, None, max(N - 1, 1)))


@dataclass(frozen=True)
class Plan:
    """How a model's batches run fastest; only rounding changes."""

    part_size: int | None = None
    """How many examples fit into the cache at once; None: batches stay whole."""
    channels_last: bool = False
    """Whether convolutions run in that memory format."""
    splits: bool = False
    """Whether examples alone have the outputs that they have together, so that a few may run."""


def make_plan(model: nn.Module, x: Any, device: torch.device) -> Plan:
    """How to run batches like this one, tried on its first and its last example.

    Batches whose rows are not independent examples stay whole, and a model whose output depends on
    the memory format keeps its own. On a GPU batches always stay whole, since small ones are slow.
    """
    N = num_examples(x)
    if not N:
        return Plan()
    on_cpu = device.type == "cpu"
    sizes: list[int] = []  # bytes of all modules' outputs

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.nbytes)

    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    handles = [module.register_forward_hook(hook) for module in modules]

    def trial() -> Plan:
        ends = first_and_last(x)
        # Dropout that is on must not use up the user's random numbers.
        with torch.no_grad(), forked_random_numbers(model):
            # Each alone, and both together: where the outputs are the same, a few examples may run
            # in the place of a batch. The largest activation of one tells how many fit into the
            # cache.
            ones = (examples(ends, slice(k, k + 1)) for k in range(min(N, 2)))
            alone = [call_with(model, {}, one) for one in ones]
            by_example = max(sizes, default=0)
            both = call_with(model, {}, ends)
            channels_last = on_cpu and _takes_channels_last(model, ends, both)
        splits = (
            len(alone) == len(both) == 2
            and by_example > 0
            and all(close(both[k : k + 1], f) for k, f in enumerate(alone))
        )
        size = max(1, LARGEST_ACTIVATION // by_example) if splits and on_cpu else None
        return Plan(size, channels_last, splits)

    try:
        plan = attempt(trial)
    finally:
        for handle in handles:
            handle.remove()
    # A model that needs a whole batch gets one. If it fails on that, too, the pass says why.
    return Plan() if isinstance(plan, Exception) else plan


def _takes_channels_last(model: nn.Module, x: Any, f: Tensor) -> bool:
    weights = in_channels_last(model)
    if not weights:
        return False
    g = attempt(lambda: call_with(model, weights, x))
    return not isinstance(g, Exception) and close(f, g)


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

    Raises:
        ValueError: options that are not for the likelihood.
    """

    def __init__(
        self,
        likelihood: str,
        options: TargetOptions = TargetOptions(),  # noqa: B008
    ) -> None:
        options.check(likelihood)
        self.options = options
        self.may_ignore = options.ignore_index is not None
        """Whether some targets do not count, as far as it is known so far."""
        self._likelihood = likelihood_of(likelihood)
        # None until a batch shows it; from then on the same for all batches.
        self._shifts = None if options.shift_labels == "auto" else bool(options.shift_labels)
        self._has_warned = False
        self._knows_outputs = False

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
        mask = mask_of(x, self.options.dict_key_mask) if self._likelihood.has_labels else None
        hidden = None if mask is None or mask.shape != y.shape else ~mask.to(y.device)
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

    def look_at(self, f: Tensor) -> None:
        """Warn once if the outputs are probabilities already, by the first batch that can tell."""
        self._knows_outputs = self._knows_outputs or warn_of_probabilities(f, self._likelihood)

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
        are_labels = self._likelihood.has_labels
        may_shift = are_labels and y.dim() > 1
        device = next(model.parameters()).device
        x, y = detached(x, device), y.to(device)
        # Step 1: two examples whose labels tell the two ways apart.
        if splits_by_example(x, y):
            counted = y != IGNORED if are_labels else torch.ones_like(y, dtype=torch.bool)
            if y.dim() > 1 and y.shape[-1] > 1:
                counted = counted[..., 1:]  # with shifted labels no output predicts the first one
            which = counted.reshape(len(y), -1).any(1).nonzero().flatten()[:2]
            x, y = examples(x, which), y[which]
            if not len(which):
                return None

        def fits() -> None:
            check_targets(call_with(model, {}, x), y, self._likelihood, may_ignore=True)

        with torch.no_grad(), forked_random_numbers(model):
            # Without labels first, to check these: on a GPU, a label out of range inside the
            # model's own loss would end the process.
            if isinstance(attempt(fits), Exception):
                return None  # reported by name, in the pass itself
            own_output = own_loss(model, x, y)
        if own_output is None:
            return False
        # Step 2: the model's own loss against ours, with these labels and with shifted ones.
        f, loss = own_output
        if not torch.isfinite(loss) or not torch.isfinite(f).all():
            return None  # reported by name, in the pass itself
        labels_of_shift = {False: y} | ({True: _shifted(y)} if may_shift else {})
        means, fitting = [], []
        for shifts, labels in labels_of_shift.items():
            ours = float(loss_sum(at_least_float32(f), labels, self._likelihood))
            terms = max(int(num_counted_terms(f, labels, self._likelihood)), 1)
            means.append(f"{ours / terms:.6g}")
            if _is_our_loss(loss, ours, terms, f, self._likelihood):
                fitting.append(shifts)
        # Step 3: exactly one way must fit. With both or none, guessing would give wrong numbers.
        if len(fitting) == 1:
            self.may_ignore = self.may_ignore or may_shift
            return fitting[0]
        raise ValueError(
            f"{type(model).__name__} computes a loss from labels itself, {float(loss):.6g} for the "
            f"first examples. Per term ours is {' or, with labels shifted by one, '.join(means)}: "
            + ("both fit. " if fitting else "another loss (label smoothing, class weights?). ")
            + f"Say which label belongs to which output: {WHICH_LABEL}."
        )


def _shifted(y: Tensor) -> Tensor:
    """Each position's label is that of the next one; the last position has none."""
    return F.pad(y[..., 1:], (0, 1), value=IGNORED)


def _is_our_loss(loss: Tensor, ours: float, terms: int, f: Tensor, likelihood: str) -> bool:
    """Whether a model's loss is our sum, or its mean over examples, loss terms or outputs.

    For regression it may also be the squared error, without our factor ½.
    """
    kind = likelihood_of(likelihood).kind
    sizes = {1, len(f), terms} | (set() if kind == "classes" else {f.numel()})
    factors = (1, 2) if kind == "numbers" else (1,)
    relative = 1e-4 if loss.dtype in (torch.float32, torch.float64) else 0.02
    # The rounding of log Σ exp grows with the outputs.
    rounding = 4 * torch.finfo(torch.float32).eps * float(f.abs().max())
    readings = [ours * factor / size for size in sizes for factor in factors]
    return any(abs(float(loss) - r) <= relative * abs(r) + rounding for r in readings)
