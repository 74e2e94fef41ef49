"""The loss of a pass, checks of its targets, and the vectors to propagate back.

What depends on the likelihood is in `kfac_backend.likelihoods`. A term whose label is `IGNORED`
(padding, say) adds neither loss nor curvature. If a data set marks such terms by another label,
`Targets` replaces that by `IGNORED`.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kfac_backend.likelihoods import IGNORED, likelihood_of
from kfac_backend.options import CurvatureOptions
from kfac_backend.precision import at_least_float32

MANY_PASSES = 20_000
"""Backward passes of a batch, above which the exact GGN is warned about."""


def loss_sum(f: Tensor, y: Tensor, likelihood: str) -> Tensor:
    """Σ ℓ over all examples and loss terms that count, a scalar (nats), in float32 at least."""
    return likelihood_of(likelihood).loss(at_least_float32(f), y)


def counted_terms(y: Tensor, likelihood: str) -> Tensor | None:
    """A mask of the labels that count; None for targets that are not labels, which all count."""
    return y != IGNORED if likelihood_of(likelihood).has_labels else None


def num_counted_terms(
    f: Float[Tensor, "*terms C"], y: Tensor, likelihood: str
) -> int | Int[Tensor, ""]:
    """The number of loss terms that count, over all examples; of labels on their device."""
    counted = counted_terms(y, likelihood)
    return f.shape[:-1].numel() if counted is None else counted.sum()


def check_targets(f: object, y: object, likelihood: str, *, may_ignore: bool = False) -> None:
    """Raise an error unless the targets y fit the outputs f.

    With ``may_ignore`` labels may be `IGNORED`; otherwise that label is out of range.

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
    likelihood_of(likelihood).check(f, y, may_ignore)


@dataclass
class BackwardVectors:
    """Vectors v such that Σ_v v vᵀ is Λ or its estimate, for each loss term.

    - exact: the columns of a root S of Λ, one loss term at a time.
    - mc: ``mc_samples`` gradients of ℓ at labels drawn from p(y|f), divided by √mc_samples; for
      numbers S ε instead, with normal numbers ε (of a Gaussian that is the gradient at a drawn y).
    - empirical: the gradient of ℓ at the label, one term at a time.

    At terms that do not count all vectors are zero. A term that counts for no example of the batch
    has no vector.

    Args:
        likelihood: of the targets.
        options: the options of the pass, of which ``fisher`` and ``mc_samples`` decide the vectors.
        generator: source of labels.
        differentiable: whether the vectors keep their graph in f. A label that is drawn has no
            derivative, so "mc" takes S ε for labels, too.
        may_ignore: whether some labels may not count.
    """

    likelihood: str
    options: CurvatureOptions = CurvatureOptions()
    generator: torch.Generator | None = None
    differentiable: bool = False
    may_ignore: bool = True

    def __call__(
        self, f: Float[Tensor, "N *terms C"], y: Tensor
    ) -> Iterator[Float[Tensor, "N *terms C"]]:
        """The vectors at outputs f and targets y."""
        likelihood = likelihood_of(self.likelihood)
        f = at_least_float32(f if self.differentiable else f.detach())
        counted = counted_terms(y, likelihood) if self.may_ignore else None
        if self.options.fisher == "mc":
            samples = self.options.mc_samples
            draw = likelihood.drawn_root if self.differentiable else likelihood.drawn_gradient
            # All terms in one vector: drawn independently, their products have expectation zero.
            for _ in range(samples):
                drawn = draw(f, y, self.generator)
                yield _where(counted, drawn.div_(samples**0.5) if samples > 1 else drawn)
        elif self.options.fisher == "empirical":
            gradient = _where(counted, likelihood.gradient(f, y))
            yield from _one_term_at_a_time(gradient, counted)
        else:
            # A vector with several terms would add products of different terms to v vᵀ.
            for column in likelihood.root(f, y):
                yield from _one_term_at_a_time(_where(counted, column), counted)

    def warn_of_many(self, f: Float[Tensor, "N *terms C"]) -> None:
        """Say that the exact GGN takes a backward pass for each output of each term, if many."""
        C = f.shape[-1]
        passes = f[0].numel() // C * likelihood_of(self.likelihood).num_vectors(C)
        if self.options.fisher == "exact" and passes > MANY_PASSES:
            warnings.warn(
                f"The exact GGN takes {passes} backward passes for each part of a batch: outputs "
                f"have shape {tuple(f.shape)}. fisher='mc' takes mc_samples passes.",
                stacklevel=2,
            )


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
