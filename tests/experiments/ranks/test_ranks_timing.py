"""The timing of two ranks runs, and finds the bytes of the formula."""

import pytest

from experiments.ranks.ranks_timing import Config, measure, table

pytestmark = pytest.mark.slow  # two processes import everything


def test_two_ranks_of_a_small_network():
    found = measure(Config(num_images=8, batch_size=2, repetitions=1, width=1))
    assert set(found["median_seconds"]) >= {"pass, one rank", "pass, two ranks", "reduction alone"}
    # Fixup's scalars and the head's bias are not in the formula: 32 and 100 numbers.
    missing = found["bytes_reduced"] - found["bytes_of_the_formula"]
    assert missing == 4 * (32 + 100)
    assert 0.5 <= found["busiest_share"] <= 1
    assert "Two ranks of one thread against one" in table(found)
