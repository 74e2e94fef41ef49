"""A process of its own in which `marglik` is killed at named points: run by a test.

``python -m tests.marglik.commands.killed_elsewhere``; a line of standard input is a JSON list of a
function's full name, of the call of it that the process does not survive, and of a command's
arguments. Each line has a process, which nothing is tidied up after. The last line printed is the
list of how these ended: -9 is killed.
"""

import json
import os
import signal
import sys
from pkgutil import resolve_name
from unittest.mock import patch

import torch

from marglik.cli import main
from marglik.commands import fit as _  # noqa: F401  # once, and not in each copy


def killed(target: str, call: int, arguments: list[str]) -> int:
    """Run a command in a copy of this process; how it ended."""
    copy = os.fork()
    if copy:
        return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    real, calls = resolve_name(target), 0

    def deadly(*arguments: object, **keywords: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **keywords)

    with patch(target.replace(":", "."), deadly):
        os._exit(main(arguments))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print([killed(*json.loads(line)) for line in sys.stdin])
