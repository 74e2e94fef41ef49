"""Processes that end before their time: killed, told to end, or beside another one."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.copies import at_write, command, sleep_until
from tests.faults.families import Case, Workplace
from tests.faults.runs import check_same, fitting, training

__all__ = [
    "failing_writes",
    "kills_at_random_times",
    "kills_at_writes",
    "requests_to_end",
    "two_processes",
]

TORN = 0.5
"""Share of a file's content that is on the disk when a process is killed as it writes."""
MOST_KILLS = 3
"""Of one run, before it may come to its end."""
SIGNALS = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}
"""Requests to end -> the exit status."""


def kills_at_random_times(place: Workplace) -> Iterator[Case]:
    """Runs that are killed one to three times, and go on after each."""
    for i in range(place.count):
        kills = [place.random.uniform(0, place.whole.seconds) for _ in range(1 + i % MOST_KILLS)]

        def run(folder: Path, kills: list[float] = kills) -> str:
            for seconds in kills:
                ended = _signalled(place, folder, signal.SIGKILL, seconds)
                if ended.status == 0:  # it was quicker
                    break
                assert ended.status == -signal.SIGKILL, ended
            return _goes_on(place, training(folder / "run", "--resume"), folder)

        yield Case(f"{i}: after {', '.join(f'{s:.2f} s' for s in kills)}", run)


def requests_to_end(place: Workplace) -> Iterator[Case]:
    """SIGTERM, SIGHUP, Ctrl-C: one line, the exit status of the signal; the state is kept."""
    for i in range(place.count):
        number = list(SIGNALS)[i % len(SIGNALS)]
        seconds = place.random.uniform(0.01, 0.95 * place.whole.seconds)

        def run(folder: Path, number: int = number, seconds: float = seconds) -> str:
            ended = _signalled(place, folder, number, seconds)
            begun = (folder / "run" / "manifest.json").exists()
            if ended.status != 0 and (begun or ended.status != -number):  # before the handlers
                assert ended.status == SIGNALS[signal.Signals(number)], ended
                assert "--resume goes on from its last checkpoint" in ended.said, ended
                lines = [line for line in ended.said.splitlines() if line.strip()]
                assert len(lines) == 1, ended
            return _goes_on(place, training(folder / "run", "--resume"), folder)

        yield Case(f"{i}: {signal.Signals(number).name} after {seconds:.2f} s", run)


def _signalled(place: Workplace, folder: Path, number: int, seconds: float) -> Any:
    copy = command(training(folder / "run", "--resume"), folder / "printed")
    sleep_until(time.perf_counter() + seconds)
    copy.signal(number)
    return copy.wait()


def _goes_on(place: Workplace, arguments: list[str], folder: Path) -> str:
    """A command comes to the end that it should have come to."""
    ended = command(arguments, folder / "printed").wait()
    assert ended.status == 0, ended
    check_same(folder / "run", place.whole.like(arguments))
    return "identical"


def kills_at_writes(place: Workplace) -> Iterator[Case]:
    """Commands that are killed at each of their writes, with half of the file on the disk.

    A write is a file's content, its name, and a file or folder that is removed or renamed.
    """
    whole = place.whole
    for kind, arguments in (("train", training), ("fit", lambda f: fitting(whole.checkpoint, f))):
        total = whole.writes[kind]
        for number in range(1, total + 1):

            def run(folder: Path, arguments: Any = arguments, number: int = number) -> str:
                def deadly() -> None:
                    at_write(number, _tear_and_die)

                first = command(arguments(folder / "run"), folder / "printed", deadly).wait()
                assert first.status == -signal.SIGKILL, first
                again = arguments(folder / "run")
                if again[0] == "train":
                    return _goes_on(place, [*again, "--resume"], folder)
                ended = command(again, folder / "printed").wait()
                if ended.error and (folder / "run" / "posterior.json").exists():
                    assert "already holds a run" in ended.error, ended  # it was finished
                else:
                    assert ended.status == 0, ended
                (folder / "run" / ".lock").unlink(missing_ok=True)
                check_same(folder / "run", whole.fit)
                return "identical"

            yield Case(f"{kind}, write {number} of {total}", run)


def _tear_and_die(file: int | None) -> None:
    if file is not None:
        os.ftruncate(file, int(TORN * os.fstat(file).st_size))
    os.kill(os.getpid(), signal.SIGKILL)


ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)


def failing_writes(place: Workplace) -> Iterator[Case]:
    """Disks that are full, at their quota, broken or read-only from a write on, or at one alone."""
    total = place.whole.writes["train"]
    for i in range(place.count):
        code, lasts = ERRORS[i % len(ERRORS)], bool(i // len(ERRORS) % 2)
        number = place.random.randint(1, total)

        def run(folder: Path, code: int = code, lasts: bool = lasts, number: int = number) -> str:
            def fail(file: int | None) -> None:
                if file is not None:
                    os.ftruncate(file, int(TORN * os.fstat(file).st_size))
                raise OSError(code, os.strerror(code))

            first = command(
                training(folder / "run"),
                folder / "printed",
                lambda: at_write(number, fail, always_after=lasts),
            ).wait()
            if first.status == 0:  # what failed was to be removed
                check_same(folder / "run", place.whole.train)
                return "identical"
            assert first.status == 2 and first.error, first
            assert os.strerror(code) in first.error, first
            return _goes_on(place, training(folder / "run", "--resume"), folder)

        how = "from write" if lasts else "at write"
        yield Case(f"{i}: {errno.errorcode[code]} {how} {number}", run)


def two_processes(place: Workplace) -> Iterator[Case]:
    """The same command twice at a time: one works, the other says so, or finds the work done."""
    for i in range(place.count):
        seconds = place.random.uniform(0, 1.2 * place.whole.seconds)

        def run(folder: Path, seconds: float = seconds) -> str:
            copies = [command(training(folder / "run", "--resume"), folder / "printed")]
            sleep_until(time.perf_counter() + seconds)
            copies.append(command(training(folder / "run", "--resume"), folder / "printed"))
            ended = [copy.wait() for copy in copies]
            done = [one for one in ended if one.status == 0]
            assert done, "; ".join(map(str, ended))
            for one in ended:
                if one not in done:
                    assert "Another process runs in" in one.error, one
            return _goes_on(place, training(folder / "run", "--resume"), folder)

        yield Case(f"{i}: {seconds:.2f} s apart", run)
