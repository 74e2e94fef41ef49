"""Random generators go on as if nothing had happened."""

import random

import numpy as np
import pytest
import torch

from marglik.storage.checkpoint import Checkpoints
from marglik.training.random_state import random_state, set_random_state


@pytest.fixture(autouse=True)
def seeded():
    """Other tests get back what they had."""
    before = random_state()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    yield
    set_random_state(before)


def generators():
    return [torch.Generator().manual_seed(seed) for seed in (5, 6)]


def draw(own):
    """Odd numbers of normal variables: numpy and Python keep the second of a pair."""
    return {
        "torch": (torch.randn(3).tolist(), torch.randperm(7).tolist()),
        "numpy": (np.random.standard_normal(3).tolist(), np.random.randint(99, size=4).tolist()),
        "python": ([random.gauss(0, 1) for _ in range(3)], random.random()),
        "generators": [torch.randn(3, generator=generator).tolist() for generator in own],
    }


@pytest.mark.parametrize("drawn", [0, 3])
def test_all_go_on(drawn, tmp_path):
    own = generators()
    for _ in range(drawn):
        draw(own)
    Checkpoints(tmp_path).save(random_state(own))
    state = Checkpoints(tmp_path).load()
    expected = [draw(own), draw(own)]
    others = generators()
    set_random_state(state, others)
    assert [draw(others), draw(others)] == expected
    set_random_state(state, others)  # drawing does not change the state that was taken
    assert draw(others) == expected[0]
    # Negative control: without restoring, each of them draws something else.
    control = draw(others) | {"generators": draw(generators())["generators"] if drawn else None}
    assert all(control[name] != value for name, value in expected[0].items())
