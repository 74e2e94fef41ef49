"""One of two ranks that train together is killed, and the run goes on with one, two or three."""

import atexit
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.faults.families import Case, Workplace
from tests.marglik.commands.dead_ranks import dead_rank, undisturbed
from tests.worlds import Worlds

__all__ = ["dead_ranks"]


def dead_ranks(place: Workplace) -> Iterator[Case]:
    """A rank is killed at a random moment: one named error, and the same result after a resume."""

    @cache
    def worlds_and_whole() -> tuple[Worlds, Path]:
        worlds, folder = Worlds(), place.folder.with_name("undisturbed")
        atexit.register(worlds.close)
        folder.mkdir(parents=True)
        return worlds, undisturbed(worlds, folder)

    for i in range(place.count):

        def run(folder: Path, seed: int = i) -> str:
            worlds, whole = worlds_and_whole()
            outcome = dead_rank(worlds, folder, whole, seed)
            assert outcome.survived, outcome.what
            way = "killed too late" if "over before" in outcome.what else "went on"
            return f"{way}: {outcome.what}"

        yield Case(f"seed {i}", run)
