"""The state of a run, from which another process can continue: safetensors and JSON, no pickle.

A folder holds ``state.json``, which names the files of its tensors and Kronecker factors, with
their SHA-256 sums. A new state writes its tensors under new names, then replaces ``state.json``
atomically, then removes the old tensors. So whenever the process is killed, there is one complete
state.
"""

import json
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.files import parse_json, write_tensors
from kfac_backend.ranks import Ranks
from marglik.storage.model_state import read_safetensors
from marglik.storage.record_file import read_record, write_record

__all__ = ["Checkpoints", "CheckpointsOfRanks", "check_same_run", "differences"]

FORMAT, FORMAT_VERSION = "marglik.checkpoint", 1
STATE = "state.json"
REMEDY = "Start again: --overwrite instead of --resume."


class Checkpoints:
    """The latest state of a run, in a folder.

    A state is nested dicts, lists and tuples of plain data, tensors and `KroneckerFactors`. The
    caller asks `is_due`, calls `save`, and in a later process `exists` and `load`. The object
    remembers when it saved last, the number in the names of the files, and which factors are
    written already.

    Args:
        folder: where to keep the state; created with the first one.
        minutes: least time between two states; with 0 one is always due.
        run: what identifies the run, plain data; the state of another run is refused.
        made_with: device, threads and versions, plain data; others give a warning.
    """

    def __init__(
        self,
        folder: str | Path,
        minutes: float = 1.0,
        run: dict[str, Any] | None = None,
        made_with: dict[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.run = run or {}
        self.made_with = made_with or {}
        self._seconds = 60 * minutes
        self._last = time.monotonic()
        self._number = 0
        # (factors, file, sum) of the latest state. Factors are large and change at updates alone,
        # so the states in between refer to the same file.
        self._written: list[tuple[KroneckerFactors, str, str]] = []

    @property
    def is_due(self) -> bool:
        """Whether ``minutes`` have passed since the last state."""
        return time.monotonic() - self._last >= self._seconds

    def exists(self) -> bool:
        """Whether there is a state.

        Raises:
            FileNotFoundError: there are tensors of a state, but its ``state.json`` was removed.
        """
        if (self.folder / STATE).is_file():
            return True
        # Except for the tensors of state 1: a process that is killed between them and the first
        # state.json leaves them alone.
        lost = [p for p in self.folder.glob("tensors-*.safetensors") if p.name != _tensors(1)]
        if lost:
            raise FileNotFoundError(
                f"{self.folder / STATE} is missing, and {lost[0].name} is useless without it. "
                f"{REMEDY}"
            )
        return False

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state.

        Raises:
            TypeError: a value that is none of the supported kinds; the error says where it is.
        """
        tensors: list[Tensor] = []
        factors: list[KroneckerFactors] = []
        plain = _encode(state, "", tensors, factors)
        json.dumps([plain, self.run])  # raises before anything is written
        # In a process that continues, the numbers go on, too: a number that is used again would
        # replace files of the state that is still valid.
        if self.exists() and not self._number:
            self._number = self.check()["number"]
        self._number += 1
        of_tensors = _tensors(self._number)
        named = {str(i): t for i, t in enumerate(tensors)}
        try:
            sum_of_tensors = write_tensors(self.folder / of_tensors, named)
            written = self._write_factors(factors)
            files = [name for _, name, _ in written]
            sums = {name: sum_ for _, name, sum_ in written}
            record = {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "number": self._number,
                "run": self.run,
                "made_with": self.made_with,
                "tensors": of_tensors,
                "factors": files,
                "state": plain,
            }
            write_record(self.folder / STATE, record, sums | {of_tensors: sum_of_tensors})
        except OSError:
            # On a full disk, the files of the unfinished state would keep it full. Only those that
            # the valid state names may stay.
            whole = (self.folder / STATE).is_file()
            old = parse_json((self.folder / STATE).read_bytes()) if whole else {}
            with suppress(OSError):  # the folder may have become read-only
                self._remove_tensors_but(old.get("tensors"), *old.get("factors", ()))
            raise
        self._written = written
        self._remove_tensors_but(of_tensors, *files)
        self._last = time.monotonic()

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The state.

        Args:
            device: device of the factors. Tensors are loaded to the CPU, since ``load_state_dict``
                moves them.

        Raises:
            FileNotFoundError: no state, or a file of it is missing.
            ValueError: a state of another run, a damaged file, or a newer format.
        """
        record = self.check()
        for name, here, there in differences(self.made_with, record["made_with"]):
            warnings.warn(
                f"{self.folder} was started with {name} {there} and continues with {here}: the "
                "result may differ by rounding from that of an uninterrupted run.",
                stacklevel=2,
            )
        tensors = read_safetensors(self.folder / record["tensors"])
        factors = [KroneckerFactors.load(self.folder / n, device) for n in record["factors"]]
        return _decode(record["state"], tensors, factors)

    def check(self) -> dict[str, Any]:
        """The content of ``state.json``, once it is verified: of this run, with all files intact.

        Raises:
            FileNotFoundError: no state, or a file of it is missing.
            ValueError: a state of another run, a damaged file, or a newer format.
        """
        if not self.exists():
            raise FileNotFoundError(f"{self.folder} holds no state ({STATE} is missing).")
        record = read_record(
            self.folder / STATE,
            FORMAT,
            FORMAT_VERSION,
            keys=("number", "run", "made_with", "tensors", "factors", "state"),
            what="state of a run",
            remedy=REMEDY,
        )
        check_same_run(self.run, record["run"], self.folder)
        return record

    def _write_factors(
        self, factors: list[KroneckerFactors]
    ) -> list[tuple[KroneckerFactors, str, str]]:
        """Write the factors that are new; returns all, each with its file and the file's sum."""
        written = []
        for i, one in enumerate(factors):
            same = [entry for entry in self._written if entry[0] is one]
            if same:
                written.append(same[0])
                continue
            name = f"factors-{self._number}-{i}.safetensors"
            written.append((one, name, one.save(self.folder / name)))
        return written

    def _remove_tensors_but(self, *names: str | None) -> None:
        for path in self.folder.glob("*.safetensors"):
            if path.name not in names:
                path.unlink()


class CheckpointsOfRanks:
    """The latest state of a run on several ranks: rank 0 writes it, all ranks read it.

    Each method is collective, and rank 0 decides: clocks differ, and so may what ranks see of a
    shared file system. Ranks that disagreed would wait for each other. With one rank it does what
    `Checkpoints` does.

    Args:
        checkpoints: in a folder that all ranks can read.
        ranks: the ranks that work on the run.
    """

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks) -> None:
        self._checkpoints = checkpoints
        self._ranks = ranks

    @property
    def is_due(self) -> bool:
        """Whether a state is due by the clock of rank 0."""
        return self._ranks.gather(self._checkpoints.is_due, "a look at the clock")[0]

    def exists(self) -> bool:
        """Whether there is a state; see `Checkpoints.exists`."""
        return self._ranks.gather(self._checkpoints.exists(), "the search for a checkpoint")[0]

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state by that of rank 0; see `Checkpoints.save`."""
        if self._ranks.rank == 0:
            self._checkpoints.save(state)

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The state, on all ranks; see `Checkpoints.load`.

        Raises:
            RankError: ranks have read different states.
        """
        state = self._checkpoints.load(device)
        number = self._checkpoints.check()["number"] if self._ranks.size > 1 else 0
        self._ranks.agree({"the number of the checkpoint": number}, "reading a checkpoint")
        return state


def _tensors(number: int) -> str:
    """Name of the file of a state's tensors."""
    return f"tensors-{number}.safetensors"


def check_same_run(here: dict[str, Any], there: dict[str, Any], folder: Path) -> None:
    """Raise a ValueError that names what differs, unless ``folder`` holds the run asked for.

    Args:
        here: what identifies the run asked for, as plain data.
        there: the same of the run in the folder.
        folder: for the error.
    """
    for name, asked, found in differences(here, there):
        raise ValueError(
            f"{folder} is of another run: {name} is {found} there, {asked} here. Resume with the "
            "options that it was started with, or pass --overwrite to start again, or another "
            "--output."
        )


def differences(here: dict[str, Any], there: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value here, value there) of each leaf that differs; "nothing" if absent."""
    plain = json.loads(json.dumps(here))  # tuples are lists in a file
    ours, theirs = dict(_leaves(plain)), dict(_leaves(there))
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        asked, found = ours.get(name, "nothing"), theirs.get(name, "nothing")
        if asked != found:
            yield name, asked, found


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{place}.{key}" if place else key)
    else:
        yield place, value


def _encode(value: Any, place: str, tensors: list[Tensor], factors: list[KroneckerFactors]) -> Any:
    """The value as JSON; tensors and factors are appended to the lists and referred to by index.

    Containers are written as {kind: content}, since JSON knows neither tuples nor keys that are
    numbers, such as those of the states of optimisers.
    """
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().clone().contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, KroneckerFactors):
        factors.append(value)
        return {"factors": len(factors) - 1}
    if isinstance(value, Mapping):
        for key in value:
            if not (key is None or isinstance(key, (bool, int, float, str))):
                raise TypeError(
                    f"A key of '{place}' of the state is a {type(key).__name__}, which a "
                    "checkpoint cannot hold; numbers and strings are supported."
                )
        pairs = [[k, _encode(v, f"{place}/{k}", tensors, factors)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(v, f"{place}/{i}", tensors, factors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"'{place}' of the state is a {type(value).__name__}, which a checkpoint cannot hold; "
        "supported are numbers, strings, tensors, Kronecker factors, and dicts, lists and tuples "
        "of them."
    )


def _decode(value: Any, tensors: dict[str, Tensor], factors: list[KroneckerFactors]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[str(content)]
    if kind == "factors":
        return factors[content]
    if kind == "dict":
        return {key: _decode(v, tensors, factors) for key, v in content}
    items = (_decode(v, tensors, factors) for v in content)
    return tuple(items) if kind == "tuple" else list(items)
