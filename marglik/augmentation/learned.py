"""`LearnedAugmentation`: a network that averages its outputs over transformed copies of an input.

f̄(x) = 1/S Σ_s f(T(x; η, u_s)). The copies share all weights. K-FAC-reduce treats them as one more
shared axis. This is exact for a deep linear network with a Gaussian likelihood. The ranges η are
hyperparameters. The likelihood alone would shrink them to zero. The evidence increases them as far
as the data is invariant, because the data then determines fewer parameters. Source: Immer et al.
2022 (arXiv:2202.10638).
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kfac_backend import examples_of_rows
from marglik.augmentation.transforms import Transform

START = 0.05
"""Initial range as a share of the largest range. It must be positive to have an effect."""


class LearnedAugmentation(nn.Module):
    """A network whose outputs are means over transformed copies, with ranges that can be learned.

    Train it like any network. `PriorLearner`, which all loops, commands and callbacks use, learns
    the ranges together with the weight decays. In train mode the copies of each example are random,
    one from each of S equal parts of the range. In eval mode the copies are the same for all
    examples, so predictions are deterministic. A forward pass costs S forward passes of the
    network.

    Args:
        model: the network; its outputs are logits, or means for regression.
        transforms: transforms, applied in this order to each copy.
        copies: number S of copies.
        ranges: name of a range -> its initial η. Other ranges start at the share `START` of their
            largest value.
        learns: whether the evidence changes the ranges; otherwise they are fixed.

    Raises:
        ValueError: there is no transform; two ranges have the same name; a range is unknown,
            negative or too large; or `Flip` has an odd number of copies.
    """

    ranges: Tensor
    """Ranges η (K,), a buffer, which is saved with the network. It is not a weight: optimisers do
    not change it, and it has no weight decay and no block in the posterior."""

    def __init__(
        self,
        model: nn.Module,
        transforms: Sequence[Transform],
        copies: int = 4,
        ranges: dict[str, float] | None = None,
        learns: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.transforms, self.copies = model, list(transforms), copies
        self.learns = learns
        self.names = [name for transform in self.transforms for name in transform.names]
        """Names of all ranges."""
        if not self.names or len(set(self.names)) < len(self.names) or copies < 1:
            raise ValueError(
                f"LearnedAugmentation got the transforms {self.transforms} and copies={copies}. "
                "The ranges of all transforms need different names, and copies must be at least "
                "1."
            )
        self.largest = torch.tensor([v for t in self.transforms for v in t.largest])
        """Largest value of each range, (K,)."""
        start = START * self.largest
        for name, value in (ranges or {}).items():
            if name not in self.names or not 0 <= value <= self.largest[self.names.index(name)]:
                limits = dict(zip(self.names, self.largest.tolist(), strict=True))
                raise ValueError(
                    f"The range {name}={value} is not supported; there are "
                    + ", ".join(f"{n} from 0 to {v:.4g}" for n, v in limits.items())
                    + "."
                )
            start[self.names.index(name)] = value
        self.register_buffer("ranges", start)
        self._weights()  # raises if the number of copies does not fit

    def forward(self, x: Float[Tensor, "N ..."]) -> Tensor:
        """Return outputs (N, ..., C), the means over the copies."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"LearnedAugmentation transforms tensors (N, ...), not {type(x).__name__}. Wrap "
                "only the part of your network whose input is a tensor."
            )
        N, S = len(x), self.copies
        rows, weights = self.transformed(x).flatten(0, 1), self._weights()
        if weights is None:  # the curvature pass detects that copies belong to one example
            return self.model(rows).unflatten(0, (N, S)).mean(1)
        index = torch.arange(N, device=x.device).repeat_interleave(S)
        with examples_of_rows(index, N, by_roots=False, weights=weights.repeat(N)):
            f = self.model(rows).unflatten(0, (N, S))
        return (f * weights.view(-1, *[1] * (f.dim() - 2))).mean(1)

    def transformed(self, x: Float[Tensor, "N ..."]) -> Float[Tensor, "N S ..."]:
        """Return the copies of each example."""
        N, S = len(x), self.copies
        rows = x.repeat_interleave(S, 0)
        for transform, eta, start in self._with_ranges():
            numbers = self._numbers(N, transform.numbers(x), x, start)
            rows = transform(rows, eta.to(x), numbers)
        return rows.unflatten(0, (N, S))

    def _with_ranges(self) -> Iterator[tuple[Transform, Tensor, int]]:
        """Yield each transform, its ranges, and the number of earlier ranges."""
        start = 0
        for transform in self.transforms:
            yield transform, self.ranges[start : start + len(transform.names)], start
            start += len(transform.names)

    def _weights(self) -> Tensor | None:
        """Return the weight of each copy, (S,), with mean 1."""
        of_transforms = (t.weights(eta, self.copies) for t, eta, _ in self._with_ranges())
        weights = [one for one in of_transforms if one is not None]
        return torch.stack(weights).prod(0) if weights else None

    def _numbers(self, N: int, k: int, like: Tensor, start: int) -> Float[Tensor, "M k"]:
        """Return numbers in [-1, 1] for each copy, one in each of S equal parts, shuffled.

        ``start``, the number of earlier ranges, gives each transform another order.
        """
        S = self.copies
        if self.training:
            order = torch.rand(N, S, k, device=like.device).argsort(1)
            place = torch.rand(N, S, k, device=like.device, dtype=like.dtype)
        else:
            generator = torch.Generator().manual_seed(start + k)
            order = torch.rand(1, S, k, generator=generator).argsort(1).to(like.device)
            order, place = order.expand(N, S, k), like.new_tensor(0.5)
        return (2 * (order + place) / S - 1).flatten(0, 1).to(like)

    def extra_repr(self) -> str:
        """Return the number of copies and the current ranges."""
        ranges = zip(self.names, self.ranges.tolist(), strict=True)
        return f"{self.copies} copies, " + ", ".join(f"{name} {eta:.3g}" for name, eta in ranges)
