"""`kronecker_factors`: the Kronecker-factored GGN of a model on data, in one call."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kfac_backend.batches import each_batch, split_batch
from kfac_backend.curvature_pass import CurvaturePass
from kfac_backend.kronecker import KroneckerFactors
from kfac_backend.options import (
    BackwardPrecision,
    Fisher,
    KfacApprox,
    Likelihood,
    ShiftLabels,
    Unsupported,
)

__all__ = ["kronecker_factors"]


def kronecker_factors(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    *,
    kfac_approx: KfacApprox = "expand",
    fisher: Fisher = "exact",
    mc_samples: int = 1,
    unsupported: Unsupported = "error",
    generator: torch.Generator | None = None,
    rank_tolerance: float = 0.0,
    backward_precision: BackwardPrecision = "float32",
    batched: bool = False,
    progress: bool = False,
    dict_key_y: str = "labels",
    ignore_index: int | None = None,
    shift_labels: ShiftLabels = "auto",
    dict_key_mask: str | None = "attention_mask",
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
        model: any model of the supported layers (`kfac_backend.rules`); a layer may run several
            times, and layers may share a tensor. Parameters with ``requires_grad=False`` have no
            block and cost nothing. Its parameters, their flags and its mode are not changed.
        data: batches (x, y), or mappings with targets under ``dict_key_y``, which go to the model
            whole, or by their entries' names if its forward has those; they are moved to the
            model's device. Examples come first; batches may differ in size.
        likelihood: "classification": logits (N, ..., C), labels (N, ...) in 0..C-1. "regression":
            outputs and targets (N, ..., C), noise 1. "bernoulli": C independent logits, targets in
            [0, 1].
        kfac_approx: "expand" or "reduce" for all layers; "auto" takes expand if examples have
            several loss terms, outputs (N, ..., C), and reduce if they have one; a mapping gives
            modes to layers' names or patterns of them, the first that fits: {"head*": "expand",
            "*": "reduce"}. A layer's mode may name its shared axes in their order, {"*":
            {"augmentation": "reduce", "space": "expand"}}: first that of the rows if
            `examples_of_rows` tells their examples, then those of its input; for convolutions
            height and width are one.
        fisher: "exact", the GGN (C - 1 or C backward passes a batch for each loss term of an
            example); "mc", an unbiased estimate with ``mc_samples`` backward passes; "empirical",
            the labels' own gradients (one backward pass for each loss term).
        mc_samples: labels drawn per example for fisher="mc".
        unsupported: parameters without a rule raise ("error"), are constants ("freeze"), or get the
            exact diagonal of their block ("diagonal", slow: each backward pass once per example).
        generator: source of fisher="mc"'s labels, on the model's device.
        rank_tolerance: share of tr Λ, the loss Hessian's trace, that may be left out for each loss
            term to save backward passes ("classification", "exact"); 0 leaves nothing out. What it
            was is in the factors, see `KroneckerFactors.left_out_share`.
        backward_precision: "float32"; "tf32" (GPU) or "bf16" (CPU) multiply so in the backward
            passes, faster; A is not touched, B of WRN-16-4 wrong by up to 0.3 % in bf16.
        batched: propagate a batch's vectors back at once: fewer launches on a GPU, V times the
            memory.
        progress: whether to show a progress bar over the batches.
        dict_key_y: the targets' key in batches that are mappings.
        ignore_index: label of loss terms that do not count (padding, say), in "classification".
        shift_labels: whether labels (N, R) stand with their own tokens, and the output at a
            position predicts the next one, as in causal language models of Hugging Face. "auto"
            asks the loss that the model computes of labels, if it does: it must be ours, of these
            labels or of shifted ones, and -100 then does not count, as there.
        dict_key_mask: key of a mask (N, R) in inputs that are mappings. Positions that it hides
            count neither in the layers nor as loss terms; the first batch that has some proves
            that they do not reach the others' outputs. None: all positions count.

    On a CPU batches are split inside where parts are faster, and convolutions run in channels_last.
    That changes nothing but rounding and the order in which labels are drawn.

    Raises:
        ValueError: no data, no trainable parameter, targets that do not fit, a loss of the model's
            own that is another one, NaN or infinity in
            outputs (naming the parameter or the inputs that have it, too), BatchNorm in train
            mode, an option that is not supported.
        TypeError: inputs that are not of floating point, outputs that are not a tensor, labels
            that are not integers, batches that are neither (x, y) nor a mapping.
        KeyError: a mapping without ``dict_key_y``.
        NotImplementedError: a layer without a rule, or used in a way that hooks cannot see.
        torch.OutOfMemoryError: naming a batch size that fits.
    """
    curvature = CurvaturePass(
        model,
        likelihood,
        kfac_approx=kfac_approx,
        fisher=fisher,
        mc_samples=mc_samples,
        unsupported=unsupported,
        generator=generator,
        rank_tolerance=rank_tolerance,
        backward_precision=backward_precision,
        batched=batched,
        ignore_index=ignore_index,
        shift_labels=shift_labels,
        dict_key_mask=dict_key_mask,
    )
    for batch in each_batch(data, "Curvature", progress):
        curvature.add(*split_batch(batch, dict_key_y))
    return curvature.factors()
