"""The record of a run: a line of JSON per epoch and update, TensorBoard on request."""

import json
import platform
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from filelock import FileLock, Timeout

from kfac_backend.files import remove_leftovers, temporary_path
from marglik import run_files
from marglik.run_files import CHECKPOINT, LOG

__all__ = [
    "RunLog",
    "check_free",
    "clear",
    "discard",
    "environment",
    "read_log",
    "run_lock",
]

TENSORBOARD = "tensorboard"


class RunLog:
    """Writes records as they come; a line is on disk before the next epoch starts.

    Args:
        folder: the run's folder; made if it is not there.
        tensorboard: whether scalars go to TensorBoard files in the folder, too.
        overwrite: whether a log that is already there may be replaced.
        resume: whether the run that is there goes on; its records are written anew.

    Raises:
        FileExistsError: the folder holds a log or results; ``overwrite`` and ``resume`` are off.
        ValueError: TensorBoard is asked for and not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool = False,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        check_free(folder, overwrite or resume)
        self._tensorboard = _tensorboard_logger(folder) if tensorboard else None
        clear(folder, keep=(CHECKPOINT,) if resume else ())
        self._file = (folder / LOG).open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.finalize("success" if error is None else "failed")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            scalars = {name: value for name, value in _scalars(record) if name != "epoch"}
            self._tensorboard.log_metrics(scalars, step=record["epoch"])


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise a FileExistsError if the folder holds a run that must not be replaced."""
    old = _old(folder)
    if old and not overwrite:
        cut_off = (folder / CHECKPOINT).exists()
        resume = "--resume to go on with it (marglik train), " if cut_off else ""
        raise FileExistsError(
            f"{folder} already holds a run ({old[0].name}); pass --overwrite, {resume}or another "
            "--output."
        )


def clear(folder: Path, keep: Collection[str] = ()) -> None:
    """Make the folder, or take an old run out of it, but for some of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in _old(folder):
        if path.name in keep:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove a folder if it is there; nobody who comes later sees half of it."""
    if folder.exists():
        condemned = temporary_path(folder)
        folder.rename(condemned)
        shutil.rmtree(condemned)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Keep other processes' runs out of a folder, which is made if it is not there.

    Raises:
        ValueError: another process runs there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"Another process runs in {folder}; wait for it, or pass another --output."
        ) from error
    try:
        remove_leftovers(folder)
        yield
    finally:
        with suppress(OSError):  # some systems keep a file that is open
            Path(lock.lock_file).unlink()
        lock.release()


def _old(folder: Path) -> list[Path]:
    names = [getattr(run_files, name) for name in run_files.__all__]
    return [folder / name for name in names if (folder / name).exists()]


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, in their order."""
    with (folder / LOG).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and device, for results that others compare."""
    packages = ("marglik", "torch", "torchvision", "laplace-torch", "lightning")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
    }


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
            "--tensorboard needs the package tensorboard: pip install 'marglik[tensorboard]'."
        ) from error
