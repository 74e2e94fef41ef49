"""The timing of K-FAC steps: how ratios are put together, and a run of two images."""

import json
from functools import partial

import pytest

from experiments.table1 import report
from experiments.table1 import update_step_timing as timing
from experiments.timing import median_ratios


def test_ratios_are_of_the_same_round():
    measured = {"SGD": [1.0, 2.0, 4.0], "other": [2.0, 6.0, 4.0]}
    assert median_ratios(measured, "SGD") == {"SGD": 1.0, "other": 2.0}


def test_amortised_is_the_mean_of_fifty_steps():
    """Each step of a run in turn: inverses at step 0, factors at 0, 10, 20, 30, 40."""
    ratios = {"old inverses": 1.1, "new factors, reduce": 1.5, "new inverses, reduce": 2.0}
    kinds = [
        "new inverses, reduce" if step == 0
        else "new factors, reduce" if step % 10 == 0
        else "old inverses"
        for step in range(50)
    ]  # fmt: skip
    right = sum(ratios[kind] for kind in kinds) / 50
    assert timing.amortised(ratios, "reduce", timing.Config()) == pytest.approx(right)


def test_a_run_of_two_images_and_its_report(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "network", partial(timing.network, width=1))
    config = timing.Config(
        batch_size=2,
        repetitions=1,
        contenders=("SGD", "marglik, reduce", *timing.PARTS),
        threads=1,
        clock="processor",
    )
    result = json.loads(json.dumps(timing.run(config)))
    assert result["times_sgd"]["SGD"] == 1.0 and not result["left_out"]
    assert result["amortised_times_sgd"].keys() == {"expand", "reduce"}
    (tmp_path / "batch_2.json").write_text(json.dumps(result))
    memory = {
        "peak_mebibytes": {"SGD": {"2": 10.0, "4": 16.0}},
        "factors_mebibytes": 5.0,
        "left_out": {},
    }
    (tmp_path / "memory.json").write_text(json.dumps(memory))
    text = report.write(tmp_path)
    assert "| marglik, reduce |" in text
    assert f"| SGD | 10 | 16 | 3.0 | {(24 * 1024 - 10) / 3 + 2:.0f} |" in text
