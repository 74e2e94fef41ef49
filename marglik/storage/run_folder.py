"""The folder of a run: one command at a time writes to it, and one record has its files' sums.

``manifest.json`` names the run's command and preset, and has the SHA-256 sum of each file that is
read again, except for the posterior and the checkpoints, which have sums of their own. Before a
file is replaced, the record gets its new sum beside the old one: whenever the process is killed,
the record has the sum of the file that is there. ``report.html`` is made from the
others, and nothing reads it again.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from kfac_backend.files import (
    DiskFullError,
    file_sum,
    parse_json,
    remove_leftovers,
    sha256,
    temporary_path,
    write_file,
)
from marglik.storage.checkpoint import STATE
from marglik.storage.provenance import Provenance
from marglik.storage.record_file import (
    ENSEMBLE,
    FACTORS,
    MEMBERS,
    MODEL,
    POSTERIOR,
    read_posterior,
    read_record,
    write_record,
)

__all__ = [
    "CHECKPOINT",
    "CONFIG",
    "EVALUATION",
    "LOG",
    "MANIFEST",
    "REPORT",
    "RESULTS",
    "RunFolder",
    "RunLog",
    "read_log",
]

MANIFEST = "manifest.json"
"""The run's command and preset, and the SHA-256 sums of its files."""
CONFIG = "config.yaml"
"""The options."""
LOG = "log.jsonl"
"""A line of JSON per epoch and update."""
RESULTS = "results.json"
"""The results of `marglik train`."""
EVALUATION = "evaluation.json"
"""The metrics of the predictives."""
REPORT = "report.html"
"""The page about the run."""
CHECKPOINT = "checkpoint"
"""A folder that exists while training lasts: the states that --resume continues from."""
FOUND = (RESULTS, POSTERIOR, EVALUATION)
"""Files with results; a new `train` or `fit` does not replace them without --overwrite."""
ALL = (CONFIG, LOG, *FOUND, MODEL, FACTORS, ENSEMBLE, MEMBERS, REPORT, CHECKPOINT, MANIFEST)

FORMAT, FORMAT_VERSION = "marglik.run", 2
REMEDY = "Run the command again (--overwrite, or another --output)."
ABSENT = ""
"""In place of the sum of a file that was not there yet."""


