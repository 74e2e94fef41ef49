"""Compare a loop's loss with its likelihood, by their gradients in the outputs.

Values are not compared, because they may differ by a constant such as log y!, and because label
smoothing hardly changes the value for a network that was just initialised.
"""

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.model_calls import logits_of
from kfac_backend.likelihoods import IGNORED, Likelihood, check_targets, num_counted_terms
from kfac_backend.precision import at_least_float32
from kfac_backend.sharding import is_part
from marglik.training.options import LearnerOptions

TOLERANCE = 1e-3
"""Tolerance relative to the gradients' norm, or several times the rounding error of a coarser
dtype."""
FEW_FIRST_LABELS = 0.02
"""Share of labels without an output that may count in a mean over terms without a warning."""
LEAST_SCALE = 2**8
"""Smallest factor that counts as a gradient scaler's."""
MOST_NUMBERS = 2**22
"""Maximum number of compared gradient entries."""


class FirstStepLossCheck:
    """Compare the loss of the first step with the likelihood's loss, in any loop, by a hook.

    The hook stores the network's first outputs that get a gradient, and this gradient. The owner of
    the loop may pass the targets. Otherwise they are derived from the gradient: for labels the
    class with the smallest entry, for Bernoulli outputs the sign. For other likelihoods the targets
    are needed.

    Args:
        model: the network.
        likelihood: likelihood with the loss ℓ.
        options: options with the normalisation and the scale of the loss.
        only_counts: whether to count only the batches of the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        options: LearnerOptions,
        *,
        only_counts: bool = False,
    ) -> None:
        self.likelihood, self.options, self._only_counts = likelihood, options, only_counts
        self.targets: Tensor | None = None
        """Targets of the next batch, for likelihoods that need them."""
        self.scale: float | None = None
        """Factor of a gradient scaler on the loss; None if it is not known."""
        self._first: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._num_outputs = 0
        self._gradients: list[tuple[int, int]] = []
        """Number of each output that got a gradient, and number of the latest output at that
        time."""
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.handle = model.register_forward_hook(self._note)

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        f = logits_of(output)
        is_of_training = module.training and isinstance(f, Tensor) and f.requires_grad
        if is_of_training and f.dim() > 1:  # passes run in eval mode
            self._num_outputs += 1
            f.register_hook(partial(self._take, self._num_outputs, f.detach(), self.targets))

    def _take(self, number: int, f: Tensor, y: Tensor | None, gradient: Tensor) -> None:
        if self._gradients and number > self._gradients[-1][1] and self._are_zeroed():
            self._gradients, self._first = [], None  # as after the first step of SAM
        self._gradients.append((number, self._num_outputs))
        if self._first is None:
            self._first = f, gradient.detach().clone(), y

    def _are_zeroed(self) -> bool:
        """Return whether the loop has set the gradients to zero since the previous backward."""
        if any(map(is_part, self._parameters)):  # their gradients may be elsewhere
            return False
        return not any(p.grad is not None and p.grad.any() for p in self._parameters)

    def compare(self) -> int:
        """Warn if the loss of the first step, which follows now, differs; remove the hook.

        Returns:
            The number of batches whose gradients the step accumulates.
        """
        self.handle.remove()
        numbers = [number for number, _ in self._gradients]
        has_joint_loss = any(i < j <= latest for i, latest in self._gradients for j in numbers)
        if self._first is None or has_joint_loss:
            return 1
        if self._only_counts:
            return len(numbers)
        f, gradient, y = self._first
        if y is None or (self.likelihood.has_labels and y.dim() > 1):  # labels may be shifted
            y = _shown_targets(gradient, self.likelihood)
        if y is not None:  # the loss of each of k accumulated batches is divided by k
            gradient = gradient * len(numbers) / (self.scale or 1)
            is_scaled = self.scale is None
            warn_of_another_gradient(
                gradient, f, y, self.likelihood, self.options, may_be_scaled=is_scaled
            )
        return len(numbers)


def _shown_targets(gradient: Tensor, likelihood: Likelihood) -> Tensor | None:
    """Return the targets that a loss's gradient shows, or None."""
    if likelihood.kind == "binary":
        return (gradient < 0).to(gradient)
    if likelihood.name not in ("classification", "noisy_classification"):
        return None
    return gradient.argmin(-1).masked_fill(~gradient.any(-1), IGNORED)


