"""Charts hold the runs' numbers, are valid for plotly, and can be told apart."""

import json
import math

import plotly.graph_objects as go
import pytest
from matplotlib.colors import to_rgb
from scipy import stats

from marglik.report.charts.chart import plain, series_style, shorten
from marglik.report.charts.colors import BACKGROUNDS, MUTED, SERIES, depth_color
from marglik.report.charts.training import time_parts
from marglik.report.contents import read_runs
from marglik.report.page import SECTIONS
from tests.marglik.report.fabricate import CONFIG, NUM_DATA, write, write_fit, write_run

WHISKERS = ("array", "arrayminus")
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


def charts_of(folders):
    runs = read_runs(folders)
    sections = {section.id: section for section in (make(runs) for make in SECTIONS)}
    return {
        name: [
            chart for block in section.blocks if block.kind == "charts" for chart in block.charts
        ]
        for name, section in sections.items()
    }


def notes_of(folders, section_id):
    runs = read_runs(folders)
    section = next(s for s in (make(runs) for make in SECTIONS) if s.id == section_id)
    return [block.text for block in section.blocks if block.kind == "note"]


def resolved(value, side, key=""):
    """As page.js does: of colours "light|dark" one side."""
    if isinstance(value, dict):
        return {k: resolved(v, side, k) for k, v in value.items()}
    if isinstance(value, list):
        return [resolved(v, side, key) for v in value]
    is_color = key.endswith("color") or key == "colorscale"
    return value.split("|")[side] if is_color and isinstance(value, str) else value


@pytest.mark.parametrize("case", ["one", "two", "deep", "fit", "mixed", "regression"])
def test_plotly_takes_every_figure(case, folders):
    charts = [chart for section in charts_of(folders[case]).values() for chart in section]
    assert charts
    for chart in charts:
        json.dumps(chart.figure, allow_nan=False)
        for side in (0, 1):
            go.Figure(resolved(chart.figure, side))
        with pytest.raises(ValueError, match="color"):
            go.Figure(chart.figure)  # the pairs are no colours
        width = {len(row.cells) + 1 for row in chart.table.rows if row.cells}
        assert width == {len(chart.table.columns)}


def test_evidence_of_one_run(folders):
    chart = charts_of(folders["one"])["curves"][0]
    run = read_runs(folders["one"])[0]
    after = next(trace for trace in chart.traces if trace["name"] == "after the update")
    before = next(trace for trace in chart.traces if trace["name"] == "before the update")
    assert after["x"] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert after["y"] == [update["evidence"] / NUM_DATA for update in run.updates]
    assert before["y"] == [update["evidence_before"] / NUM_DATA for update in run.updates]
    assert after["marker"]["symbol"] == [*["circle"] * 7, "star"]  # epoch 40 was kept
    assert [row.header for row in chart.table.rows] == [str(epoch) for epoch in after["x"]]


def test_several_runs_are_overlaid_in_colours_of_their_own(folders):
    for chart in charts_of(folders["two"])["curves"]:
        assert [trace["name"] for trace in chart.traces] == ["expand", "reduce"]
        assert len({trace["line"]["color"] for trace in chart.traces}) == 2
        assert chart.layout["showlegend"]
    runs = charts_of(folders["mixed"])["curves"][0]
    assert [trace["name"] for trace in runs.traces] == ["deep", "one"]
    colors = [trace["line"]["color"] for trace in runs.traces]
    assert colors == list(SERIES[1:3])  # those of the runs' positions, though the first has none


