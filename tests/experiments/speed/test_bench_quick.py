"""The quick benchmark measures all that it names, and warns about what has become slower."""

from experiments.speed.bench_quick import compare, measure


def test_a_small_network_is_measured():
    found = measure(repetitions=1, batch_size=1, width=1)
    assert set(found["times_the_limit"]) == set(found["limits"])
    assert all(ratio > 0 for ratio in found["times_the_limit"].values())
    ratios = found["times_the_limit"]
    assert ratios["first pass, reduce, mc"] > ratios["batch, reduce, mc"]
    assert "WARNING" not in compare(found, None)
    assert "WARNING" not in compare(found, found)


def test_a_slower_ratio_is_warned_about_on_the_same_machine_alone():
    machine = {"processor": "one", "torch": "2"}
    now = {"times_the_limit": {"a": 1.06, "b": 1.04, "new": 3.0}, "measured_with": machine}
    before = {"times_the_limit": {"a": 1.0, "b": 1.0}, "measured_with": machine}
    assert compare(now, before).splitlines()[-1] == "WARNING: over 5 % slower: a."
    assert "+6.0 %" in compare(now, before)
    other = before | {"measured_with": {"processor": "two", "torch": "2"}}
    assert compare(now, other).splitlines()[-1].startswith("The earlier ratios are from another")
