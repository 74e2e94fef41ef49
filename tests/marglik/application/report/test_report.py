"""The page: it has the runs' numbers, fetches nothing, and names do nothing in it."""

import base64
import json
import math
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from scipy import stats

from marglik.application.records import (
    Example,
    Explanations,
    PredictiveRecord,
    SuspiciousLabels,
    to_json,
)
from marglik.application.report import write_report
from marglik.application.report.charts import SERIES, Chart, reliability_chart
from marglik.application.report.contents import Predictive, differing, read_runs
from marglik.application.report.sections import SECTIONS
from marglik.application.report.tables import (
    differences_table,
    number,
    summary_table,
)
from marglik.application.run_folder import read_log
from marglik.prediction.metric_types import Coverage, Metrics
from marglik.storage.record_files import write_record
from tests.marglik.application.report.conftest import EVIL, read_unchecked

LAPLACE = "Laplace, probit"


@pytest.fixture(scope="module")
def run(evaluated):
    (found,) = read_runs([evaluated])
    return found


@pytest.fixture(scope="module")
def two(evaluated, copied):
    return read_runs([copied(of, curvature={"kfac_approx": of}) for of in ("expand", "reduce")])


def charts(runs, section):
    lists = [block for block in SECTIONS[section](runs) if isinstance(block, list)]
    return [chart for block in lists for chart in block]


def named(chart):
    return {trace["name"]: trace for trace in chart.traces}


# Charts


def test_every_chart_has_json_a_name_and_a_full_table(run, two):
    found = [chart for runs in ([run], two) for id in SECTIONS for chart in charts(runs, id)]
    assert len(found) == 22 and all(isinstance(chart, Chart) for chart in found)
    for chart in found:
        figure = json.loads(chart.json, parse_constant=pytest.fail)
        assert figure["data"] and chart.description and chart.table.rows
        assert {len(row.cells) + 1 for row in chart.table.rows} == {len(chart.table.columns)}


def test_what_a_run_went_through(run, two):
    evidence, loss = charts([run], "curves")
    curve = named(evidence)["evidence"]
    updates = [record for record in read_log(run.folder) if record["kind"] == "update"]
    assert curve["y"] == [update["evidence"] / run.results.num_data for update in updates]
    assert curve["marker"]["symbol"] == ["circle", "circle", "star"]  # the last one was kept
    assert evidence.table.rows[0].cells[0] == f"{curve['y'][0]:.4f}".replace("-", "−")
    assert [*named(loss)] == ["loss", "with weight decay"] and len(loss.table.columns) == 4
    (decays,) = charts([run], "weight-decay")
    for name, tensor in run.results.weight_decay.items():
        of = named(decays)[name]
        assert of["y"][0] == tensor.initial and of["y"][-1] == pytest.approx(tensor.learned)
        assert of["line"]["dash"] == ("dot" if name.endswith("bias") else "solid")
    (table,) = [b for b in SECTIONS["weight-decay"]([run]) if not isinstance(b, list)]
    first = next(iter(run.results.weight_decay.values()))
    assert table.rows[0].cells[1] == number(first.effective_parameters)
    for chart in charts(two, "curves"):  # overlaid, in colours of their own
        assert [*named(chart)] == ["expand", "reduce"]
        assert [trace["line"]["color"] for trace in chart.traces] == [*SERIES[:2]]


def wilson(right, count):
    return list(stats.binomtest(right, count).proportion_ci(method="wilson"))


def ends_of(curve):
    bars = curve["error_y"]
    both = zip(curve["y"], bars["arrayminus"], bars["array"], strict=True)
    return [end for v, below, above in both for end in ((v or 0) - below, (v or 0) + above)]


def test_reliability_of_classes_and_of_a_regression(run):
    (chart,) = charts([run], "reliability")
    made = run.evaluation.predictives["MAP"].reliability
    curve = named(chart)["MAP"]
    assert curve["x"] == made.confidence and curve["y"] == made.accuracy
    assert made.counts.count(0) == curve["y"].count(None) > 0  # empty bins are gaps
    for i, (accuracy, n) in enumerate(zip(curve["y"], made.counts, strict=True)):
        if n:
            expected = wilson(round(accuracy * n), n)
            assert ends_of(curve)[2 * i : 2 * i + 2] == pytest.approx(expected)
    assert chart.table.columns[-1] == "0.933–1.000"
    assert f"{made.counts[-1]} predictions" in chart.table.rows[0].small[-1]
    record = PredictiveRecord(Metrics(), reliability=Coverage([0.5, 0.9], [0.4, 0.8], 200))
    of_regression = Predictive(run, "MAP", record, "MAP")
    curve = named(reliability_chart("intervals", [of_regression]))["MAP"]
    assert ends_of(curve) == pytest.approx([*wilson(80, 200), *wilson(160, 200)])