def test_weight_decay_of_fifty_layers(folders):
    (chart,) = charts_of(folders["deep"])["weight-decay"]
    run = read_runs(folders["deep"])[0]
    *lines, bar = chart.traces
    assert len(lines) == len(chart.highlight) == 50
    assert chart.layout["yaxis"]["type"] == "log" and not chart.layout["showlegend"]
    assert bar["marker"]["showscale"]
    name = lines[7]["name"]
    assert lines[7]["x"] == [0, 5, 10, 15, 20, 25, 30, 35, 40]
    assert lines[7]["y"] == [5e-4, *(update["weight_decay"][name] for update in run.updates)]
    assert len({line["line"]["color"] for line in lines}) == 50
    low, high = chart.layout["yaxis"]["range"]
    values = [value for line in lines for value in line["y"]]
    assert 10**low < min(values) and max(values) < 10**high


def test_few_layers_have_a_legend(folders):
    (chart,) = charts_of(folders["one"])["weight-decay"]
    assert len(chart.traces) == 10 and chart.layout["showlegend"]


def test_two_runs_share_the_axis_of_weight_decay(folders):
    final, first, second = charts_of(folders["two"])["weight-decay"]
    assert first.layout["yaxis"]["range"] == second.layout["yaxis"]["range"]
    assert [trace["name"] for trace in final.traces] == ["expand", "reduce"]


def test_zero_has_no_place_on_a_logarithmic_axis_but_in_the_table(folders):
    (chart,) = charts_of(folders["fit"])["effective"]
    dots = chart.traces[-1]
    assert dots["x"] == [20.0, 3.0, 300.0, None]
    assert chart.table.rows[3].cells == ["16", "0.0", "0.0 %"]
    assert chart.table.rows[0].cells == ["150", "20.0", "13.3 %"]


def test_time_adds_up_to_the_total(folders):
    run = read_runs(folders["one"])[0]
    parts = time_parts(run)
    assert list(parts)[0] == "training steps" and list(parts)[-1] == "everything else"
    assert parts["training steps"] == pytest.approx(40 * 0.05)
    assert parts["curvature pass"] == pytest.approx(8 * 0.22)
    assert parts["baseline (initial weight decay)"] == 2.0
    assert parts["data and checks"] == 1.0 and parts["evaluation"] == 0.25
    assert sum(parts.values()) == pytest.approx(run.results["seconds"])
    (chart,) = charts_of(folders["one"])["time"]
    assert chart.table.rows[0].cells == ["2.0 s", "18.7 %"]


def test_reliability_of_one_run_leaves_empty_bins_out(folders):
    (chart,) = charts_of(folders["one"])["reliability"]
    made = read_runs(folders["one"])[0].evaluation["predictives"]["MAP"]["reliability"]
    curve = next(t for t in chart.traces if t["name"] == "MAP" and t["type"] == "scatter")
    assert curve["x"] == [value for value in made["confidence"] if value is not None]
    bars = next(t for t in chart.traces if t["name"] == "MAP" and t["type"] == "bar")
    assert sum(bars["y"]) == pytest.approx(1)
    assert 0 < made["confidence"].count(None) == 15 - len(curve["x"])
    bins = [(a, n) for a, n in zip(made["accuracy"], made["counts"], strict=True) if n]
    for i, (accuracy, n) in enumerate(bins):
        low, high = stats.binomtest(round(accuracy * n), n).proportion_ci(method="wilson")
        assert curve["error_y"]["arrayminus"][i] == pytest.approx(accuracy - low)
        assert curve["error_y"]["array"][i] == pytest.approx(high - accuracy)
    few = min(range(len(bins)), key=lambda i: bins[i][1])
    most = max(range(len(bins)), key=lambda i: bins[i][1])
    width = [a + b for a, b in zip(*(curve["error_y"][k] for k in WHISKERS), strict=True)]
    assert width[few] > 3 * width[most]


def test_reliability_of_several_runs_has_a_chart_per_predictive(folders):
    charts = charts_of(folders["two"])["reliability"]
    assert [chart.title for chart in charts] == ["MAP", "Laplace, probit", "Laplace, mc"]
    names = [t["name"] for t in charts[0].traces if t["type"] == "scatter"]
    assert names == ["calibrated", "expand", "reduce"]


