"""What ranks do in tests of the command line: called in each, see `tests.worlds`."""

import io
from contextlib import redirect_stderr, redirect_stdout

from kfac_backend.ranks import Ranks
from marglik.cli import main


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit status, and what was printed on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def different(arguments: list[str], more: list[str]) -> tuple[int, str, str]:
    """A command that has more arguments on rank 1."""
    return command(*arguments, *(more if Ranks().rank == 1 else ()))
