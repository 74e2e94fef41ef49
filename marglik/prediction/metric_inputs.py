"""Checks of the inputs of metrics, and their conversion to float64 on the CPU."""

import torch
from torch import Tensor

__all__ = [
    "as_binary",
    "as_finite",
    "as_labels",
    "as_probabilities",
    "as_variance",
    "check_rows_sum_to_one",
    "check_shapes",
]


def check_shapes(**tensors: tuple[Tensor, str]) -> None:
    """Raise a ValueError unless axes of the same letter have the same size, and none is empty.

    Args:
        tensors: name -> (tensor, its axes, one letter each); ``labels=(y, "N")``.
    """
    sizes: dict[str, int] = {}
    for tensor, axes in tensors.values():
        fits = tensor.dim() == len(axes) and all(
            sizes.setdefault(axis, size) == size
            for axis, size in zip(axes, tensor.shape, strict=True)
        )
        if not fits or tensor.numel() == 0:
            given = ", ".join(f"{name} {tuple(t.shape)}" for name, (t, _) in tensors.items())
            wanted = ", ".join(f"{name} ({', '.join(a)})" for name, (_, a) in tensors.items())
            raise ValueError(
                f"The shapes are {given}; expected {wanted}, of at least one example. Pass the "
                "whole data set, examples first; add or remove axes with .unsqueeze(1), .flatten()."
            )


def as_probabilities(name: str, values: Tensor) -> Tensor:
    """Probabilities as float64 on the CPU; those above 1 by rounding become 1.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: NaN, negative numbers, or numbers above 1 by more than rounding.
    """
    if not values.is_floating_point():
        raise TypeError(
            f"{name} have dtype {values.dtype}; expected floating-point probabilities. Pass what "
            "the predictive returns, or convert with .float()."
        )
    p = values.detach().cpu().double()
    _refuse(
        p[~((p >= 0) & (p <= 1 + _rounding(values.dtype)))],  # NaN included
        f"{name} include {{}}; expected numbers in [0, 1]. Pass logits through softmax or sigmoid "
        "first; NaN comes from a predictive that has diverged.",
    )
    return p.clamp(max=1.0)


def check_rows_sum_to_one(p: Tensor, dtype: torch.dtype) -> None:
    """Raise a ValueError unless probabilities (N, C) are of two classes or more and sum to 1.

    Args:
        p: the probabilities, in float64.
        dtype: the dtype that they were computed in, which sets the tolerance.
    """
    if p.shape[1] < 2:
        raise ValueError(
            "The predictive has 1 class; expected two or more. One column of probabilities of the "
            "target 1 belongs in bernoulli_metrics."
        )
    sums = p.sum(dim=1)
    _refuse(
        sums[(sums - 1).abs() > _rounding(dtype)],
        "The probabilities of an example sum to {}; expected 1. Pass logits through softmax over "
        "the classes first; independent outputs belong in bernoulli_metrics.",
    )


def as_labels(labels: Tensor, num_classes: int) -> Tensor:
    """Class indices as int64 on the CPU.

    Raises:
        TypeError: no integers.
        ValueError: labels outside 0..num_classes - 1.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(
            f"labels have dtype {labels.dtype}; expected class indices, int64. Convert them with "
            ".long(), one-hot rows with .argmax(dim=1)."
        )
    y = labels.detach().cpu().long()
    _refuse(
        y[(y < 0) | (y >= num_classes)],
        f"labels include {{}}; expected 0 to {num_classes - 1}, the predictive's classes. Leave "
        "out examples without a label, or of classes that the network was not trained on.",
    )
    return y


def as_binary(targets: Tensor) -> Tensor:
    """Targets 0 and 1, of any dtype, as bool on the CPU; a ValueError for others."""
    y = targets.detach().cpu()
    _refuse(
        y[(y != 0) & (y != 1)],
        "targets include {}; expected 0 or 1. Soft targets have no accuracy and no calibration: "
        "threshold them first, for example targets > 0.5.",
    )
    return y == 1


def as_variance(variance: Tensor) -> Tensor:
    """Positive, finite variances as float64 on the CPU; a ValueError for others."""
    v = as_finite("variance", variance)
    _refuse(
        v[v <= 0],
        "variance includes {}; expected positive numbers. Pass variances, not their logarithms, "
        "and add the noise σ² to the variance of the network's outputs.",
    )
    return v


def as_finite(name: str, values: Tensor) -> Tensor:
    """Finite numbers as float64 on the CPU; a ValueError for NaN and infinities."""
    x = values.detach().cpu().double()
    _refuse(
        x[~torch.isfinite(x)],
        f"{name} include {{}}; expected finite numbers. Find them with ~torch.isfinite({name}), "
        "and leave those examples out or repair what predicts them.",
    )
    return x


def _refuse(wrong: Tensor, message: str) -> None:
    """Raise a ValueError that names the first of the wrong values, if there are any."""
    if len(wrong):
        raise ValueError(message.format(f"{wrong[0].item():.4g}"))


def _rounding(dtype: torch.dtype) -> float:
    """Tolerance for probabilities above 1, and for their sum over classes."""
    return max(1e-3, 4 * torch.finfo(dtype).eps)
