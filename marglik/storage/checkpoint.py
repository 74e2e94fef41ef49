"""The state of a run, from which another process can continue: one file of torch's, and its sum.

Only plain data and tensors are written, and torch's restricted loader (``weights_only``) reads
them, which runs no code. The file ends with the SHA-256 sum of what comes before. It is replaced
in one step: whenever the process is killed, there is one whole state.
"""

import hashlib
import io
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.files import write_file
from kfac_backend.ranks import Ranks

__all__ = ["Checkpoints", "CheckpointsOfRanks", "check_same_run", "differences"]

STATE = "state.pt"
MINUTES = 1.0
"""Least time between two states, unless one is to be written in any case."""
FACTORS = "marglik.factors"
"""The key under which a file has the state of Kronecker factors."""
SIZE_OF_SUM = hashlib.sha256().digest_size
REMEDY = "Start again: --overwrite instead of --resume."


class Checkpoints:
    """The latest state of a run, in a folder.

    A state is nested dicts, lists and tuples of plain data, tensors and `KroneckerFactors`. The
    caller asks `is_due`, calls `save`, and in a later process `exists` and `load`.

    Args:
        folder: where to keep the state; created with the first one.
        minutes: least time between two states; with 0 one is always due. By default `MINUTES`.
        run: what identifies the run, plain data; the state of another run is refused.
        made_with: device, threads and versions, plain data; others give a warning.
    """

    def __init__(
        self,
        folder: str | Path,
        minutes: float | None = None,
        run: dict[str, Any] | None = None,
        made_with: dict[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.run = run or {}
        self.made_with = made_with or {}
        self._seconds = 60 * (MINUTES if minutes is None else minutes)
        self._last = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the least time has passed since the last state."""
        return time.monotonic() - self._last >= self._seconds

    def exists(self) -> bool:
        """Whether there is a state."""
        return (self.folder / STATE).is_file()

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state.

        Raises:
            TypeError: a value that is none of the supported kinds; the error says where it is.
        """
        # As JSON, as a name of another type, such as a version's, would not be read back.
        about = json.dumps({"run": self.run, "made_with": self.made_with})
        stream = io.BytesIO()
        torch.save({"about": about, "state": _encode(state, "")}, stream)
        content = stream.getvalue()
        write_file(self.folder / STATE, content + hashlib.sha256(content).digest())
        self._last = time.monotonic()

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The state.

        Args:
            device: device of the factors. Tensors are loaded to the CPU, since ``load_state_dict``
                moves them.

        Raises:
            FileNotFoundError: no state.
            ValueError: a state of another run, or a damaged file.
        """
        about, state = self._read()
        for name, here, there in differences(self.made_with, about["made_with"]):
            warnings.warn(
                f"{self.folder} was started with {name} {there} and continues with {here}: the "
                "result may differ by rounding from that of an uninterrupted run.",
                stacklevel=2,
            )
        return _decode(state, device)

    def check(self) -> None:
        """Raise an error unless there is a state of this run, and undamaged; see `load`."""
        self._read()

    def _read(self) -> tuple[dict[str, Any], Any]:
        path = self.folder / STATE
        if not self.exists():
            raise FileNotFoundError(f"{self.folder} holds no state ({STATE} is missing).")
        content = path.read_bytes()
        content, found = content[:-SIZE_OF_SUM], content[-SIZE_OF_SUM:]
        if found != hashlib.sha256(content).digest():
            raise ValueError(
                f"{path} is not as it was written: it was truncated or altered. {REMEDY}"
            )
        try:
            file = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            about, state = json.loads(file["about"]), file["state"]
        except Exception as error:  # torch.load raises whatever another program's file leads to
            raise ValueError(f"{path} holds more than plain data and tensors. {REMEDY}") from error
        check_same_run(self.run, about["run"], self.folder)
        return about, state


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
        path = self._checkpoints.folder / STATE
        sum_ = path.read_bytes()[-SIZE_OF_SUM:].hex() if self._ranks.size > 1 else ""
        self._ranks.agree({"the sum of the checkpoint": sum_}, "reading a checkpoint")
        return state


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


def _encode(value: Any, place: str) -> Any:
    """The value with copies of its tensors on the CPU, and plain data in place of factors.

    torch writes anything, but reads back only what is plain: what else there is is refused now.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()  # of a view, torch would write the whole storage
    if isinstance(value, KroneckerFactors):
        return {FACTORS: _encode(value.state_dict(), place)}
    if isinstance(value, Mapping):
        for key in value:
            _check_plain(key, f"A key of '{place}'")
        return {key: _encode(inner, f"{place}/{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(_encode(inner, f"{place}/{i}") for i, inner in enumerate(value))
    _check_plain(value, f"'{place}'")
    return value


def _check_plain(value: Any, what: str) -> None:
    if type(value) not in (type(None), bool, int, float, str):
        raise TypeError(
            f"{what} of the state is a {type(value).__name__}, which a checkpoint cannot hold; "
            "supported are numbers, strings, tensors, Kronecker factors, and dicts, lists and "
            "tuples of them."
        )


def _decode(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, dict):
        if value.keys() == {FACTORS}:
            state = value[FACTORS]
            tensors = {name: tensor.to(device) for name, tensor in state["tensors"].items()}
            return KroneckerFactors.from_state_dict(state | {"tensors": tensors})
        return {key: _decode(inner, device) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_decode(inner, device) for inner in value)
    return value
