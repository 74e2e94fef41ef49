"""A run's folder: one command at a time writes into it, and a manifest vouches for what it holds.

``manifest.json`` names the command and the preset that the run is of, and has a SHA-256 sum of each
file that is read again; the posterior's record and the states have sums of their tensors
themselves. A file's new sum joins the old one before the file is replaced, so that whenever a
process is killed the manifest is right. ``report.html`` and TensorBoard's files are not in it: they
are made from the others, for people.
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
"""File -> the sums that it may have, the last one that it should have; None: it is not there."""


class RunFolder:
    """What `marglik` leaves, and reads again.

    Args:
        path: the folder, which need not be there yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @contextmanager
    def locked(self) -> Iterator[Self]:
        """Keep other processes' commands out while this one works; the folder is made if need be.

        Raises:
            ValueError: another process works in it.
            OSError: nothing can be written into it; before any work is lost.
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
            remove_leftovers(self.path)
            self._try_to_write()
            yield self
            self.settle()
        finally:
            with suppress(OSError):  # some systems keep a file that is open
                Path(lock.lock_file).unlink()
            lock.release()
            if is_new:
                with suppress(OSError):  # the command has left something
                    self.path.rmdir()

    def begin(
        self, command: str, provenance: Provenance, *, overwrite: bool = False, resume: bool = False
    ) -> None:
        """Make this the folder of a new run, and take out what an old one left.

        Args:
            command: that makes the run, such as "train".
            provenance: its preset, and the options that are written down.
            overwrite: whether an old run may be replaced.
            resume: whether the old run goes on from its state, which is kept.

        Raises:
            FileExistsError: see `check_free`.
        """
        self.check_free(command, provenance.preset, overwrite or resume)
        manifest = self._manifest() if resume else None
        preset = provenance.preset if manifest is None else manifest["preset"]
        self._write_manifest(command, preset, {})
        for path in self._known():
            if path.name != MANIFEST and not (resume and path.name == CHECKPOINT):
                _remove(path)
        if provenance.options is not None:
            self.write(CONFIG, provenance.options.encode())

    def check_free(self, command: str, preset: str | None, overwrite: bool = False) -> None:
        """Raise a FileExistsError if a new run would replace what must not be lost.

        That is all that is not of a run; a run of another command or preset; and, without
        ``overwrite``, one with results or a state to go on from.
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
            resume = "--resume to go on with it, " if has_state else ""
            raise FileExistsError(
                f"{self.path} already holds a run ({(left or [CHECKPOINT])[0]}); pass --overwrite, "
                f"{resume}or another --output."
            )

    def tidy(self) -> None:
        """Remove what processes that were killed had in work, unless another one works here."""
        if self.path.is_dir():
            with suppress(OSError, ValueError), self.locked():
                pass

    def check_beside(self) -> None:
        """Raise a FileExistsError unless a command may add its files to what is there.

        That is a run, nothing, or a posterior alone, which has its own sums.
        """
        known, alone = self._known(), {POSTERIOR, FACTORS, MODEL, REPORT}
        has_posterior = (self.path / POSTERIOR).exists()
        if self._manifest() is None:
            self._check_unknown([p for p in known if not (has_posterior and p.name in alone)])

    def adopt(self, command: str) -> None:
        """Make a folder without a run the command's own, see `check_beside`."""
        self.check_beside()
        if self._manifest() is None:
            self._write_manifest(command, None, {})
            if (self.path / POSTERIOR).exists():
                self.vouch(POSTERIOR, sha256((self.path / POSTERIOR).read_bytes()))

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it, and vouch for it."""
        self.settle()
        sums = self._sums()
        self._vouch(sums | {name: [*sums.get(name, [None]), sha256(content)]})
        write_file(self.path / name, content)

    def settle(self) -> None:
        """Vouch for the one of a file's two sums that it has: the old if a process was killed."""
        before = self._sums()
        sums = {name: self._settled(name, found) for name, found in before.items()}
        if sums != before:
            self._vouch(sums)

    def vouch(self, name: str, sum_: str) -> None:
        """Vouch for a new file that was written already, by the sum of what was written."""
        found: Sums = {name: [sum_]}
        self._vouch(self._sums() | found)

    def read(self, name: str) -> bytes | None:
        """A file's content, as it was written; None if the run has not left such a file.

        Raises:
            FileNotFoundError: it was removed.
            ValueError: it was altered, or is not of this run.
        """
        manifest, path = self._manifest(), self.path / name
        allowed = [None] if manifest is None else manifest["files"].get(name, [None])
        content = path.read_bytes() if path.is_file() else None
        if (None if content is None else sha256(content)) in allowed:
            return content
        if self._manifest() != manifest:  # a command is at work
            return self.read(name)
        if content is None:
            raise FileNotFoundError(
                f"{path} is missing, which {MANIFEST} speaks of. Put it back. {REMEDY}"
            )
        if manifest is None:
            raise ValueError(
                f"{self.path} has no {MANIFEST}, so that nothing vouches for its {name}: it is of "
                f"an older marglik, or of none. {REMEDY}"
            )
        if name not in manifest["files"]:
            raise ValueError(
                f"{path} is not of the run in {self.path}: {MANIFEST} does not speak of it. Take "
                "it away."
            )
        other = ""
        if name == CONFIG:
            other = " To run with other options, pass an edited copy from elsewhere as --config."
        raise ValueError(
            f"{path} is not as marglik wrote it: it was altered or damaged. Put the original "
            f"back. {REMEDY}{other}"
        )

    def posterior(self) -> dict[str, Any] | None:
        """What ``posterior.json`` says, see `read_posterior`; None if there is none.

        It may be there alone, without a run: it vouches for itself and its tensors.
        """
        if self._manifest() is not None:
            self.read(POSTERIOR)
        return read_posterior(self.path) if (self.path / POSTERIOR).is_file() else None

    def check(self, but: str | None = None) -> None:
        """Raise an error unless all that the run left is as it was written; see `read`.

        Args:
            but: the name of a file that is not looked at.
        """
        for name in self._sums():
            if name != but:
                self.read(name)
        self.posterior()

    def discard(self, name: str) -> None:
        """Remove a folder in it if it is there; nobody who comes later sees half of it."""
        _remove(self.path / name)

    def _known(self) -> list[Path]:
        """What is there under the names that a run's files have."""
        return [path for name in run_files.ALL if (path := self.path / name).exists()]

    def _check_unknown(self, paths: Sequence[Path]) -> None:
        if paths:
            raise FileExistsError(
                f"{self.path} holds {', '.join(path.name for path in paths)} and no {MANIFEST}: "
                "that is not from a run of this marglik, and is never overwritten. Pass another "
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
    """Remove a file, or a folder under another name."""
    if path.is_dir():
        condemned = temporary_path(path)
        path.rename(condemned)
        shutil.rmtree(condemned)
    else:
        path.unlink(missing_ok=True)
