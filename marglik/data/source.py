"""The interface of data sources, and the search for the files of named data sets."""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

__all__ = ["DataSource", "local_file"]

VARIABLE = "MARGLIK_DATA"
"""Environment variable with the folder of data files for which no path is given."""


class DataSource(ABC):
    """A source of data, with a test set of its own."""

    @abstractmethod
    def load(self) -> Any:
        """Return `ImageSplits` or `TensorSplits`; the same arguments always give the same data."""


def local_file(path: str | Path | None, name: str, origin: str) -> Path:
    """The file at ``path``, or without a path the file ``name`` in the folder of MARGLIK_DATA.

    The environment variable is read at each call, and not when the package is imported.

    Args:
        path: the path that the user gave, or None.
        name: name of the file, as it is published.
        origin: where it is published.

    Raises:
        FileNotFoundError: neither path nor variable is given, or there is no such file; the message
            says where to get it.
    """
    folder = os.environ.get(VARIABLE)
    if path is None and not folder:
        raise FileNotFoundError(
            f"No path was given, and {VARIABLE} is not set. Get {name} ({origin}), and pass its "
            f"path (--data.path), or set the environment variable {VARIABLE} to its folder."
        )
    found = Path(folder or "", name) if path is None else Path(path).expanduser()
    if not found.is_file():
        raise FileNotFoundError(
            f"'{found}' is not a file. Get {name} ({origin}), and pass its path (--data.path), or "
            f"put it into a folder and set the environment variable {VARIABLE} to that folder."
        )
    return found
