"""Files that a run leaves, damaged one at a time: what reads them says so, or needs them not."""

import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from marglik.storage.checkpoint import Checkpoints
from tests.faults.copies import command
from tests.faults.families import Case, Workplace
from tests.faults.runs import Whole, check_same, files_of, fitting, training

__all__ = ["DAMAGES", "STAGES", "damaged_files", "dict_difference", "stage_of"]


def _truncated(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content))]


def _flipped(content: bytes, random: Random) -> bytes:
    place = random.randrange(len(content))
    return (
        content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]
    )


def _zeroed(content: bytes, random: Random) -> bytes:
    """A block that the disk lost."""
    start = random.randrange(len(content))
    lost = min(512, len(content) - start)
    return content[:start] + bytes(lost) + content[start + lost :]


def _longer(content: bytes, random: Random) -> bytes:
    return content + random.randbytes(random.randint(1, 600))


DAMAGES: dict[str, Callable[[bytes, Random], bytes | None]] = {
    "truncated": _truncated,
    "flipped": _flipped,
    "emptied": lambda content, random: b"",
    "deleted": lambda content, random: None,
    "zeroed": _zeroed,
    "longer": _longer,
}
"""What the file holds afterwards; None: it is not there."""

KILLED = {
    "killed in training": ("learned", 3),
    "killed in the evaluation": ("learned_evaluation", 2),
    "killed in the baseline": ("baseline", 2),
    "killed fit": ("fit", 1),
}
"""Where commands were killed: which state's how-manieth save they did not survive."""
STAGES = (*KILLED, "finished, resumed", "finished, evaluated", "finished, reported")


def damaged_files(place: Workplace) -> Iterator[Case]:
    """Each file of runs that were killed at some stage, and of finished ones, in turn."""
    # For a few cases a few stages do, which take a run each.
    of_stage = {
        stage: stage_of(place.whole, stage)
        for stage in place.random.sample(STAGES, min(place.count, len(STAGES)))
    }
    every = [
        (name, file, how)
        for how in DAMAGES
        for name, (folder, _) in of_stage.items()
        for file, content in files_of(folder).items()
        if content and not Path(file).name.startswith(".lock")
    ]
    place.random.shuffle(every)
    # Each file of each stage once before any comes again.
    first = {(name, file): (name, file, how) for name, file, how in every}.values()
    chosen = [*first, *(case for case in every if case not in set(first))][: place.count]
    for name, file, how in chosen:
        folder, make = of_stage[name]
        seed = place.random.random()

        def run(
            scratch: Path,
            folder: Path = folder,
            make: Any = make,
            file: str = file,
            how: str = how,
            seed: float = seed,
        ) -> str:
            here = shutil.copytree(folder, scratch / "run")
            content = DAMAGES[how]((here / file).read_bytes(), Random(seed))
            if content is None:
                (here / file).unlink()
            else:
                (here / file).write_bytes(content)
            before = files_of(here)
            arguments, whole = make(here)
            ended = command(arguments, scratch / "printed").wait()
            if ended.status == 0:
                left_alone = files_of(here).get(file) == content  # it was not needed
                if left_alone and (whole / file).exists():
                    shutil.copy(folder / file, here / file)
                check_same(here, whole)
                return "identical"
            assert ended.status == 2 and ended.error, ended
            assert str(here) in ended.error, f"it names no file: {ended.error}"
            after = files_of(here)
            for one in (before, after):
                one.pop(".lock", None)
            assert after == before, f"changed {dict_difference(before, after)}"
            return f"refused: {ended.error.removeprefix('marglik: error: ')}"

        yield Case(f"{name}: {file} {how}", run)


def dict_difference(a: dict[str, bytes], b: dict[str, bytes]) -> list[str]:
    """Names under which two folders do not hold the same."""
    return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))


@cache
def stage_of(whole: Whole, stage: str) -> tuple[Path, Callable[[Path], Any]]:
    """A stage's folder, and what is run in a copy of it, with what that should end like.

    Made once for all families: only copies of the folder are written to.
    """
    folder, printed = whole.train.with_name(stage), whole.train.with_name("printed")

    def resumed(run: Path) -> Any:
        return training(run, "--resume"), whole.train

    def fit(run: Path) -> Any:
        return fitting(whole.checkpoint, run), whole.fit

    def evaluate(run: Path) -> Any:
        return ["evaluate", str(run), "--progress", "false"], folder

    if stage in KILLED:
        make = fit if stage == "killed fit" else resumed
        _killed(make(folder)[0], *KILLED[stage], printed)
        return folder, make
    if stage == "finished, evaluated":
        shutil.copytree(whole.train, folder)
        assert command(evaluate(folder)[0], printed).wait().status == 0
        return whole.train, evaluate
    if stage == "finished, reported":
        return whole.train, lambda run: (["report", str(run)], whole.train)
    return whole.train, resumed


def _killed(arguments: list[str], state: str, number: int, printed: Path) -> None:
    """Run a command that does not survive a state's save of this number."""
    save, seen = Checkpoints.save, 0

    def deadly(self: Checkpoints, *given: Any) -> None:
        nonlocal seen
        save(self, *given)
        seen += self.folder.name == state
        if seen == number:
            signal.raise_signal(signal.SIGKILL)

    ended = command(arguments, printed, patch.object(Checkpoints, "save", deadly).start).wait()
    assert ended.status == -signal.SIGKILL, ended