def test_reliability_of_other_bins_has_a_chart_of_its_own(folders, tmp_path):
    other = write_run(tmp_path / "other", config=REDUCE)
    content = json.loads((other / "evaluation.json").read_text())
    bins = {"edges": [0, 1], "counts": [3], "confidence": [0.5], "accuracy": [0.6]}
    content["predictives"]["MAP"]["reliability"] = bins
    write(other / "evaluation.json", content)
    charts = charts_of([*folders["one"], other])["reliability"]
    assert [chart.title for chart in charts].count("MAP") == 2


def test_intervals_of_a_regression(folders):
    (chart,) = charts_of(folders["regression"])["reliability"]
    curve = next(trace for trace in chart.traces if trace["name"] == "Laplace")
    assert curve["y"] == [level**1.1 for level in curve["x"]]
    k = round(200 * curve["y"][9])
    low, high = stats.binomtest(k, 200).proportion_ci(method="wilson")
    assert curve["y"][9] - curve["error_y"]["arrayminus"][9] == pytest.approx(low)
    assert curve["y"][9] + curve["error_y"]["array"][9] == pytest.approx(high)


def test_errors_of_one_run(folders):
    risk, classes = charts_of(folders["one"])["errors"]
    made = read_runs(folders["one"])[0].evaluation["predictives"]
    assert [trace["name"] for trace in risk.traces] == list(made)
    assert risk.traces[0]["y"] == made["MAP"]["risk_coverage"]["risk"]
    assert risk.table.rows[-1].header == "100 %"
    assert risk.table.rows[-1].cells[0] == "12.50 %"
    # MAP and probit predict the same classes.
    assert [trace["name"] for trace in classes.traces] == ["MAP; Laplace, probit", "Laplace, mc"]
    assert classes.traces[0]["x"] == [1, 1, 30 / 32] + [1] * 7
    assert classes.traces[1]["x"][0] == 30 / 33
    low, _ = stats.binomtest(30, 33).proportion_ci(method="wilson")
    assert classes.traces[1]["error_x"]["arrayminus"][0] == pytest.approx(30 / 33 - low)
    assert classes.table.rows[2].cells[:2] == ["93.8 %", "30 of 32"]


def test_errors_of_several_runs_have_charts_per_predictive(folders):
    charts = charts_of(folders["two"])["errors"]
    assert [chart.title for chart in charts] == [
        f"{what}: {name}"
        for what in ("Error rate by coverage", "Accuracy by class")
        for name in ("MAP", "Laplace, probit", "Laplace, mc")
    ]
    assert [trace["name"] for trace in charts[0].traces] == ["expand", "reduce"]


def test_whiskers_of_sequences_are_doubted(folders, tmp_path):
    run = write_run(tmp_path / "run")
    content = json.loads((run / "evaluation.json").read_text()) | {"num_positions": 640}
    write(run / "evaluation.json", content)
    for section in ("reliability", "errors"):
        assert any("too narrow" in note for note in notes_of([run], section))
        assert not any("too narrow" in note for note in notes_of(folders["one"], section))


def test_of_many_classes_those_with_the_most_errors_are_shown(tmp_path):
    run = write_run(tmp_path / "run")
    content = json.loads((run / "evaluation.json").read_text())
    content["classes"] = [f"class {i}" for i in range(100)]
    for entry in content["predictives"].values():
        entry["classes"] = {"counts": [9] * 99 + [0], "right": [9 - i % 7 for i in range(99)] + [0]}
    write(run / "evaluation.json", content)
    _, chart = charts_of([run])["errors"]
    assert chart.title == "Accuracy by class: the 30 of 100 with the most errors"
    shown = [int(row.header.split()[1]) for row in chart.table.rows]
    assert shown == sorted(shown) and len(shown) == 30
    assert {i % 7 for i in shown} == {5, 6, 4}
    assert all(i in shown for i in range(99) if i % 7 in (5, 6))


