"""The table of rivals: each row is measured as it says, and tables are made from the JSON alone."""

from dataclasses import replace

import pytest

from experiments.predictions import predictive_rivals, rivals
from experiments.predictions.predictive_rivals import PROBLEMS, Config, table
from marglik.models import MLP


def row(nll, seconds=2.0, accuracy=0.9):
    metrics = {"cls/NLL": nll, "cls/accuracy": accuracy, "cls/Brier": 0.1, "cal/ECE": 0.02}
    return {
        "metrics": metrics,
        "tempered": metrics | {"cls/NLL": nll / 2},
        "temperature": 2.0,
        "training_seconds": seconds,
        "search_seconds": 3 * seconds,
        "prediction_seconds": seconds / 100,
    }


def seed(number, rows, failed=()):
    return {
        "config": {"data": "digits", "seed": number},
        "problem": {"title": "digits", "epochs": 4},
        "num_examples": {"train": 1000, "validation": 20, "test": 30},
        "rows": rows,
        "failed": dict(failed),
    }


def test_the_table():
    scaled = {"temperature scaling": row(0.2)}
    runs = [
        seed(0, {"MAP": row(0.2), "MC dropout": row(0.1, seconds=4.0)} | scaled),
        seed(1, {"MAP": row(0.4)} | scaled, [("MC dropout", "ValueError: no")]),
    ]
    *_, map_row, swag_row, _, _, missing = table(runs).splitlines()
    assert map_row == (
        "| MAP | 0.300 ± 0.100 | 0.150 ± 0.050 | 90.00 ± 0.00 | 2.0 ± 0.0 | 2.0 ± 0.0 "
        "| 0.100 ± 0.000 | 2.00 | 1.0 | 4.0 | 1.0 | +0.050 ± 0.050 |"
    )
    assert swag_row.startswith(
        "| MC dropout (1 seeds) | 0.100 | 0.050 | 90.00 | 2.0 | 2.0 | 0.100 |"
    )
    assert missing == "Left out: MC dropout (ValueError: no)."


def test_a_run_measures_every_row_but_of_a_rival_that_fails(monkeypatch, capsys):
    def fails(*arguments):
        raise NotImplementedError("graphs")

    tiny = replace(PROBLEMS["digits"], make_model=lambda: MLP(64, (6,)))
    monkeypatch.setitem(PROBLEMS, "digits", tiny)
    monkeypatch.setattr(rivals, "laplace_torch", fails)
    config = Config(epochs=4, samples=2, members=2, weight_decays=(5e-4, 5e-2), repetitions=1)
    found = predictive_rivals.run(config)
    rows = found["rows"]
    assert found["failed"] == dict.fromkeys(
        ("laplace-torch", "laplace-torch, last layer"), "NotImplementedError: graphs"
    )
    assert "digits_0: laplace-torch" in capsys.readouterr().err
    assert len(rows) == 12
    assert found["num_examples"] == {"train": 629, "validation": 270, "test": 898}
    # Temperature scaling as a row and as a column are one thing.
    scaled, raw = rows["temperature scaling"], rows["MAP, chosen weight decay"]
    for name, value in raw["tempered"].items():
        assert scaled["metrics"][name] == pytest.approx(value, rel=1e-3)
    assert scaled["temperature"] == pytest.approx(1.0, abs=1e-2)
    assert raw["search_seconds"] > 0 < raw["prediction_seconds"]
    for name in ("probit", "mc", "probit, last layer"):
        plain, calibrated = rows[f"marglik, {name}"], rows[f"marglik, {name}, calibrated"]
        assert calibrated["held_out"]["cls/NLL"] <= plain["held_out"]["cls/NLL"] + 1e-6
        assert calibrated["search_seconds"] > 0 == plain["search_seconds"]
        # Held-out data has hardly more to say than it has said.
        assert calibrated["temperature"] == pytest.approx(1.0, abs=0.15)
