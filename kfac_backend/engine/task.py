"""What a model's batches mean: their targets, which of them count, and which positions of inputs.

Also the checks of inputs, outputs and targets. How a batch is taken apart is in `engine.batches`.
"""

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

WHICH_LABEL = (
    "pass shift_labels=False if the output at a position predicts its own label, True if it "
    "predicts the next one"
)
"""The way out of errors where a model's own loss does not show whether it shifts labels."""


MOST_ROWS = 64
"""Rows of outputs that are enough to know that all are probabilities."""
FEWEST_OUTPUTS = 32
"""Outputs below which values in [0, 1] alone say nothing: an untrained network has such logits."""


class Task:
    """What a likelihood and options say about a model's batches.

    `targets` gives the targets of the outputs, position by position, and the rest checks and counts
    them. A pass, the learner, calibration and metrics share it. A batch's labels may differ from
    the targets in two ways:

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
        likelihood: Likelihood | str,
        options: TargetOptions = TargetOptions(),  # noqa: B008
    ) -> None:
        self.options, self.likelihood = options, likelihood_of(likelihood)
        options.check(self.likelihood)
        self.may_ignore = options.ignore_index is not None
        """Whether some targets do not count, as far as it is known so far."""
        self.shifts = None if options.shift_labels == "auto" else bool(options.shift_labels)
        """Whether labels are shifted, the same for all batches. None until a batch shows it; as
        long as that, `targets` needs the model."""
        self._has_warned = False
        self.knows_outputs = False
        self.knows_axis = self.shifts is True or self.likelihood.kind != "classes"
        """Whether the last axis of outputs is known to be that of the classes."""
        self._is_unproved = False  # a sharded model's, whose sizes alone can show the axis

    def mask(self, x: Any) -> Tensor | None:
        """Which positions of a mapping's examples count (N, R); None if it hides none.

        A mask of other axes, as attention takes for each pair of positions, hides none.

        Raises:
            ValueError: a mask of floating point that is not of zeros and ones.
        """
        key = self.options.dict_key_mask
        mask = x.get(key) if key and isinstance(x, Mapping) else None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return None
        counted = mask != 0
        if mask.is_floating_point() and not torch.equal(counted.to(mask), mask):
            raise ValueError(
                f"'{key}' has entries other than 0 (hidden) and 1 (counts). Give it truth values, "
                "or let all positions count (dict_key_mask=None)."
            )
        return None if counted.all() else counted

    def targets(
        self, model: nn.Module | None, x: Any, y: Any, mask: Tensor | Literal["ask"] | None = "ask"
    ) -> Any:
        """The targets of a batch, in the labels' shape; `IGNORED` where they do not count.

        ``mask`` is `mask` of x, for who has it already: asking for it waits for a GPU.

        Raises:
            ValueError: the model's own loss equals ours neither with these labels nor with shifted
                ones; numbers at positions that a mask hides.
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
                f"shift_labels=True needs labels (N, R), several an example; these have shape "
                f"{tuple(y.shape)}. Pass shift_labels=False."
            )
        self.may_ignore = True
        if hidden is not None:
            self._warn_of_hidden(y, hidden)
            y = y.masked_fill(hidden, IGNORED)
        if self.shifts:
            y = _shifted(y)
            # Before the shift the mask hides labels, after it the positions that would predict one.
            y = y if hidden is None else y.masked_fill(hidden, IGNORED)
        return y

    def _check_hidden(self, y: Tensor, mask: Tensor | None) -> None:
        """Raise a ValueError if numbers at positions that a mask hides would count in the loss."""
        if mask is None or y.dim() != 3 or y.shape[:-1] != mask.shape:
            return
        if isinstance(self.likelihood, Weighted) and not y[..., -1][~mask.to(y.device)].any():
            return
        raise ValueError(
            f"'{self.options.dict_key_mask}' hides positions, and likelihood '{self.likelihood}' "
            "counts the targets of all: only labels can be left out. Give each position a weight, "
            f"0 where it is hidden (\"weighted(of='{self.likelihood}')\"), or let all positions "
            "count (dict_key_mask=None)."
        )

    def telling_examples(self, y: Tensor) -> Tensor:
        """The first two examples whose labels can tell whether the model shifts them."""
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
        """Raise a ValueError if a sharded model's outputs may have the classes second; once.

        Its layers are not run on one example, so that the sizes alone decide.
        """
        if self._is_unproved and not self.knows_axis and f.dim() > 2 and len(f):
            if _has_equal_sizes(f):
                raise ValueError(
                    f"An example has outputs {tuple(f.shape[1:])}, whose classes may be second or "
                    "last, and the layers of a model under fully_shard cannot show which. Add an "
                    "axis, and pass y.unsqueeze(1): return f.unsqueeze(1) where the classes are "
                    "last, and f.movedim(1, -1).unsqueeze(1) where they are second."
                )
            self.knows_axis = True

    def check_axis(self, model: nn.Module | None, x: Any, y: Any) -> None:
        """Raise a ValueError unless the classes are on the last axis of the outputs; asked once.

        For labels (N, H, W), outputs (N, C, H, W) with C = H = W have the shape that they have with
        classes last. Then the layer that returns them decides, run on one example: its features
        are last if it is linear, and second if it is a convolution. A model under `fully_shard` is
        not run: `check_sizes` refuses such outputs when they are there.
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
            words = "are second, and must be" if is_last is False else "may be second, or"
            raise ValueError(
                f"An example has outputs {shape} and labels {tuple(y.shape[1:])}. The classes "
                f"{words} last. Return f.movedim(1, -1) where they are second. If the "
                "layers do not show that they are last, add an axis that does: return "
                "f.unsqueeze(1), and pass y.unsqueeze(1)."
            )
        self.knows_axis = is_ambiguous or y.shape[1:2] == f.shape[1:2]

    def look_at(self, f: Tensor) -> None:
        """Warn once of outputs that are probabilities already, where the likelihood takes logits.

        Those of classes lie in [0, 1] and sum to 1, which logits do not by chance. Those of
        Bernoulli outputs all lie in [0, 1]. Logits of an untrained network often do, too, close to
        each other: so a sigmoid must have made the outputs, or they must differ by more than a
        half. The first batch with enough outputs to tell decides.
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
                reason = "each row lies in [0, 1] and sums to 1", "softmax (or the logarithm"
        if name == "bernoulli":
            is_sigmoid = _is_made_by_sigmoid(f)
            if f.numel() < FEWEST_OUTPUTS and not is_sigmoid:
                return
            smallest, largest = torch.aminmax(f.detach())
            if smallest >= 0 and largest <= 1 and (is_sigmoid or largest - smallest > 0.5):
                reason = "all lie in [0, 1]", "sigmoid (or torch.logit"
        self.knows_outputs = True
        if reason is not None:
            warnings.warn(
                f"The model's outputs are probabilities: {reason[0]}. Likelihood '{likelihood}' "
                f"takes logits. Return these, without the {reason[1]} of its result).",
                stacklevel=3,
            )

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
        are_labels = self.likelihood.has_labels
        may_shift = are_labels and y.dim() > 1
        device = next(model.parameters()).device
        x, y = detached(x, device), y.to(device)
        # Step 1: two examples whose labels tell the two ways apart.
        if splits_by_example(x, y):
            index = self.telling_examples(y)
            x, y = examples(x, index), y[index]
            if not len(index):
                return None

        def fits() -> None:
            check_targets(call_with(model, {}, x), y, self.likelihood, may_ignore=True)

        with torch.no_grad(), forked_random_numbers(model):
            # Without labels first, to check these: on a GPU, a label out of range inside the
            # model's own loss would end the process.
            if isinstance(try_twice(fits), Exception):
                return None  # reported by name, in the pass itself
            own_output = own_loss(model, x, y)
        if own_output is None:
            return False
        # Step 2: the model's own loss, which knows of no label noise, against ours, with these
        # labels and with shifted ones.
        likelihood = self.likelihood
        likelihood = likelihood.replace(noise=0.0) if likelihood.has_label_noise else likelihood
        f, loss = own_output
        if not torch.isfinite(loss) or not torch.isfinite(f).all():
            return None  # reported by name, in the pass itself
        labels_of_shift = {False: y} | ({True: _shifted(y)} if may_shift else {})
        means, fitting = [], []
        for shifts, labels in labels_of_shift.items():
            ours = float(loss_sum(at_least_float32(f), labels, likelihood))
            terms = max(int(num_counted_terms(f, labels, likelihood)), 1)
            means.append(f"{ours / terms:.6g}")
            if _is_our_loss(loss, ours, terms, f, likelihood.kind):
                fitting.append(shifts)
        # Step 3: exactly one way must fit. With both or none, guessing would give wrong numbers.
        if len(fitting) == 1:
            self.knows_axis = True  # with classes elsewhere the loss would be another
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


