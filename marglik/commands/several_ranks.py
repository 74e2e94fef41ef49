"""A command on several ranks of one machine: it starts them, watches them, and ends them together.

``--devices 2`` does what ``torchrun --nproc-per-node 2 -m marglik`` does. It has a launcher of its
own since torch's waits half a minute for the others once a rank has failed, sees no rank that is
stopped, and lets each rank say on its own how it ended. Here the ranks leave their last words, and
one message is printed: of a rank that was killed or stopped, else the first that one has left.

What tells a rank that hangs from one that is slow: a rank that was killed or stopped is seen by
this process at once; one that does nothing while others wait is seen by them
(`kfac_backend.distributed`).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["is_another_rank", "launch", "leave_last_words", "number_to_launch"]

POLL = 0.1
"""Seconds between two looks at the ranks."""
STOPPED = 10.0
"""Seconds for which a rank may be stopped, as by SIGSTOP or a debugger, while this process runs."""
GRACE = 5.0
"""Seconds that ranks have to end when they are told to, before they are killed."""
LAST_WORDS = "MARGLIK_LAST_WORDS"
"""Names this process, and the folder where a rank writes what it would print at its end."""
BAD_INPUT = 2
"""The exit status of a rank after which it, or another one, has said why."""


def is_another_rank() -> bool:
    """Whether this is a rank other than the first, as torchrun says; it imports nothing slow."""
    return os.environ.get("RANK", "0") != "0"


def leave_last_words(message: str) -> bool:
    """Leave what this process ends with to the one that has started it; False if none has."""
    launcher, _, folder = os.environ.get(LAST_WORDS, "").partition(":")
    if launcher != str(os.getppid()):  # it is another's child where that one was killed
        return False
    (Path(folder) / os.environ["RANK"]).write_text(message)
    return True


def number_to_launch(options: Any) -> int:
    """How many ranks this process has to start; 0: it does the work itself.

    Raises:
        ValueError: a number that cannot be.
    """
    devices = options.get("devices")
    if devices is None or devices == 1:
        return 0
    from marglik.runs.build import number_of_ranks  # imports torch, which other commands may not
    from marglik.runs.config import check_devices

    check_devices(devices, options.rank_timeout)
    number = number_of_ranks(devices, options.accelerator)
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else number


def launch(command: Sequence[str], number: int) -> int:
    """Run a Python command, such as ``-m marglik ARGUMENTS``, on so many ranks.

    Returns the exit status, once all have ended; what a rank has left to say is printed.

    Raises:
        KeyboardInterrupt: this process was interrupted.
        ChildProcessError: a rank was killed or stopped, or has ended without a word.
    """
    from torch.distributed import TCPStore

    # It lives here, so that no rank's end takes it away from the others.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {
        # What torchrun tells ranks, and Fabric and torch.distributed read.
        "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "GROUP_RANK": 0,
        "MASTER_ADDR": "localhost", "MASTER_PORT": store.port,
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    # Ranks that each use all cores wait for each other.
    threads = {"OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // number)}
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="marglik-") as folder:
        try:
            for i in range(number):
                own = {"RANK": i, "LOCAL_RANK": i, LAST_WORDS: f"{os.getpid()}:{folder}"}
                environment = {name: str(value) for name, value in (common | own).items()}
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env={k: str(v) for k, v in threads.items()} | os.environ | environment,
                        start_new_session=True,  # Ctrl-C is for this process, which ends them
                    )
                )
            stopped = _watch(ranks)
        finally:
            ended_here = _end(ranks)
        words = sorted(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        first_words = words[0].read_text() if words else ""
    if stopped:
        raise ChildProcessError(
            f"Rank {stopped[0]} of {number} was stopped for {STOPPED:g} s (by SIGSTOP, a debugger "
            "or the system), and the others waited for it: all were ended."
        )
    statuses = {i: rank.returncode for i, rank in enumerate(ranks) if i not in ended_here}
    for rank, status in statuses.items():
        if status < 0:
            raise ChildProcessError(
                f"Rank {rank} of {number} was ended by {signal.Signals(-status).name}: by the "
                "system, as where memory runs out, or by somebody."
            )
    for rank, status in statuses.items():
        if 0 < status < 128 and status != BAD_INPUT:  # above are requests to end
            raise ChildProcessError(
                f"Rank {rank} of {number} ended with exit status {status}; what it has printed "
                "says why."
            )
    if first_words:
        print(first_words, file=sys.stderr)
    return next((status for status in statuses.values() if status), 0)


def _watch(ranks: Sequence["subprocess.Popen[bytes]"]) -> list[int]:
    """Wait until all have ended well, or one has not; returns those that are stopped."""
    looks = [0] * len(ranks)  # and no seconds: this process may be stopped, too, as by Ctrl-Z
    while True:
        statuses = [rank.poll() for rank in ranks]
        if any(statuses) or None not in statuses:
            return []
        for i, rank in enumerate(ranks):
            looks[i] = looks[i] + 1 if statuses[i] is None and _is_stopped(rank.pid) else 0
        if max(looks) * POLL >= STOPPED:
            return [i for i, number in enumerate(looks) if number == max(looks)]
        time.sleep(POLL)


def _is_stopped(child: int) -> bool:
    """Whether a child process is stopped; it may be asked again, as this takes no notice away."""
    if not hasattr(os, "waitid"):  # Windows, and macOS before Python 3.13
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _end(ranks: Sequence["subprocess.Popen[bytes]"]) -> set[int]:
    """End those that still run; returns which."""
    running = {i for i, rank in enumerate(ranks) if rank.poll() is None}
    try:
        for i in running:
            # Who is stopped would not hear of a request before it goes on.
            (_kill if _is_stopped(ranks[i].pid) else subprocess.Popen.terminate)(ranks[i])
        end = time.monotonic() + GRACE
        while time.monotonic() < end and any(ranks[i].poll() is None for i in running):
            time.sleep(POLL / 10)
    finally:  # also if it is interrupted once more
        for i in running:
            _kill(ranks[i])
        for i in running:
            ranks[i].wait()
    return running


def _kill(rank: "subprocess.Popen[bytes]") -> None:
    """Kill a rank, and the processes that load its data."""
    if rank.poll() is None:
        with suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(rank.pid, signal.SIGKILL)
            else:
                rank.kill()
