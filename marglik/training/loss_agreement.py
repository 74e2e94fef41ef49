"""Whether a loop's loss is the one that its likelihood says: by their gradients in the outputs.

Not by their values, which may differ by a constant such as log y!; and label smoothing hardly
changes the value of a network that was just initialised.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.model_calls import logits_of
from kfac_backend.likelihoods import Likelihood, check_targets, num_counted_terms
from kfac_backend.precision import at_least_float32

if TYPE_CHECKING:
    from marglik.training.state import LearnerOptions

TOLERANCE = 1e-3
"""Of the gradients' norm; several times the rounding of a coarser dtype if that is more."""
MOST_NUMBERS = 2**22
"""Of the gradients that are compared."""


class OutputOf:
    """Notes a network's outputs by a hook, until it is closed.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._outputs: list[Tensor] = []
        self._handle = model.register_forward_hook(self._note)

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        f = logits_of(output)
        if isinstance(f, Tensor) and f.requires_grad:
            self._outputs.append(f)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    @property
    def only(self) -> Tensor | None:
        """The output of the only call; None if there was none, or several, which may all count."""
        return self._outputs[0] if len(self._outputs) == 1 else None


def warn_of_another_loss(
    loss: Tensor,
    f: Tensor,
    y: Tensor,
    likelihood: Likelihood,
    options: "LearnerOptions",
) -> None:
    """Warn, with the likely cause, unless ∂loss/∂f = scale · Σ ∇ℓ / count.

    The count is that of the examples, or with mean_over="terms" of the loss terms.

    Args:
        loss: a function of ``f``, with its graph.
        f: outputs (N, ..., C), with their graph.
        y: targets that the likelihood takes.
        likelihood: says ℓ.
        options: say what the loss is a mean over, and its scale.

    Raises:
        ValueError: targets that do not fit the outputs.
    """
    (gradient,) = torch.autograd.grad(loss.sum(), f, retain_graph=True, allow_unused=True)
    if gradient is None:
        return
    check_targets(f, y, likelihood, may_ignore=True)
    scale, is_mean_over_terms = options.loss_scale, options.mean_over == "terms"
    terms = max(int(num_counted_terms(f, y, likelihood)), 1)
    count = terms if is_mean_over_terms else len(f)
    rounding = torch.finfo(f.dtype).eps
    # Of some terms alone, where a vocabulary makes the gradients large: (M, C).
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
    unit = "classes" if likelihood.has_labels else "targets"
    if same(loops, factor * ours):
        difference = f"is {factor:.4g} times that of the likelihood"
        if any(abs(factor / number - 1) < TOLERANCE for number in (len(f), terms, 2 * len(f))):
            difference += ', as with reduction="sum". Take the mean'
        elif not is_mean_over_terms and abs(factor * terms / len(f) - 1) < TOLERANCE:
            difference += ", as of a mean over all terms that count. Pass mean_over='terms'"
        else:
            difference += (
                ", as of a mean over outputs, or a loss without the factor ½. If it is for all "
                f"batches, pass loss_scale={scale * factor:.6g} to the learner"
            )
    elif ours.shape[1] > 1 and same(loops, _per_term(loops, ours) * ours):
        difference = (
            f"counts some {unit} more than others. Give the likelihood their weights, as in "
            "'classification(weights=[1, 2])' or \"weighted(of='regression')\""
        )
    elif smoothing := _smoothing(loops, ours, y, count / scale, same):
        difference = (
            f"is that of labels smoothed by {smoothing:.4g}. Pass the likelihood "
            f"'classification(smoothing={smoothing:.4g})', or leave the smoothing out"
        )
    else:
        difference = (
            "has another direction. Are there label smoothing, class weights, mixed examples or "
            "a further term? Choose a likelihood that says so (docs/likelihoods.md)"
        )
    warnings.warn(
        f"The loop's loss is not that of likelihood '{likelihood}', whose evidence decides the "
        f"weight decays: its gradient in the outputs of the first batch {difference}.",
        RuntimeWarning,
        stacklevel=2,
    )


def _per_term(loops: Tensor, ours: Tensor) -> Tensor:
    """The factor of each term, (M, 1), by which it counts more; 0 where it has no gradient."""
    squares = ours.square().sum(1, keepdim=True)
    return ((loops * ours).sum(1, keepdim=True) / squares).nan_to_num(0.0, 0.0, 0.0)


def _smoothing(loops: Tensor, ours: Tensor, y: Tensor, count: float, same: Any) -> float | None:
    """ε if the gradient is that of labels of which ε is spread evenly over all classes.

    The gradient of the smoothed loss is p − (1 − ε) e_y − ε/C, that is ε (e_y − 1/C) more.
    """
    C = ours.shape[1]
    counted = ours.any(1)
    if y.is_floating_point() or y.dim() > 1:
        return None
    labels = nn.functional.one_hot(y.long().where(counted, 0), C)
    spread = (labels.to(ours) - 1 / C) * counted[:, None] / count
    smoothing = float(((loops - ours) * spread).sum() / spread.square().sum())
    return smoothing if smoothing > 0 and same(loops, ours + smoothing * spread) else None
