"""The table of rivals: each row is measured as it says, and tables are made from the JSON alone."""

import json
from dataclasses import replace

import pytest

from experiments.options import SHIPPED
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
    runs = [
        seed(0, {"MAP": row(0.2), "SWAG": row(0.1, seconds=4.0)}),
        seed(1, {"MAP": row(0.4)}, [("SWAG", "ValueError: no")]),
    ]
    *_, map_row, swag_row, _, missing = table(runs).splitlines()
    assert map_row == (
        "| MAP | 0.300 ± 0.100 | 0.150 ± 0.050 | 90.00 ± 0.00 | 2.0 ± 0.0 | 2.0 ± 0.0 "
        "| 0.100 ± 0.000 | 2.00 | 1.0 | 4.0 | 1.0 |"
    )
    assert swag_row == (
        "| SWAG (1 seeds) | 0.100 | 0.050 | 90.00 | 2.0 | 2.0 | 0.100 | 2.00 | 2.0 | 8.0 | 2.0 |"
    )
    assert missing == "Left out: SWAG (ValueError: no)."


def test_differences_from_temperature_scaling_are_paired():
    rows = [{"MAP": row(a), "temperature scaling": row(b)} for a, b in ((0.2, 0.1), (0.4, 0.1))]
    lines = table([seed(i, own) for i, own in enumerate(rows)]).splitlines()
    assert "| NLL, tempered − temperature scaling |" in lines[4]
    assert lines[-2].endswith("| +0.100 ± 0.050 |")
    assert lines[-1].endswith("| +0.000 ± 0.000 |")


def test_a_run_measures_every_row_but_of_a_rival_that_fails(monkeypatch, capsys):
    def fails(*arguments):
        raise NotImplementedError("graphs")

    tiny = replace(PROBLEMS["digits"], make_model=lambda: MLP(64, (6,)))
    monkeypatch.setitem(PROBLEMS, "digits", tiny)
    monkeypatch.setattr(rivals, "ivon", fails)
    config = Config(epochs=4, samples=2, members=2, weight_decays=(5e-4, 5e-2), repetitions=1)
    found = predictive_rivals.run(config)
    rows = found["rows"]
    assert found["failed"] == {"IVON": "NotImplementedError: graphs"}
    assert "digits_0: IVON" in capsys.readouterr().err
    assert len(rows) == 15 and "ivon-opt" in found["versions"]
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
    # Our rows alone: the same again, beside the rivals' as they were.
    before = json.loads(json.dumps(found))
    for row in before["rows"].values():
        row["prediction_seconds"] *= 3
    del before["rows"]["marglik, mc"]
    before["rows"]["marglik, probit"]["metrics"] = {}
    again = predictive_rivals.our_rows_again(before)["rows"]
    assert set(again) == set(rows)
    for name, row in again.items():
        for key, value in rows[name]["metrics"].items():
            assert row["metrics"][key] == pytest.approx(value, rel=1e-5), (name, key)
        if not name.startswith("marglik"):
            assert row == before["rows"][name]
    before["rows"]["MAP"]["metrics"]["cls/NLL"] += 0.1
    with pytest.raises(ValueError, match="code or data have changed"):
        predictive_rivals.our_rows_again(before)


def test_the_readme_has_the_shipped_table():
    """Of digits all rows; of the other problems some, and these not with all columns."""
    readme = (SHIPPED.parent / "README.md").read_text()
    _, digits, *others = (SHIPPED / "predictive_rivals" / "table.md").read_text().split("## ")
    for line in digits.splitlines()[1:]:
        assert line in readme, line
    assert others
    for shipped in others:
        title, *lines = shipped.splitlines()
        excerpt = readme.split(f"**{title}**")[1].split("\n\n")[1].splitlines()[2:]
        assert len(excerpt) > 8
        for row in excerpt:
            name, *cells = row.strip("| ").split(" | ")
            (whole,) = (line for line in lines if line.startswith(f"| {name} |"))
            assert set(cells) <= set(whole.strip("| ").split(" | ")), row
