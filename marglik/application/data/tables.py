"""Tables: rows of a CSV or Parquet file, split into parts, with targets for a likelihood."""

import math
import re
import warnings
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from kfac_backend.extras import extra
from kfac_backend.options import check_fraction, check_option
from marglik.application.data.encoding import TableEncoding, read_frame
from marglik.application.data.files import in_float32
from marglik.application.data.splits import DataSource, Splits, divided
from marglik.data.batches import Pair

TINY = 1e-300
"""Smallest variance of a target, far above the smallest numbers of float64."""
MOST_CATEGORIES = 100
"""Maximum number of values in a column of text, each of which becomes an input. A column with more
values probably contains row names."""
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
Missing = Literal["indicator", "error"]


@dataclass(eq=False)
class TableFile(DataSource):
    """A CSV or Parquet file with one example per row, read by pandas.

    Columns of numbers are inputs without changes. `marglik train` standardises them by the training
    rows inside the network, so that a saved network accepts rows of the file. A column of text
    becomes a column of zeros and ones for each of its values. A target with fractions is numeric,
    for likelihood regression. It is standardised by the training rows; ``posterior.json`` has its
    mean and standard deviation. Any other target is a class.

    Args:
        path: the file. Files ending in .parquet are Parquet, others CSV.
        target: name of the column to predict; the last column if not given.
        drop: names of columns that are not inputs, such as ids and dates: "[id, date]".
        classes: whether the target is a class. If not given, text, booleans and integers are
            classes.
        standardise: whether a numeric target is standardised. Pass false for counts (poisson).
        missing: treatment of missing input values. indicator adds a column of zeros and ones that
            marks them, and replaces missing numbers by the median of the training rows. error
            rejects them. A missing target is always rejected.
        test_fraction: share of all rows that become the test set, in (0, 1).
        validation: share of the training rows that become the validation set, in [0, 1).
        seed: seed of both splits, which are stratified by class.
        name: name of the data in tables and figures; the name of the file if not given.

    Raises:
        ValueError: a fraction is out of range, or ``drop`` includes the target.
    """

    path: str | Path
    target: str | None = None
    drop: str | list[str] = field(default_factory=list)
    classes: bool | None = None
    standardise: bool = True
    missing: Missing = "indicator"
    test_fraction: float = 0.2
    validation: float = 0.0
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        check_fraction("test_fraction", self.test_fraction, zero=False)
        check_fraction("validation", self.validation)
        check_option("missing", self.missing, Missing)
        self.drop = [self.drop] if isinstance(self.drop, str) else list(self.drop)
        if self.target in self.drop:
            raise ValueError(f"drop={self.drop} includes the target. Drop only other columns.")
        self.path = Path(self.path).expanduser()
        self.name = self.name or self.path.stem
        self._encoding: TableEncoding | None = None

    def encoded_as(self, record: dict[str, Any]) -> Self:
        """Return the same rows with the encoding of the training data."""
        other = copy(self)
        other._encoding = TableEncoding(**record["table"]) if "table" in record else None
        return other

    def load(self) -> Splits:
        """Return the data: inputs (N, columns) in float32, classes (N,) or numbers (N, 1).

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file cannot be read or lacks a column, values are missing or infinite, a
                column has too many texts, or a class has too few rows. One error lists all columns
                that cannot be inputs.
        """
        frame, targets, encoding = self._rows()
        # Divide the numbers of the rows, because the training rows determine the medians.
        numbers = torch.arange(len(frame))[:, None]
        splits = self._splits((numbers, targets), encoding)
        splits = divided(splits, self.test_fraction, self.validation, self.seed)
        if self._encoding is None:
            medians = frame[[*encoding.numbers]].iloc[splits.train[0][:, 0].numpy()].median()
            encoding = replace(encoding, numbers=encoding.numbers | medians.dropna().to_dict())
        x = encoding.encode(frame, f"'{self.path}'")
        parts: dict[str, Any] = {
            name: part and (x[part[0][:, 0]], part[1]) for name, part in splits.parts.items()
        }
        splits = replace(splits, table=encoding, **parts)
        if self._encoding is None:
            self._warn_of_copies(splits)
        return self._scaled(splits)

    def load_undivided(self) -> Splits:
        """Return all rows as test data."""
        frame, targets, encoding = self._rows()
        x = encoding.encode(frame, f"'{self.path}'")
        return self._scaled(self._splits((x, targets), encoding))

    def _splits(self, rows: Pair, encoding: TableEncoding) -> Splits:
        """Return all rows, as training and as test data."""
        classes = None if encoding.classes is None else tuple(encoding.classes)
        return Splits(rows, None, rows, self.name, classes, table=encoding)

    def _warn_of_copies(self, splits: Splits) -> None:
        """Warn of test rows that equal a training row in all columns."""
        train, test = (
            [row.tobytes() for row in torch.cat([x, y.view(len(y), -1)], 1).double().numpy()]
            for x, y in (splits.train, splits.test)
        )
        if copies := len(list(filter({*train}.__contains__, test))):
            warnings.warn(
                f"'{self.path}': {copies} of the {len(test)} test rows equal a training row in "
                "all columns. If these rows are duplicates of one example, the metrics are too "
                "optimistic. Remove duplicate rows.",
                stacklevel=3,
            )

    def _scaled(self, splits: Splits) -> Splits:
        """Return the data with numeric targets in float32, standardised on request."""
        y = splits.train[1]  # (N, 1)
        if splits.classes is not None:
            return splits
        if not self.standardise:
            return splits.with_target_scale(None)
        mean, std = y.mean().item(), y.std(correction=0).item()
        if y.min() == y.max():
            std = 1.0
        elif not TINY < std**2 < math.inf:  # as the variances of predictions
            raise ValueError(
                f"'{self.path}': the target has values from {y.min():.6g} to {y.max():.6g}, which "
                "float64 cannot standardise. Multiply or divide them by a number."
            )
        return splits.with_target_scale((mean, std))

    def _rows(self) -> tuple[Any, Tensor, TableEncoding]:
        """Return the data frame, its targets, and the encoding of the inputs."""
        with extra("tables"):
            import pandas

        encoding = self._encoding
        frame = read_frame(self.path) if encoding is None else encoding.read(self.path)
        named = ", ".join(map(str, frame.columns))
        target = self.target
        if encoding is None:
            if unknown := [name for name in self.drop if name not in frame]:
                raise ValueError(
                    f"'{self.path}' has no column(s) {', '.join(unknown)} to drop. Its columns are "
                    f"{named}."
                )
            frame = frame.drop(columns=self.drop)
            target = next(iter(frame.columns[-1:]), None) if target is None else target
        elif target is None:
            target = encoding.target
        if target not in frame or len(frame.columns) < 2:
            raise ValueError(
                f"target={target!r} is not supported: '{self.path}' has the columns {named}. Pass "
                "one of them. The table needs at least two columns."
            )
        y, problems = frame[target], []
        if (lacking := int(y.isna().sum())) > 0:
            problems.append(
                f"{lacking} row(s) lack the target {target!r}; drop them, or fill them in."
            )
        inputs = frame.drop(columns=target)
        encoding = encoding or self._fitted(inputs, y, problems)
        if problems:
            raise ValueError(f"'{self.path}': {' '.join(problems)}")
        if encoding.classes is None:
            return inputs, torch.tensor(y.to_numpy(dtype="float64"))[:, None], encoding
        codes = pandas.Index(encoding.classes).get_indexer(y.astype(str))
        if (codes < 0).any():
            raise ValueError(
                f"'{self.path}': the target {target!r} is {str(y[codes < 0].iloc[0])!r} in "
                f"{(codes < 0).sum()} row(s). The network was trained on the classes "
                f"{', '.join(encoding.classes)}. Remove these rows."
            )
        return inputs, torch.tensor(codes, dtype=torch.int64), encoding

    def _fitted(self, inputs: Any, y: Any, problems: list[str]) -> TableEncoding:
        """Return the encoding of this file, with the medians of all rows for now.

        It adds sentences about columns that cannot be used to ``problems``.
        """
        with extra("tables"):
            import pandas

        lacking = inputs.isna().sum()
        missing = [column for column in inputs if lacking[column]]
        numbers, texts, unfit = {}, {}, []
        for column, values in inputs.items():
            name = str(column)
            if values.dtype.kind in "mMc":
                problem = f"has dtype {values.dtype}. Convert it to a number."
            elif lacking[column] == len(values):
                problem = "has no values."
            elif pandas.api.types.is_numeric_dtype(values):  # booleans are numeric, too
                present = values.dropna().to_numpy(dtype="float64")
                numbers[name] = float(np.median(present))
                problem = _problem_of_numbers(present)
            else:
                texts[name] = sorted(values.dropna().astype(str).unique())
                problem = _decimal_commas(texts[name])
                if not problem and (count := len(texts[name])) > MOST_CATEGORIES:
                    problem = (
                        f"has {count} different texts, more than {MOST_CATEGORIES}. Merge some of "
                        "them, or drop the column."
                    )
            if problem:
                unfit.append(name)
                problems.append(f"Column {column!r} {problem}")
        if unfit:
            names = ", ".join(unfit)
            problems.append(f'Or drop them: --data.drop "[{names}]" (in Python drop={unfit}).')
        rows = ", ".join(f"{lacking[column]} row(s) lack column {column!r}" for column in missing)
        if missing and self.missing == "error":
            problems.append(
                f"{rows}; drop them, fill them in, or pass --data.missing indicator (in Python "
                "missing='indicator')."
            )
        classes = None
        if self.classes is None and not pandas.api.types.is_numeric_dtype(y):
            if problem := _decimal_commas(list(y.dropna().astype(str).unique())):
                problems.append(f"The target {y.name!r} {problem}")
        if y.dtype.kind != "f" if self.classes is None else self.classes:
            values = pandas.factorize(y, sort=True)[1]
            if self.classes is None and y.dtype.kind in "iu" and len(values) > MOST_CATEGORIES:
                problems.append(
                    f"The target {y.name!r} has {len(values)} different integers. Pass "
                    "--data.classes false if they are numbers, true if they are classes (in "
                    "Python classes=False or True)."
                )
            classes = [str(value) for value in values]
        if missing and not problems:
            warnings.warn(
                f"'{self.path}': {rows}. An additional column marks the missing values, and the "
                "median of the training rows replaces missing numbers. Pass --data.missing error "
                "to reject them.",
                stacklevel=2,
            )
        return TableEncoding(str(y.name), numbers, texts, [str(c) for c in missing], classes)


def _problem_of_numbers(values: np.ndarray) -> str:
    """Return the reason why numbers cannot be inputs, or an empty string."""
    if infinite := int(np.isinf(values).sum()):
        return f"has {infinite} infinite value(s). Correct them, or remove these rows."
    try:
        in_float32("", values)
    except ValueError as error:
        return str(error).strip()
    return ""


def _decimal_commas(texts: list[str]) -> str:
    """Return the reason if texts are numbers with decimal commas, or an empty string."""
    numbers = [text for text in texts if DECIMAL_COMMA.fullmatch(text.strip())]
    if 2 * len(numbers) <= len(texts):
        return ""
    return (
        f"has numbers with a comma, such as {numbers[0]!r}, which pandas reads as text. Use "
        "decimal points. If they are text, put a letter in front of each."
    )
