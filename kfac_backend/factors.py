"""`kronecker_factors`: the Kronecker-factored GGN of a model on data, in one call."""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import nn

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.curvature_pass import CurvaturePass
from kfac_backend.model.batches import each_batch
from kfac_backend.model.targets import split_batch
from kfac_backend.options import CurvatureKeywords, CurvatureOptions, Likelihood

__all__ = ["kronecker_factors"]


def kronecker_factors(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    options: CurvatureOptions = CurvatureOptions(),  # noqa: B008
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
    **keywords: Unpack[CurvatureKeywords],
) -> KroneckerFactors:
    """Kronecker-factored GGN (K-FAC) of a model on data, B ⊗ A per parameter tensor.

    Expand is exact for deep linear networks, Gaussian likelihood and one loss term per position;
    reduce where positions are summed or averaged into one output per example. Source: Eschenhagen
    et al. 2023 (arXiv:2311.00636), sections 3.2 and 3.3.

    The model runs in the mode (train or eval) it is in; dropout that is on stays on. Some thirty
    examples of the first batch run twice before the pass, to prove that the hooks see all and that
    no examples mix. (After a first batch of one example, so do those of the first that has
    several.) One and two run before that, to see which layers run once for all examples, and how
    batches may be split; further runs prove that attention by parts and copies of a module's own
    parameters, where there are any, are what the model computes.

    Args:
        model: any model of the supported layers (`kfac_backend.layers`); a layer may run several
            times, and layers may share a tensor. Parameters with ``requires_grad=False`` have no
            block and cost nothing. Its parameters, their flags and its mode are not changed.
        data: batches (x, y), or mappings with targets under ``dict_key_y``, which go to the model
            whole, or by their entries' names if its forward has those; they are moved to the
            model's device. Examples come first; batches may differ in size.
        likelihood: "classification": logits (N, ..., C), labels (N, ...) in 0..C-1. "regression":
            outputs and targets (N, ..., C), noise 1. "bernoulli": C independent logits, targets in
            [0, 1].
        options: all choices of the pass: mode, Fisher, which targets count; see `CurvatureOptions`.
        generator: source of fisher="mc"'s labels, on the model's device.
        progress: whether to show a progress bar over the batches.
        keywords: single options, in place of those of ``options``: ``kfac_approx="reduce"``.

    On a CPU batches are split inside where parts are faster, and convolutions run in channels_last.
    That changes nothing but rounding and the order in which labels are drawn.

    Raises:
        ValueError: no data, no trainable parameter, targets that do not fit, a loss of the model's
            own that is another one, NaN or infinity in outputs (naming the parameter or the inputs
            that have it, too), BatchNorm in train mode, an option that is not supported.
        TypeError: inputs that are not of floating point, outputs that are not a tensor, labels
            that are not integers, batches that are neither (x, y) nor a mapping.
        KeyError: a mapping without ``dict_key_y``.
        NotImplementedError: a layer without a rule, or used in a way that hooks cannot see.
        torch.OutOfMemoryError: naming a batch size that fits.
    """
    options = options.but(**keywords)
    curvature = CurvaturePass(model, likelihood, options, generator=generator)
    for batch in each_batch(data, "Curvature", progress):
        curvature.add(*split_batch(batch, options.dict_key_y))
    return curvature.factors()
