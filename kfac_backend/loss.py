"""The loss, square roots S of its Hessian, S Sᵀ = Λ = ∇²_f ℓ, and the vectors to propagate back.

Outputs f are (N, C), or (N, ..., C) where an example has several loss terms, one for each position
in ``...``. The loss is ℓ = −log p(y|f) up to constants (nats): cross-entropy with logits;
½‖y − f‖², the Gaussian with unit noise; binary cross-entropy with logits, summed over C.

A term whose label is `IGNORED` (padding, say) adds neither loss nor curvature. If a data set marks
such terms by another label, `Targets` replaces that by `IGNORED`.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_backend.extras import Float, Int
from kfac_backend.options import CurvatureOptions, Likelihood
from kfac_backend.precision import at_least_float32

__all__ = [
    "IGNORED",
    "BackwardVectors",
    "check_targets",
    "counted_terms",
    "loss_hessian_root",
    "loss_sum",
    "num_counted_terms",
]

IGNORED = -100
"""The label of terms that do not count, as in PyTorch's losses and Hugging Face's models."""

LARGEST_DRAW = 2**19
"""Number of probabilities, over some loss terms, from which labels are drawn at once."""

CLASSES_OF_BLOCK = 256
"""Classes in a block, where labels are drawn in two steps."""

MANY_PASSES = 20_000
"""Backward passes of a batch, above which the exact GGN is warned about."""

MOST_PASSES = 1_000_000
"""Backward passes of a batch, above which it is refused: at least a quarter of an hour each."""

MANY_CLASSES = 1024
"""Number of classes from which on a label is drawn in two steps: a block, then a class in it."""


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


def num_counted_terms(
    f: Float[Tensor, "*terms C"], y: Tensor, likelihood: Likelihood
) -> int | Int[Tensor, ""]:
    """The number of loss terms that count, over all examples; of labels on their device."""
    counted = counted_terms(y, likelihood)
    return f.shape[:-1].numel() if counted is None else counted.sum()


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
        tiny = torch.finfo(f.dtype).tiny
        scale = (torch.sigmoid(f) * torch.sigmoid(-f)).clamp(min=tiny).sqrt()
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
    # Cumulative sums from the smallest probability up, read backwards: t_j.
    t = p.flip(-1).cumsum(-1).flip(-1)
    tiny = torch.finfo(p.dtype).tiny  # where probabilities underflow, columns are 0 and not 0 / 0
    for j in range(p.shape[-1] - 1):
        p_j, t_j, t_next = p[..., j], t[..., j], t[..., j + 1]
        column = torch.zeros_like(p)
        first = (p_j * (t_next / t_j.clamp(min=tiny))).clamp(min=tiny).sqrt()[..., None]
        ratio = p[..., j + 1 :] / t_next.clamp(min=tiny)[..., None]
        column[..., j : j + 1] = first
        column[..., j + 1 :] = -ratio * first
        # Back to the order of the classes.
        yield torch.zeros_like(p).scatter(-1, order, column)


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
    if y.is_complex():
        raise TypeError(f"The targets are complex ({y.dtype}), and likelihoods are of real ones.")
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


@dataclass
class BackwardVectors:
    """Vectors v such that Σ_v v vᵀ is Λ or its estimate, for each loss term.

    - exact: the columns of a root S of Λ. If examples have several loss terms, the columns come one
      term at a time: a vector with several terms would add products of different terms to v vᵀ.
    - mc: ``mc_samples`` gradients of ℓ at labels drawn from p(y|f), divided by √mc_samples. The
      estimate is unbiased with all terms in one vector, too: labels are drawn independently, so
      that products of different terms have expectation zero.
    - empirical: the gradient of ℓ at the label, one term at a time.

    At terms that do not count all vectors are zero. A term that counts for no example of the batch
    has no vector.

    Args:
        likelihood: of the targets.
        options: the options of the pass, of which ``fisher`` and ``mc_samples`` decide the vectors.
        generator: source of labels.
        differentiable: whether the vectors keep their graph in f. A label that is drawn has no
            derivative, so "mc" draws S ε instead, with normal numbers ε.
    """

    likelihood: Likelihood
    options: CurvatureOptions = CurvatureOptions()
    generator: torch.Generator | None = None
    differentiable: bool = False

    def __call__(
        self, f: Float[Tensor, "N *terms C"], y: Tensor
    ) -> Iterator[Float[Tensor, "N *terms C"]]:
        """The vectors at outputs f and targets y."""
        f = at_least_float32(f if self.differentiable else f.detach())
        counted = counted_terms(y, self.likelihood)
        if self.options.fisher == "mc":
            # No number can be drawn from NaN (a label can), and on a GPU the attempt may end the
            # process. The pass reports it when it reads its checks.
            if self.likelihood != "classification":
                f = f.nan_to_num(nan=0.0, posinf=0.0, neginf=-torch.inf)
            samples = self.options.mc_samples
            for _ in range(samples):
                sampled = self._drawn_root(f) if self.differentiable else self._sampled_gradient(f)
                yield _only(counted, sampled.div_(samples**0.5) if samples > 1 else sampled)
        elif self.options.fisher == "empirical":
            yield from _one_term_at_a_time(self._label_gradient(f, y, counted), counted)
        else:
            for column in loss_hessian_root(f, self.likelihood):
                yield from _one_term_at_a_time(_where(counted, column), counted)

    def warn_of_many(self, f: Float[Tensor, "N *terms C"]) -> None:
        """Say that the exact GGN takes a backward pass for each output of each term, if many.

        Raises:
            ValueError: so many that a batch would not end.
        """
        if self.options.fisher != "exact":
            return
        C = f.shape[-1]
        passes = f[0].numel() // C * (C - 1 if self.likelihood == "classification" else C)
        message = (
            f"The exact GGN takes {passes} backward passes for each part of a batch: outputs "
            f"have shape {tuple(f.shape)}. fisher='mc' takes mc_samples passes."
        )
        if passes > MOST_PASSES:
            raise ValueError(message)
        if passes > MANY_PASSES:
            warnings.warn(message, stacklevel=2)

    def _sampled_gradient(self, f: Tensor) -> Tensor:
        """∇_f ℓ(ŷ, f) at a label ŷ drawn from p(y|f), per loss term; in the shape of f."""
        if self.likelihood == "classification":
            p = torch.softmax(f, dim=-1)
            return _less_one_hot(p, _drawn(p.flatten(0, -2), self.generator).view(f.shape[:-1]))
        if self.likelihood == "regression":
            return torch.randn(f.shape, generator=self.generator, dtype=f.dtype, device=f.device)
        p = torch.sigmoid(f)
        return p - torch.bernoulli(p, generator=self.generator)

    def _drawn_root(self, f: Tensor) -> Tensor:
        """S ε with E[S ε εᵀ Sᵀ] = Λ, per loss term; (diag(√p) − p √pᵀ) ε for classes."""
        noise = torch.randn(f.shape, generator=self.generator, dtype=f.dtype, device=f.device)
        if self.likelihood == "regression":
            return noise
        tiny = torch.finfo(f.dtype).tiny  # the root of 0 has no derivative
        if self.likelihood == "bernoulli":
            return (torch.sigmoid(f) * torch.sigmoid(-f)).clamp(min=tiny).sqrt() * noise
        p = torch.softmax(f, dim=-1)
        scaled = p.clamp(min=tiny).sqrt() * noise
        return scaled - p * scaled.sum(-1, keepdim=True)

    def _label_gradient(self, f: Tensor, y: Tensor, counted: Tensor | None) -> Tensor:
        """∇_f ℓ(y, f) at the label, zero where it does not count; in the shape of f."""
        if self.likelihood == "classification":
            label = y.long() if counted is None else y.long().where(counted, 0)
            p = torch.softmax(f, dim=-1)
            return _only(counted, _less_one_hot(p.clone() if self.differentiable else p, label))
        if self.likelihood == "regression":
            return f - y.to(f)
        return torch.sigmoid(f) - y.to(f)


def _drawn(p: Float[Tensor, "M C"], generator: torch.Generator | None) -> Int[Tensor, "M 1"]:
    """A label for each row, drawn from its probabilities by inverting the distribution function.

    That takes one random number for each label, where `torch.multinomial` draws one for each class:
    4,096 rows of 256 classes take 3 instead of 22 ms (one x86-64 core).
    """
    # Some rows at a time: the cumulative sums in float64 take twice the memory of the outputs.
    rows = max(1, LARGEST_DRAW // p.shape[1])
    draw = _drawn_of_few if p.shape[1] < MANY_CLASSES else _drawn_of_many
    return torch.cat([draw(some, generator) for some in p.split(rows)])


def _drawn_of_few(p: Float[Tensor, "M C"], generator: torch.Generator | None) -> Int[Tensor, "M 1"]:
    up_to = p.cumsum(1, dtype=torch.float64)
    point = _share_of(up_to[:, -1:], generator)
    return torch.searchsorted(up_to, point, right=True).clamp_(max=p.shape[1] - 1)


def _share_of(
    total: Float[Tensor, "M 1"], generator: torch.Generator | None
) -> Float[Tensor, "M 1"]:
    """Each total times a random number from [0, 1)."""
    return total * torch.rand(
        total.shape, generator=generator, dtype=total.dtype, device=total.device
    )


def _drawn_of_many(
    p: Float[Tensor, "M C"], generator: torch.Generator | None
) -> Int[Tensor, "M 1"]:
    """As `_drawn_of_few`, but first a block of classes, and then a class of this block.

    So cumulative sums over all classes are not needed. Sums are in float64: differences of a
    float32 sum are wrong by a percent where p is 1e-5.
    """
    C, size = p.shape[1], CLASSES_OF_BLOCK
    whole = C - C % size
    # Step 1: the block, from the sums of all blocks; the last one may be shorter.
    blocks = p[:, :whole].unflatten(1, (-1, size)).sum(2, dtype=torch.float64)
    rest = p[:, whole:].sum(1, keepdim=True, dtype=torch.float64)
    sums = torch.cat([blocks, rest], 1)
    up_to = sums.cumsum(1)
    point = _share_of(up_to[:, -1:], generator)
    block = torch.searchsorted(up_to, point, right=True).clamp_(max=sums.shape[1] - 1)
    point -= up_to.gather(1, block) - sums.gather(1, block)
    # Step 2: the class within the block, at what is left of the random point.
    classes = block * size + torch.arange(size, device=p.device)  # (M, size)
    inside = p.gather(1, classes.clamp(max=C - 1)).masked_fill_(classes >= C, 0.0)
    place = torch.searchsorted(inside.cumsum(1, dtype=torch.float64), point, right=True)
    return (block * size + place.clamp_(max=size - 1)).clamp_(max=C - 1)


def _less_one_hot(p: Float[Tensor, "*terms C"], label: Int[Tensor, "*terms"]) -> Tensor:
    """The gradient p − e_label, written over p; one-hot integers would take twice its memory."""
    return p.scatter_add_(-1, label[..., None], -torch.ones_like(p[..., :1]))


def _only(counted: Tensor | None, vector: Float[Tensor, "N *terms C"]) -> Tensor:
    """`_where` in place."""
    return vector if counted is None else vector.masked_fill_(~counted[..., None], 0.0)


def _where(counted: Tensor | None, vector: Float[Tensor, "N *terms C"]) -> Tensor:
    """The vector, zero at terms that do not count."""
    return vector if counted is None else vector.masked_fill(~counted[..., None], 0.0)


def _one_term_at_a_time(
    vector: Float[Tensor, "N *terms C"], counted: Tensor | None = None
) -> Iterator[Tensor]:
    """The vector itself for one loss term per example, else a copy for each term, zero elsewhere.

    Terms that count for no example are left out.
    """
    if vector.dim() == 2:
        yield vector
        return
    terms = vector.flatten(1, -2)  # (N, T, C)
    chosen = range(terms.shape[1])
    if counted is not None:
        # The first at least, so that the layers' gradients are zero and not missing.
        chosen = counted.flatten(1).any(0).nonzero().flatten().tolist() or [0]
    for t in chosen:
        only = torch.zeros_like(terms)
        only[:, t] = terms[:, t]
        yield only.view_as(vector)
