"""The same work again and again in one process: what it holds does not grow."""

import gc
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from kfac_backend import kronecker_factors
from tests.marglik.conftest import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")


def soak(work: Callable[[int], object], times: int) -> None:
    """Do work so many times, twice; objects, tensors among them, files and threads stay as many."""

    def held() -> tuple[int, ...]:
        gc.collect()
        system = (len(os.listdir(f"/proc/self/{part}")) for part in ("fd", "task"))
        return len(gc.get_objects()), *system

    gc.collect()
    gc.freeze()  # the packages' own objects, which take a second to look through
    try:
        found = []
        for i in range(2 * times):
            work(i)
            if (i + 1) % times == 0:
                found.append(held())
    finally:
        gc.unfreeze()
    first, last = found
    # What was found is some, and a cache that fills up for good is no leak.
    assert last[0] - first[0] < 3 + times / 3, found
    assert last[1:] <= first[1:], found


def test_passes_leave_nothing():
    """Of one network and of new ones, also where one fails in the middle."""
    x, y = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 2, 3), torch.arange(6) % 3

    def network():
        encoder = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Linear(3, 4), encoder, nn.Flatten(), nn.Linear(8, 3)).double()

    kept = network()

    def one_pass(i):
        model = kept if i % 3 else network()
        options = {"kfac_approx": ("expand", "reduce")[i % 2], "fisher": "mc" if i % 4 else "exact"}
        kronecker_factors(model, [(x, y)], "classification", **options)
        handle = model[i % 4].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kronecker_factors(model, [(x, y)], "classification")
        handle.remove()

    soak(one_pass, 12)


@pytest.mark.parametrize("kept", [lambda: open("/dev/null"), lambda: torch.ones(2)])  # noqa: SIM115
def test_the_soak_sees_a_leak(kept):
    """Negative control: a file, or a tensor, each time."""
    found = []
    with pytest.raises(AssertionError):
        soak(lambda i: found.append([kept()]), 20)
