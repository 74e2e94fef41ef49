"""Worlds of several ranks, forked from one process that has imported everything and runs no thread.

`Worlds` starts that process, ``python -m tests.worlds``; a line of its standard input is a
JSON object of a world: its folder, its size, and a function's full name. Each rank calls the
function with the arguments that lie in the folder, and leaves there what it returns or how it
failed. The answer is a line with the ranks' exit statuses.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

IMPORTED = (
    "marglik.application.cli", "marglik.application.report",
    "marglik.application.runs.evaluate", "marglik.application.runs.train",
    "scipy.optimize", "sklearn.metrics", "torch._dynamo",
)  # fmt: skip
"""What commands import when they need it."""
ROOT = Path(__file__).parents[1]


class Failed(Exception):
    """What a rank has raised: the name of its type, and its text."""


class Worlds:
    """Ranks that are started within milliseconds, in a process that lasts."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.worlds"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, size: int, function: str, *arguments: Any, timeout: float = 60) -> list[Any]:
        """What each rank's call returned; `Failed`, not raised, where it has raised something.

        Args:
            size: number of ranks; 1 has no process group.
            function: its full name, ``package.module:name``.
            arguments: that can be pickled.
            timeout: of the process group, in seconds.
        """
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "arguments").write_bytes(pickle.dumps(arguments))
            assert self._process.stdin is not None and self._process.stdout is not None
            print(
                json.dumps([folder, size, function, timeout]), file=self._process.stdin, flush=True
            )
            statuses = json.loads(self._process.stdout.readline())
            found = []
            for rank, status in enumerate(statuses):
                left = Path(folder, str(rank))
                value, failure = None, ("ended", status)
                if left.exists():
                    value, failure = pickle.loads(left.read_bytes())
                found.append(Failed(*failure) if failure else value)
        return found

    def all(self, size: int, function: str, *arguments: Any) -> list[Any]:
        """The same, where no rank may fail."""
        found = self.run(size, function, *arguments)
        failures = [f"rank {i}: {one.args[1]}" for i, one in enumerate(found) if failed(one)]
        assert not failures, "\n".join(failures)
        return found

    def close(self) -> None:
        """End the process, which has nothing to tidy up."""
        self._process.kill()
        self._process.communicate()


def failed(found: Any) -> bool:
    """Whether a rank has raised something, or is gone."""
    return isinstance(found, Failed)


def _one_rank(rank: int, folder: str, size: int, function: str, timeout: float) -> None:
    import torch
    from torch import distributed as dist

    # torch replaces its pool of threads at the first use after a fork. Two threads that do so at
    # once, such as this one and one of autograd's, would end the process.
    torch.set_num_threads(1)
    # As torchrun says it, which is how Fabric learns of it.
    own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    own |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "test"}
    if size > 1:
        os.environ.update({name: str(value) for name, value in own.items()})
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the group is there
        store = f"file://{folder}/store"
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store, rank=rank, world_size=size, timeout=limit)
    torch.manual_seed(0)
    arguments = pickle.loads(Path(folder, "arguments").read_bytes())
    found, failure = None, None
    try:
        found = resolve_name(function)(*arguments)
    except BaseException as error:
        failure = type(error).__name__, f"{error}\n{traceback.format_exc()}"
    Path(folder, f"{rank}.partial").write_bytes(pickle.dumps((found, failure)))
    Path(folder, f"{rank}.partial").rename(Path(folder, str(rank)))


def main() -> None:
    """Fork worlds until the input ends."""
    import torch

    for name in IMPORTED:  # once, and not in each rank
        import_module(name)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is none of the answers
    for line in sys.stdin:
        folder, size, function, timeout = json.loads(line)
        resolve_name(function)  # imported once, and not in each rank
        if size > 1:
            import_module("lightning.fabric")  # as well, where it is used
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                os.close(0)
                try:
                    _one_rank(rank, folder, size, function, timeout)
                finally:
                    sys.stderr.flush()
                    os._exit(0)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), file=answers, flush=True)


if __name__ == "__main__":
    main()
