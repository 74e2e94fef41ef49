"""What ranks do in tests of the command line: called in each, see `tests.worlds`."""

import io
import os
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partialmethod
from threading import Thread
from typing import Any
from unittest.mock import patch

from tqdm import tqdm

from kfac_backend.ranks import Ranks
from marglik.cli import main
from marglik.prediction import evaluation_record
from marglik.storage.checkpoint import Checkpoints
from marglik.storage.run_folder import RunLog
from marglik.training.network import NetworkTraining


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit status, and what was printed on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def different(arguments: list[str], more: list[str]) -> tuple[int, str, str]:
    """A command that has more arguments on rank 1."""
    return command(*arguments, *(more if Ranks().rank == 1 else ()))


def in_a_terminal(columns: int, arguments: list[str]) -> tuple[int, str]:
    """Exit status of a command in a terminal of so many columns, and all that it wrote there."""
    import fcntl
    import pty
    import struct
    import termios

    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.environ["NO_COLOR"] = "1"
        os.environ.pop("COLUMNS", None)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        every_step = partialmethod(tqdm.__init__, mininterval=0)
        with patch.object(tqdm, "__init__", every_step):
            status = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    printed = b""
    try:
        while part := os.read(terminal, 65536):
            printed += part
    except OSError:  # Linux says so when the other end is closed
        pass
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed.decode()


def interrupted(where: str, stop: int, arguments: list[str]) -> dict[str, Any]:
    """Status and work of a command that is interrupted; where it is not, it comes to its end.

    Args:
        where: "log", or a folder of states: "learned", "baseline" and so on.
        stop: the number of records, written or in a state, or of an evaluation's states.
        arguments: of the command.
    """
    epochs, predicted, seen = [], [], []
    train, write, save = NetworkTraining.epoch, RunLog.write, Checkpoints.save
    predict = evaluation_record.predict_all

    def counted_epoch(self, number, *given):
        epochs.append(number)
        return train(self, number, *given)

    def counted_predictions(*given, **keywords):
        predicted.append(given)
        return predict(*given, **keywords)

    def interrupting_write(self, record):
        write(self, record)
        if where == "log":
            seen.append(record)
            if len(seen) == stop:
                raise KeyboardInterrupt

    def interrupting_save(self, state):
        save(self, state)
        if self.folder.name == where:
            seen.append(state)
            if len(state.get("records", seen)) == stop:
                raise KeyboardInterrupt

    with (
        patch("marglik.storage.checkpoint.MINUTES", 0.0),
        patch.object(NetworkTraining, "epoch", counted_epoch),
        patch.object(evaluation_record, "predict_all", counted_predictions),
        patch.object(RunLog, "write", interrupting_write),
        patch.object(Checkpoints, "save", interrupting_save),
    ):
        status, _, said = command(*arguments)
    return {"status": status, "said": said, "epochs": epochs, "predicted": len(predicted)}


def killed_after(seconds: float, rank: int, arguments: list[str]) -> tuple[int, str, str]:
    """A command during which one rank is killed, so many seconds after its first step."""
    real = NetworkTraining.epoch
    started = []

    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def epoch(*given, **keywords):
        if not started and Ranks().rank == rank:
            started.append(True)
            Thread(target=die, daemon=True).start()
        return real(*given, **keywords)

    with (
        patch("marglik.storage.checkpoint.MINUTES", 0.0),
        patch.object(NetworkTraining, "epoch", epoch),
    ):
        return command(*arguments)
