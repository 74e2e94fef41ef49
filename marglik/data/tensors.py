"""Data in tensors or graphs: splits, batches, and files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset

from kfac_backend.options import TargetOptions
from marglik.data.shard import WHOLE, Shard
from marglik.data.source import DataSource
from marglik.graphs import Graphs
from marglik.sizes import check_sizes

__all__ = [
    "Inputs",
    "SplitName",
    "TensorBatches",
    "TensorFile",
    "TensorSplits",
    "described",
]

SplitName = Literal["train", "validation", "test"]

Inputs = Tensor | Graphs
"""N examples: a tensor (N, ...), or N graphs."""
Pair = tuple[Inputs, Tensor]
"""Inputs x and targets y, examples first."""


class Examples(Dataset[Pair]):
    """Inputs and targets as a data set with one example per target."""

    def __init__(self, x: Inputs, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: int) -> Pair:
        return self.x[which], self.y[which]


class MemoryBatches:
    """What loaders of examples in memory have in common: their order, and a rank's part of it.

    All random numbers come from ``generator``, a CPU generator of the loader's own, so that a seed
    gives the same batches on every device. Each iteration draws them at its start, so that the next
    one does not depend on how far it was read. Two iterations differ, and the same seed gives the
    same sequence of iterations. ``generator.get_state()`` and ``set_state()`` save and restore it.

    Args:
        num_examples: N, the number of all examples.
        batch_size: B; the last batch may be smaller.
        shuffle: whether each iteration takes the examples in a new order.
        seed: seed of the generator.
        shard: the part of each batch that is yielded; if it is empty, a batch without examples.

    Raises:
        ValueError: if ``batch_size`` is below 1.
    """

    def __init__(
        self, num_examples: int, batch_size: int, shuffle: bool, seed: int, shard: Shard
    ) -> None:
        check_sizes(batch_size=batch_size)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.shard = shard
        self.generator = torch.Generator().manual_seed(seed)
        self._all = num_examples

    @property
    def num_examples(self) -> int:
        """Number of examples that one iteration yields."""
        return self.shard.num_examples(self._all, self.batch_size)

    def __len__(self) -> int:
        """Number of batches of one iteration."""
        return -(-self._all // self.batch_size)

    def _parts(self, device: torch.device) -> list[Tensor]:
        """The indices of each batch of an iteration; all ranks draw the same order."""
        n = self._all
        order = torch.randperm(n, generator=self.generator) if self.shuffle else torch.arange(n)
        order = order.to(device)
        return [order[part] for part in self.shard.batches(n, self.batch_size)]


class TensorBatches(MemoryBatches):
    """Loader of batches (x, y), selected from inputs and targets on the device, in their dtypes.

    Args:
        x: inputs, a tensor (N, ...) or N graphs.
        y: targets, (N, ...).
        batch_size: B; the last batch may be smaller.
        shuffle: whether each iteration takes the examples in a new order.
        seed: seed of shuffling.
        device: where the batches are made.
        shard: the part of each batch that is yielded.
    """

    def __init__(
        self,
        x: Inputs,
        y: Tensor,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__(len(y), batch_size, shuffle, seed, shard)
        self.dataset = Examples(x.to(device), y.to(device))

    def __iter__(self) -> Iterator[Pair]:
        # Not a DataLoader, which would collate each batch from single examples.
        x, y = self.dataset.x, self.dataset.y
        return ((x[part], y[part]) for part in self._parts(y.device))


@dataclass(frozen=True, eq=False)
class TensorSplits:
    """A data set of any kind, divided: sequences, graphs, regression, several labels at once.

    Args:
        train: inputs x (N, ...), or N graphs, and targets y (N, ...) to train on.
        validation: the same for validation, disjoint from the training examples, or None.
        test: the same for testing; nothing is chosen by it.
        name: name of the data in tables and figures.
        classes: class names; label k stands for ``classes[k]``. None if targets are not class
            labels, or the number of classes is unknown.
        ignore_index: label of targets that do not count, such as those of padding; None if all
            count.

    Raises:
        ValueError: if a split has no examples, different numbers of inputs and targets, or values
            that are not finite; if the splits differ in the shape or dtype of an example; or if a
            label has no class.
    """

    train: Pair
    validation: Pair | None
    test: Pair
    name: str
    classes: tuple[str, ...] | None = None
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        for split, (x, y) in self._pairs().items():
            self._check_values(f"x_{split}", x)
            self._check_values(f"y_{split}", y)
            if len(x) != len(y):
                raise ValueError(
                    f"{self.name}: x_{split} has {len(x)} examples and y_{split} {len(y)}; each "
                    "input needs one target."
                )
            # A network that takes one split's examples must take the others', too.
            for which, values, trained_on in zip("xy", (x, y), self.train, strict=True):
                if described(values) != described(trained_on):
                    raise ValueError(
                        f"{self.name}: {which}_{split} has examples of {described(values)}, but "
                        f"{which}_train of {described(trained_on)}; all splits must agree."
                    )
            self._check_labels(split, y)

    @property
    def targets(self) -> TargetOptions:
        """How batches of this data give their targets."""
        return TargetOptions(ignore_index=self.ignore_index)

    @property
    def num_terms(self) -> int:
        """Number of test targets that count: for sequences, one per position."""
        y = self.test[1]
        return y.numel() if self.ignore_index is None else int((y != self.ignore_index).sum())

    def batches(
        self,
        split: SplitName,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        shard: Shard = WHOLE,
    ) -> TensorBatches:
        """Return a loader of a split.

        Raises:
            ValueError: if there is no such split, or ``batch_size`` is below 1.
        """
        pairs = self._pairs()
        if split not in pairs:
            raise ValueError(f"{self.name} has no split {split!r}; it has {', '.join(pairs)}.")
        return TensorBatches(
            *pairs[split],
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            device=device,
            shard=shard,
        )

    def _pairs(self) -> dict[str, Pair]:
        """The splits that are not None, by name."""
        pairs = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: pair for split, pair in pairs.items() if pair is not None}

    def _check_values(self, name: str, values: Inputs) -> None:
        if isinstance(values, Graphs):
            try:
                values.check()
            except ValueError as error:
                raise ValueError(f"{self.name}: {name}: {error}") from error
            for part in ("nodes", "edges"):
                self._check_finite(f"{part} of {name}", getattr(values, part), part[:-1])
            return
        if values.dim() == 0 or not values.numel():
            raise ValueError(
                f"{self.name}: {name} is empty (shape {tuple(values.shape)}); it needs examples, "
                "along its first axis."
            )
        self._check_finite(name, values, "example")

    def _check_finite(self, name: str, tensor: Tensor, row: str) -> None:
        bad = (~tensor.isfinite()).nonzero()
        if len(bad):
            raise ValueError(
                f"{self.name}: {name} holds {len(bad)} value(s) that are NaN or infinite, the "
                f"first in {row} {int(bad[0, 0])}; remove these examples, or fill them in."
            )

    def _check_labels(self, split: str, y: Tensor) -> None:
        if self.classes is None:
            return
        labels = y if self.ignore_index is None else y[y != self.ignore_index]
        if not labels.numel():
            raise ValueError(
                f"{self.name}: all labels of y_{split} are {self.ignore_index}, which do not count."
            )
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(self.classes):
            raise ValueError(
                f"{self.name}: labels of y_{split} reach from {low} to {high}; with "
                f"{len(self.classes)} classes they must lie in 0..{len(self.classes) - 1}."
            )


def described(values: Inputs) -> str:
    """A description of an example that is the same for all data that a network could take."""
    if isinstance(values, Graphs):
        return (
            f"graphs with {values.nodes.shape[1]} features per node and {values.edges.shape[1]} "
            "per edge"
        )
    return f"shape {tuple(values.shape[1:])} and dtype {values.dtype}"


REQUIRED = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("x_validation", "y_validation")


class TensorFile(DataSource):
    """Inputs and targets from a safetensors file, for regression or several labels at once.

    The file contains ``x_train``, ``y_train``, ``x_test`` and ``y_test``, and ``x_validation`` with
    ``y_validation`` if there is a validation set. The first axis of each is the examples; other
    axes and dtypes are free. Values are used as they are, so standardise them before saving. Write
    the file with ``safetensors.torch.save_file({"x_train": x, ...}, path)``. Nothing is unpickled,
    so that a file of unknown origin runs no code.

    Args:
        path: the file.
        name: name of the data in tables and figures; the file's name if not given.
    """

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path).expanduser()
        self.name = name or self.path.stem

    def load(self) -> TensorSplits:
        """Return the data.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not a safetensors file or damaged, if a tensor is missing,
                unknown, empty or not finite, or if inputs and targets, or the splits, do not fit
                together.
        """
        tensors = self._read()
        train, test = (
            (tensors[f"x_{split}"], tensors[f"y_{split}"]) for split in ("train", "test")
        )
        validation = None
        if OPTIONAL[0] in tensors:
            validation = tensors[OPTIONAL[0]], tensors[OPTIONAL[1]]
        return TensorSplits(train, validation, test, self.name)

    def _read(self) -> dict[str, Tensor]:
        if not self.path.is_file():
            raise FileNotFoundError(
                f"'{self.path}' is not a file. Give the path of a safetensors file with "
                f"{', '.join(REQUIRED)}."
            )
        try:
            with safe_open(self.path, framework="pt") as file:
                self._check_names(set(file.keys()))
                return {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"'{self.path}' is not a safetensors file, or damaged ({reason}). Write it with "
                "safetensors.torch.save_file; if it was transferred, fetch it again."
            ) from error

    def _check_names(self, names: set[str]) -> None:
        there = ", ".join(sorted(names)) or "nothing"
        wanted = REQUIRED + (OPTIONAL if names & set(OPTIONAL) else ())
        missing = [name for name in wanted if name not in names]
        if missing:
            raise ValueError(
                f"'{self.path}' lacks {', '.join(missing)} (it holds {there}). Save inputs and "
                "targets of each split under these names; a validation set is optional."
            )
        unknown = sorted(names.difference(wanted))
        if unknown:
            raise ValueError(
                f"'{self.path}' holds {', '.join(unknown)}, which would be ignored; supported are "
                f"{', '.join(REQUIRED + OPTIONAL)}. Rename or remove the others."
            )