class RunFolder:
    """A folder that the commands write to and read from.

    A command that writes works inside `locked`. It first calls `begin` (a new run: what an old run
    left is removed) or `adopt` (files are added to what is there), then `write`. Reading needs no
    lock: `read` returns a file only if the record has its sum.

    The object holds nothing but the path: all state is on disk, where a killed process leaves it.

    Args:
        path: the folder, which need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @contextmanager
    def locked(self) -> Iterator[Self]:
        """A context that keeps out the commands of other processes; creates the folder if needed.

        Raises:
            ValueError: another process works in the folder.
            OSError: the folder cannot be written to. This is tested at once, before any work that
                could be lost.
        """
        is_new = not self.path.exists()
        lock = FileLock(self.path / ".lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"Another process runs in {self.path}; wait for it, or pass another --output."
            ) from error
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            # The leftovers of killed processes are known to be nobody's only under the lock.
            remove_leftovers(self.path)
            self._try_to_write()
            yield self
        finally:
            with suppress(OSError):  # Windows does not remove a file that is open
                Path(lock.lock_file).unlink()
            lock.release()
            if is_new:
                with suppress(OSError):  # it is not empty: the command has written something
                    self.path.rmdir()

    def begin(
        self, command: str, provenance: Provenance, *, overwrite: bool = False, resume: bool = False
    ) -> None:
        """Make this the folder of a new run, and remove what an old one left.

        Args:
            command: the command of the run, such as "train".
            provenance: its preset, and the options to write to ``config.yaml``.
            overwrite: whether an old run may be replaced.
            resume: whether the run continues from its checkpoints, which are then kept.

        Raises:
            FileExistsError: see `check_free`.
        """
        self.check_free(command, provenance.preset, overwrite or resume)
        manifest = self._manifest() if resume else None
        preset = provenance.preset if manifest is None else manifest["preset"]
        # An empty record first: a process that is killed during the removal leaves a folder that
        # is known to be a run's, and whose remaining files nothing takes for this run's.
        self._write_manifest(command, preset, {})
        for path in self._known():
            if path.name != MANIFEST and not (resume and path.name == CHECKPOINT):
                _remove(path)
        if provenance.options is not None:
            self.write(CONFIG, provenance.options.encode())

    def check_free(self, command: str, preset: str | None, overwrite: bool = False) -> None:
        """Raise a FileExistsError if a new run would replace something that may be needed.

        These are files that no run has written, and a run of another command or preset. Without
        ``overwrite``, they are also results, and checkpoints of a run that can be resumed.
        """
        manifest = self._manifest()
        if manifest is None:
            self._check_unknown(self._known())
            return
        there = _name(manifest["command"], manifest["preset"])
        if there != _name(command, preset):
            raise FileExistsError(
                f"{self.path} already holds a run of {there}, which {_name(command, preset)} "
                "does not overwrite. Pass another --output, or remove the folder."
            )
        has_state = any((self.path / CHECKPOINT).glob(f"*/{STATE}"))
        left = [name for name in FOUND if (self.path / name).exists()]
        if not overwrite and (left or has_state):
            resume = "--resume to continue it, " if has_state else ""
            raise FileExistsError(
                f"{self.path} already holds a run ({(left or [CHECKPOINT])[0]}); pass --overwrite, "
                f"{resume}or another --output."
            )

    def check_beside(self) -> None:
        """Raise a FileExistsError unless a command may add its files to what is there.

        It may add to a run, to an empty folder, and to a posterior that `save_posterior` wrote
        without a run, whose record has its own sums.
        """
        known, alone = self._known(), {POSTERIOR, FACTORS, MODEL, REPORT}
        has_posterior = (self.path / POSTERIOR).exists()
        if self._manifest() is None:
            self._check_unknown([p for p in known if not (has_posterior and p.name in alone)])

    def adopt(self, command: str) -> None:
        """Start a record if there is none; see `check_beside`."""
        self.check_beside()
        if self._manifest() is None:
            self._write_manifest(command, None, {})

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it, with its sum in the record.

        Raises:
            FileNotFoundError: the folder was removed since the command has begun.
        """
        manifest = self._manifest()
        if manifest is None:
            raise FileNotFoundError(
                f"{self.path} was removed, or its {MANIFEST}, while the command was at work. Start "
                "it again."
            )
        # Both sums, then the file: killed in between, the file has one of them. The new sum alone
        # would disown the old file.
        there = self._sum_of(name)
        still = [there] if there in manifest["files"].get(name, [ABSENT]) else []
        sums = manifest["files"] | {name: [*still, sha256(content)]}
        self._write_manifest(manifest["command"], manifest["preset"], sums)
        write_file(self.path / name, content)

    def read(self, name: str) -> bytes | None:
        """The content of a file, verified by its sum; None if it is not there.

        Raises:
            ValueError: the file was altered, or is not from this run.
        """
        manifest, path = self._manifest(), self.path / name
        if not path.is_file():
            return None
        content = path.read_bytes()
        if manifest is not None and sha256(content) in manifest["files"].get(name, []):
            return content
        # Readers take no lock. If the record has changed since, a command has replaced the file
        # between our two looks, and nothing is wrong.
        if self._manifest() != manifest:
            return self.read(name)
        if manifest is None:
            raise ValueError(
                f"{self.path} has no {MANIFEST}, which would have the checksum of its {name}: "
                f"another program wrote it. {REMEDY}"
            )
        if name not in manifest["files"]:
            raise ValueError(
                f"{path} is not from the run in {self.path}: {MANIFEST} does not list it. Remove "
                "it."
            )
        other = ""
        if name == CONFIG:
            other = " To run with other options, pass an edited copy from elsewhere as --config."
        raise ValueError(
            f"{path} is not as marglik wrote it: it was altered or damaged. Put the original "
            f"back. {REMEDY}{other}"
        )

    def posterior(self) -> dict[str, Any] | None:
        """The content of ``posterior.json``, see `read_posterior`; None if there is none."""
        return read_posterior(self.path) if (self.path / POSTERIOR).is_file() else None

    def check(self, but: str | None = None) -> None:
        """Raise an error unless all files that are there are as they were written; see `read`.

        Args:
            but: name of a file that is not checked.
        """
        for name in (self._manifest() or {"files": {}})["files"]:
            if name != but:
                self.read(name)
        self.posterior()

    def discard(self, name: str) -> None:
        """Remove a file or folder, if it exists; a folder disappears in one step."""
        _remove(self.path / name)

    def _known(self) -> list[Path]:
        """The existing files and folders whose names are those of a run's files."""
        return [path for name in ALL if (path := self.path / name).exists()]

    def _check_unknown(self, paths: Sequence[Path]) -> None:
        if paths:
            raise FileExistsError(
                f"{self.path} holds {', '.join(path.name for path in paths)} but no {MANIFEST}: "
                "no run of this marglik wrote that, so it is never overwritten. Pass another "
                "--output, or move it away."
            )

    def _manifest(self) -> dict[str, Any] | None:
        path = self.path / MANIFEST
        if not path.is_file():
            return None
        remedy = "Put the original back, or pass another --output."
        return read_record(path, FORMAT, FORMAT_VERSION, what="run", remedy=remedy)

    def _sum_of(self, name: str) -> str:
        path = self.path / name
        return file_sum(path) if path.is_file() else ABSENT

    def _write_manifest(self, command: str, preset: str | None, sums: dict[str, list[str]]) -> None:
        record = {"format": FORMAT, "version": FORMAT_VERSION, "command": command}
        write_record(self.path / MANIFEST, record | {"preset": preset, "files": sums}, {})

    def _try_to_write(self) -> None:
        probe = self.path / ".writable"
        try:
            write_file(probe, bytes(2**16))
            probe.unlink()
        except DiskFullError:
            raise
        except OSError as error:
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> OSError:
        reason = os.strerror(error.errno) if error.errno else error
        return OSError(
            f"{self.path} cannot be written to ({reason}). Make room or change "
            "its permissions, or pass another --output."
        )


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


def _name(command: str, preset: str | None) -> str:
    return f"marglik {command}" + (f" --config {preset}" if preset else "")


def _remove(path: Path) -> None:
    """Remove a file or folder; a folder is renamed first, so that it disappears in one step."""
    if path.is_dir():
        going = temporary_path(path)
        path.rename(going)
        shutil.rmtree(going)
    else:
        path.unlink(missing_ok=True)
