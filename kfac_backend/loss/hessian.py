"""The loss, and square roots S of its Hessian, S Sᵀ = Λ = ∇²_f ℓ, column by column.

Outputs f are (N, C), or (N, ..., C) where an example has several loss terms, one for each position
in ``...``. The loss is ℓ = −log p(y|f) up to constants (nats): cross-entropy with logits;
½‖y − f‖², the Gaussian with unit noise; binary cross-entropy with logits, summed over C.

A term whose label is `IGNORED` (padding, say) adds neither loss nor curvature. If a data set marks
such terms by another label, `Targets` replaces that by `IGNORED`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kfac_backend.options import Likelihood
from kfac_backend.precision import at_least_float32

__all__ = [
    "IGNORED",
    "categorical_root_energies",
    "check_targets",
    "counted_terms",
    "loss_hessian_root",
    "loss_sum",
    "num_counted_terms",
]


IGNORED = -100
"""The label of terms that do not count, as in PyTorch's losses and Hugging Face's models."""


def loss_sum(f: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """Σ ℓ over all examples and loss terms that count, a scalar (nats), in float32 at least."""
    f = at_least_float32(f)
    if likelihood == "classification":
        outputs, labels = f.flatten(0, -2), y.flatten().long()
        return F.cross_entropy(outputs, labels, ignore_index=IGNORED, reduction="sum")
    if likelihood == "regression":
        return 0.5 * F.mse_loss(f, y.to(f), reduction="sum")
    return F.binary_cross_entropy_with_logits(f, y.to(f), reduction="sum")


def counted_terms(y: Tensor, likelihood: Likelihood) -> Tensor | None:
    """A mask of the labels that count; None for targets that are not labels, which all count."""
    return y != IGNORED if likelihood == "classification" else None


def num_counted_terms(f: Float[Tensor, "*terms C"], y: Tensor, likelihood: Likelihood) -> int:
    """The number of loss terms that count, over all examples."""
    counted = counted_terms(y, likelihood)
    return f.shape[:-1].numel() if counted is None else int(counted.sum())


def loss_hessian_root(
    f: Float[Tensor, "*terms C"], likelihood: Likelihood
) -> Iterator[Float[Tensor, "*terms C"]]:
    """The columns s of S with Σ s sᵀ = Λ = ∇²_f ℓ: C − 1 for "classification", otherwise C."""
    if likelihood == "classification":
        yield from _categorical_root(f)
        return
    if likelihood == "regression":
        scale = torch.ones_like(f)
    else:
        scale = (torch.sigmoid(f) * torch.sigmoid(-f)).sqrt()
    for c in range(f.shape[-1]):
        column = torch.zeros_like(f)
        column[..., c] = scale[..., c]
        yield column


def _categorical_root(f: Float[Tensor, "*terms C"]) -> Iterator[Float[Tensor, "*terms C"]]:
    """The C − 1 columns of the Cholesky factor of diag(p) − ppᵀ, with p in descending order.

    With t_j = Σ_{k≥j} p_k: S_jj = √(p_j t_{j+1} / t_j), and S_ij = −p_i / t_{j+1} · S_jj for i > j.
    In descending order each t_j is a sum of the smallest terms, from the smallest up. Computed as
    1 − Σ_{k<j} p_k it would cancel.
    """
    p, order = torch.softmax(f, dim=-1).sort(dim=-1, descending=True)
    t = p.flip(-1).cumsum(-1).flip(-1)
    tiny = torch.finfo(p.dtype).tiny  # where probabilities underflow, columns are 0 and not 0 / 0
    for j in range(p.shape[-1] - 1):
        p_j, t_j, t_next = p[..., j], t[..., j], t[..., j + 1]
        column = torch.zeros_like(p)
        column[..., j] = (p_j * (t_next / t_j.clamp(min=tiny))).sqrt()
        ratio = p[..., j + 1 :] / t_next.clamp(min=tiny)[..., None]
        column[..., j + 1 :] = -ratio * column[..., j : j + 1]
        yield torch.zeros_like(p).scatter(-1, order, column)


def categorical_root_energies(f: Float[Tensor, "*terms C"]) -> Float[Tensor, "*terms columns"]:
    """‖S_j‖² of each column of `_categorical_root`, whose sum is tr Λ, without the columns.

    ‖S_j‖² = S_jj² (1 + Σ_{i>j} p_i² / t_{j+1}²), which needs only cumulative sums.
    """
    p = torch.softmax(f, dim=-1).sort(dim=-1, descending=True).values
    tiny = torch.finfo(p.dtype).tiny
    t = p.flip(-1).cumsum(-1).flip(-1)
    t_next = t[..., 1:]
    # In float64: squares of small probabilities underflow in float32.
    squares = p.double().square().flip(-1).cumsum(-1).flip(-1)[..., 1:]
    t_double = t_next.double().clamp(min=tiny)
    ratio = (squares / t_double / t_double).to(p.dtype)
    pivot = p[..., :-1] * (t_next / t[..., :-1].clamp(min=tiny))
    return pivot * (1 + ratio)


def check_targets(
    f: object, y: object, likelihood: Likelihood, *, may_ignore: bool = False
) -> None:
    """Raise an error unless the targets y fit the outputs f.

    Args:
        f: outputs (N, ..., C).
        y: targets.
        likelihood: of the targets.
        may_ignore: whether labels may be `IGNORED`; otherwise that label is out of range.

    Raises:
        TypeError: outputs or targets of a wrong type or dtype.
        ValueError: a wrong shape, a label out of range, targets that are not finite.
    """
    if not isinstance(f, Tensor) or not isinstance(y, Tensor):
        raise TypeError(
            f"The model returned {type(f).__name__} and the data {type(y).__name__} as targets; "
            "both must be tensors. Wrap a model that returns an object so that it returns logits."
        )
    if f.dim() < 2:
        raise ValueError(
            f"The model's output has shape {tuple(f.shape)}; expected (N, ..., C). One output for "
            "each example is (N, 1): leave out squeeze(-1)."
        )
    if likelihood == "classification":
        _check_labels(f, y, may_ignore)
        return
    if y.shape != f.shape:
        way_out = (
            " Give the targets their last axis: y[..., None]." if f.shape == (*y.shape, 1) else ""
        )
        raise ValueError(
            f"Targets have shape {tuple(y.shape)}, the model's output {tuple(f.shape)}; "
            f"likelihood {likelihood!r} needs the same shape.{way_out}"
        )
    if not torch.isfinite(y).all():
        raise ValueError("The targets contain NaN or infinity; clean the data.")
    if likelihood == "bernoulli" and not ((y >= 0) & (y <= 1)).all():
        raise ValueError("likelihood 'bernoulli' needs targets in [0, 1].")


def _check_labels(f: Tensor, y: Tensor, may_ignore: bool) -> None:
    C = f.shape[-1]
    if y.shape != f.shape[:-1] and y.shape == (len(f), *f.shape[2:]) and not y.is_floating_point():
        last = ", ".join(map(str, (*y.shape, f.shape[1])))
        raise ValueError(
            f"The model's output has shape {tuple(f.shape)}, classes second, for labels of shape "
            f"{tuple(y.shape)}; here classes come last, ({last}). Return f.movedim(1, -1)."
        )
    if C < 2:
        raise ValueError(
            "likelihood 'classification' needs at least two outputs, the model has one; "
            "for one logit use likelihood='bernoulli'."
        )
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise TypeError(
            f"Class labels have dtype {y.dtype}; likelihood 'classification' needs integers, "
            "for example y.long(). Use 'regression' or 'bernoulli' for other targets."
        )
    if y.shape != f.shape[:-1]:
        raise ValueError(
            f"Class labels have shape {tuple(y.shape)}, but the model's output "
            f"{tuple(f.shape)} asks for {tuple(f.shape[:-1])}."
        )
    outside = (y < 0) | (y >= C)
    wrong = y[outside & (y != IGNORED) if may_ignore else outside]
    if len(wrong):
        label = wrong[0].item()
        way_out = "Relabel the data, or change the number of the model's outputs."
        if label < 0:
            way_out = f"If it marks positions that do not count, pass ignore_index={label}."
        raise ValueError(
            f"Label {label} is out of range: the model has {C} outputs, labels must be 0 to "
            f"{C - 1}. {way_out}"
        )
