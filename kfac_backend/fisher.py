"""Define the matrix that the factors approximate, by vectors at the outputs.

The block of a layer is Σ_v b_v b_vᵀ ⊗ ..., where b_v is the gradient at the layer's output from a
backward pass with v at the outputs. Vectors with Σ_v v vᵀ = Λ, the loss Hessian of each term, or an
estimate of it, therefore define a matrix. An option names one of the classes. A new class with a
name is another choice for ``CurvatureOptions(fisher=...)``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.likelihoods import Likelihood, counted_terms
from kfac_backend.precision import at_least_float32

MANY_PASSES = 20_000
"""Number of backward passes per batch above which the exact GGN warns."""


@dataclass(frozen=True)
class Fisher(ABC):
    """The vectors v of a batch, with Σ_v v vᵀ = Λ or an estimate of it, for each loss term.

    Args:
        mc_samples: number of random vectors of an estimate.
    """

    name: ClassVar[str]
    """Name of the option."""
    draws: ClassVar[bool] = False
    """Whether the vectors are random: independent for all terms and with mean zero. One vector may
    then combine all terms of an example, because their products vanish on average."""
    is_loss_gradient: ClassVar[bool] = False
    """Whether the vector is the gradient of the loss itself, whose backward pass a training step
    computes anyway."""

    by_name: ClassVar[dict[str, type["Fisher"]]] = {}
    """Maps names to classes."""

    mc_samples: int = 1

    def __init_subclass__(cls) -> None:
        """Register the class under its name."""
        Fisher.by_name[cls.name] = cls

    @abstractmethod
    def columns(
        self,
        likelihood: Likelihood,
        f: Float[Tensor, "N *terms C"],
        y: Tensor,
        generator: torch.Generator | None,
    ) -> Iterator[Float[Tensor, "N *terms C"]]:
        """Return the vectors at outputs f and targets y, each with all terms of the examples.

        They are differentiable in f if f requires a gradient.
        """

    def num_passes(self, likelihood: Likelihood, f: Float[Tensor, "N *terms C"]) -> int:
        """Return the number of backward passes for outputs f."""
        return self.mc_samples

    def vectors(
        self,
        likelihood: Likelihood,
        f: Float[Tensor, "N *terms C"],
        y: Tensor,
        generator: torch.Generator | None = None,
        *,
        may_ignore: bool = True,
    ) -> Iterator[Float[Tensor, "N *terms C"]]:
        """Yield the vectors for the backward passes, in float32 at least.

        At terms that do not count all vectors are zero. A term that counts for no example of the
        batch has no vector.

        Args:
            likelihood: likelihood of the targets.
            f: the outputs; vectors keep their graph in them if they require a gradient.
            y: the targets.
            generator: random numbers.
            may_ignore: whether some labels may not count.
        """
        counted = counted_terms(y, likelihood) if may_ignore else None
        for column in self.columns(likelihood, at_least_float32(f), y, generator):
            if counted is not None:
                column = column.masked_fill(~counted[..., None], 0.0)
            # A vector with several terms adds the products of different terms to v vᵀ. For drawn
            # vectors they vanish on average.
            if self.draws or column.dim() == 2:
                yield column
            else:
                yield from _one_term_at_a_time(column, counted)


class ExactGGN(Fisher):
    """The generalised Gauss-Newton matrix: the columns of a root S of Λ, S Sᵀ = Λ."""

    name = "exact"

    def columns(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Yield the columns s of the root S, Σ s sᵀ = Λ."""
        return likelihood.root(f, y)

    def num_passes(self, likelihood: Likelihood, f: Tensor) -> int:
        """Return one pass for each column of S and each loss term of an example."""
        return f[0, ..., 0].numel() * likelihood.num_vectors(f.shape[-1])


class DrawnLabels(Fisher):
    """An unbiased estimate of Λ: gradients of ℓ at labels drawn from p(y|f), over √mc_samples.

    For numbers it uses S ε, see `RandomSigns`. For labels it does the same if f requires a
    gradient, because a drawn label has no derivative.
    """

    name = "mc"
    draws = True
    draws_labels: ClassVar[bool] = True
    """Whether labels are drawn where the likelihood can draw them."""

    def columns(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Yield ``mc_samples`` draws, each over √mc_samples."""
        of_labels = self.draws_labels and not f.requires_grad
        draw = likelihood.drawn_gradient if of_labels else likelihood.drawn_root
        for _ in range(self.mc_samples):
            drawn = draw(f, y, generator)
            yield drawn if self.mc_samples == 1 else drawn / self.mc_samples**0.5


class RandomSigns(DrawnLabels):
    """An unbiased estimate of Λ: S ε with random signs ε, over √mc_samples.

    It costs as much as drawn labels, and is less noisy if the network is confident. Nearly all
    drawn gradients are then almost zero, and a few are large, but S ε always has about the same
    length. Source: curvature propagation, Martens, Sutskever & Swersky 2012 (arXiv:1206.6464).
    """

    name = "random_signs"
    draws_labels = False


class EmpiricalFisher(Fisher):
    """The gradient of ℓ at the data's own labels."""

    name = "empirical"
    is_loss_gradient = True

    def columns(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Yield the gradient of the loss."""
        yield likelihood.gradient(f, y)

    def num_passes(self, likelihood: Likelihood, f: Tensor) -> int:
        """Return one pass for each loss term of an example."""
        return f[0, ..., 0].numel()


def _one_term_at_a_time(
    vector: Float[Tensor, "N *terms C"], counted: Tensor | None
) -> Iterator[Tensor]:
    """Yield the vector for each term that counts anywhere, with zeros at other terms."""
    terms = vector.flatten(1, -2)  # (N, T, C)
    chosen = range(terms.shape[1])
    if counted is not None:
        # Yield at least the first one, so that the layers' gradients are zero and not missing.
        chosen = counted.flatten(1).any(0).nonzero().flatten().tolist() or [0]
    for t in chosen:
        only = torch.zeros_like(terms)
        only[:, t] = terms[:, t]
        yield only.view_as(vector)