def test_entropy_of_both_data_as_shares(folders):
    roc, *charts = charts_of(folders["one"])["entropy"]
    assert roc.title == "ROC curve: noise"
    made = read_runs(folders["one"])[0].evaluation["predictives"]
    assert [trace["name"] for trace in roc.traces] == ["chance", *made]
    assert roc.traces[1]["y"] == made["MAP"]["roc"]["tpr"]
    assert [chart.title for chart in charts] == ["MAP", "Laplace, probit", "Laplace, mc"]
    names = [trace["name"] for trace in charts[0].traces]
    assert names == ["test set", "out of distribution: noise"]
    assert [sum(trace["y"]) for trace in charts[0].traces] == pytest.approx([1, 1])
    assert len({tuple(chart.layout["yaxis"]["range"]) for chart in charts}) == 1


def test_shift_starts_at_the_test_set(folders):
    charts = charts_of(folders["two"])["shift"]
    assert len(charts) == 8
    assert charts[0].title == "Negative log-likelihood: noise"
    names = [trace["name"] for trace in charts[0].traces]
    assert names[0] == "expand: MAP" and names[-1] == "reduce: Laplace, mc"
    metrics = read_runs(folders["two"])[0].evaluation["predictives"]["MAP"]["metrics"]
    shifted = [metrics[f"shift/noise/{severity}/cls/NLL"] for severity in range(1, 6)]
    assert charts[0].traces[0]["x"] == [0, 1, 2, 3, 4, 5]
    assert charts[0].traces[0]["y"] == [metrics["test/cls/NLL"], *shifted]
    assert [t["line"]["dash"] for t in charts[0].traces] == ["solid", "dash", "dot"] * 2


def test_what_is_missing_is_told(folders):
    (note,) = notes_of(folders["deep"], "reliability")
    assert note.endswith("deep has no evaluation.json, which holds reliability. To get it:")
    (note,) = notes_of(folders["regression"], "entropy")
    assert note.endswith("regression has no predictive entropy.")
    (note,) = notes_of(folders["regression"], "shift")
    assert note.endswith("regression has no shifted test sets. For images:")
    (note,) = notes_of(folders["fit"], "time")
    assert "a posterior that was fitted to a trained network has no epochs" in note
    assert notes_of(folders["one"], "reliability") == []


def test_numbers_that_json_lacks_are_gaps(folders, tmp_path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "log.jsonl").read_text().splitlines()
    record = json.loads(lines[2]) | {"loss": math.nan}
    lines[2] = json.dumps(record)
    write(folder / "log.jsonl", "\n".join(lines))
    chart = charts_of([folder])["curves"][1]
    assert chart.figure["data"][0]["y"][2] is None
    assert chart.table.rows[2].cells[0] == "NaN"


def test_names_mean_nothing_to_plotly():
    assert plain("<b>a & b</b>") == "&lt;b&gt;a &amp; b&lt;/b&gt;"
    assert shorten("a" * 26) == "a" * 26
    assert len(shorten("a" * 27)) < 27 and "…" in shorten("a" * 27)


def test_styles_of_many_runs_differ():
    styles = [series_style(position) for position in range(40)]
    looks = {(style["line"]["color"], style["marker"]["symbol"]) for style in styles}
    assert len(looks) == 40


def contrast(first, second):
    """Contrast ratio of two colours (WCAG 2.2, "relative luminance" and "contrast ratio")."""

    def luminance(color):
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)
        ]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted([luminance(first), luminance(second)])
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_in_both_themes():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    depths = [depth_color(step / 20) for step in range(21)]
    for pair in [*SERIES, MUTED, *depths]:
        for color, background in zip(pair.split("|"), BACKGROUNDS.split("|"), strict=True):
            assert contrast(color, background) >= 3, (color, background)
    assert contrast("#f0e442", "#ffffff") < 3  # Okabe and Ito's yellow would not do
