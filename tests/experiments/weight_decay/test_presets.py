"""The table of the presets is made from the JSON alone, and says which way each run went."""

import pytest

from experiments.weight_decay import presets


def run(preset, seed, learned, initial):
    metrics = {
        f"{who}, {which}": {"test/cls/NLL": nll + (which != "MAP"), "test/cls/accuracy": 0.5}
        for who, nll in (("learned", learned), ("initial", initial))
        for which in ("MAP", "MAP, temperature-scaled", "Laplace, mc")
    }
    return {"config": {"preset": preset, "seed": seed}, "metrics": metrics, "seconds": 90.0}


def test_the_table():
    runs = [run("gpt_dart", 0, 1.0, 1.5), run("gpt_dart", 1, 2.0, 1.9)]
    (row,) = presets.table(runs).splitlines()[2:]
    assert row == (
        "| GPT, DART, per byte | 1.500 / 1.700 | -0.200 ± 0.300 | 1 of 2 | 50.0 % / 50.0 % "
        "| 2.500 / 2.700 | 2.500 / 2.700 | 2 |"
    )


def test_one_seed_has_no_error():
    assert "| -0.500 | 1 of 1 |" in presets.table([run("vit_cifar10", 0, 1.0, 1.5)])


def test_a_run_that_ends_with_an_error_is_named(monkeypatch):
    monkeypatch.setattr(presets, "marglik", lambda arguments: 2)
    with pytest.raises(RuntimeError, match="--config gpt_dart ended with status 2"):
        presets.run(presets.Config("gpt_dart", 0))
