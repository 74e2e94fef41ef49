"""The table of metrics, and numbers as text."""

import json
import math

import pytest

from marglik.report.contents import read_runs
from marglik.report.metrics import predictives, summary_table
from marglik.report.tables import duration, number, percentage
from tests.marglik.report.fabricate import write, write_run


def of_predictives(tmp_path, metrics, name="run", data="digits"):
    """A run whose evaluation has these metrics by predictive."""
    folder = write_run(tmp_path / name)
    path = folder / "evaluation.json"
    content = json.loads(path.read_text())
    content["predictives"] = {key: {"metrics": value} for key, value in metrics.items()}
    write(path, content)
    results = json.loads((folder / "results.json").read_text()) | {"data": data}
    write(folder / "results.json", results)
    return folder


def rows_of(table):
    return {row.header: row for row in table.rows}


def test_best_of_a_row_is_by_its_direction(tmp_path):
    metrics = {
        "MAP": {"test/cls/NLL": 0.2, "test/cls/accuracy": 0.97, "test/cal/coverage90": 0.7},
        "A": {"test/cls/NLL": 0.1, "test/cls/accuracy": 0.96, "test/cal/coverage90": 0.88},
        "B": {"test/cls/NLL": 0.3, "test/cls/accuracy": 0.95, "test/cal/coverage90": 0.99},
    }
    rows = rows_of(summary_table(read_runs([of_predictives(tmp_path, metrics)])))
    nll, accuracy = rows["Negative log-likelihood"], rows["Accuracy"]
    assert (nll.cells, nll.best) == (["0.2000", "0.1000", "0.3000"], {1})
    assert nll.detail == "nats per example, lower is better"
    assert (accuracy.cells, accuracy.best) == (["97.00", "96.00", "95.00"], {0})
    assert accuracy.detail == "%, higher is better"
    coverage = rows["Coverage of the 90 % interval"]
    assert (coverage.best, coverage.detail) == ({1}, "%, best at 90 %")
    assert rows["Test set"].cells == ()


def test_intervals_stand_under_their_values(tmp_path):
    folder = write_run(tmp_path / "run")
    results = json.loads((folder / "results.json").read_text())
    for kind in ("metrics", "intervals"):
        results[kind]["initial, MAP"] = results[kind]["learned, MAP"]
    write(folder / "results.json", results)
    row = rows_of(summary_table(read_runs([folder])))["Accuracy"]
    assert row.small == ["94.32–98.14"] * 3 + ["94.95–98.48"]
    assert rows_of(summary_table(read_runs([folder])))["Brier score"].small == [""] * 4


def test_ties_missing_values_and_unknown_metrics(tmp_path):
    metrics = {
        "A": {"test/cls/NLL": 0.1, "test/cls/Brier": 0.2, "test/my/metric": 3.0},
        "B": {"test/cls/NLL": 0.1, "test/cls/Brier": 0.2, "test/my/metric": 4.0},
        "C": {"test/cls/NLL": 0.5, "test/cls/AURC": math.nan, "shift/noise/1/cls/NLL": 9.0},
    }
    rows = rows_of(summary_table(read_runs([of_predictives(tmp_path, metrics)])))
    assert rows["Negative log-likelihood"].best == {0, 1}
    assert rows["Brier score"].best == frozenset()  # all are the same
    assert rows["Brier score"].cells[2] == "–"
    assert rows["Area under the risk–coverage curve"].cells == ["–", "–", "NaN"]
    unknown = rows["my/metric"]
    assert (unknown.cells, unknown.best, unknown.detail) == (
        ["3.0000", "4.0000", "–"],
        frozenset(),
        "",
    )
    assert not any("noise" in header for header in rows)


def test_best_is_among_runs_on_one_data_set(tmp_path):
    """0.1 would be best of all, but is of other data, where nothing else is to compare with."""
    folders = [
        of_predictives(tmp_path, {"MAP": {"test/cls/NLL": 0.3}}, "a"),
        of_predictives(tmp_path, {"MAP": {"test/cls/NLL": 0.2}}, "b"),
        of_predictives(tmp_path, {"MAP": {"test/cls/NLL": 0.1}}, "c", data="CIFAR-10"),
    ]
    table = summary_table(read_runs(folders))
    assert rows_of(table)["Negative log-likelihood"].best == {1}
    assert table.groups == [("", 1), ("a", 1), ("b", 1), ("c", 1)]
    same = [folders[0], folders[1], of_predictives(tmp_path, {"MAP": {"test/cls/NLL": 0.1}}, "d")]
    assert rows_of(summary_table(read_runs(same)))["Negative log-likelihood"].best == {2}


def test_results_stand_in_where_there_is_no_evaluation(tmp_path):
    folder = write_run(tmp_path / "run", evaluation=None)
    results = json.loads((folder / "results.json").read_text())
    results["metrics"]["initial, MAP"] = {"test/cls/NLL": 0.4}
    write(folder / "results.json", results)
    names = [one.name for one in predictives(read_runs([folder]))]
    assert names == ["learned, MAP", "initial, MAP"]
    evaluated = write_run(tmp_path / "evaluated")
    write(evaluated / "results.json", results)
    names = [one.name for one in predictives(read_runs([evaluated]))]
    assert names == ["MAP", "Laplace, probit", "Laplace, mc", "initial, MAP"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (1234567, "1,234,567"),
        (-0.75804, "−0.758"),
        (0.00012345, "1.23e−04"),
        (12345.6, "12,346"),
        (0.0, "0"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "NaN"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_shares_and_durations():
    assert percentage(0.97214) == "97.21 %"
    assert percentage(None) == "–"
    assert [duration(s) for s in (None, 0.0123, 10.75, 125.4, 7384.0)] == [
        "–",
        "12 ms",
        "10.8 s",
        "2 min 5 s",
        "2 h 3 min",
    ]
