"""The table of metrics, and numbers as text."""

import math

import pytest

from marglik.report.contents import read_runs
from marglik.report.tables import (
    differences_table,
    duration,
    number,
    percentage,
    summary_table,
)
from tests.marglik.report.fabricate import changed, write_run


def of_predictives(folder, metrics, data="digits"):
    """A run whose evaluation has these metrics by predictive."""
    write_run(folder)
    found = {name: {"metrics": values} for name, values in metrics.items()}
    changed(folder / "evaluation.json", lambda evaluation: evaluation.update(predictives=found))
    changed(folder / "results.json", lambda results: results.update(data=data))
    return folder


def rows_of(*folders):
    return {row.header: row for row in summary_table(read_runs(folders)).rows}


def test_best_of_a_row_is_by_its_direction(tmp_path):
    metrics = {
        "MAP": {"test/cls/NLL": 0.2, "test/cls/accuracy": 0.97, "test/cal/coverage90": 0.7},
        "A": {"test/cls/NLL": 0.1, "test/cls/accuracy": 0.96, "test/cal/coverage90": 0.88},
        "B": {"test/cls/NLL": 0.3, "test/cls/accuracy": 0.95, "test/cal/coverage90": 0.99},
    }
    rows = rows_of(of_predictives(tmp_path / "run", metrics))
    nll, accuracy = rows["Negative log-likelihood"], rows["Accuracy"]
    assert (nll.cells, nll.best) == (["0.2000", "0.1000", "0.3000"], {1})
    assert nll.detail == "nats per example, lower is better"
    assert (accuracy.cells, accuracy.best) == (["97.00", "96.00", "95.00"], {0})
    assert accuracy.detail == "%, higher is better"
    coverage = rows["Coverage of the 90 % interval"]
    assert (coverage.best, coverage.detail) == ({1}, "%, best at 90 %")
    assert rows["Test set"].cells == ()


def test_ties_missing_values_and_unknown_metrics(tmp_path):
    metrics = {
        "A": {"test/cls/NLL": 0.1, "test/cls/Brier": 0.2, "test/my/metric": 3.0},
        "B": {"test/cls/NLL": 0.1, "test/cls/Brier": 0.2, "test/my/metric": 4.0},
        "C": {"test/cls/NLL": 0.5, "test/cls/AURC": math.nan, "shift/noise/1/cls/NLL": 9.0},
    }
    rows = rows_of(of_predictives(tmp_path / "run", metrics))
    assert rows["Negative log-likelihood"].best == {0, 1}
    assert rows["Brier score"].best == frozenset()  # all are the same
    assert rows["Brier score"].cells[2] == "–"
    assert rows["Area under the risk–coverage curve"].cells == ["–", "–", "NaN"]
    unknown = rows["my/metric"]
    assert (unknown.cells, unknown.best, unknown.detail) == (["3.0000", "4.0000", "–"], set(), "")
    assert not any("noise" in header for header in rows)


def test_best_is_among_runs_on_one_data_set(tmp_path):
    """0.1 would be best of all, but is of other data, where nothing else is to compare with."""
    a, b, same, other = (
        of_predictives(tmp_path / name, {"MAP": {"test/cls/NLL": nll}}, data)
        for name, nll, data in (
            ("a", 0.3, "digits"), ("b", 0.2, "digits"), ("c", 0.1, "digits"), ("d", 0.1, "CIFAR-10")
        )
    )  # fmt: skip
    assert rows_of(a, b, other)["Negative log-likelihood"].best == {1}
    assert rows_of(a, b, same)["Negative log-likelihood"].best == {2}
    groups = summary_table(read_runs([a, b, other])).groups
    assert groups == [("", 1), ("a", 1), ("b", 1), ("d", 1)]


def test_differences_with_their_intervals():
    found = {
        "A": {"test/cls/NLL": [-0.02, -0.04, 0.001], "test/cls/accuracy": [0.0028, -0.005, 0.01]}
    }
    (table,) = differences_table("title", found | {"B": {"test/cls/Brier": [0.0, 0.0, 0.0]}})
    assert table.columns[1:] == ["NLL (nats)", "accuracy (percentage points)", "Brier score"]
    assert table.rows[0].cells == ["−0.0200", "+0.28", "–"]
    assert table.rows[0].small == ["−0.0400 to 0.0010", "−0.50 to 1.00", ""]
    assert differences_table("title", {"A": {"test/cal/ECE": [0.0, 0.0, 0.0]}}) == []


NUMBERS = {
    None: "–", 1234567: "1,234,567", -0.75804: "−0.758", 0.00012345: "1.23e−04", 12345.6: "12,346",
    0.0: "0", math.inf: "∞", -math.inf: "−∞", math.nan: "NaN",
}  # fmt: skip
DURATIONS = {
    None: "–", 0.0123: "12 ms", 10.75: "10.8 s", 125.4: "2 min 5 s", 7384.0: "2 h 3 min",
}  # fmt: skip


@pytest.mark.parametrize(
    ("show", "texts"),
    [(number, NUMBERS), (duration, DURATIONS), (percentage, {0.97214: "97.21 %", None: "–"})],
)
def test_numbers_as_text(show, texts):
    assert [show(value) for value in texts] == list(texts.values())
