"""A command on several ranks: they are started by torch's own launcher, and end together.

``--devices 2`` is ``torchrun --nproc-per-node 2 -m marglik`` with a word of ours at its end. The
process that was called does none of the work. So it can say how a rank ended, whichever that was,
and end the others.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

__all__ = ["is_another_rank", "launch", "number_to_launch"]

GRACE = "10"
"""Seconds that ranks have to end when they are told to, before they are killed."""
BAD_INPUT, INTERRUPTED = 2, 130


def is_another_rank() -> bool:
    """Whether this is a rank other than the first, as torchrun says; it imports nothing slow."""
    return os.environ.get("RANK", "0") != "0"


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


def launch(arguments: Sequence[str], number: int) -> int:
    """Run ``marglik ARGUMENTS`` on so many ranks; returns the exit status.

    Raises:
        KeyboardInterrupt: this process was interrupted.
        ChildProcessError: a rank was killed.
    """
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", GRACE)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # It logs what ends it at length, which is said in a line here.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "marglik", *arguments)
    except SignalException as error:
        raise KeyboardInterrupt from error
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        # The launcher itself ends what is left by SIGTERM.
        killed = {r: -code for r, code in statuses.items() if code < 0 and -code != signal.SIGTERM}
        if not killed:  # the ranks have said why
            return INTERRUPTED if INTERRUPTED in statuses.values() else BAD_INPUT
        rank, number_of_signal = min(killed.items())
        name = signal.Signals(number_of_signal).name
        raise ChildProcessError(
            f"Rank {rank} of {number} was ended by {name}: by the system, as where memory runs "
            "out, by somebody, or because it did not end with the others."
        ) from error
    return 0
