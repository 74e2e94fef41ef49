"""Read and write the folder of a run: its files, records with checksums, rules for replacing it.

A record is a JSON file with the SHA-256 sums of its own content and of other files in the folder.
It is written after these files, in one step. If it exists, the files are complete. `results.json`
has the sums of options, log and posterior, and `posterior.json` the sums of its tensors.
`evaluation.json` has, under ``posterior``, the sum of the evaluated `posterior.json`. No command
reads `report.html`. Only one command at a time may write to a folder.
"""

import json
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kfac_backend.atomic_files import file_sum, parse_json, remove_leftovers, write_file
from marglik.application.records import Evaluation, Results, from_json, to_json
from marglik.storage.checkpoint import STATE
from marglik.storage.record_files import (
    ENSEMBLE,
    FACTORS,
    FINGERPRINTS,
    MEMBERS,
    MODEL,
    POSTERIOR,
    format_of,
    read_record,
    write_record,
)

Record = TypeVar("Record")

CONFIG = "config.yaml"
"""The options."""
LOG = "log.jsonl"
"""One line of JSON per epoch and per update."""
RESULTS = "results.json"
"""The results of `marglik train`."""
EVALUATION = "evaluation.json"
"""The metrics of the predictives."""
REPORT = "report.html"
"""Report about the run."""
CHECKPOINT = "checkpoint"
"""Folder that exists during the training, with the states from which --resume continues."""
ALL = (
    RESULTS, POSTERIOR, EVALUATION, CONFIG, LOG, MODEL, FACTORS, FINGERPRINTS, ENSEMBLE,
    MEMBERS, REPORT, CHECKPOINT,
)  # fmt: skip
RECORDS = (RESULTS, POSTERIOR, EVALUATION, ENSEMBLE)
"""Files by which marglik recognises the folder of a run."""
TENSORBOARD, EVENTS = "tensorboard", "events.out.tfevents.*"
"""Folder with the curves for TensorBoard, and its files."""
STATES = re.compile(r"learned|plain|member_[0-9]+")
"""Names of the folders in `CHECKPOINT`: one for each network that a run trains."""


def begin_run(
    folder: Path, options: str | None, *, overwrite: bool = False, resume: bool = False
) -> None:
    """Create the folder of a new run, and remove the files of an old run in it; see `check_free`.

    It removes only files and links with the names in `ALL`, and never the target of a link. With
    ``resume`` the checkpoints stay. ``options`` is the content of ``config.yaml``.
    """
    check_free(folder, overwrite, resume=resume)
    checkpoint = folder / CHECKPOINT
    if checkpoint.is_symlink() and not resume:
        checkpoint.unlink()
    # Create it first. If the process is killed during the removal, the folder is still recognised
    # as a run.
    checkpoint.mkdir(parents=True, exist_ok=True)
    for name in {*ALL} - {CHECKPOINT}:
        (folder / name).unlink(missing_ok=True)
    # A resumed run logs its earlier records again.
    curves = folder / TENSORBOARD
    if curves.is_symlink():
        curves.unlink()
    for path in curves.glob(EVENTS):
        path.unlink()
    if resume:
        remove_leftovers(folder)
    else:
        remove_states(folder)
        checkpoint.mkdir()
    if options is not None:
        write_file(folder / CONFIG, options.encode())


def check_free(folder: Path, overwrite: bool = False, *, resume: bool = False) -> None:
    """Raise a FileExistsError if a new run would replace files that may be needed.

    These are files that marglik did not write, and, without ``overwrite`` or ``resume``, the files
    of a run. An empty checkpoint folder of a command that was killed early does not count.
    """
    if folder.is_symlink():
        raise FileExistsError(
            f"{folder} is a link, and marglik removes nothing through links. Pass its target: "
            f"--output {folder.resolve()}."
        )
    present = [name for name in ALL if (folder / name).exists() or (folder / name).is_symlink()]
    if not present or (present == [CHECKPOINT] and _names_of_states(folder) == []):
        return
    if not _is_of_run(folder):
        raise FileExistsError(
            f"{folder} contains {', '.join(present)}, which marglik did not write, so the folder "
            "is not overwritten. Pass another --output, or move these files."
        )
    others = [name for name in _names_of_states(folder) or () if not STATES.fullmatch(name)]
    if others and not resume:
        raise FileExistsError(
            f"{folder / CHECKPOINT} contains {', '.join(others)}, which marglik did not write, so "
            "the folder is not overwritten. Pass another --output, or move these files."
        )
    if not (overwrite or resume):
        can_resume = any((folder / CHECKPOINT).glob(f"*/{STATE}"))
        ways = "--resume (of marglik train) to continue it, " if can_resume else ""
        raise FileExistsError(
            f"{folder} already contains a run ({present[0]}). Pass --overwrite, {ways}or another "
            "--output."
        )


