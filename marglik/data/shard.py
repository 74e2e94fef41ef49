"""The part of each batch that one of several ranks has."""

from dataclasses import dataclass

__all__ = ["WHOLE", "Shard"]


@dataclass(frozen=True)
class Shard:
    """The contiguous part of each batch that a rank has; sizes of parts differ by one at most.

    All ranks draw the same order of all examples, so that their parts together are the batch that
    one process would have. Parts are empty if a batch has fewer examples than there are ranks.

    Args:
        rank: number of the rank, from 0.
        ranks: number of ranks.

    Raises:
        ValueError: a rank that is not in 0..ranks - 1.
    """

    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is not one of {self.ranks}, which count from 0.")

    def of(self, start: int, stop: int) -> slice:
        """This rank's part of a batch of the examples ``start`` to ``stop``."""
        size = stop - start
        first, last = (size * i // self.ranks for i in (self.rank, self.rank + 1))
        return slice(start + first, start + last)

    def batches(self, num_examples: int, batch_size: int) -> list[slice]:
        """This rank's part of each batch, in order."""
        starts = range(0, num_examples, batch_size)
        return [self.of(start, min(start + batch_size, num_examples)) for start in starts]

    def num_examples(self, num_examples: int, batch_size: int) -> int:
        """The number of examples in this rank's parts of all batches."""
        return sum(part.stop - part.start for part in self.batches(num_examples, batch_size))


WHOLE = Shard()
"""The whole of each batch, for a single process."""
