"""Charts hold the runs' numbers, have a table, are valid for plotly, and can be told apart."""

import json
import math

import pytest
from plotly.colors import unlabel_rgb
from scipy import stats

from marglik.report.charts import DARK, SERIES, Chart
from marglik.report.contents import read_runs
from marglik.report.sections import SECTIONS, Note
from tests.marglik.report.fabricate import CONFIG, NUM_DATA, changed, write, write_fit, write_run

REDUCE = {"curvature": CONFIG["curvature"] | {"kfac_approx": "reduce"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {
        "one": [write_run(root / "one")],
        "two": [write_run(root / "a"), write_run(root / "b", seed=1, config=REDUCE)],
        "deep": [write_run(root / "deep", layers=50, evaluation=None)],
        "fit": [write_fit(root / "fit")],
        "mixed": [root / "fit", root / "deep", root / "one"],
        "regression": [write_run(root / "regression", evaluation="regression")],
    }


@pytest.fixture(scope="module")
def charts(folders):
    """(case, section) -> its charts."""
    runs = {case: read_runs(paths) for case, paths in folders.items()}
    return {(case, id): charts_of(runs[case], id) for case in runs for id in SECTIONS}


def charts_of(runs, section):
    lists = [block for block in SECTIONS[section](runs) if isinstance(block, list)]
    return [chart for block in lists for chart in block]


def notes_of(folders, section):
    blocks = SECTIONS[section](read_runs(folders))
    return [block.text for block in blocks if isinstance(block, Note)]


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


def test_evidence_of_one_run(charts, folders):
    evidence, loss = charts["one", "curves"]
    (run,) = read_runs(folders["one"])
    after, before = named(evidence)["after the update"], named(evidence)["before the update"]
    assert after.x == before.x == (5, 10, 15, 20, 25, 30, 35, 40)
    assert after.y == tuple(update["evidence"] / NUM_DATA for update in run.updates)
    assert before.y == tuple(update["evidence_before"] / NUM_DATA for update in run.updates)
    assert after.marker.symbol == (*["circle"] * 7, "star")  # epoch 40 was kept
    assert [row.header for row in evidence.table.rows] == [str(epoch) for epoch in after.x]
    assert evidence.table.rows[0].cells[1] == f"{after.y[0]:.4f}".replace("-", "−")
    assert [*named(loss)] == ["loss and weight decay", "loss"]
    assert loss.figure.layout.yaxis.type == "log"


def test_several_runs_are_overlaid_in_colours_of_their_own(charts):
    for chart in charts["two", "curves"]:
        assert [trace.name for trace in chart.figure.data] == ["expand", "reduce"]
        assert [trace.line.color for trace in chart.figure.data] == [*SERIES[:2]]
    # Those of the runs' positions, though the first has no log.
    traces = charts["mixed", "curves"][0].figure.data
    assert [(trace.name, trace.line.color) for trace in traces] == [
        ("deep", SERIES[1]), ("one", SERIES[2])
    ]  # fmt: skip


def test_weight_decays_of_fifty_layers_of_ten_and_of_two_runs(charts, folders):
    (chart,) = charts["deep", "weight-decay"]
    *lines, bar = chart.figure.data
    assert len(lines) == len(chart.highlight) == 50
    assert bar.marker.showscale and not chart.figure.layout.showlegend
    (run,), name = read_runs(folders["deep"]), lines[7].name
    assert lines[7].x == (0, 5, 10, 15, 20, 25, 30, 35, 40)
    assert lines[7].y == (5e-4, *(update["weight_decay"][name] for update in run.updates))
    assert len({line.line.color for line in lines}) == 50
    low, high = chart.figure.layout.yaxis.range
    values = [value for line in lines for value in line.y]
    assert 10**low < min(values) and max(values) < 10**high
    assert chart.table.columns[:3] == ["Group", "epoch 0", "epoch 5"]
    (few,) = charts["one", "weight-decay"]
    assert len(few.figure.data) == 10 and few.figure.layout.showlegend
    final, first, second = charts["two", "weight-decay"]
    assert first.figure.layout.yaxis.range == second.figure.layout.yaxis.range
    assert [trace.name for trace in final.figure.data] == ["expand", "reduce"]


def test_effective_parameters_of_a_fit(charts):
    (chart,) = charts["fit", "effective"]
    assert named(chart)["effective parameters"].x == (20.0, 3.0, 300.0, 0.0)
    # A logarithmic axis has no place for 0, the table has.
    cells = [[*row.cells, *row.small] for row in chart.table.rows]
    assert cells[0] == ["150", "20.0", "", "13.3 %"] and cells[3][:2] == ["16", "0.0"]


def test_time_adds_up_to_the_total(charts, folders):
    (chart,) = charts["one", "time"]
    seconds = {trace.name: trace.x[0] for trace in chart.figure.data}
    assert list(seconds)[0] == "training steps" and list(seconds)[-1] == "everything else"
    assert seconds["training steps"] == pytest.approx(40 * 0.05)
    assert seconds["curvature pass"] == pytest.approx(8 * 0.22)
    assert seconds["baseline (initial weight decay)"] == 2.0
    assert sum(seconds.values()) == pytest.approx(read_runs(folders["one"])[0].results["seconds"])
    assert [*chart.table.rows[0].cells, *chart.table.rows[0].small] == ["2.0 s", "18.7 %"]


def test_reliability_of_one_run(charts, folders):
    (chart,) = charts["one", "reliability"]
    made = read_runs(folders["one"])[0].evaluation["predictives"]["MAP"]["reliability"]
    curve, bars = (t for t in chart.figure.data if t.name == "MAP")
    assert list(curve.x) == made["confidence"] and list(curve.y) == made["accuracy"]
    assert made["counts"].count(0) == list(curve.y).count(None) > 0  # empty bins are gaps
    assert sum(bars.y) == pytest.approx(1)
    ends = ends_of([value or 0.0 for value in curve.y], curve.error_y)
    expected = [wilson(round(a * n), n) for a, n in zip(curve.y, made["counts"], strict=True) if n]
    filled = [2 * i + k for i, n in enumerate(made["counts"]) if n for k in (0, 1)]
    assert [ends[i] for i in filled] == pytest.approx([end for pair in expected for end in pair])
    few, most = ([ends[2 * i : 2 * i + 2] for i in range(15) if made["counts"][i] == n]
                 for n in (min(filter(None, made["counts"])), max(made["counts"])))  # fmt: skip
    assert few[0][1] - few[0][0] > 3 * (most[0][1] - most[0][0])
    last = chart.table.rows[-1]
    assert last.header == "0.933–1.000" and f"{made['counts'][-1]} predictions" in last.small[0]


def test_predictives_of_several_runs_have_charts_of_their_own(charts, folders, tmp_path):
    names = ["MAP", "Laplace, probit", "Laplace, mc"]
    titles = [chart.title for chart in charts["two", "reliability"]]
    assert titles == names
    legend = [t.name for t in charts["two", "reliability"][0].figure.data if t.type == "scatter"]
    assert legend == ["calibrated", "expand", "reduce"]
    titles = [chart.title for chart in charts["two", "errors"]]
    of = ("Error rate by coverage", "Accuracy by class")
    assert titles == [f"{what}: {name}" for what in of for name in names]
    # Runs with other bins have a chart more.
    other = write_run(tmp_path / "other", config=REDUCE)
    bins = {"edges": [0, 1], "counts": [3], "confidence": [0.5], "accuracy": [0.6]}
    change = {"reliability": bins}
    changed(other / "evaluation.json", lambda e: e["predictives"]["MAP"].update(change))
    found = charts_of(read_runs([*folders["one"], other]), "reliability")
    assert [chart.title for chart in found].count("MAP") == 2


def test_intervals_of_a_regression(charts):
    (chart,) = charts["regression", "reliability"]
    curve = named(chart)["Laplace"]
    assert curve.y == tuple(level**1.1 for level in curve.x)
    ends = [end for share in curve.y for end in wilson(round(200 * share), 200)]
    assert ends_of(curve.y, curve.error_y) == pytest.approx(ends)


def test_errors_of_one_run(charts, folders):
    risk, classes = charts["one", "errors"]
    made = read_runs(folders["one"])[0].evaluation["predictives"]
    assert [trace.name for trace in risk.figure.data] == list(made)
    assert list(risk.figure.data[0].y) == made["MAP"]["risk_coverage"]["risk"]
    assert (risk.table.rows[-1].header, risk.table.rows[-1].cells[0]) == ("100 %", "12.50 %")
    # MAP and probit predict the same classes.
    first, second = classes.figure.data
    assert (first.name, second.name) == ("MAP; Laplace, probit", "Laplace, mc")
    assert first.x == (1, 1, 30 / 32, *[1] * 7) and second.x[0] == 30 / 33
    assert ends_of(second.x, second.error_x)[:2] == pytest.approx(wilson(30, 33))
    row = classes.table.rows[2]
    assert row.cells[0] == "93.8 %" and row.small[0].startswith("30 of 32, 95 %: ")


def test_of_many_classes_those_with_the_most_errors_are_shown(tmp_path):
    run = write_run(tmp_path / "run")

    def widen(evaluation):
        evaluation["classes"] = [f"class {i}" for i in range(100)]
        right = [9 - i % 7 for i in range(99)] + [0]
        for entry in evaluation["predictives"].values():
            entry["classes"] = {"counts": [9] * 99 + [0], "right": right}

    changed(run / "evaluation.json", widen)
    _, chart = charts_of(read_runs([run]), "errors")
    assert chart.title == "Accuracy by class: the 30 of 100 with the most errors"
    shown = [int(row.header.split()[1]) for row in chart.table.rows]
    assert shown == sorted(shown) and len(shown) == 30
    assert {i % 7 for i in shown} == {4, 5, 6}
    assert all(i in shown for i in range(99) if i % 7 in (5, 6))


def test_entropy_of_both_data_as_shares(charts, folders):
    roc, *found = charts["one", "entropy"]
    made = read_runs(folders["one"])[0].evaluation["predictives"]
    assert roc.title == "ROC curve: noise"
    assert [trace.name for trace in roc.figure.data] == ["chance", *made]
    assert list(roc.figure.data[1].y) == made["MAP"]["roc"]["tpr"]
    assert [chart.title for chart in found] == ["MAP", "Laplace, probit", "Laplace, mc"]
    bars = found[0].figure.data
    assert [trace.name for trace in bars] == ["test set", "out of distribution: noise"]
    assert [sum(trace.y) for trace in bars] == pytest.approx([1, 1])
    assert len({chart.figure.layout.yaxis.range for chart in found}) == 1


def test_shift_starts_at_the_test_set(charts, folders):
    found = charts["two", "shift"]
    metrics = read_runs(folders["two"])[0].evaluation["predictives"]["MAP"]["metrics"]
    shifted = [metrics[f"shift/noise/{severity}/cls/NLL"] for severity in range(1, 6)]
    first = found[0].figure.data[0]
    assert len(found) == 8 and found[0].title == "Negative log-likelihood: noise"
    assert (first.name, first.x) == ("expand: MAP", (0, 1, 2, 3, 4, 5))
    assert list(first.y) == [metrics["test/cls/NLL"], *shifted]
    assert [t.line.dash for t in found[0].figure.data] == ["solid", "dash", "dot"] * 2


@pytest.mark.parametrize(
    ("case", "section", "ending"),
    [
        ("deep", "reliability", "deep has no evaluation.json, which holds reliability. To get it:"),
        ("regression", "entropy", "regression has no predictive entropy."),
        ("regression", "shift", "regression has no shifted test sets. For images:"),
        ("fit", "time", "a posterior that was fitted to a trained network has no epochs."),
        ("one", "reliability", None),
    ],
)
def test_what_is_missing_is_told(case, section, ending, folders):
    notes = notes_of(folders[case], section)
    assert notes == [] if ending is None else len(notes) == 1 and notes[0].endswith(ending)


def test_numbers_that_json_lacks_are_gaps(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "log.jsonl").read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"loss": math.nan})
    write(folder / "log.jsonl", "\n".join(lines))
    chart = charts_of(read_runs([folder]), "curves")[1]
    assert json.loads(chart.json)["data"][0]["y"][2] is None
    assert chart.table.rows[2].cells[0] == "NaN"


def contrast(first, second):
    """Contrast ratio of two colours (WCAG 2.2, "relative luminance" and "contrast ratio")."""

    def luminance(color):
        if color.startswith("#"):
            shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        else:
            shares = [part / 255 for part in unlabel_rgb(color)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted([luminance(first), luminance(second)])
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_in_both_themes():
    white, black = "#ffffff", "#16191f"  # of page.css
    assert contrast(white, "#000000") == pytest.approx(21) and DARK[white] == black
    for light, dark in DARK.items():
        if light != white:
            assert contrast(light, white) >= 3 and contrast(dark, black) >= 3, (light, dark)
    assert contrast("#f0e442", white) < 3  # Okabe and Ito's yellow would not do
