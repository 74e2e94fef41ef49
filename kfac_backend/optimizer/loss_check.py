"""Check that the loss of a training belongs to K-FAC's likelihood.

A training step has neither targets nor loss, but the loss's gradient g at the outputs f. For a
cross-entropy it is s (softmax(f) − e_y), and for the binary form s (σ(f) − y): the signs show the
labels, and the factor s is the same everywhere. Differences that do not change the curvature are no
mistake: soft labels, label smoothing, and any factor s of the loss except a sum's. With
fisher="empirical" the curvature has the factor s², which is documented and not checked here.
"""

import warnings
from typing import Literal

import torch
from torch import Tensor

from kfac_backend.engine.task import Task
from kfac_backend.likelihoods import IGNORED, Likelihood, Ordinal
from kfac_backend.precision import at_least_float32

TOLERANCES = {torch.bfloat16: 0.02, torch.float32: 0.001, torch.float64: 0.001}
"""Maximum relative error of a gradient that fits, by the dtype of the outputs."""
SPREAD = 10
"""Minimum standard deviation of outputs, in tolerances. If all outputs are zero, different losses
have similar gradients."""
ROWS = 512
"""Number of loss terms that are checked."""


MeanOver = Literal["terms", "examples"]
"""Unit of a loss that is a mean: over its terms, or over examples, whose terms are summed."""


class LossLikelihoodCheck:
    """Derive the targets, and the kind of loss, from a training's gradients, step by step.

    The task of the curvature may then have targets that do not count.
    """

    def __init__(self, task: Task, loss_mean_over: MeanOver) -> None:
        self._task, self.loss_mean_over = task, loss_mean_over
        task.may_ignore = True
        self._checked_shape: torch.Size | None = None  # shape of one example's outputs
        self._is_compared = False  # whether the loss was compared with the likelihood's

    def targets(self, f: Tensor, g: Tensor, mask: Tensor | None) -> Tensor:
        """Return targets that only show which terms count, because the labels are not known here.

        The loss has the gradient g at the outputs f (N, ..., C). A term with gradient zero counts
        as one whose label does not count. If each example has one term, this applies only if a mask
        (N, R) or the options say that there are such terms: the gradient is also zero if the
        network is so confident that it rounds to zero.

        The first batch that shows it decides whether to warn that the loss is not the likelihood's.
        """
        likelihood = self._task.likelihood
        if likelihood.needs_targets:
            raise NotImplementedError(
                f"The curvature of likelihood '{likelihood}' depends on the targets, which are not "
                "available to K-FAC's steps. Train with another optimiser."
            )
        if likelihood.kind != "classes":
            y = f.new_zeros(likelihood.target_shape(f))
        else:
            y = torch.zeros(f.shape[:-1], dtype=torch.long, device=f.device)
            if f.dim() > 2 or mask is not None or self._task.options.ignore_index is not None:
                y = y.masked_fill((g == 0).all(-1), IGNORED)
        if f.shape[1:] != self._checked_shape:  # only the shape can be wrong
            self._task.check(f.detach(), y)
            self._checked_shape = f.shape[1:]
        if not self._is_compared:
            if likelihood.kind == "classes" and not isinstance(likelihood, Ordinal):
                check_axis(f, g)
            why = why_not(f, g, likelihood, self.loss_mean_over == "examples")
            self._is_compared = why is not None
            if why:
                warnings.warn(why, stacklevel=3)
        return y


def check_axis(f: Tensor, g: Tensor) -> None:
    """Raise a ValueError if the loss has the classes on the second axis of the outputs f.

    The gradient g of a cross-entropy sums to zero over the classes for any labels.
    """
    g = at_least_float32(g.detach())
    size = float(g.abs().sum())
    if f.dim() < 3 or f.dtype not in TOLERANCES or not size:
        return
    of_last, of_second = (float(g.sum(axis).abs().sum()) / size for axis in (-1, 1))
    if of_last > 0.1 and of_second < 0.01:
        raise ValueError(
            f"An example has outputs {tuple(f.shape[1:])}, and the loss's gradient shows that "
            "their classes are second; they must be last. Return f.movedim(1, -1), and compute the "
            "loss of its f.movedim(-1, 1)."
        )


