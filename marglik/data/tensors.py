"""Data in tensors or graphs: splits and files; the interface of all data sources."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kfac_backend.options import TargetOptions
from marglik.graphs import Graphs

__all__ = [
    "DataSource",
    "Inputs",
    "Pair",
    "SplitName",
    "TensorFile",
    "TensorSplits",
    "described",
]

SplitName = Literal["train", "validation", "test"]

Inputs = Tensor | Graphs
"""N examples: a tensor (N, ...), or N graphs."""
Pair = tuple[Inputs, Tensor]
"""Inputs x and targets y, examples first."""


class DataSource(ABC):
    """A source of data, with a test set of its own."""

    @abstractmethod
    def load(self) -> Any:
        """Return `ImageSplits` or `TensorSplits`; the same arguments always give the same data."""


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
        columns: names of the columns of a table; None for other data.
        target_scale: mean and standard deviation by which targets of a table are standardised.

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
    columns: tuple[str, ...] | None = None
    target_scale: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        for split, pair in splits.items():
            if pair is None:
                continue
            x, y = pair
            if len(x) != len(y):
                raise ValueError(
                    f"{self.name}: x_{split} has {len(x)} examples and y_{split} {len(y)}; each "
                    "input needs one target."
                )
            for which, values, trained_on in zip("xy", pair, self.train, strict=True):
                _check_values(f"{self.name}: {which}_{split}", values)
                # A network that takes one split's examples must take the others', too.
                if described(values) != described(trained_on):
                    raise ValueError(
                        f"{self.name}: {which}_{split} has examples of {described(values)}, but "
                        f"{which}_train of {described(trained_on)}; all splits must agree."
                    )
            if self.classes is not None:
                self._check_labels(f"y_{split}", y, len(self.classes))

    @property
    def targets(self) -> TargetOptions:
        """How batches of this data give their targets."""
        return TargetOptions(ignore_index=self.ignore_index)

    @property
    def num_terms(self) -> int:
        """Number of test targets that count: for sequences, one per position."""
        y = self.test[1]
        return y.numel() if self.ignore_index is None else int((y != self.ignore_index).sum())

    def _check_labels(self, name: str, y: Tensor, num_classes: int) -> None:
        labels = y if self.ignore_index is None else y[y != self.ignore_index]
        if not labels.numel():
            raise ValueError(
                f"{self.name}: all labels of {name} are {self.ignore_index}, which do not count."
            )
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"{self.name}: labels of {name} reach from {low} to {high}; with {num_classes} "
                f"classes they must lie in 0..{num_classes - 1}."
            )


def described(values: Inputs) -> str:
    """A description of an example that is the same for all data that a network could take."""
    if isinstance(values, Graphs):
        return (
            f"graphs with {values.nodes.shape[1]} features per node and {values.edges.shape[1]} "
            "per edge"
        )
    return f"shape {tuple(values.shape[1:])} and dtype {values.dtype}"


def _check_values(name: str, values: Inputs) -> None:
    if isinstance(values, Graphs):
        try:
            values.check()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        parts = {f"{name}, nodes": values.nodes, f"{name}, edges": values.edges}
    else:
        if values.dim() == 0 or not values.numel():
            raise ValueError(
                f"{name} is empty (shape {tuple(values.shape)}); it needs examples, along its "
                "first axis."
            )
        parts = {name: values}
    for part, tensor in parts.items():
        bad = (~tensor.isfinite()).nonzero()
        if len(bad):
            raise ValueError(
                f"{part} holds {len(bad)} value(s) that are NaN or infinite, the first in row "
                f"{int(bad[0, 0])}; remove these examples, or fill them in."
            )


REQUIRED = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("x_validation", "y_validation")


class TensorFile(DataSource):
    """Inputs and targets from a safetensors or npz file, for regression or several labels at once.

    The file contains ``x_train``, ``y_train``, ``x_test`` and ``y_test``, and ``x_validation`` with
    ``y_validation`` if there is a validation set. The first axis of each is the examples; other
    axes and dtypes are free, but numbers of an npz file become float32, as networks are. Values are
    used as they are, so standardise them before saving. Write the file with
    ``safetensors.torch.save_file({"x_train": x, ...}, path)`` or ``numpy.savez(path, x_train=x,
    ...)``. Nothing is unpickled, so that a file of unknown origin runs no code.

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
            ValueError: if it is not a safetensors or npz file or damaged, if a tensor is missing,
                unknown, empty or not finite, or if inputs and targets, or the splits, do not fit
                together.
        """
        if not self.path.is_file():
            raise FileNotFoundError(
                f"'{self.path}' is not a file. Give the path of a safetensors or npz file with "
                f"{', '.join(REQUIRED)}."
            )
        try:
            tensors = _read(self.path)
        except (SafetensorError, OSError, ValueError, BadZipFile) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"'{self.path}' is not a safetensors or npz file, or damaged ({reason}). Write it "
                "with safetensors.torch.save_file or numpy.savez; if it was transferred, fetch it "
                "again."
            ) from error
        # All names must be known: a misspelt x_validation would silently be left out.
        wanted = {*REQUIRED, *(OPTIONAL if {*OPTIONAL} & tensors.keys() else ())}
        if tensors.keys() != wanted:
            raise ValueError(
                f"'{self.path}' holds {', '.join(sorted(tensors)) or 'nothing'}; it needs "
                f"{', '.join(REQUIRED)}, and may have {' and '.join(OPTIONAL)}. Save, rename or "
                "remove the others."
            )
        train, validation, test = (
            (tensors[f"x_{split}"], tensors[f"y_{split}"]) if f"x_{split}" in wanted else None
            for split in ("train", "validation", "test")
        )
        assert train is not None and test is not None
        return TensorSplits(train, validation, test, self.name)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".npz":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    with np.load(path, allow_pickle=False) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays}
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