def test_errors_and_out_of_distribution_data(run, two):
    made, names = run.evaluation.predictives, [*run.evaluation.predictives]
    (risk,), *matrices = SECTIONS["errors"]([run])
    assert [*named(risk)] == names == ["MAP", "MAP, temperature-scaled", LAPLACE, "Laplace, mc"]
    assert named(risk)["MAP"]["y"] == made["MAP"].risk_coverage.y
    # Predictives that predict the same classes share a matrix.
    assert "; ".join(matrix.title for matrix in matrices).count("MAP;") == 1
    assert sum(map(sum, matrices[0].counts)) == run.evaluation.num_test
    (roc,) = charts([run], "ood")
    assert [*named(roc)] == ["chance", *names] and roc.title == "ROC curve: noise"
    assert [chart.title for chart in charts(two, "reliability")] == names  # for each, both runs


# Tables


def of_metrics(copied, change, name, metrics, data="digits"):
    folder = copied(name)
    found = {p: to_json(PredictiveRecord(values)) for p, values in metrics.items()}
    change(folder / "evaluation.json", lambda evaluation: evaluation.update(predictives=found))
    change(folder / "results.json", lambda results: results.update(networks={}))
    change(folder / "results.json", lambda results: results["identity"].update(data=data))
    return folder


def rows_of(*folders):
    return {row.header: row for row in summary_table(read_runs(folders)).rows}


def test_the_best_of_a_row_is_by_its_direction(copied, change):
    metrics = {
        "A": Metrics(nll=0.2, accuracy=0.97, coverage90=0.7),
        "B": Metrics(nll=0.1, nll_observed_labels=0.4, accuracy=0.96, coverage90=0.88),
        "C": Metrics(nll=0.1, aurc=math.nan),
    }
    rows = rows_of(of_metrics(copied, change, "run", metrics))
    nll = rows["Negative log-likelihood"]
    assert (nll.cells, nll.best) == (["0.2000", "0.1000", "0.1000"], {1, 2})
    assert nll.detail == "nats per example, lower is better"
    assert (rows["Accuracy"].cells, rows["Accuracy"].best) == (["97.00", "96.00", "–"], {0})
    assert rows["Coverage of the 90 % interval"].best == {1}  # the nearest to 90 %
    assert rows["Area under the risk–coverage curve"].cells[2] == "NaN"


def test_the_best_is_among_runs_on_one_data_set(copied, change):
    """0.1 would be best of all, but is of other data, where nothing else is to compare with."""
    a, b, other = (
        of_metrics(copied, change, name, {"MAP": Metrics(nll=nll)}, data)
        for name, nll, data in (("a", 0.3, "digits"), ("b", 0.2, "digits"), ("c", 0.1, "CIFAR-10"))
    )
    assert rows_of(a, b, other)["Negative log-likelihood"].best == {1}


def test_differences_with_their_intervals():
    a = Metrics(nll=(-0.02, -0.04, 0.001), accuracy=(0.0028, -0.005, 0.01))
    (table,) = differences_table("title", {"A": a, "B": Metrics(brier=(0.0, 0.0, 0.0))})
    assert table.rows[0].cells == ["−0.0200", "+0.28", "–"]
    assert table.rows[0].small == ["−0.0400 to 0.0010", "−0.50 to 1.00", ""]
    assert differences_table("title", {"A": Metrics(ece=(0.0, 0.0, 0.0))}) == []


# Runs side by side


def test_runs_are_named_by_their_folders(copied):
    a, b, other = copied("a"), copied("b"), copied("a")
    assert [(run.label, run.style) for run in read_runs([a, b])] == [("a", 0), ("b", 1)]
    assert [run.label for run in read_runs([a, other])] == [str(a), str(other)]


def test_suspicious_labels_have_a_probability_of_being_wrong_where_it_is_known(run):
    for wrong in (None, 0.973):
        is_known = {} if wrong is None else {"probability of being wrong": wrong}
        one = Example(7, "3", "8", {"score": 2.5} | is_known)
        results = replace(run.results, suspicious_labels=SuspiciousLabels(10, 1, 0.9, [one]))
        _, table = SECTIONS["suspicious"]([replace(run, results=results)])
        assert ("probability of being wrong" in table.columns) == (wrong is not None)
        assert len(table.columns) == 1 + len(table.rows[0].cells)
        assert (table.rows[0].cells[-1] == "0.973") == (wrong is not None)


def test_explained_predictions_without_pictures_are_a_table(run):
    example = Example(7, "a", numbers={"effect": -0.5})
    explained = Explanations([Example(3, "a", "b", explained_by=[example])])
    results = replace(run.results, explanations=explained)
    (table,) = SECTIONS["explanations"]([replace(run, results=results)])
    heading, row = table.rows
    assert heading.header == "Test example 3: a, predicted as b"
    assert (row.header, row.cells) == ("Training example 7", ["a", "−0.5"])
    unknown = replace(run.results, explanations=Explanations([], "why not"))
    assert SECTIONS["explanations"]([replace(run, results=unknown)]) == ["why not"]


