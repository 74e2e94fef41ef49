"""Data in files: tensors in safetensors or npz, and rows of a table in CSV or Parquet."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from kfac_backend.extras import extra
from marglik.data.splits import (
    DataSource,
    Splits,
    check_fraction,
    divided,
    pixel_statistics,
)

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("x_validation", "y_validation")


class TensorFile(DataSource):
    """Inputs and targets from a safetensors or npz file: images, or tensors of any kind.

    The file contains ``x_train``, ``y_train``, ``x_test`` and ``y_test``, and ``x_validation`` with
    ``y_validation`` if there is a validation set. The first axis of each is the examples; other
    axes and dtypes are free, but numbers of an npz file become float32, as networks are. Inputs in
    uint8 with axes (N, C, H, W) are images: they are normalised by the training pixels, and may be
    augmented. Other values are used as they are, so standardise them before saving. Write the file
    with
    ``safetensors.torch.save_file({"x_train": x, ...}, path)`` or ``numpy.savez(path, x_train=x,
    ...)``. Nothing is unpickled, so that a file of unknown origin runs no code.

    Args:
        path: the file.
        name: name of the data in tables and figures; the file's name if not given.
    """

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path).expanduser()
        self.name = name or self.path.stem

    def load(self) -> Splits:
        """Return the data.

        Raises:
            ValueError: if it is no safetensors or npz file, or damaged, if a tensor is missing,
                unknown, empty or not finite, or if inputs and targets, or the splits, do not fit
                together.
        """
        try:
            tensors = _read(self.path)
        except Exception as error:  # of safetensors, zipfile, zlib and numpy
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
        if self.path.suffix == ".npz":  # of which float64 is the usual type
            for name, tensor in tensors.items():
                if tensor.is_floating_point():
                    what = f"'{self.path}': {name}"
                    tensors[name] = torch.from_numpy(in_float32(what, tensor.double().numpy()))
        train, validation, test = (
            (tensors[f"x_{split}"], tensors[f"y_{split}"]) if f"x_{split}" in wanted else None
            for split in ("train", "validation", "test")
        )
        assert train is not None and test is not None
        splits, x = Splits(train, validation, test, self.name), train[0]
        if x.dtype != torch.uint8 or x.dim() != 4:
            return splits
        _, C, _, W = x.shape
        if C not in (1, 3) and W in (1, 3):
            raise ValueError(
                f"'{self.path}': x_train has shape {tuple(x.shape)}, which looks like images with "
                "their channels last; images are (N, C, H, W). Save x.transpose(0, 3, 1, 2)."
            )
        mean, std = pixel_statistics(x)
        return replace(splits, mean=mean, std=std)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".npz":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def in_float32(what: str, values: np.ndarray) -> np.ndarray:
    """Float64 values in float32, as networks compute; what is not finite stays so.

    Raises:
        ValueError: values, or differences between them, that float32 cannot hold: it ends at 3e38
            and 1e-38, and has seven digits, of which 1e9 + 0.5 needs more.
    """
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if not values.size or not np.isfinite(values).all():
        return rounded
    largest, is_constant = np.abs(values).max(), values.min() == values.max()
    std = 0.0 if is_constant else (values / largest).std() * largest  # squares might overflow
    lost = np.abs(rounded - values).max()
    if not np.isfinite(lost) or (not is_constant and (lost > 0.01 * std or std < TINY)):
        raise ValueError(
            f"{what} has values from {values.min():.6g} to {values.max():.6g}, with a standard "
            f"deviation of {std:.3g}. float32, in which networks compute, has seven digits and "
            "reaches from 1e-38 to 3e38: it would lose them. Subtract their mean, or divide them "
            "by a number, beforehand."
        )
    return rounded


TINY = float(np.finfo(np.float32).tiny)
"""The smallest number that float32 holds with all its digits."""
MOST_CATEGORIES = 100
"""Of a column of text, which becomes as many columns; more of them are probably names of rows."""


@dataclass(eq=False)
class TableFile(DataSource):
    """A CSV or Parquet file with one example per row, read by pandas.

    Numbers are taken as they are: `marglik train` standardises each column by the training part, in
    the network, so that a saved network takes rows of the file. A column of text becomes a column
    of zeros and ones for each of its values. A target of fractions is for likelihood regression,
    standardised by the training part (the file ``posterior.json`` has its mean and standard
    deviation); any other is a class.

    Args:
        path: the file; one that ends in .parquet is read as Parquet, others as CSV.
        target: name of the column to predict; the last one if not given.
        classes: whether the target is a class; if not given, whether it is text, yes or no, or
            integers.
        standardise: whether a target that is no class is standardised; not for counts (poisson).
        test_fraction: share of all rows that become the test set, in (0, 1).
        validation: share of the training rows that become the validation set, in [0, 1).
        seed: seed of both splits, which are stratified by class.
        name: name of the data in tables and figures; the file's name if not given.

    Raises:
        ValueError: if a fraction is out of range.
    """

    path: str | Path
    target: str | None = None
    classes: bool | None = None
    standardise: bool = True
    test_fraction: float = 0.2
    validation: float = 0.0
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        check_fraction("test_fraction", self.test_fraction, zero=False)
        check_fraction("validation", self.validation)
        self.path = Path(self.path).expanduser()
        self.name = self.name or self.path.stem

    def load(self) -> Splits:
        """Return the data: inputs (N, columns) in float32, classes (N,) or numbers (N, 1).

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it cannot be read, or has no such column; missing or infinite values; too
                many texts in a column; a class with too few rows.
        """
        splits = divided(self._whole(), self.test_fraction, self.validation, self.seed)
        return self._scaled(splits)

    def load_undivided(self) -> Splits:
        """All rows as test data."""
        return self._scaled(self._whole())

    def _scaled(self, splits: Splits) -> Splits:
        """The data with targets that are numbers in float32, standardised if asked for."""
        y = splits.train[1]  # (N, 1)
        if splits.classes is not None:
            return splits
        if not self.standardise:
            return splits.with_target_scale(None)
        if y.min() == y.max():
            return splits.with_target_scale((y[0].item(), 1.0))
        largest = y.abs().max()
        scaled = y / largest  # squares of large or small numbers leave the range of float64
        mean, std = (scaled.mean() * largest).item(), (scaled.std(correction=0) * largest).item()
        if not std or not 0.99 < ((y - mean) / std).std(correction=0) < 1.01:
            raise ValueError(
                f"'{self.path}': the target has values from {y.min():.6g} to {y.max():.6g}, which "
                "float64 cannot standardise. Divide them by a number beforehand."
            )
        return splits.with_target_scale((mean, std))

    def _whole(self) -> Splits:
        """All rows, as training and as test data."""
        with extra("tables"):
            import pandas

        frame = self._frame(pandas)
        target = frame.columns[-1] if self.target is None else self.target
        if target not in frame or len(frame.columns) < 2:
            raise ValueError(
                f"'{self.path}' has the columns {', '.join(map(str, frame.columns))}; target must "
                f"be one of two or more, not {target!r}."
            )
        y, inputs = frame[target], frame.drop(columns=target)
        for column, values in inputs.items():
            if values.dtype.kind in "mMc":
                raise ValueError(
                    f"'{self.path}': column {column!r} has {values.dtype}; columns are numbers, "
                    "yes or no, or text. Make it a number, or drop it."
                )
        for column in inputs.select_dtypes(exclude=["number", "bool"]):
            if (count := inputs[column].nunique()) > MOST_CATEGORIES:
                raise ValueError(
                    f"'{self.path}': column {column!r} has {count} different texts, more than "
                    f"{MOST_CATEGORIES}. Drop it, or give it fewer values."
                )
        for column, values in frame.items():
            if (missing := int(values.isna().sum())) > 0:
                what = "the target" if column == target else "column"
                raise ValueError(
                    f"'{self.path}': {missing} row(s) lack {what} {column!r}; drop them, or fill "
                    "them in."
                )
        numbers = pandas.get_dummies(inputs, dtype=float)
        of_columns = [
            in_float32(f"'{self.path}': column {name!r}", column.to_numpy(dtype="float64"))
            for name, column in numbers.items()
        ]
        x, columns = torch.from_numpy(np.stack(of_columns, 1)), tuple(map(str, numbers.columns))
        is_class = y.dtype.kind != "f" if self.classes is None else self.classes
        if is_class:
            codes, found = pandas.factorize(y, sort=True)
            if self.classes is None and y.dtype.kind in "iu" and len(found) > MOST_CATEGORIES:
                raise ValueError(
                    f"'{self.path}': the target {target!r} has {len(found)} different integers. "
                    "Pass --data.classes false if they are numbers, true if they are classes (in "
                    "Python classes=False or True)."
                )
            names, targets = tuple(map(str, found)), torch.tensor(codes, dtype=torch.int64)
        else:
            names, targets = None, torch.tensor(y.to_numpy(dtype="float64"))[:, None]
        return Splits((x, targets), None, (x, targets), self.name, names, columns=columns)

    def _frame(self, pandas: Any) -> Any:
        path = Path(self.path)
        if not path.is_file():
            raise FileNotFoundError(
                f"'{path}' is not a file. Give the path of a CSV or Parquet file."
            )
        is_parquet = path.suffix == ".parquet"
        try:
            return pandas.read_parquet(path) if is_parquet else pandas.read_csv(path)
        except (ValueError, OSError) as error:  # pandas' parsers and pyarrow raise subclasses
            reason = str(error).partition("\n")[0]
            kind = "Parquet" if is_parquet else "CSV"
            raise ValueError(f"'{path}' cannot be read as {kind} ({reason}).") from error
