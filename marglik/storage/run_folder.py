"""The folder of a run: its files, and one record that has their sums.

``manifest.json`` names the run's command and preset, and has the SHA-256 sum of each file that is
read again, except for the posterior and the checkpoints, which have sums of their own. Before a
file is replaced, the record gets its new sum beside the old one: whenever the process is killed,
the record has the sum of the file that is there. ``report.html`` is made from the others, and
nothing reads it again. One command at a time may write to a folder.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from kfac_backend.files import file_sum, parse_json, remove_leftovers, sha256, write_file
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

FORMAT = "marglik.run"
REMEDY = "Put the original back, or run the command again (--overwrite, or another --output)."


class RunFolder:
    """A folder that the commands write to and read from.

    A command that writes first calls `begin` (a new run: what an old run left is removed) or
    `adopt` (files are added to what is there), then `write`. The object holds nothing but the path:
    all state is on disk, where a killed process leaves it.

    Args:
        path: the folder, which need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

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
        # An empty record first: a process that is killed during the removal leaves a folder that
        # is known to be a run's, and whose remaining files nothing takes for this run's.
        self._write_manifest(command, provenance.preset, {})
        for name in self._known():
            if name != MANIFEST and not (resume and name == CHECKPOINT):
                self.discard(name)
        remove_leftovers(self.path)
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
        there, here = _name(manifest["command"], manifest["preset"]), _name(command, preset)
        if there != here:
            raise FileExistsError(
                f"{self.path} already holds a run of {there}, which {here} does not overwrite. "
                "Pass another --output, or remove the folder."
            )
        can_resume = any((self.path / CHECKPOINT).glob(f"*/{STATE}"))
        left = [name for name in FOUND if (self.path / name).exists()]
        if not overwrite and (left or can_resume):
            resume = "--resume to continue it, " if can_resume else ""
            raise FileExistsError(
                f"{self.path} already holds a run ({(left or [CHECKPOINT])[0]}); pass --overwrite, "
                f"{resume}or another --output."
            )

    def adopt(self, command: str) -> None:
        """Start a record if there is none, to add files to what is there.

        A command may add to a run, to an empty folder, and to a posterior that `save_posterior`
        wrote without a run, whose record has its own sums.

        Raises:
            FileExistsError: files that no run has written.
        """
        if self._manifest() is None:
            known = self._known()
            alone = {POSTERIOR, FACTORS, MODEL, REPORT} if POSTERIOR in known else set()
            self._check_unknown([name for name in known if name not in alone])
            self._write_manifest(command, None, {})

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it, with its sum in the record.

        Raises:
            FileNotFoundError: the folder was removed since the command has begun.
        """
        manifest, path = self._manifest(), self.path / name
        if manifest is None:
            raise FileNotFoundError(
                f"{self.path} was removed, or its {MANIFEST}, while the command was at work. Start "
                "it again."
            )
        # Both sums, then the file: killed in between, the file has one of them. The new sum alone
        # would disown the old file.
        there = [file_sum(path)] if path.is_file() else []
        known = [one for one in there if one in manifest["files"].get(name, [])]
        sums = manifest["files"] | {name: [*known, sha256(content)]}
        self._write_manifest(manifest["command"], manifest["preset"], sums)
        write_file(path, content)

    def read(self, name: str) -> bytes | None:
        """The content of a file, verified by its sum; None if it is not there.

        Raises:
            ValueError: the file is damaged, or not from this run.
        """
        path = self.path / name
        if not path.is_file():
            return None
        content = path.read_bytes()
        if sha256(content) not in (self._manifest() or {"files": {}})["files"].get(name, []):
            other = ""
            if name == CONFIG:
                other = " To run with other options, pass an edited copy as --config."
            raise ValueError(
                f"{path} is not as marglik wrote it: it was altered or damaged, or is not from "
                f"this run. {REMEDY}{other}"
            )
        return content

    def posterior(self) -> dict[str, Any] | None:
        """The content of ``posterior.json``, see `read_posterior`; None if there is none."""
        return read_posterior(self.path) if (self.path / POSTERIOR).is_file() else None

    def check(self) -> None:
        """Raise an error unless all files that are there are as they were written; see `read`."""
        for name in (self._manifest() or {"files": {}})["files"]:
            self.read(name)
        self.posterior()

    def discard(self, name: str) -> None:
        """Remove a file or folder, if it exists."""
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def _known(self) -> list[str]:
        """The existing files and folders whose names are those of a run's files."""
        return [name for name in ALL if (self.path / name).exists()]

    def _check_unknown(self, names: list[str]) -> None:
        if names:
            raise FileExistsError(
                f"{self.path} holds {', '.join(names)} but no {MANIFEST}: no run of this marglik "
                "wrote that, so it is never overwritten. Pass another --output, or move it away."
            )

    def _manifest(self) -> dict[str, Any] | None:
        path = self.path / MANIFEST
        return read_record(path, FORMAT, REMEDY) if path.is_file() else None

    def _write_manifest(self, command: str, preset: str | None, sums: dict[str, list[str]]) -> None:
        record = {"format": FORMAT, "command": command, "preset": preset, "files": sums}
        write_record(self.path / MANIFEST, record, {})


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
        ValueError: it is damaged.
    """
    return [parse_json(line) for line in (RunFolder(folder).read(LOG) or b"").splitlines()]


def _name(command: str, preset: str | None) -> str:
    return f"marglik {command}" + (f" --config {preset}" if preset else "")
