"""The state of a run, from which another process goes on: safetensors and JSON, nothing pickled.

A folder holds ``state.json``, which names the files of the tensors and of the Kronecker factors
that belong to it, with their SHA-256 sums. It is replaced, atomically, when these are whole; the
old ones go after that. So whenever a process is killed, one whole state is there.
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
from kfac_backend.distributed import Ranks
from kfac_backend.files import parse_json, write_tensors
from marglik.storage.model_state import read_safetensors
from marglik.storage.record_file import read_record, write_record

__all__ = ["Checkpoints", "CheckpointsOfRanks", "check_same_run", "differences"]

FORMAT, FORMAT_VERSION = "marglik.checkpoint", 1
STATE = "state.json"
REMEDY = "Start anew: --overwrite instead of --resume."


class Checkpoints:
    """The latest state of one run.

    A state is nested dicts, lists and tuples of plain data, tensors and `KroneckerFactors`.

    Args:
        folder: where it is kept; made with the first state.
        minutes: least time between two states, 0 for all that are offered.
        run: what makes the run what it is, plain data; a state of another run is refused.
        made_with: device, threads and versions, plain data; that they were others is a warning.
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
        # Factors change at updates alone, and are large.
        self._written: list[tuple[KroneckerFactors, str, str]] = []

    @property
    def is_due(self) -> bool:
        """Whether the last state is old enough."""
        return time.monotonic() - self._last >= self._seconds

    def exists(self) -> bool:
        """Whether there is a state.

        Raises:
            FileNotFoundError: there are tensors of one, but ``state.json`` was removed.
        """
        if (self.folder / STATE).is_file():
            return True
        # The first state's may be there because a process was killed before its record.
        lost = [p for p in self.folder.glob("tensors-*.safetensors") if p.name != _tensors(1)]
        if lost:
            raise FileNotFoundError(
                f"{self.folder / STATE} is missing, and {lost[0].name} is of no use without it. "
                f"{REMEDY}"
            )
        return False

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state.

        Raises:
            TypeError: a value of another kind, named by its place.
        """
        tensors: list[Tensor] = []
        factors: list[KroneckerFactors] = []
        plain = _encode(state, "", tensors, factors)
        json.dumps([plain, self.run])  # raises before anything is written
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
        except OSError:  # such as a full disk, which the files of half a state would keep full
            whole = (self.folder / STATE).is_file()
            old = parse_json((self.folder / STATE).read_bytes()) if whole else {}
            with suppress(OSError):  # in a folder that is read-only now
                self._remove_tensors_but(old.get("tensors"), *old.get("factors", ()))
            raise
        self._written = written
        self._remove_tensors_but(of_tensors, *files)
        self._last = time.monotonic()

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The state.

        Args:
            device: of the factors; tensors come on the CPU, for ``load_state_dict`` to move.

        Raises:
            FileNotFoundError: no state, or a file of it is missing.
            ValueError: a state of another run, a damaged file, or one of a newer format.
        """
        record = self.check()
        for name, here, there in differences(self.made_with, record["made_with"]):
            warnings.warn(
                f"{self.folder} was begun with {name} {there} and goes on with {here}: the result "
                "may differ from that of one process by rounding.",
                stacklevel=2,
            )
        tensors = read_safetensors(self.folder / record["tensors"])
        factors = [KroneckerFactors.load(self.folder / n, device) for n in record["factors"]]
        return _decode(record["state"], tensors, factors)

    def check(self) -> dict[str, Any]:
        """What ``state.json`` says, if it is of this run, and its files are whole.

        Raises:
            FileNotFoundError: no state, or a file of it is missing.
            ValueError: a state of another run, a damaged file, or one of a newer format.
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
        """Write those that are new; returns each with its file and the sum of that."""
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
    """The latest state of a run that several ranks work on: rank 0 writes it, all read it.

    Each method is collective, and what rank 0 sees holds for all. Of one rank it is what
    `Checkpoints` is.

    Args:
        checkpoints: in a folder that all ranks can read.
        ranks: who works on the run.
    """

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks) -> None:
        self._checkpoints = checkpoints
        self._ranks = ranks

    @property
    def is_due(self) -> bool:
        """Whether the last state is old enough."""
        return self._ranks.gather(self._checkpoints.is_due, "a look at the clock")[0]

    def exists(self) -> bool:
        """Whether there is a state; see `Checkpoints.exists`."""
        with self._ranks.failing_together("the search for a checkpoint"):
            found = self._checkpoints.exists()
        return self._ranks.gather(found, "the search for a checkpoint")[0]

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state by rank 0's; see `Checkpoints.save`."""
        with self._ranks.failing_together("writing a checkpoint"), self._ranks.beating():
            if self._ranks.rank == 0:
                self._checkpoints.save(state)

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The state, on all ranks; see `Checkpoints.load`."""
        with self._ranks.failing_together("reading a checkpoint"), self._ranks.beating():
            state = self._checkpoints.load(device)
            number = self._checkpoints.check()["number"] if self._ranks.size > 1 else 0
        self._ranks.agree({"the number of the checkpoint": number}, "reading a checkpoint")
        return state


def _tensors(number: int) -> str:
    """The file of a state's tensors."""
    return f"tensors-{number}.safetensors"


def check_same_run(here: dict[str, Any], there: dict[str, Any], folder: Path) -> None:
    """Raise a ValueError unless what was asked for is what a folder holds; names what differs."""
    for name, asked, found in differences(here, there):
        raise ValueError(
            f"{folder} is of another run: {name} is {found} there, {asked} here. Resume with the "
            "options that it was started with, or pass --overwrite to start anew, or another "
            "--output."
        )


def differences(here: dict[str, Any], there: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, value here and value there of all that differs."""
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
    """The value as JSON; tensors and factors go into the lists, and are named by their numbers."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().clone().contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, KroneckerFactors):
        factors.append(value)
        return {"factors": len(factors) - 1}
    if isinstance(value, Mapping):  # keys may be numbers, as in the optimisers' states
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
