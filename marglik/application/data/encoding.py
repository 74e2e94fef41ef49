"""Encode the rows of a table as inputs of a network, with an encoding that is plain data."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfac_backend.extras import extra


@dataclass(frozen=True)
class TableEncoding:
    """Encoding of rows as inputs of a network, in the same way as the training rows.

    The inputs are the columns of numbers, a column of zeros and ones for each value of each text
    column, and a column of zeros and ones for each column with missing values in the training file.
    In the last kind of column, 1 marks a missing value.

    Args:
        target: name of the column to predict.
        numbers: column of numbers -> median of the training split, which replaces missing values.
        texts: column of text -> its values.
        missing: columns with missing values in some rows of the training file.
        classes: classes of the target; None if the target is numeric.
    """

    target: str
    numbers: dict[str, float]
    texts: dict[str, list[str]]
    missing: list[str]
    classes: list[str] | None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the inputs. Two inputs from different columns may have the same name."""
        values = [f"{column}_{value}" for column, texts in self.texts.items() for value in texts]
        return (*self.numbers, *values, *map(indicator, self.missing))

    def encode(self, frame: Any, name: str) -> Tensor:
        """Return the inputs (N, columns), float32, of the rows of a data frame.

        Args:
            frame: the rows. Columns are found by name; other columns are ignored.
            name: name of the data in errors.

        Raises:
            ValueError: columns are missing, have a value that is not in the training file, or have
                a missing value where the training file has none. The error lists all of them.
        """
        with extra("tables"):
            import pandas

        columns = [*self.numbers, *self.texts]
        if lacking := [column for column in columns if column not in frame]:
            raise ValueError(
                f"{name} lacks the column(s) {', '.join(lacking)}. The network was trained on "
                f"{', '.join(columns)}. The order does not matter."
            )
        # Use a list, because names of inputs may be equal: a = "b_c" and a_b = "c".
        inputs, absent, problems = [], frame[columns].isna(), []
        for column in columns:
            values, is_absent = frame[column], absent[column]
            if column not in self.missing and is_absent.any():
                problems.append(
                    f"{is_absent.sum()} row(s) lack column {column!r}, which all rows of the "
                    "training data have"
                )
            if column in self.numbers:
                numbers: Any = pandas.to_numeric(values, errors="coerce").astype(float)  # pyright: ignore
                unknown = values[numbers.isna() & ~is_absent]
                inputs.append(numbers.fillna(self.numbers[column]))
            else:
                texts = values.astype(str)
                unknown = values[~is_absent & ~texts.isin(self.texts[column])]
                inputs += [(texts == value) & ~is_absent for value in self.texts[column]]
            if len(unknown):
                expected = self.texts.get(column, ["a number"])
                problems.append(
                    f"column {column!r} has {str(unknown.iloc[0])!r} (in {len(unknown)} row(s)), "
                    f"where the training data has {', '.join(expected)}"
                )
        if problems:
            raise ValueError(f"{name}: {'; '.join(problems)}. Correct or remove these rows.")
        inputs += [absent[column] for column in self.missing]
        with np.errstate(over="ignore"):  # a later error names infinite values
            x = [values.to_numpy(dtype="float64").astype("float32") for values in inputs]
        return torch.from_numpy(np.stack(x, 1))

    def read(self, path: str | Path) -> Any:
        """Return the rows of a file as a data frame, with the original texts.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file cannot be read.
        """
        return read_frame(path, dict.fromkeys(self.texts, "str"))


SEPARATORS = ("\t", ";", "|")
"""Separators, other than commas, that an error recognises."""


def indicator(column: str) -> str:
    """Return the name of the input that marks missing values of a column."""
    return f"{column} is missing"


def read_frame(path: str | Path, dtypes: dict[str, str] | None = None) -> Any:
    """Return a data frame of a file; errors as in `TableEncoding.read`, also for equal names."""
    with extra("tables"):
        import pandas

    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"'{path}' is not a file. Give the path of a CSV or Parquet file.")
    is_parquet = path.suffix == ".parquet"
    try:
        if is_parquet:
            frame = pandas.read_parquet(path)
            _check_unique(list(frame.columns))
            return frame
        # Read the header as text, because pandas renames columns with equal names.
        first = pandas.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False)
        header = first.iloc[0].tolist()
        # Check this before reading, because rows with decimal commas would be misread.
        if len(header) == 1 and (separators := [s for s in SEPARATORS if s in header[0]]):
            raise ValueError(
                f"its columns are separated by {separators[0]!r} instead of commas. Save it with "
                f"commas, for example by pandas.read_csv(path, sep={separators[0]!r}).to_csv(path, "
                "index=False)"
            )
        _check_unique(header)
        # If rows have more values than names, pandas would take the first values as an index, and
        # each value would get the name of its left neighbour. Without an index it warns.
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame = pandas.read_csv(path, dtype=dtypes, index_col=False)  # pyright: ignore
        while header[-1:] == [""] and frame.iloc[:, len(header) - 1].isna().all():
            frame = frame.iloc[:, : len(header) - 1]  # each line ends with a comma
            header.pop()
        return frame
    except (ValueError, OSError, pandas.errors.ParserWarning) as error:
        reason = str(error).partition("\n")[0]
        kind = "Parquet" if is_parquet else "CSV"
        raise ValueError(f"'{path}' cannot be read as {kind} ({reason}).") from error


def _check_unique(names: list[Any]) -> None:
    """Raise a ValueError if columns have the same name."""
    if doubled := [name for name in dict.fromkeys(names) if names.count(name) > 1 and name != ""]:
        raise ValueError(
            f"several columns have the name {', '.join(map(repr, doubled))}. Rename or remove them"
        )
