"""The same work again and again in one process: what it holds does not grow."""

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn

from kfac_backend import kronecker_factors
from marglik.storage.checkpoint import Checkpoints
from tests.interrupts import everything_of
from tests.marglik.conftest import one_thread  # noqa: F401
from tests.marglik.training.runs import CASES, make

pytestmark = pytest.mark.usefixtures("one_thread")

SLACK_KIB = 2048
"""How much the resident memory of a process that leaks nothing moves by itself."""


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    kib: int
    """Resident memory."""
    files: int
    threads: int
    objects: int
    """That Python's garbage collector looks at, after a collection."""


def held() -> Held:
    """What this process holds now, once all that is garbage has been given back."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(gc.get_objects()),
    )


def soak(work: Callable[[int], object], times: int) -> list[Held]:
    """Do work so many times; what is held after each fifth of it, once the first is done.

    Raises:
        AssertionError: files, threads or objects have become more, or memory with each fifth.
    """
    found = []
    gc.collect()
    gc.freeze()  # the packages' own objects, which take a second to look through
    try:
        for i in range(times):
            work(i)
            if (i + 1) % (times // 5) == 0:
                found.append(held())
    finally:
        gc.unfreeze()
    first, last = found[0], found[-1]
    print(*found, sep="\n", file=sys.stderr)
    assert last.files <= first.files, found
    assert last.threads <= first.threads, found
    # What was found is some, and a cache that fills up for good is no leak.
    assert last.objects - first.objects < len(found) + times / 5, found
    assert last.kib - first.kib < SLACK_KIB, found
    return found


X, Y = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 2, 3), torch.arange(6) % 3


def network():
    """Attention by its parts, a normalisation, and a layer of each other kind."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return model.double()


SHORT_AND_LONG = [30, pytest.param(400, marks=pytest.mark.slow)]


@pytest.mark.parametrize("times", SHORT_AND_LONG)
def test_passes_leave_nothing(times):
    model, before = network(), everything_of(network())
    modes = cycle(["expand", "reduce"])

    layers, failed = [m for m in model.modules() if not list(m.children())], []

    def fails(*_):
        raise RuntimeError("in the middle")

    def fails_in(layer, in_backward):
        def hook(_, inputs, output):
            output = output[0] if isinstance(output, tuple) else output
            if not in_backward:
                fails()
            if output.requires_grad:
                output.register_hook(fails)

        handle = layer.register_forward_hook(hook)
        try:
            kronecker_factors(model, [(X, Y)], "classification")
        except RuntimeError as error:
            failed.append(str(error))
        handle.remove()

    def one_pass(i):
        fails_in(layers[i % len(layers)], in_backward=i % 2 == 0)
        fresh = network() if i % 5 == 0 else model  # what is kept of models goes with them
        options = {"kfac_approx": next(modes), "fisher": "mc" if i % 3 else "exact"}
        assert kronecker_factors(fresh, [(X, Y)], "classification", **options).num_data == 6

    soak(one_pass, times)
    assert set(failed) == {"in the middle"} and len(failed) > times / 2
    after = everything_of(model)
    assert {k: v for k, v in after.items() if "values" in k} == {
        k: v for k, v in before.items() if "values" in k
    }


@pytest.mark.filterwarnings("ignore")  # pytest keeps each warning, an object or two a loop
@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_loops_leave_nothing(times, tmp_path):
    """Of each kind in turn, with states."""
    cases = cycle([name for name in CASES if name != "float16"])
    names = (
        [next(cases) for _ in range(12)] if times > 60 else ["SGD", "K-FAC", "regression, MacKay"]
    )

    def loop(i):
        states = Checkpoints(tmp_path / str(i % 2), minutes=0, run={"i": i})
        for path in states.folder.glob("*"):
            path.unlink()
        make(names[i % len(names)]).run(states)

    for i in range(2 * len(names)):  # each kind in both folders
        loop(i)  # what a kind keeps for good, it keeps from its first run on
    soak(loop, times)


def test_the_soak_sees_a_leak():
    """Negative control: files, memory and objects."""
    kept = []
    with pytest.raises(AssertionError, match="Held"):
        soak(lambda i: kept.append(open("/dev/null")), 20)  # noqa: SIM115
    for file in kept:
        file.close()
    with pytest.raises(AssertionError, match="Held"):
        soak(lambda i: kept.append(torch.ones(2**17)), 20)
    with pytest.raises(AssertionError, match="Held"):
        soak(lambda i: kept.append([[i]]), 20)
