"""Rows of a CSV or Parquet file: columns to predict from, and one to predict."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kfac_backend.extras import extra
from marglik.data.splits import check_fraction, check_seed, hold_out
from marglik.data.tensors import DataSource, TensorSplits

__all__ = ["TableFile"]

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
        test_fraction: share of all rows that become the test set, in (0, 1).
        validation: share of the training rows that become the validation set, in [0, 1).
        seed: seed of both splits, which are stratified by class.
        name: name of the data in tables and figures; the file's name if not given.

    Raises:
        ValueError: if a fraction or the seed is out of range.
    """

    path: str | Path
    target: str | None = None
    classes: bool | None = None
    test_fraction: float = 0.2
    validation: float = 0.0
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        check_fraction("test_fraction", self.test_fraction, zero=False)
        check_fraction("validation", self.validation)
        check_seed(self.seed)
        self.path = Path(self.path).expanduser()
        self.name = self.name or self.path.stem

    def load(self) -> TensorSplits:
        """Return the data: inputs (N, columns) in float32, classes (N,) or numbers (N, 1).

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it cannot be read, or has no such column; missing or infinite values; too
                many texts in a column; a class with too few rows.
        """
        frame = self._frame()
        target = frame.columns[-1] if self.target is None else self.target
        if target not in frame or len(frame.columns) < 2:
            raise ValueError(
                f"'{self.path}' has the columns {', '.join(map(str, frame.columns))}; target must "
                f"be one of two or more, not {target!r}."
            )
        y, inputs = frame[target], frame.drop(columns=target)
        for column in inputs.select_dtypes(exclude=["number", "bool"]):
            if (count := inputs[column].nunique()) > MOST_CATEGORIES:
                raise ValueError(
                    f"'{self.path}': column {column!r} has {count} different texts, more than "
                    f"{MOST_CATEGORIES}. Drop it, or give it fewer values."
                )
        if (missing := int(y.isna().sum())) > 0:
            raise ValueError(
                f"'{self.path}': {missing} row(s) lack the target {target!r}; drop them."
            )
        with extra("tables"):
            import pandas

        numbers = pandas.get_dummies(inputs, dtype=float).astype("float32")
        x, columns = torch.tensor(numbers.to_numpy()), tuple(map(str, numbers.columns))
        is_class = y.dtype.kind != "f" if self.classes is None else self.classes
        if is_class:
            codes, found = pandas.factorize(y, sort=True)
            names, targets = tuple(map(str, found)), torch.tensor(codes, dtype=torch.int64)
        else:
            names, targets = None, torch.tensor(y.to_numpy(dtype="float64"))[:, None]
        whole = TensorSplits((x, targets), None, (x, targets), self.name, names, columns=columns)
        parts, _ = hold_out(whole, self.test_fraction, self.seed)
        assert parts.validation is not None
        splits = replace(parts, validation=None, test=parts.validation)
        if self.validation:
            splits, _ = hold_out(splits, self.validation, self.seed)
        return splits if is_class else _standardised(splits)

    def _frame(self) -> Any:
        path = Path(self.path)
        if not path.is_file():
            raise FileNotFoundError(
                f"'{path}' is not a file. Give the path of a CSV or Parquet file."
            )
        with extra("tables"):
            import pandas

        is_parquet = path.suffix == ".parquet"
        try:
            return pandas.read_parquet(path) if is_parquet else pandas.read_csv(path)
        except (ValueError, OSError) as error:  # pandas' parsers and pyarrow raise subclasses
            reason = str(error).partition("\n")[0]
            kind = "Parquet" if is_parquet else "CSV"
            raise ValueError(f"'{path}' cannot be read as {kind} ({reason}).") from error


def _standardised(splits: TensorSplits) -> TensorSplits:
    """The same with the mean of the training targets subtracted, divided by their deviation."""
    y = splits.train[1]
    mean, std = y.mean().item(), y.std(correction=0).item() or 1.0

    def scaled(pair: Any) -> Any:
        return pair and (pair[0], ((pair[1] - mean) / std).float())

    parts = {name: scaled(getattr(splits, name)) for name in ("train", "validation", "test")}
    return replace(splits, **parts, target_scale=(mean, std))