def run_folder_of(path: Path) -> Path | None:
    """Return the run folder that contains a path, at any depth, or None.

    A folder with only an empty folder `CHECKPOINT` may belong to the user, so it is not a run.
    """
    for folder in path.parent.resolve().joinpath(path.name).parents:
        if _is_of_run(folder) and (_has_record(folder) or _names_of_states(folder)):
            return folder
    return None


def _is_of_run(folder: Path) -> bool:
    """Return whether a folder has a record of marglik, or checkpoints of an unfinished run."""
    names = _names_of_states(folder)
    return _has_record(folder) or (names is not None and all(map(STATES.fullmatch, names)))


def _has_record(folder: Path) -> bool:
    for path in (folder / name for name in RECORDS):
        with suppress(OSError, ValueError, TypeError, KeyError):
            if parse_json(path.read_bytes())["format"] == format_of(path):
                return True
    return False


def _names_of_states(folder: Path) -> list[str] | None:
    """Return the names in the checkpoint folder; None if there is no such folder."""
    path = folder / CHECKPOINT
    return [p.name for p in path.iterdir()] if path.is_dir() and not path.is_symlink() else None


def remove_states(folder: Path) -> None:
    """Remove the checkpoints of a run, and incomplete files of killed processes.

    It removes links, but not their targets, and nothing from a checkpoint folder with other files.
    """
    path, names = folder / CHECKPOINT, _names_of_states(folder)
    if path.is_symlink():
        path.unlink()
    elif names is not None and all(map(STATES.fullmatch, names)):
        shutil.rmtree(path)
    remove_leftovers(folder)


def write_evaluation(folder: Path, evaluation: Evaluation, run: Path) -> None:
    """Write ``evaluation.json``, with the sum of the posterior in the folder of its run."""
    evaluation = replace(evaluation, posterior=file_sum(run / POSTERIOR))
    write_record(folder / EVALUATION, to_json(evaluation))


def read_evaluation(folder: Path) -> Evaluation | None:
    """Return the content of ``evaluation.json``, None if there is no such file; see `read_record`.

    A ValueError is raised if it belongs to another posterior than the posterior in the folder.
    """
    evaluation, posterior = _read_as(Evaluation, folder / EVALUATION), folder / POSTERIOR
    if evaluation and posterior.is_file() and evaluation.posterior != file_sum(posterior):
        raise ValueError(
            f"{folder / EVALUATION} belongs to another posterior than {POSTERIOR} in the same "
            f"folder. Remove it, then run marglik evaluate {folder}."
        )
    return evaluation


def write_results(folder: Path, results: Results) -> None:
    """Write ``results.json``, with the sums of the files that the run wrote before."""
    names = [name for name in (CONFIG, LOG, POSTERIOR, ENSEMBLE) if (folder / name).exists()]
    sums = {name: file_sum(folder / name) for name in names}
    write_record(folder / RESULTS, to_json(results), sums)


def read_results(folder: Path) -> Results | None:
    """Return the content of ``results.json``, None if there is no such file; see `read_record`."""
    return _read_as(Results, folder / RESULTS)


def _read_as(kind: type[Record], path: Path) -> Record | None:
    record = read_record(path)
    if not record:
        return None
    del record["format"]
    try:
        return from_json(kind, record)
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} was written by another version of marglik ({error}). Run the command that "
            "wrote it again."
        ) from error


class RunLog:
    """Log of a run: each record is on disk before the next epoch starts.

    The log starts empty. A resumed run writes its earlier records again. Each record rewrites the
    whole file in one step.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG
        self._lines = ""
        write_file(self._path, b"")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self._lines += json.dumps(record) + "\n"
        write_file(self._path, self._lines.encode())


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """Return the records of a run in chronological order; [] if it has no log."""
    path = Path(folder) / LOG
    return [parse_json(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
