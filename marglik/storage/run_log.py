"""The log of a run: a line of JSON per epoch and update."""

import json
from pathlib import Path
from typing import Any

from kfac_backend.files import parse_json
from marglik.storage.run_files import LOG
from marglik.storage.run_folder import RunFolder

__all__ = ["RunLog", "read_log"]


class RunLog:
    """Writes each record at once, so that its line is on disk before the next epoch starts.

    It starts empty: a resumed run writes its earlier records again. Each record rewrites the whole
    file, as the folder has a sum of it.

    Args:
        folder: the run's folder, after its `begin`.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lines = ""
        folder.write(LOG, b"")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self._lines += json.dumps(record) + "\n"
        self._folder.write(LOG, self._lines.encode())


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The records of a run, in the order in which they were written; none if it has no log.

    Raises:
        FileNotFoundError: the log was removed.
        ValueError: it was altered.
    """
    return [parse_json(line) for line in (RunFolder(folder).read(LOG) or b"").splitlines()]
