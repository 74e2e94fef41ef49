"""A command on several ranks of one machine, started and watched by torchrun's engine.

``--devices 2`` does what ``torchrun --nproc-per-node 2 -m marglik`` does. A rank that fails leaves
its message in the file that torchrun gives it, and torchrun ends the others; so one message is
printed, once all have ended. Ranks that wait for one that hangs fail after ``--rank_timeout``.
"""

import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["is_another_rank", "launch", "leave_message", "number_to_launch"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of a rank that torchrun has started: where it leaves its message."""
GRACE = 5
"""Seconds that ranks have to end when they are told to, before they are killed."""


def is_another_rank() -> bool:
    """Whether this process is a rank other than the first.

    From the environment that torchrun sets, as importing torch would be slow.
    """
    return os.environ.get("RANK", "0") != "0"


def leave_message(message: str, is_consequence: bool = False) -> bool:
    """Leave a final message for torchrun, which prints the first; False if it did not start this.

    Args:
        message: what the rank has to say.
        is_consequence: whether it says that another rank was lost. That rank's own message comes
            first then: torchrun ends this one while it waits.
    """
    if ERROR_FILE not in os.environ:
        return False
    if is_consequence:
        time.sleep(GRACE)
    record = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(os.environ[ERROR_FILE]).write_text(json.dumps({"message": record}))
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


def launch(command: Sequence[str], number: int) -> None:
    """Run a Python command, such as ``-m marglik ARGUMENTS``, on ``number`` ranks.

    Raises:
        KeyboardInterrupt: this process was interrupted, or asked to end by the signal in its
            arguments; the ranks have ended.
        ChildProcessError: a rank has failed, with its message; the others have ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # one message, not several
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    # Ranks that each used all cores would slow each other down. A user's own setting has priority.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException as error:
        raise KeyboardInterrupt(int(error.sigval)) from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        if status < 0:
            raise ChildProcessError(
                f"Rank {rank} of {number} was ended by {signal.Signals(-status).name}: by the "
                "system, for example because memory ran out, or by a user."
            ) from error
        message: Any = failure.message
        if isinstance(message, dict):
            said = message["message"].rstrip(".")
            raise ChildProcessError(f"Rank {rank} of {number}: {said}.") from error
        raise ChildProcessError(
            f"Rank {rank} of {number} ended with exit status {status}; its output above says why."
        ) from error