def why_not(f: Tensor, g: Tensor, likelihood: Likelihood, of_examples: bool) -> str | None:
    """Return why the loss is not the likelihood's: empty if it may be, None if unclear.

    The loss has the gradient g at the outputs f (N, ..., C). With ``of_examples`` it should be a
    mean over examples, otherwise over their terms. The function waits for a GPU.
    """
    tolerance = TOLERANCES.get(f.dtype)
    if tolerance is None:  # in float16 small gradients are zero
        return ""
    N = len(f)
    f, g = (at_least_float32(t.detach()).flatten(0, -2) for t in (f, g))
    counts = (g != 0).any(-1)  # leave out terms whose label does not count
    number = N if of_examples else int(counts.sum())
    f, g = f[counts][:ROWS], g[counts][:ROWS]  # (M, C)
    if g.numel() < 8 or f.std() < SPREAD * tolerance:
        return None
    # Step 1: the labels for a cross-entropy, and its gradient up to the factor s.
    y = g.argmin(-1)
    d = f.softmax(-1).scatter_add(-1, y[:, None], -torch.ones_like(f[:, :1]))
    if f.shape[-1] > 1:
        unsure = d.norm(dim=-1) > 1e-3  # if p_y rounds to 1, g is mostly rounding error
        if not unsure.any():
            return None
        f, g, y, d = f[unsure], g[unsure], y[unsure], d[unsure]
    forms = {"classification": d, "bernoulli": f.sigmoid() - (g < 0).to(f)}
    if likelihood.has_label_noise:  # y also has the smallest gradient entry; at ε = 0 both fit
        forms = {likelihood.name: likelihood.gradient(f, y)} | forms
    # Step 2: another likelihood's gradient, or a factor that is not a mean's.
    for name, form in forms.items():
        s = ((g * form).sum() / form.square().sum()).item()
        if not s > 0 or (g - s * form).norm() > tolerance * g.norm():
            continue
        if name != likelihood.name:
            return (
                f"The gradient of the loss belongs to likelihood {name!r}, but K-FAC has "
                f"likelihood '{likelihood}', whose curvature is different. Pass {name!r}."
            )
        if number > 1 and abs(s - 1) < tolerance:
            return (
                f"The loss is a sum over {number} terms (reduction='sum'?), but K-FAC expects "
                f"their mean. The gradients are {number} times too large for damping, kl_clip and "
                "learning rate. Use the mean."
            )
        return ""
    if likelihood.name != "classification":
        return ""
    return _why_no_cross_entropy(g, d, y, tolerance)


def _why_no_cross_entropy(g: Tensor, d: Tensor, y: Tensor, tolerance: float) -> str:
    """Return why a gradient g is no cross-entropy's s d: another loss, or weighted classes.

    d has the gradient's direction for labels y.
    """
    if g.sum(-1).abs().sum() > 0.1 * g.abs().sum():  # a softmax's gradients sum to 0
        return (
            "The gradient of the loss is not the gradient of a cross-entropy of logits, but K-FAC "
            "has likelihood 'classification', whose curvature is different. Pass the likelihood "
            "of the loss, and let the model return logits instead of probabilities."
        )
    if _weighs_classes(g, d, y, tolerance):
        return (
            "The loss has class weights (weight=...), but the curvature of likelihood "
            "'classification' counts all classes equally. Remove the weights, and draw the "
            "classes with these frequencies instead (a WeightedRandomSampler)."
        )
    return ""


def _weighs_classes(g: Tensor, d: Tensor, y: Tensor, tolerance: float) -> bool:
    """Return whether the terms of each class have a separate factor: g_n = s_y d_n."""
    sure = d.norm(dim=-1) > 0.1  # in half precision the others are too inexact
    g, d, y = g[sure], d[sure], y[sure]
    s = (g * d).sum(-1) / d.square().sum(-1)
    if not ((g - s[:, None] * d).norm(dim=-1) <= tolerance * g.norm(dim=-1)).all():
        return False
    classes, y = y.unique(return_inverse=True)
    if len(y) < len(classes) + 4:  # a few of a class agree by chance
        return False
    zeros = s.new_zeros(len(classes))
    least, largest = (
        zeros.scatter_reduce(0, y, s, reduction, include_self=False)
        for reduction in ("amin", "amax")
    )
    return bool((largest - least <= tolerance * largest).all())
