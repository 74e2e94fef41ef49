"""Write and read the checkpoint of a run, one file from which another process can continue.

The restricted loader of torch (``weights_only``) reads the file without running code. The file ends
with the SHA-256 sum of its content. It is replaced in one step, so a process that is killed at any
time leaves one complete state.
"""

import hashlib
import io
import json
import time
from pathlib import Path
from typing import Any

import torch

from kfac_backend.atomic_files import write_file
from kfac_backend.ranks import Ranks

STATE = "state.pt"
MINUTES = 1.0
"""Minimum time between two states in minutes, unless a state is required."""
SIZE_OF_SUM = hashlib.sha256().digest_size
REMEDY = "Start again with --overwrite instead of --resume."


class Checkpoints:
    """The latest state of a run in a folder. Rank 0 writes it, and all ranks read it.

    A state consists of nested dicts, lists and tuples of plain data and tensors. The caller calls
    `is_due` and `save`, and in a later process `exists` and `load`. Each call is collective, and
    rank 0 decides: clocks, and views of a shared file system, may differ between ranks. If ranks
    decided differently, they would wait for each other.

    Args:
        folder: folder of the state, which is created with the first state.
        minutes: minimum time between two states; with 0 a state is always due. None is `MINUTES`.
        run: identity of the run, as plain data. The state of another run raises an error.
        ranks: ranks of the run; `OnlineTraining` sets its own ranks.
    """

    def __init__(
        self,
        folder: str | Path,
        minutes: float | None = None,
        run: dict[str, Any] | None = None,
        ranks: Ranks = Ranks(None),  # noqa: B008
    ) -> None:
        self.folder = Path(folder)
        self.run = run or {}
        self.ranks = ranks
        self._seconds = 60 * (MINUTES if minutes is None else minutes)
        self._last = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the minimum time has passed since the last state."""
        due = time.monotonic() - self._last >= self._seconds
        return self.ranks.gather(due)[0]

    def exists(self) -> bool:
        """Return whether there is a state."""
        exists = (self.folder / STATE).is_file()
        return self.ranks.gather(exists)[0]

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state, or raise an UnpicklingError if it could not be read again."""
        if self.ranks.rank > 0:
            return
        stream = io.BytesIO()
        torch.save({"run": json.dumps(self.run), "state": state}, stream)
        # torch writes any object, but reads back only plain data. Find an error now, because later
        # the state would be lost.
        stream.seek(0)
        torch.load(stream, map_location="meta", weights_only=True)
        content = stream.getvalue()
        write_file(self.folder / STATE, content + hashlib.sha256(content).digest())
        self._last = time.monotonic()

    def load(self) -> dict[str, Any]:
        """Return the state with its tensors on the CPU, from which ``load_state_dict`` moves them.

        Raises:
            FileNotFoundError: there is no state.
            ValueError: the state belongs to another run, or the file is damaged.
            RankError: ranks have read different states.
        """
        path = self.folder / STATE
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.folder} contains no state ({STATE} is missing), so there is nothing to "
                "resume. Start a new run."
            )
        content = path.read_bytes()
        content, checksum = content[:-SIZE_OF_SUM], content[-SIZE_OF_SUM:]
        if checksum != hashlib.sha256(content).digest():
            raise ValueError(
                f"{path} is damaged: its content differs from the content that marglik wrote. "
                f"{REMEDY}"
            )
        self.ranks.agree({"the sum of the checkpoint": checksum.hex()})
        file = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        check_same_run(self.run, json.loads(file["run"]), self.folder)
        return file["state"]


def check_same_run(here: dict[str, Any], there: dict[str, Any], folder: Path) -> None:
    """Raise a ValueError that names a difference, unless ``folder`` contains the requested run.

    Args:
        here: identity of the requested run, as plain data.
        there: identity of the run in the folder.
        folder: the folder, for the error.
    """
    # Convert both as a file would, in which tuples are lists.
    ours, theirs = (leaves(json.loads(json.dumps(one))) for one in (here, there))
    for name in ours | theirs:
        our_value, their_value = (run.get(name, "nothing") for run in (ours, theirs))
        if our_value != their_value:
            raise ValueError(
                f"{folder} belongs to another run: {name} is {their_value} there and {our_value} "
                "here. Resume with the same options, start again with --overwrite, or pass "
                "another --output."
            )


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted names. Lists and empty dicts are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_nested = isinstance(value, dict) and value
        flat |= leaves(value, f"{name}.") if is_nested else {name: value}
    return flat
