"""The part of each batch that one of several ranks has."""

from dataclasses import dataclass

__all__ = ["WHOLE", "Shard"]


@dataclass(frozen=True)
class Shard:
    """Which contiguous part of each batch a rank has; parts differ by one example at most.

    All ranks draw the same order of all examples, so that their parts together are the batch that
    one process would have. A part is empty where a batch has fewer examples than there are ranks.

    Args:
        rank: from 0.
        ranks: how many there are.

    Raises:
        ValueError: a rank that is not one of them.
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
        """This rank's part of each batch, in their order."""
        starts = range(0, num_examples, batch_size)
        return [self.of(start, min(start + batch_size, num_examples)) for start in starts]

    def num_examples(self, num_examples: int, batch_size: int) -> int:
        """How many of so many examples are in this rank's parts."""
        return sum(part.stop - part.start for part in self.batches(num_examples, batch_size))


WHOLE = Shard()
"""All of each batch: one process alone."""
