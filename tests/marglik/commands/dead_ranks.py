"""One of several ranks is killed at a random moment of `marglik train`: who survives it.

``python -m tests.marglik.commands.dead_ranks FOLDER [NUMBER [SEED]]`` prints a line for each of so
many runs, and exits with 1 if one did not survive. `dead_rank` is one run, for a list of faults.
"""

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.marglik.close_state import assert_near
from tests.marglik.commands.command_line import DATA, MODEL, TRAIN, results_of
from tests.worlds import Worlds

HERE = "tests.marglik.commands.commands_on_ranks"
OPTIONS = [*TRAIN, *DATA, *MODEL, "--checkpoint_minutes", "0"]
SECONDS = 60.0
"""In which the others must have ended."""
TOLERANCE = 2e-3
"""Of float32, as in the commands' tests."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    survived: bool
    """The others ended with one named error, in time, and the run went on to its result."""
    what: str
    """In words."""


def undisturbed(worlds: Worlds, folder: Path) -> Path:
    """A run of two ranks that nothing happens to; what the others must come to."""
    output = ["--output", str(folder / "whole")]
    for status, _, said in worlds.all(2, f"{HERE}:command", *OPTIONS, *output):
        assert status == 0, said
    return folder / "whole"


def dead_rank(worlds: Worlds, folder: Path, whole: Path, seed: int) -> Outcome:
    """Kill one rank of two at a random moment, and go on with one, two or three.

    Args:
        worlds: of ranks.
        folder: for the run.
        whole: of `undisturbed`; its seconds are those in which a rank may be killed.
        seed: of the moment, the rank, and the number of ranks that go on.
    """
    expected, chance = results_of(whole), random.Random(seed)
    latest = expected["seconds"] - expected["seconds_beside"]["start"]
    rank, seconds, size = chance.randrange(2), chance.uniform(0, latest), chance.choice((1, 2, 3))
    output = ["--output", str(folder / f"run {seed}")]
    start = time.perf_counter()
    found = worlds.run(2, f"{HERE}:killed_after", seconds, rank, [*OPTIONS, *output])
    took = time.perf_counter() - start
    gone, other = found[rank], found[1 - rank]
    what = f"rank {rank} killed after {seconds:.2f} s, {size} went on"
    if getattr(gone, "args", None) == ("ended", -9):
        named = isinstance(other, tuple) and other[0] == 2 and "marglik: error" in other[2]
        done = isinstance(other, tuple) and other[0] == 0  # the other had nothing left to ask for
        if not (named or done):
            return Outcome(False, f"{what}: the other rank ended with {other}")
        if took > SECONDS + latest:
            return Outcome(False, f"{what}: the other rank took {took:.0f} s to end")
    else:
        what = f"{what} (the run was over before)"
    for one in worlds.run(size, f"{HERE}:command", *OPTIONS, *output, "--resume"):
        if not isinstance(one, tuple) or one[0]:
            return Outcome(False, f"{what}: the resume ended with {one}")
    here = results_of(Path(output[1]))
    try:
        for key in ("num_data", "evidence", "weight_decay"):
            assert_near(here[key], expected[key], TOLERANCE, key)
    except AssertionError as error:
        return Outcome(False, f"{what}: another result, {error}")
    return Outcome(True, what)


def main(folder: str, number: str = "20", seed: str = "0") -> int:
    """1 if a run did not survive."""
    worlds, survived = Worlds(), 0
    try:
        whole = undisturbed(worlds, Path(folder))
        for i in range(int(seed), int(seed) + int(number)):
            outcome = dead_rank(worlds, Path(folder), whole, i)
            survived += outcome.survived
            print("survived" if outcome.survived else "DIED", outcome.what, flush=True)
    finally:
        worlds.close()
    print(f"{survived} of {number} survived")
    return int(survived < int(number))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
