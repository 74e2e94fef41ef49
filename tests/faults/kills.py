"""Processes that end before their time: killed, told to end, or beside another one."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.faults.copies import Ended, at_write, command, sleep_until
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
        name = f"{i}: after {', '.join(f'{s:.2f} s' for s in kills)}"
        yield Case(name, partial(_killed, place, kills))


def _killed(place: Workplace, kills: list[float], folder: Path) -> str:
    for seconds in kills:
        ended = _signalled(folder, signal.SIGKILL, seconds)
        if ended.status == 0:  # it was quicker
            break
        assert ended.status == -signal.SIGKILL, ended
    return _goes_on(place, training(folder / "run", "--resume"), folder)


def requests_to_end(place: Workplace) -> Iterator[Case]:
    """SIGTERM, SIGHUP, Ctrl-C: one line, the exit status of the signal; the state is kept."""
    for i in range(place.count):
        number = list(SIGNALS)[i % len(SIGNALS)]
        seconds = place.random.uniform(0.01, 0.95 * place.whole.seconds)
        name = f"{i}: {number.name} after {seconds:.2f} s"
        yield Case(name, partial(_asked_to_end, place, number, seconds))


def _asked_to_end(place: Workplace, number: signal.Signals, seconds: float, folder: Path) -> str:
    ended = _signalled(folder, number, seconds)
    begun = (folder / "run" / "manifest.json").exists()
    if ended.status != 0 and (begun or ended.status != -number):  # before the handlers
        assert ended.status == SIGNALS[number], ended
        assert "--resume continues from its last checkpoint" in ended.said, ended
        lines = [line for line in ended.said.splitlines() if line.strip()]
        assert len(lines) == 1, ended
    return _goes_on(place, training(folder / "run", "--resume"), folder)


def _signalled(folder: Path, number: int, seconds: float) -> Ended:
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
    for kind, total in place.whole.writes.items():
        for number in range(1, total + 1):
            name = f"{kind}, write {number} of {total}"
            yield Case(name, partial(_killed_at_write, place, kind, number))


def _killed_at_write(place: Workplace, kind: str, number: int, folder: Path) -> str:
    def tear_and_die(file: int | None) -> None:
        _tear(file)
        os.kill(os.getpid(), signal.SIGKILL)

    run, printed = folder / "run", folder / "printed"
    arguments = training(run) if kind == "train" else fitting(place.whole.checkpoint, run)
    first = command(arguments, printed, lambda: at_write(number, tear_and_die)).wait()
    assert first.status == -signal.SIGKILL, first
    if kind == "train":
        return _goes_on(place, [*arguments, "--resume"], folder)
    ended = command(arguments, printed).wait()
    if ended.error and (run / "posterior.json").exists():
        assert "already holds a run" in ended.error, ended  # it was finished
    else:
        assert ended.status == 0, ended
    (run / ".lock").unlink(missing_ok=True)
    check_same(run, place.whole.fit)
    return "identical"


def _tear(file: int | None) -> None:
    """A part of what was written is on the disk."""
    if file is not None:
        os.ftruncate(file, int(TORN * os.fstat(file).st_size))


ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)


def failing_writes(place: Workplace) -> Iterator[Case]:
    """Disks that are full, at their quota, broken or read-only from a write on, or at one alone."""
    for i in range(place.count):
        code, lasts = ERRORS[i % len(ERRORS)], bool(i // len(ERRORS) % 2)
        number = place.random.randint(1, place.whole.writes["train"])
        how = "from write" if lasts else "at write"
        name = f"{i}: {errno.errorcode[code]} {how} {number}"
        yield Case(name, partial(_failing, place, code, lasts, number))


def _failing(place: Workplace, code: int, lasts: bool, number: int, folder: Path) -> str:
    def fail(file: int | None) -> None:
        _tear(file)
        raise OSError(code, os.strerror(code))

    run = folder / "run"
    first = command(
        training(run), folder / "printed", lambda: at_write(number, fail, always_after=lasts)
    ).wait()
    if first.status == 0:  # what failed was to be removed
        check_same(run, place.whole.train)
        return "identical"
    assert first.status == 2 and first.error, first
    assert os.strerror(code) in first.error, first
    return _goes_on(place, training(run, "--resume"), folder)


def two_processes(place: Workplace) -> Iterator[Case]:
    """The same command twice at a time: one works, the other says so, or finds the work done."""
    for i in range(place.count):
        seconds = place.random.uniform(0, 1.2 * place.whole.seconds)
        yield Case(f"{i}: {seconds:.2f} s apart", partial(_twice, place, seconds))


def _twice(place: Workplace, seconds: float, folder: Path) -> str:
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
