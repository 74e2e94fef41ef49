"""Inputs and targets of any kind in memory, divided, and their batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

__all__ = ["SplitName", "TensorBatches", "TensorSplits"]

SplitName = Literal["train", "validation", "test"]

Pair = tuple[Tensor, Tensor]
"""Inputs x and targets y, examples first."""


class TensorBatches:
    """Loader of batches (x, y), cut out of two tensors on the device, in their own dtypes.

    All random numbers come from ``generator``, a generator of its own on the CPU: two iterations
    differ, and the same seed gives the same sequence of iterations on every device.

    Args:
        x: inputs, (N, ...).
        y: targets, (N, ...).
        batch_size: B; the last batch may be smaller.
        shuffle: whether each iteration takes the examples in a new order.
        seed: of shuffling.
        device: where the batches are made.

    Raises:
        ValueError: if ``batch_size`` is below 1.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1.")
        self.dataset = TensorDataset(x.to(device), y.to(device))
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def num_examples(self) -> int:
        """Number of examples that one iteration yields."""
        return len(self.dataset)

    def __len__(self) -> int:
        """Number of batches of one iteration."""
        return -(-self.num_examples // self.batch_size)

    def __iter__(self) -> Iterator[Pair]:
        # Not a DataLoader, which would stack a batch from single examples.
        n = self.num_examples
        order = torch.randperm(n, generator=self.generator) if self.shuffle else torch.arange(n)
        x, y = self.dataset.tensors
        return ((x[batch], y[batch]) for batch in order.to(x.device).split(self.batch_size))


@dataclass(frozen=True, eq=False)
class TensorSplits:
    """A data set of any kind, divided: for regression, several labels at once, and the like.

    Args:
        train: inputs x (N, ...) and targets y (N, ...) to learn from.
        validation: the same, kept out of the training examples, or None.
        test: the same, by which nothing is chosen.
        name: what tables and figures call the data.

    Raises:
        ValueError: if a split has no examples, inputs and targets of different numbers, or values
            that are not finite, or if the splits differ in an example's shape or dtype.
    """

    train: Pair
    validation: Pair | None
    test: Pair
    name: str

    def __post_init__(self) -> None:
        for split, pair in self._pairs().items():
            self._check_pair(split, *pair)
            for which, tensor, trained_on in zip("xy", pair, self.train, strict=True):
                if (tensor.shape[1:], tensor.dtype) != (trained_on.shape[1:], trained_on.dtype):
                    raise ValueError(
                        f"{self.name}: {which}_{split} has examples of {_described(tensor)}, but "
                        f"{which}_train of {_described(trained_on)}; all splits must agree."
                    )

    def batches(
        self,
        split: SplitName,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> TensorBatches:
        """Return a loader of a split.

        Raises:
            ValueError: if there is no such split, or ``batch_size`` is below 1.
        """
        pairs = self._pairs()
        if split not in pairs:
            raise ValueError(f"{self.name} has no split {split!r}; it has {', '.join(pairs)}.")
        return TensorBatches(
            *pairs[split], batch_size=batch_size, shuffle=shuffle, seed=seed, device=device
        )

    def _pairs(self) -> dict[str, Pair]:
        """The splits that there are."""
        pairs = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: pair for split, pair in pairs.items() if pair is not None}

    def _check_pair(self, split: str, x: Tensor, y: Tensor) -> None:
        for name, tensor in ((f"x_{split}", x), (f"y_{split}", y)):
            if tensor.dim() == 0 or not tensor.numel():
                raise ValueError(
                    f"{self.name}: {name} is empty (shape {tuple(tensor.shape)}); it needs "
                    "examples, along its first axis."
                )
            bad = (~tensor.isfinite()).nonzero()
            if len(bad):
                raise ValueError(
                    f"{self.name}: {name} holds {len(bad)} value(s) that are NaN or infinite, the "
                    f"first in example {int(bad[0, 0])}; remove these examples, or fill them in."
                )
        if len(x) != len(y):
            raise ValueError(
                f"{self.name}: x_{split} has {len(x)} examples and y_{split} {len(y)}; each input "
                "needs one target."
            )


def _described(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape[1:])} and dtype {tensor.dtype}"
