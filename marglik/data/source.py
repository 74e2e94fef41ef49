"""What every source of data provides, and where the project's own files lie."""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

__all__ = ["DataSource", "local_file", "missing_file"]

FOLDER = "../shared/data"
VARIABLE = "MARGLIK_DATA"
"""Environment variable that names another folder."""


class DataSource(ABC):
    """A source of data, with a test set of its own."""

    @abstractmethod
    def load(self) -> Any:
        """Return `ImageSplits` or `TensorSplits`; the same arguments always give the same data."""


def local_file(path: str | Path | None, name: str) -> Path:
    """Return the path, or without one the file of that name in ``MARGLIK_DATA`` or ../shared/data.

    The environment variable is read now, and not when the package is imported.
    """
    if path is not None:
        return Path(path).expanduser()
    return Path(os.environ.get(VARIABLE) or FOLDER) / name


def missing_file(path: Path, name: str, origin: str) -> FileNotFoundError:
    """Return an error that says how a file that is not there can be had.

    Args:
        path: where it was looked for.
        name: of the file, as it is published.
        origin: where it is published.
    """
    return FileNotFoundError(
        f"'{path}' is not a file. Get {name} ({origin}), and pass its path (--data.path), or put "
        f"it into ../shared/data or the folder that {VARIABLE} names."
    )