def test_what_differs():
    first = {"a": 1, "b": 2, "null": None, "output": "x", "t": True}
    assert differing([first, {"a": 1, "b": 3, "c": 4, "output": "y", "t": 1}]) == ["b", "t", "c"]


def test_folders_that_are_of_no_run(evaluated, tmp_path):
    for folders, error, message in (
        ([], ValueError, "Pass one or several"),
        ([evaluated, evaluated / ".." / evaluated.name], ValueError, "each once"),
        ([evaluated / "x"], FileNotFoundError, "x does not exist"),
        ([tmp_path], ValueError, "it contains none of results.json"),
    ):
        with pytest.raises(error, match=message):
            read_runs(folders)


# The page


class Page(HTMLParser):
    """Elements with their attributes, scripts by their type, and the text of the rest."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.scripts, self.words, self.inside = [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        elif self.inside != "style":
            self.words.append(data)

    def having(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    def figures(self):
        return [json.loads(text) for kind, text in self.scripts if kind == "application/json"]


@pytest.fixture(scope="module")
def page(evaluated, tmp_path_factory):
    return Page(write_report([evaluated], tmp_path_factory.mktemp("page") / "page.html"))


def test_the_page_says_what_the_run_found(page, run):
    nll = run.evaluation.predictives[LAPLACE].metrics.nll
    for text in (
        "MLP on digits (0, 1, 2)", f"{nll:.4f}", "Negative log-likelihood nats per example, lower",
        "Difference to the plain network on the same test examples", "Each tensor at the end",
        "Possibly wrong training labels", "curvature.fisher mc", "noise (20 examples)",
    ):  # fmt: skip
        assert text in page.text, text
    plots = [attrs for attrs in page.having("div") if attrs.get("class") == "chart-plot"]
    assert len(plots) == len(page.figures()) == 8 and all(plot["aria-label"] for plot in plots)
    uncertain = [a["alt"] for a in page.having("img") if a["alt"].startswith("Test image")]
    assert len(uncertain) == 12 and all("predicted as" in alt for alt in uncertain)


def test_the_page_is_small_and_fetches_nothing(page, evaluated, tmp_path):
    assert write_report([evaluated], tmp_path / "page.html").stat().st_size < 0.75 * 2**20
    with_address = {"src", "href", "action", "data", "poster", "srcset", "formaction"}
    addresses = [v for _, a in page.elements for k, v in a.items() if k in with_address and v]
    assert len(addresses) >= 20 and all(a.startswith(("#", "data:")) for a in addresses)
    policies = [a["content"] for a in page.having("meta") if "http-equiv" in a]
    policy = dict(part.split(" ", 1) for part in policies[0].split("; "))
    assert (policy["default-src"], policy["img-src"]) == ("'none'", "data: blob:")
    (packed,) = [text for kind, text in page.scripts if kind == "application/octet-stream"]
    plotly = zlib.decompress(base64.b64decode(packed)).decode()
    assert plotly.startswith("/**\n* plotly.js (basic") and "MIT license" in plotly[:200]


def test_what_differs_stands_out_on_a_page_of_its_own(two):
    first = two[0].folder
    before = (first / "report.html").read_bytes()
    path = write_report([run.folder for run in two])
    assert path == first.parent / "comparison.html"
    assert (first / "report.html").read_bytes() == before
    page = Page(path)
    rows = [attrs for attrs in page.having("tr") if attrs.get("class") == "differs"]
    assert len(rows) == 1 and "2 runs: expand , reduce" in page.text


def test_a_run_without_a_log_or_an_evaluation_has_a_page(copied):
    folder = copied("no log", seed=0)
    (folder / "log.jsonl").unlink()
    (folder / "evaluation.json").unlink()
    write_record(folder / "results.json", read_unchecked(folder / "results.json"))
    page = Page(write_report([str(folder)]))
    assert len(page.figures()) == 2 and "Each tensor at the end" in page.text
    assert "marglik evaluate" in page.text
    old = (folder / "report.html").read_bytes()
    (folder / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results\.json"):
        write_report([folder])
    assert (folder / "report.html").read_bytes() == old


def test_names_are_text_everywhere(evil, tmp_path):
    path = write_report([evil], tmp_path / "page.html")
    page, source = Page(path), path.read_text()
    assert [a for a in page.having("img") if not a["src"].startswith("data:")] == []
    assert not any("onerror" in attrs for _, attrs in page.elements)
    assert len(page.figures()) == 8 and page.text.count(EVIL) > 30
    assert EVIL not in source and EVIL[:20] not in source


def test_a_log_of_another_version_is_named(copied):
    folder = copied("other")
    (folder / "log.jsonl").write_text('{"kind": "epoch", "epoch": 1}\n')
    write_record(folder / "results.json", read_unchecked(folder / "results.json"))
    with pytest.raises(ValueError, match=r"other: another version of marglik wrote the log"):
        read_runs([folder])
