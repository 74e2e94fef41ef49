"""The study of evidences from the training's factors: a small run, and its table."""

import pytest

from experiments.weight_decay import evidence_from_training as study


def test_a_small_run_and_its_table(monkeypatch):
    monkeypatch.setattr(study, "EPOCHS", 10)
    found = study.run(study.Config(100, 0))
    assert set(found["rows"]) == set(study.CASES)
    assert all(row["nll"] > 0 for row in found["rows"].values())
    decays = {name: tuple(row["weight_decay"]) for name, row in found["rows"].items()}
    assert len(set(decays.values())) == 3
    found["config"]["size"] = 400
    found["rows"]["passes"]["processor_seconds"] = 4.0
    found["rows"]["factors every 10 steps"]["processor_seconds"] = 3.0
    rows = study.table([found]).splitlines()[2:]
    assert len(rows) == 3
    assert rows[0].split("|")[3].strip() == "1.00" and rows[0].split("|")[-2].strip() == "1.0"
    assert float(rows[1].split("|")[3]) == pytest.approx(0.75)
