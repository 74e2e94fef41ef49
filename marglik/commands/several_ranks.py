"""A command on several ranks of one machine: start the ranks, watch them, and end them together.

``--devices 2`` does what ``torchrun --nproc-per-node 2 -m marglik`` does. It has a launcher of its
own, because torchrun waits half a minute for the others once a rank has failed, does not notice a
rank that is stopped, and lets each rank print its own error. Here each rank writes its final
message to a file, and the launcher prints one: about a rank that was killed or stopped if there is
one, else the message that was written first, which names the cause; later ones are consequences.

A rank can hang in two ways. If it was killed or stopped, this process sees it. If it runs but does
nothing while others wait for it, they notice (`kfac_backend.distributed`) and fail.
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
"""Seconds after which a rank that is stopped (by SIGSTOP or a debugger) counts as lost."""
GRACE = 5.0
"""Seconds that ranks have to end when they are told to, before they are killed."""
LAST_WORDS = "MARGLIK_LAST_WORDS"
"""Environment variable "PID:FOLDER": the launcher, and where ranks write their final messages."""
BAD_INPUT = 2
"""Exit status of a rank that has left a message itself, or relies on that of another rank."""


def is_another_rank() -> bool:
    """Whether this process is a rank other than the first.

    From the environment that the launcher or torchrun sets, as importing torch would be slow.
    """
    return os.environ.get("RANK", "0") != "0"


def leave_last_words(message: str) -> bool:
    """Hand the final message to the launcher; False if no launcher started this process."""
    launcher, _, folder = os.environ.get(LAST_WORDS, "").partition(":")
    # If the launcher was killed, this process has another parent, and nobody reads the folder. It
    # prints its message itself then.
    if launcher != str(os.getppid()):
        return False
    (Path(folder) / os.environ["RANK"]).write_text(message)
    return True


def number_to_launch(options: Any) -> int:
    """The number of ranks that this process has to start; 0 if it does the work itself.

    Raises:
        ValueError: a number of devices that is not possible on this machine.
    """
    devices = options.get("devices")
    if devices is None or devices == 1:
        return 0
    from marglik.runs.build import number_of_ranks  # late: imports torch, slow for other commands
    from marglik.runs.config import check_devices

    check_devices(devices, options.rank_timeout)
    number = number_of_ranks(devices, options.accelerator)
    # A process that torchrun, or `launch`, has started is a rank already.
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else number


def launch(command: Sequence[str], number: int) -> int:
    """Run a Python command, such as ``-m marglik ARGUMENTS``, on ``number`` ranks.

    Prints the first message that a rank has left, and returns the exit status, once all ranks have
    ended.

    Raises:
        KeyboardInterrupt: this process was interrupted.
        ChildProcessError: a rank was killed or stopped, or has ended without a message.
    """
    from torch.distributed import TCPStore

    # The store of torch.distributed lives in this process and not, as usual, in rank 0: when rank 0
    # ends, the others can still tell each other what happened.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {
        # What torchrun tells ranks, and Fabric and torch.distributed read.
        "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "GROUP_RANK": 0,
        "MASTER_ADDR": "localhost", "MASTER_PORT": store.port,
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    # Ranks that each used all cores would slow each other down. A user's own setting has priority.
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
                        # Ctrl-C then reaches this process alone, which ends the ranks.
                        start_new_session=True,
                    )
                )
            stopped = _watch(ranks)
        finally:
            ended_here = _end(ranks)
        words = sorted(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        first_words = words[0].read_text() if words else ""
    # The most certain cause first: what the other ranks say is about a rank that they lost.
    if stopped:
        raise ChildProcessError(
            f"Rank {stopped[0]} of {number} was stopped for {STOPPED:g} s (by SIGSTOP, a debugger "
            "or the system) while the others waited for it, so all ranks were ended."
        )
    statuses = {i: rank.returncode for i, rank in enumerate(ranks) if i not in ended_here}
    for rank, status in statuses.items():
        if status < 0:
            raise ChildProcessError(
                f"Rank {rank} of {number} was ended by {signal.Signals(-status).name}: by the "
                "system, for example because memory ran out, or by a user."
            )
    for rank, status in statuses.items():
        if 0 < status < 128 and status != BAD_INPUT:  # from 128 on: it was asked to end
            raise ChildProcessError(
                f"Rank {rank} of {number} ended with exit status {status}; its output above says "
                "why."
            )
    if first_words:
        print(first_words, file=sys.stderr)
    return next((status for status in statuses.values() if status), 0)


def _watch(ranks: Sequence["subprocess.Popen[bytes]"]) -> list[int]:
    """Wait until all ranks have succeeded or one has failed; returns the ranks that are stopped."""
    # Numbers of looks and not seconds: while this process is itself stopped (Ctrl-Z stops all of
    # them), no rank must count as lost.
    looks = [0] * len(ranks)
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
    """Whether a child process is stopped; can be asked again, as this does not reap it."""
    if not hasattr(os, "waitid"):  # Windows, and macOS before Python 3.13
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _end(ranks: Sequence["subprocess.Popen[bytes]"]) -> set[int]:
    """End the ranks that still run; returns which, since their exit status is of our making."""
    running = {i for i, rank in enumerate(ranks) if rank.poll() is None}
    try:
        for i in running:
            # A stopped process would react to SIGTERM only once it continues.
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
    """Kill a rank with the workers of its data loaders, which are in its process group."""
    if rank.poll() is None:
        with suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(rank.pid, signal.SIGKILL)
            else:
                rank.kill()
