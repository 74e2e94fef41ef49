"""Charts hold the runs' numbers, have a table, are valid for plotly, and can be told apart."""

import json

import pytest
from scipy import stats

from marglik.report.charts import SERIES, Chart
from marglik.report.contents import read_runs
from marglik.report.sections import SECTIONS, Note
from tests.marglik.report.fabricate import CONFIG, NUM_DATA, changed, write_fit, write_run

REDUCE = {"curvature": CONFIG["curvature"] | {"kfac_approx": "reduce"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    folders = {
        "one": [write_run(root / "one")],
        "two": [write_run(root / "a"), write_run(root / "b", seed=1, config=REDUCE)],
        "deep": [write_run(root / "deep", layers=50, evaluation=None)],
        "fit": [write_fit(root / "fit")],
        "mixed": [root / "fit", root / "deep", root / "one"],
        "regression": [write_run(root / "regression", evaluation="regression")],
    }
    return {case: read_runs(paths) for case, paths in folders.items()}


@pytest.fixture(scope="module")
def charts(runs):
    """(case, section) -> its charts."""
    return {(case, id): charts_of(runs[case], id) for case in runs for id in SECTIONS}


def charts_of(runs, section):
    lists = [block for block in SECTIONS[section](runs) if isinstance(block, list)]
    return [chart for block in lists for chart in block]


def named(chart):
    """Name -> the first trace that has it."""
    return {trace.name: trace for trace in reversed(chart.figure.data)}


def ends_of(values, bars):
    """Lower and upper ends of error bars."""
    pairs = zip(values, bars.arrayminus, bars.array, strict=True)
    return [end for v, below, above in pairs for end in (v - below, v + above)]


def wilson(right, count):
    return list(stats.binomtest(right, count).proportion_ci(method="wilson"))


def test_every_chart_has_json_and_a_full_table(charts):
    """Plotly's own constructors have refused what it cannot draw."""
    found = [chart for of_section in charts.values() for chart in of_section]
    assert len(found) > 60 and all(isinstance(chart, Chart) for chart in found)
    for chart in found:
        figure = json.loads(chart.json, parse_constant=pytest.fail)
        assert figure["data"] and "template" not in figure["layout"]
        assert chart.table.rows and chart.description
        assert {len(row.cells) + 1 for row in chart.table.rows} == {len(chart.table.columns)}


def test_evidence_and_loss(charts, runs):
    evidence, loss = charts["one", "curves"]
    (run,) = runs["one"]
    after, before = named(evidence)["after the update"], named(evidence)["before the update"]
    assert after.x == before.x == (5, 10, 15, 20, 25, 30, 35, 40)
    assert after.y == tuple(update["evidence"] / NUM_DATA for update in run.updates)
    assert before.y == tuple(update["evidence_before"] / NUM_DATA for update in run.updates)
    assert after.marker.symbol == (*["circle"] * 7, "star")  # epoch 40 was kept
    assert evidence.table.columns[1:] == [str(epoch) for epoch in after.x]
    assert evidence.table.rows[1].cells[0] == f"{after.y[0]:.4f}".replace("-", "−")
    assert [*named(loss)] == ["loss and weight decay", "loss"]
    assert loss.figure.layout.yaxis.type == "log"
    assert len(loss.table.columns) == 22 and loss.table.columns[-1] == "40"  # of forty epochs


def test_several_runs_are_overlaid_in_colours_of_their_own(charts):
    for chart in charts["two", "curves"]:
        assert [trace.name for trace in chart.figure.data] == ["expand", "reduce"]
        assert [trace.line.color for trace in chart.figure.data] == [*SERIES[:2]]
    # Those of the runs' positions, though the first has no log.
    traces = charts["mixed", "curves"][0].figure.data
    assert [(trace.name, trace.line.color) for trace in traces] == [
        ("deep", SERIES[1]), ("one", SERIES[2])
    ]  # fmt: skip


def test_weight_decays_and_effective_parameters(charts, runs):
    (chart,) = charts["deep", "weight-decay"]
    lines, (run,) = chart.figure.data, runs["deep"]
    assert len(lines) == 50 == len({line.line.color for line in lines})
    assert lines[7].x == (0, 5, 10, 15, 20, 25, 30, 35, 40)
    decays = [update["weight_decay"][lines[7].name] for update in run.updates]
    assert lines[7].y == (5e-4, *decays)
    low, high = chart.figure.layout.yaxis.range
    values = [value for line in lines for value in line.y]
    assert 10**low < min(values) and max(values) < 10**high
    final, first, second = charts["two", "weight-decay"]
    assert first.figure.layout.yaxis.range == second.figure.layout.yaxis.range
    assert [trace.name for trace in final.figure.data] == ["expand", "reduce"]
    (chart,) = charts["fit", "effective"]
    assert named(chart)["all parameters"].x == (150, 6, 2400, 16)
    assert named(chart)["effective parameters"].x == (20.0, 3.0, 300.0, 0.0)
    # A logarithmic axis has no place for 0, the table has.
    row = chart.table.rows[1]
    assert (row.cells[0], row.small[0], row.cells[3]) == ("20", "13.3 %", "0")


def test_time_adds_up_to_the_total(charts, runs):
    (chart,) = charts["one", "time"]
    seconds = {trace.name: trace.x[0] for trace in chart.figure.data}
    assert list(seconds)[0] == "training steps" and list(seconds)[-1] == "everything else"
    assert seconds["training steps"] == pytest.approx(40 * 0.05)
    assert seconds["curvature pass"] == pytest.approx(8 * 0.22)
    assert seconds["baseline (initial weight decay)"] == 2.0
    assert sum(seconds.values()) == pytest.approx(runs["one"][0].results["seconds"])
    assert [*chart.table.rows[0].cells, *chart.table.rows[0].small] == ["2.0 s", "18.7 %"]


def test_reliability_of_classes_and_of_a_regression(charts, runs):
    (chart,) = charts["one", "reliability"]
    made = runs["one"][0].evaluation["predictives"]["MAP"]["reliability"]
    curve = named(chart)["MAP"]
    assert list(curve.x) == made["confidence"] and list(curve.y) == made["accuracy"]
    assert made["counts"].count(0) == list(curve.y).count(None) > 0  # empty bins are gaps
    ends = ends_of([value or 0.0 for value in curve.y], curve.error_y)
    for i, (accuracy, n) in enumerate(zip(curve.y, made["counts"], strict=True)):
        if n:
            assert ends[2 * i : 2 * i + 2] == pytest.approx(wilson(round(accuracy * n), n))
    assert chart.table.columns[-1] == "0.933–1.000"
    assert f"{made['counts'][-1]} predictions" in chart.table.rows[0].small[-1]
    (chart,) = charts["regression", "reliability"]
    curve = named(chart)["Laplace"]
    assert curve.y == tuple(level**1.1 for level in curve.x)
    ends = [end for share in curve.y for end in wilson(round(200 * share), 200)]
    assert ends_of(curve.y, curve.error_y) == pytest.approx(ends)


def test_predictives_of_several_runs_have_charts_of_their_own(charts, runs, tmp_path):
    names = ["MAP", "Laplace, probit", "Laplace, mc"]
    assert [chart.title for chart in charts["two", "reliability"]] == names
    legend = [t.name for t in charts["two", "reliability"][0].figure.data]
    assert legend == ["calibrated", "expand", "reduce"]
    # Runs with other bins have a chart more.
    other = write_run(tmp_path / "other", config=REDUCE)
    bins = {"edges": [0, 1], "counts": [3], "confidence": [0.5], "accuracy": [0.6]}
    change = {"reliability": bins}
    changed(other / "evaluation.json", lambda e: e["predictives"]["MAP"].update(change))
    found = charts_of(read_runs([runs["one"][0].folder, other]), "reliability")
    assert [chart.title for chart in found].count("MAP") == 2


def test_errors_and_classes_with_the_most(charts, runs, tmp_path):
    risk, classes = charts["one", "errors"]
    made = runs["one"][0].evaluation["predictives"]
    assert [trace.name for trace in risk.figure.data] == list(made)
    assert list(risk.figure.data[0].y) == made["MAP"]["risk_coverage"]["risk"]
    assert (risk.table.columns[-1], risk.table.rows[0].cells[-1]) == ("1", "12.50 %")
    # MAP and probit predict the same classes.
    first, second = classes.figure.data
    assert (first.name, second.name) == ("MAP; Laplace, probit", "Laplace, mc")
    assert first.x == (1, 1, 30 / 32, *[1] * 7) and second.x[0] == 30 / 33
    assert ends_of(second.x, second.error_x)[:2] == pytest.approx(wilson(30, 33))
    assert classes.table.rows[0].small[2].startswith("30 of 32, 95 %: ")

    def widen(evaluation):
        evaluation["classes"] = [f"class {i}" for i in range(100)]
        right = [9 - i % 7 for i in range(99)] + [0]
        for entry in evaluation["predictives"].values():
            entry["classes"] = {"counts": [9] * 99 + [0], "right": right}

    run = write_run(tmp_path / "run")
    changed(run / "evaluation.json", widen)
    _, chart = charts_of(read_runs([run]), "errors")
    assert chart.title == "Accuracy by class: the 30 of 100 with the most errors"
    shown = [int(column.split()[1]) for column in chart.table.columns[1:]]
    assert shown == sorted(shown) and {i % 7 for i in shown} == {4, 5, 6}


def test_entropy_and_shifts(charts, runs):
    roc, *found = charts["one", "entropy"]
    made = runs["one"][0].evaluation["predictives"]
    assert roc.title == "ROC curve: noise"
    assert [trace.name for trace in roc.figure.data] == ["chance", *made]
    assert list(roc.figure.data[1].y) == made["MAP"]["roc"]["tpr"]
    bars = found[0].figure.data
    assert [trace.name for trace in bars] == ["test set", "out of distribution: noise"]
    assert [sum(trace.y) for trace in bars] == pytest.approx([1, 1])
    assert len({chart.figure.layout.yaxis.range for chart in found}) == 1
    found = charts["two", "shift"]
    metrics = runs["two"][0].evaluation["predictives"]["MAP"]["metrics"]
    shifted = [metrics[f"shift/noise/{severity}/cls/NLL"] for severity in range(1, 6)]
    first = found[0].figure.data[0]
    assert len(found) == 8 and found[0].title == "Negative log-likelihood: noise"
    assert (first.name, first.x) == ("expand: MAP", (0, 1, 2, 3, 4, 5))
    assert list(first.y) == [metrics["test/cls/NLL"], *shifted]


@pytest.mark.parametrize(
    ("case", "section", "ending"),
    [
        ("deep", "reliability", "deep has no reliability diagram. To get it:"),
        ("regression", "entropy", "regression has no predictive entropy."),
        ("regression", "shift", "regression has no shifted test sets. For images:"),
        ("fit", "time", "fit has no times."),
        ("one", "reliability", None),
    ],
)
def test_what_is_missing_is_told(case, section, ending, runs):
    notes = [block.text for block in SECTIONS[section](runs[case]) if isinstance(block, Note)]
    assert notes == [] if ending is None else len(notes) == 1 and notes[0].endswith(ending)
