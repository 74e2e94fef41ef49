"""Thirty seconds of the fuzzer, with fixed seeds; ``python -m tests.fuzz`` goes on for longer."""

import pytest
import torch

from tests.fuzz.search import Counts, search
from tests.fuzz.trainers import RELATIONS


@pytest.mark.parametrize("name", [name for name, one in RELATIONS.items() if one.examples])
def test_no_case_is_found_where_it_does_not_hold(name):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        counts = Counts()
        found = search(RELATIONS[name], counts, 0, RELATIONS[name].examples)
    finally:
        torch.set_num_threads(threads)
    assert found is None, f"\n{found.script}\n{found.details}"
    assert sum(counts.refused.values()) <= 0.6 * counts.tried
