"""Copies of this process: each case of a fault has one, so that it may be killed or run wild.

The first process imports torch and marglik once; a copy costs milliseconds. Copies are made before
this process has a second thread, which `os.fork` would leave behind with its locks held.
"""

import contextlib
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from marglik.cli import main

__all__ = ["Copy", "Ended", "at_write", "command", "one_thread_alone", "sleep_until"]

PATIENCE = 120.0
"""Seconds of the processor after which a copy counts as hung; or without any, in so many."""


@dataclass(frozen=True)
class Ended:
    """How a copy ended."""

    status: int
    """Its exit status; the number of the signal that ended it, negative."""
    printed: str
    """What it wrote to stdout."""
    said: str
    """What it wrote to stderr."""
    megabytes: float
    """Most memory that it held beyond what it was born with."""

    @property
    def error(self) -> str:
        """The one line that a command ends with which refuses something; "" without one."""
        lines = self.said.strip().splitlines()
        return lines[-1] if lines and lines[-1].startswith("marglik: error: ") else ""

    def __str__(self) -> str:
        printed = f", printed {self.printed.strip()[-300:]!r}" if self.printed.strip() else ""
        return f"exit status {self.status}, {self.said.strip()[-300:]!r}{printed}"


class Copy:
    """A copy of this process that runs a function, whose result is its exit status.

    Args:
        function: what it runs.
        folder: where what it prints goes.
    """

    def __init__(self, function: Callable[[], int], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in folder.glob("*.out"))
        self._out, self._err = folder / f"{number}.out", folder / f"{number}.err"
        # From here on, so that the time of a kill is counted from the function's begin.
        awake, ready = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._be_the_copy(function, ready)
        os.close(ready)
        os.read(awake, 1)
        os.close(awake)

    def _be_the_copy(self, function: Callable[[], int], ready: int) -> None:
        status = 70
        try:
            for stream, path in ((1, self._out), (2, self._err)):
                file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
                os.dup2(file, stream)
                os.close(file)
            sys.stdout, sys.stderr = (
                os.fdopen(1, "w", closefd=False),
                os.fdopen(2, "w", buffering=1, closefd=False),
            )
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.write(ready, b"1")
            os.close(ready)
            status = function()
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def _seconds_used(self) -> float:
        """Of the processor, so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait(self, patience: float = PATIENCE) -> Ended:
        """How it ended; it is killed if it does not end.

        Seconds of a clock would say nothing where others have the processor.

        Raises:
            AssertionError: it had to be killed.
        """
        end = os.pidfd_open(self.pid)
        try:
            used = 0.0
            has_ended = select.select([end], [], [], patience)[0]
            while not has_ended and used < (now := self._seconds_used()) < patience:
                used = now
                has_ended = select.select([end], [], [], patience)[0]
            if not has_ended:
                self.signal(signal.SIGKILL)
        finally:
            os.close(end)
        _, status, usage = os.wait4(self.pid, 0)
        said = self._err.read_text(errors="replace")
        assert has_ended, f"it hung, {usage.ru_utime:.0f} s of the processor: {said[-300:]!r}"
        born = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Ended(
            os.waitstatus_to_exitcode(status),
            self._out.read_text(errors="replace"),
            said,
            (usage.ru_maxrss - born) / 1024,
        )


def command(
    arguments: Sequence[str], folder: Path, before: Callable[[], object] = lambda: None
) -> Copy:
    """A copy that runs a command of `marglik`.

    Args:
        arguments: of the command line.
        folder: where what it prints goes.
        before: what is done in the copy first.
    """

    def run() -> int:
        before()
        return main(arguments)

    return Copy(run, folder)


def at_write(number: int, act: Callable[[int | None], Any], *, always_after: bool = False) -> None:
    """Act in place of a process's write of this number, 0 for each; others are as they are.

    Args:
        number: counted from 1.
        act: given the file that is being written, None for names.
        always_after: whether to act at all later writes, too.
    """
    seen = 0

    def watch(name: str, counts: Callable[[Any], bool]) -> None:
        real = getattr(os, name)

        def watched(*arguments: Any, **keywords: Any) -> Any:
            nonlocal seen
            if counts(arguments[0]):
                seen += 1
                if number in (0, seen) or (always_after and seen > number):
                    act(arguments[0] if name == "fsync" else None)
            return real(*arguments, **keywords)

        setattr(os, name, watched)

    watch("fsync", lambda _: True)
    for name in ("replace", "rename", "unlink", "rmdir"):
        watch(name, lambda path: os.path.lexists(path))


def one_thread_alone() -> None:
    """Make this a process that can be copied.

    Raises:
        AssertionError: there is another thread.
    """
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # a thread that watches bars
    names = os.listdir("/proc/self/task")
    assert len(names) == 1, (
        f"{len(names)} threads; a copy would have one of them. Start with OMP_NUM_THREADS=1, which "
        "keeps numpy from starting its own."
    )


def sleep_until(moment: float) -> None:
    """Wait for a moment of `time.perf_counter`."""
    time.sleep(max(0.0, moment - time.perf_counter()))
