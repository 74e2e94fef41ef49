"""The log of a run: a line of JSON per epoch and update, and TensorBoard files on request."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kfac_backend.files import parse_json
from marglik.storage.run_files import LOG, TENSORBOARD
from marglik.storage.run_folder import RunFolder

__all__ = ["RunLog", "read_log"]


class RunLog:
    """Writes each record at once, so that its line is on disk before the next epoch starts.

    Used as a context, which starts an empty log: a resumed run writes its earlier records again.
    Each record rewrites the whole file, as the folder has a sum of it.

    Args:
        folder: the run's folder, after its `begin`.
        tensorboard: whether to write scalars to TensorBoard files in the folder, too.

    Raises:
        ValueError: TensorBoard is asked for but not installed.
    """

    def __init__(self, folder: RunFolder, *, tensorboard: bool = False) -> None:
        self._folder = folder
        self._lines = ""
        self._tensorboard = _tensorboard_logger(folder.path) if tensorboard else None

    def __enter__(self) -> Self:
        self._folder.write(LOG, b"")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._tensorboard is not None:
            self._tensorboard.finalize("success" if error is None else "failed")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self._lines += json.dumps(record) + "\n"
        self._folder.write(LOG, self._lines.encode())
        if self._tensorboard is not None:
            scalars = {name: value for name, value in _scalars(record) if name != "epoch"}
            self._tensorboard.log_metrics(scalars, step=record["epoch"])


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The records of a run, in the order in which they were written; none if it has no log.

    Raises:
        FileNotFoundError: the log was removed.
        ValueError: it was altered.
    """
    return [parse_json(line) for line in (RunFolder(folder).read(LOG) or b"").splitlines()]


def _scalars(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield prefix + key, value


def _tensorboard_logger(folder: Path) -> Any:
    try:
        from lightning.fabric.loggers import TensorBoardLogger

        return TensorBoardLogger(root_dir=folder, name=TENSORBOARD, version="")
    except ModuleNotFoundError as error:
        raise ValueError(
            "--tensorboard needs the package tensorboard: pip install tensorboard."
        ) from error