def _is_our_loss(loss: Tensor, ours: float, terms: int, f: Tensor, kind: str) -> bool:
    """Whether a model's loss is our sum, or its mean over examples, loss terms or outputs.

    For regression it may also be the squared error, without our factor ½.
    """
    sizes = {1, len(f), terms} | (set() if kind == "classes" else {f.numel()})
    factors = (1, 2) if kind == "continuous" else (1,)
    relative = 1e-4 if loss.dtype in (torch.float32, torch.float64) else 0.02
    # The rounding of log Σ exp grows with the outputs.
    rounding = 4 * torch.finfo(torch.float32).eps * float(f.abs().max())
    readings = [ours * factor / size for size in sizes for factor in factors]
    return any(abs(float(loss) - r) <= relative * abs(r) + rounding for r in readings)


def _is_made_by_sigmoid(f: Tensor) -> bool:
    """Whether a sigmoid or softmax made the outputs, but for operations that only move numbers."""
    node: Any = f.grad_fn
    while node is not None:
        if any(name in node.name().lower() for name in ("sigmoid", "softmax")):
            return True
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return False


def _has_equal_sizes(f: Tensor) -> bool:
    """Whether outputs (N, ...) have the same shape with any axis as the last."""
    return f.shape[-1] > 1 and len(set(f.shape[1:])) == 1


