"""Thirty seconds of the fuzzer, with a fixed seed; ``python -m tests.fuzz`` goes on for longer."""

import pytest

from tests.fuzz.relations import RELATIONS
from tests.fuzz.search import Counts, search
from tests.marglik.threads import one_thread

SEED = 4


@pytest.mark.parametrize("name", RELATIONS)
def test_no_case_is_found_where_it_does_not_hold(name):
    counts = Counts()
    with one_thread():
        finding = search(RELATIONS[name], counts, SEED, RELATIONS[name].examples)
    assert finding is None, f"\n{finding.traceback}\n{finding.script}"
    assert sum(counts.refused.values()) < counts.tried / 2
