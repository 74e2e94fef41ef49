"""Checks of the inputs of metrics, and their conversion to float64 on the CPU."""

import torch
from torch import Tensor
from torch.distributions import Normal

__all__ = [
    "as_binary",
    "as_finite",
    "as_gaussian",
    "as_labels",
    "as_probabilities",
    "check_rows_sum_to_one",
    "check_shapes",
]


def check_shapes(**tensors: tuple[Tensor, str]) -> None:
    """Check that axes of the same letter have the same size, and that none is empty.

    Args:
        tensors: name -> (tensor, its axes, one letter each); ``labels=(y, "N")``.

    Raises:
        ValueError: another number of axes, sizes that disagree, or nothing to evaluate.
    """
    sizes: dict[str, int] = {}
    for tensor, axes in tensors.values():
        fits = tensor.dim() == len(axes) and all(
            sizes.setdefault(axis, size) == size
            for axis, size in zip(axes, tensor.shape, strict=True)
        )
        if not fits:
            given = ", ".join(f"{name} {tuple(t.shape)}" for name, (t, _) in tensors.items())
            wanted = ", ".join(f"{name} ({', '.join(a)})" for name, (_, a) in tensors.items())
            raise ValueError(
                f"The shapes are {given}; expected {wanted}. Pass the whole data set, examples "
                "first; add or remove axes with .unsqueeze(1) or .flatten()."
            )
    for name, (tensor, _) in tensors.items():
        if tensor.numel() == 0:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: there is nothing to evaluate; pass at "
                "least one example."
            )


def as_probabilities(name: str, values: Tensor) -> Tensor:
    """Return probabilities as float64 on the CPU; those above 1 by rounding become 1.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: NaN, negative numbers, or numbers above 1 by more than rounding.
    """
    if not values.is_floating_point():
        raise TypeError(
            f"{name} have dtype {values.dtype}; expected a floating-point tensor of probabilities. "
            "Pass what the predictive returns, or convert with .float()."
        )
    p = values.detach().cpu().double()
    wrong = p[~((p >= 0) & (p <= 1 + _rounding(values.dtype)))]  # NaN included
    if len(wrong):
        raise ValueError(
            f"{name} include {wrong[0].item():.4g}; expected numbers in [0, 1]. Pass logits "
            "through softmax or sigmoid first; NaN comes from a predictive that has diverged."
        )
    return p.clamp(max=1.0)


def check_rows_sum_to_one(p: Tensor, dtype: torch.dtype) -> None:
    """Check class probabilities (N, C).

    Args:
        p: the probabilities, in float64.
        dtype: the dtype that they were computed in, which sets the tolerance.

    Raises:
        ValueError: fewer than two classes, or a row that does not sum to one.
    """
    if p.shape[1] < 2:
        raise ValueError(
            "The predictive has 1 class; expected two or more. One column of probabilities of the "
            "target 1 belongs in bernoulli_metrics."
        )
    sums = p.sum(dim=1)
    worst = int((sums - 1).abs().argmax())
    if (sums[worst] - 1).abs() > _rounding(dtype):
        raise ValueError(
            f"The probabilities of example {worst} sum to {sums[worst].item():.4g}; expected 1. "
            "Pass logits through softmax over the classes first; independent outputs belong in "
            "bernoulli_metrics."
        )


def as_labels(labels: Tensor, num_classes: int) -> Tensor:
    """Return class indices as int64 on the CPU.

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
    low, high = int(y.min()), int(y.max())
    if high >= num_classes:
        raise ValueError(
            f"labels reach {high}, the predictive has {num_classes} classes; expected 0 to "
            f"{num_classes - 1}. Evaluate on data with the classes that the network was trained on."
        )
    if low < 0:
        raise ValueError(
            f"labels include {low}; expected 0 to {num_classes - 1}. Leave out the examples that "
            "have no label."
        )
    return y


def as_binary(targets: Tensor) -> Tensor:
    """Return targets 0 and 1, of any dtype, as bool on the CPU.

    Raises:
        ValueError: another number; soft targets have no accuracy and no calibration.
    """
    y = targets.detach().cpu()
    wrong = y[(y != 0) & (y != 1)]
    if len(wrong):
        raise ValueError(
            f"targets include {wrong[0].item():.4g}; expected 0 or 1. Soft targets have no "
            "accuracy and no calibration: threshold them first, for example targets > 0.5."
        )
    return y == 1


def as_gaussian(mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[Normal, Tensor]:
    """Return N(mean, variance) and targets, all (N, C), in float64 on the CPU.

    Raises:
        ValueError: shapes that differ, no examples, variances that are not positive, or numbers
            that are not finite.
    """
    check_shapes(mean=(mean, "NC"), variance=(variance, "NC"), targets=(targets, "NC"))
    m, v = as_finite("mean", mean), as_finite("variance", variance)
    if v.min() <= 0:
        raise ValueError(
            f"variance includes {v.min().item():.4g}; expected positive numbers. Pass variances, "
            "not their logarithms, and add the noise σ² to the variance of the network's outputs."
        )
    return Normal(m, v.sqrt()), as_finite("targets", targets)


def as_finite(name: str, values: Tensor) -> Tensor:
    """Return finite numbers as float64 on the CPU.

    Raises:
        ValueError: NaN or an infinity.
    """
    x = values.detach().cpu().double()
    wrong = x[~torch.isfinite(x)]
    if len(wrong):
        raise ValueError(
            f"There is {wrong[0].item()} in {name}; expected finite numbers. Find them with "
            f"~torch.isfinite({name}), and leave those examples out or repair what predicts them."
        )
    return x


def _rounding(dtype: torch.dtype) -> float:
    """Tolerance for probabilities above 1, and for their sum over classes."""
    return max(1e-3, 4 * torch.finfo(dtype).eps)