def _run_with_axis(model: nn.Module, x: Any) -> tuple[Tensor, bool | None]:
    """The outputs, and whether features of the layer that returns them are last; None: unknown."""
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


INPUTS_NOT_FINITE = "The inputs contain NaN or infinity; clean the data."


def check_inputs(x: Any) -> None:
    """Raise a ValueError if the inputs have NaN or infinity; a mapping's masks may have −∞."""
    if any(not torch.isfinite(value).all() for value in numbers_of(x)):
        raise ValueError(INPUTS_NOT_FINITE)


def numbers_of(x: Any) -> Iterator[Tensor]:
    """The tensors of an input that must be finite."""
    for key, value in x.items() if isinstance(x, Mapping) else [("", x)]:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            # Masks that are added to the scores of attention hide positions by −∞.
            value = torch.view_as_real(value) if value.is_complex() else value
            yield value.masked_fill(value == -torch.inf, 0) if "mask" in str(key) else value


def check_finite(model: nn.Module, f: Tensor, x: Any) -> None:
    """Raise a ValueError that names what has NaN or infinity, if the outputs f have any."""
    # The sum is tested first, which takes a fifth of the time of testing each entry. If all entries
    # are finite it may still overflow, and then each entry is tested.
    if torch.isfinite(f.sum()) or torch.isfinite(f).all():
        return
    check_inputs(x)
    raise not_finite(model)


def not_finite(model: nn.Module) -> ValueError:
    """The error for outputs with NaN or infinity at inputs without."""
    for name, p in model.named_parameters():
        if not torch.isfinite(local_part(p)).all():  # each rank may call this alone
            return ValueError(
                f"Parameter '{name}' contains NaN or infinity; training has diverged. "
                "Go back to an earlier state, with a smaller learning rate."
            )
    return ValueError(
        "The model's output contains NaN or infinity though its parameters and inputs are "
        "finite; activations overflow. Normalise the inputs, or use float32 or float64."
    )
