"""Random cases, with fixed seeds; ``FUZZ=100 python -m pytest tests/fuzz`` tries 100 times as many.

Hypothesis prints the smallest failing case, whose ``repr`` builds it again.
"""

import os
import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.cases import Impossible
from tests.fuzz.relations import Refused
from tests.fuzz.trainers import RELATIONS

TIMES = int(os.environ.get("FUZZ", "1"))


@pytest.mark.parametrize("name", RELATIONS)
def test_no_case_is_found_where_it_does_not_hold(name):
    relation, outcomes = RELATIONS[name], {"holds": 0, "refused": 0}

    @seed(0)
    @settings(
        max_examples=TIMES * relation.examples, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(relation.strategy)
    def holds(case):
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                relation.check(case)
            outcomes["holds"] += 1
        except Refused:
            outcomes["refused"] += 1
        except Impossible:
            pass

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        holds()
    finally:
        torch.set_num_threads(threads)
    assert outcomes["refused"] <= 0.6 * sum(outcomes.values())
