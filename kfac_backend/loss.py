"""The loss of a pass, and checks of its targets.

What depends on the likelihood is in `kfac_backend.likelihoods`. A term whose label is `IGNORED`
(padding, say) adds neither loss nor curvature. If a data set marks such terms by another label,
`Task` replaces that by `IGNORED`.
"""

from jaxtyping import Float, Int
from torch import Tensor

from kfac_backend.likelihoods import IGNORED, Likelihood
from kfac_backend.precision import at_least_float32


def loss_sum(f: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """Σ ℓ over all examples and loss terms that count, a scalar (nats), in float32 at least."""
    return likelihood.loss(at_least_float32(f), y)


def counted_terms(y: Tensor, likelihood: Likelihood) -> Tensor | None:
    """A mask of the labels that count; None for targets that are not labels, which all count."""
    return y != IGNORED if likelihood.has_labels else None


def num_counted_terms(
    f: Float[Tensor, "*terms C"], y: Tensor, likelihood: Likelihood
) -> int | Int[Tensor, ""]:
    """The number of loss terms that count, over all examples; of labels on their device."""
    counted = counted_terms(y, likelihood)
    return f.shape[:-1].numel() if counted is None else counted.sum()


def check_targets(
    f: object, y: object, likelihood: Likelihood, *, may_ignore: bool = False
) -> None:
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
    likelihood.check(f, y, may_ignore)
