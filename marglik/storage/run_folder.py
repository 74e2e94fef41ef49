"""The folder of a run: one command at a time writes to it, and a manifest has its files' checksums.

``manifest.json`` names the run's command and preset, and has the SHA-256 sum of each file that is
read again. The tensors of the posterior and of checkpoints have their sums in records of their own.
Before a file is replaced, its new sum is added to the old one: whenever the process is killed, the
manifest has the sum of the file that is there. ``report.html`` and TensorBoard's files are not in
the manifest: they are made from the other files, and nothing reads them again.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from kfac_backend.files import (
    DiskFullError,
    remove_leftovers,
    sha256,
    temporary_path,
    write_file,
)
from marglik.storage import run_files
from marglik.storage.provenance import Provenance
from marglik.storage.record_file import read_posterior, read_record, write_record
from marglik.storage.run_files import (
    CHECKPOINT,
    CONFIG,
    FACTORS,
    MANIFEST,
    MODEL,
    POSTERIOR,
    REPORT,
)

__all__ = ["RunFolder"]

FORMAT, FORMAT_VERSION = "marglik.run", 1
REMEDY = "Run the command again (--overwrite, or another --output)."

Sums = dict[str, list[str | None]]
"""File name -> the sums that it may have; None stands for a file that does not exist. There are two
while a write is under way, or after one that was killed: the old sum, then the new one."""


class RunFolder:
    """A folder that the commands write to and read from.

    A command that writes works inside `locked`. It first calls `begin` (a new run: what an old run
    left is removed, and the manifest is started) or `adopt` (files are added to what is there).
    Then each `write` puts a file and its sum there; `vouch` does so for a file that was written by
    other means. `settle`, at the start of each write and at the end of `locked`, decides which of
    two sums holds. Reading needs no lock: `read` returns a file only if the manifest has its sum.

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
            self.settle()
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
        # An empty manifest first: a process that is killed during the removal leaves a folder that
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
        has_state = any((self.path / CHECKPOINT).glob("*/state.json"))
        left = [name for name in run_files.FOUND if name in manifest["files"]]
        if not overwrite and (left or has_state):
            resume = "--resume to continue it, " if has_state else ""
            raise FileExistsError(
                f"{self.path} already holds a run ({(left or [CHECKPOINT])[0]}); pass --overwrite, "
                f"{resume}or another --output."
            )

    def tidy(self) -> None:
        """Remove the unfinished files of killed processes, unless another process works here."""
        if self.path.is_dir():
            with suppress(OSError, ValueError), self.locked():
                pass

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
        """Start a manifest if there is none, with a posterior that is there; see `check_beside`."""
        self.check_beside()
        if self._manifest() is None:
            self._write_manifest(command, None, {})
            if (self.path / POSTERIOR).exists():
                self.vouch(POSTERIOR, sha256((self.path / POSTERIOR).read_bytes()))

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it, with its sum in the manifest."""
        self.settle()
        sums = self._sums()
        # Both sums, then the file: killed in between, the file has one of them. The other order
        # would leave a file without its sum, and the new sum alone would condemn the old file.
        self._vouch(sums | {name: [*sums.get(name, [None]), sha256(content)]})
        write_file(self.path / name, content)

    def settle(self) -> None:
        """Of each file's two sums, keep the one that the file has: the old one after a kill."""
        before = self._sums()
        sums = {name: self._settled(name, found) for name, found in before.items()}
        if sums != before:
            self._vouch(sums)

    def vouch(self, name: str, sum_: str) -> None:
        """Put the sum of a file that is written already into the manifest."""
        found: Sums = {name: [sum_]}
        self._vouch(self._sums() | found)

    def read(self, name: str) -> bytes | None:
        """The content of a file, verified by its sum; None if the run has not written it.

        Raises:
            FileNotFoundError: the file was removed.
            ValueError: the file was altered, or is not from this run.
        """
        manifest, path = self._manifest(), self.path / name
        allowed = [None] if manifest is None else manifest["files"].get(name, [None])
        content = path.read_bytes() if path.is_file() else None
        if (None if content is None else sha256(content)) in allowed:
            return content
        # Readers take no lock. If the manifest has changed since, a command has replaced the file
        # between our two looks, and nothing is wrong.
        if self._manifest() != manifest:
            return self.read(name)
        if content is None:
            raise FileNotFoundError(
                f"{path} is missing, which {MANIFEST} lists. Put it back. {REMEDY}"
            )
        if manifest is None:
            raise ValueError(
                f"{self.path} has no {MANIFEST}, which would have the checksum of its {name}: an "
                f"older marglik wrote it, or another program. {REMEDY}"
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
        """The content of ``posterior.json``, see `read_posterior`; None if there is none.

        It may be there alone, without a run: it has the sums of itself and of its tensors.
        """
        if self._manifest() is not None:
            self.read(POSTERIOR)
        return read_posterior(self.path) if (self.path / POSTERIOR).is_file() else None

    def check(self, but: str | None = None) -> None:
        """Raise an error unless all files of the run are as they were written; see `read`.

        Args:
            but: name of a file that is not checked.
        """
        for name in self._sums():
            if name != but:
                self.read(name)
        self.posterior()

    def discard(self, name: str) -> None:
        """Remove a file or folder, if it exists; a folder disappears in one step."""
        _remove(self.path / name)

    def _known(self) -> list[Path]:
        """The existing files and folders whose names are those of a run's files."""
        return [path for name in run_files.ALL if (path := self.path / name).exists()]

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
        return read_record(
            path,
            FORMAT,
            FORMAT_VERSION,
            keys=("command", "preset", "files"),
            what="run",
            remedy="Put the original back, or pass another --output.",
        )

    def _sums(self) -> Sums:
        return (self._manifest() or {"files": {}})["files"]

    def _settled(self, name: str, sums: list[str | None]) -> list[str | None]:
        if len(sums) == 1:
            return sums
        path = self.path / name
        found = sha256(path.read_bytes()) if path.is_file() else None
        return [found] if found in sums else sums

    def _vouch(self, sums: Sums) -> None:
        manifest = self._manifest()
        assert manifest is not None, "begin() or adopt() comes first"
        self._write_manifest(manifest["command"], manifest["preset"], sums)

    def _write_manifest(self, command: str, preset: str | None, sums: Sums) -> None:
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


def _name(command: str, preset: str | None) -> str:
    return f"marglik {command}" + (f" --config {preset}" if preset else "")


def _remove(path: Path) -> None:
    """Remove a file or folder; a folder is renamed first, so that it disappears in one step."""
    if path.is_dir():
        condemned = temporary_path(path)
        path.rename(condemned)
        shutil.rmtree(condemned)
    else:
        path.unlink(missing_ok=True)