def warn_of_another_gradient(
    gradient: Tensor,
    f: Tensor,
    y: Tensor,
    likelihood: Likelihood,
    options: LearnerOptions,
    *,
    may_be_scaled: bool = False,
) -> None:
    """Warn, with the likely cause, unless ∂loss/∂f = scale · Σ ∇ℓ / count.

    The count is the number of examples, or with loss_mean_over="terms" of loss terms.

    Args:
        gradient: ∂loss/∂f.
        f: outputs (N, ..., C).
        y: targets of the likelihood.
        likelihood: likelihood with the loss ℓ.
        options: options with the normalisation and the scale of the loss.
        may_be_scaled: whether a gradient scaler may have multiplied the gradient by a power of two,
            initially 2¹⁶.

    Raises:
        ValueError: targets do not fit the outputs.
    """
    check_targets(f, y, likelihood, may_ignore=True)
    scale, is_mean_over_terms = options.loss_scale, options.loss_mean_over == "terms"
    terms = max(int(num_counted_terms(f, y, likelihood)), 1)
    count = terms if is_mean_over_terms else len(f)
    rounding = torch.finfo(f.dtype).eps
    # For a large vocabulary use only some terms, (M, C).
    some = slice(max(1, MOST_NUMBERS // f.shape[-1]))
    y, first = y.flatten(0, f.dim() - 2)[some], f.detach().flatten(0, -2)[some]
    ours = likelihood.gradient(at_least_float32(first), y).detach().double() * scale / count
    loops = gradient.flatten(0, -2)[some].double()
    # The gradient of a probability that is almost 0 or 1 is a difference of numbers close to 1.
    floor = 8 * rounding * scale / count * ours.numel() ** 0.5

    def same(a: Tensor, b: Tensor) -> bool:
        return float((a - b).norm()) <= max(TOLERANCE, 4 * rounding) * float(b.norm()) + floor

    if same(loops, ours) or not (loops.isfinite().all() and ours.isfinite().all()):
        return
    factor = float((loops * ours).sum() / ours.square().sum())
    is_sum = any(abs(factor / number - 1) < TOLERANCE for number in (len(f), terms, 2 * len(f)))
    scaler = 2.0 ** round(math.log2(factor)) if factor > 0 else 0.0
    if may_be_scaled and not is_sum and scaler >= LEAST_SCALE:
        loops, factor = loops / scaler, factor / scaler
        if same(loops, ours):
            return
    # Hugging Face's trainer divides by the number of labels before a model shifts them: by one more
    # for each sequence.
    num_labels = round(terms / factor) if factor > 0 else 0
    counts_first_labels = is_mean_over_terms and terms < num_labels <= terms + len(f)
    if counts_first_labels and factor > 1 - FEW_FIRST_LABELS and same(loops, factor * ours):
        return
    unit = "classes" if likelihood.has_labels else "targets"
    smoothing = _smoothing(loops, ours, y, count / scale, same)
    # With equal probabilities both explain the gradient; labels rarely have more smoothing.
    is_factor = same(loops, factor * ours)
    if smoothing and not is_sum and (smoothing <= 0.5 or not is_factor):
        difference = (
            f"belongs to labels with a smoothing of {smoothing:.4g}. Pass the likelihood "
            f"'classification(smoothing={smoothing:.4g})', or omit the smoothing"
        )
    elif is_factor:
        difference = f"is {factor:.4g} times the gradient of the likelihood"
        shifted = num_labels if counts_first_labels else None
        difference += _cause_of(factor, is_sum, len(f), terms, shifted, options)
    elif ours.shape[1] > 1 and same(loops, _per_term(loops, ours) * ours):
        difference = (
            f"has larger weights for some {unit} than for others. Give the likelihood these "
            "weights, for example 'classification(weights=[1, 2])' or \"weighted(of='regression')\""
        )
    else:
        difference = (
            "has another direction. Possible reasons are label smoothing, class weights, mixed "
            "examples or a further term. Choose a likelihood with this loss (docs/likelihoods.md)"
        )
    warnings.warn(
        f"The loop's loss differs from the loss of likelihood '{likelihood}', whose evidence "
        "determines the weight decays. Its gradient in the outputs of the first batch "
        f"{difference}.",
        RuntimeWarning,
        stacklevel=2,
    )


def _cause_of(
    factor: float,
    is_sum: bool,
    num_examples: int,
    terms: int,
    num_labels: int | None,
    options: LearnerOptions,
) -> str:
    """Return the likely cause of a factor, and the way out, for a warning.

    ``num_labels`` is the number of labels before a shift that would explain the factor.
    """
    loss_scale = f"{options.loss_scale * factor:.6g}"
    if is_sum:
        return ', as with reduction="sum". Take the mean'
    if num_labels is not None:
        return (
            f", as for a sum over {terms} terms that is divided by the number of labels before "
            f"their shift, {num_labels}. If all sequences have this length, pass "
            f"loss_scale={loss_scale} to the learner"
        )
    is_mean_over_examples = options.loss_mean_over == "examples"
    if is_mean_over_examples and abs(factor * terms / num_examples - 1) < TOLERANCE:
        return ", as for a mean over all terms that count. Pass loss_mean_over='terms'"
    return (
        ", as for a mean over outputs, or a loss without the factor ½. If this holds for all "
        f"batches, pass loss_scale={loss_scale} to the learner"
    )


def _per_term(loops: Tensor, ours: Tensor) -> Tensor:
    """Return each term's weight in the gradient, (M, 1); 0 if it has no gradient."""
    squares = ours.square().sum(1, keepdim=True)
    return ((loops * ours).sum(1, keepdim=True) / squares).nan_to_num(0.0, 0.0, 0.0)


def _smoothing(loops: Tensor, ours: Tensor, y: Tensor, count: float, same: Any) -> float | None:
    """Return ε if the gradient belongs to labels with a share ε spread evenly over all classes.

    The gradient of the smoothed loss is p − (1 − ε) e_y − ε/C. It differs from the plain one by ε
    (e_y − 1/C).
    """
    C = ours.shape[1]
    counted = ours.any(1)
    if y.is_floating_point() or y.dim() > 1:
        return None
    labels = nn.functional.one_hot(y.long().where(counted, 0), C)
    spread = (labels.to(ours) - 1 / C) * counted[:, None] / count
    smoothing = float(((loops - ours) * spread).sum() / spread.square().sum())
    return smoothing if smoothing > 0 and same(loops, ours + smoothing * spread) else None
