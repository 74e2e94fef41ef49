"""What studies share: tables from the JSON alone, finished runs, runs that fail."""

import hashlib
import json
import shutil
from argparse import Namespace
from dataclasses import dataclass
from importlib import import_module

import pytest

from experiments import studies
from experiments.exactness import modes
from experiments.options import SHIPPED
from experiments.speed import bench_curvature

STUDIES = {
    "optimizers.graph_network_training": "",
    "optimizers.optimizer_comparison": "",
    "optimizers.optimizer_defaults": "",
    "optimizers.vision_transformer_training": "",
    "predictions.out_of_distribution": "",
    "predictions.predictive_rivals": "",
    "predictions.predictive_study": "",
    "table2.marglik_cifar10": "table2",
    "uci.regression": "uci",
    "weight_decay.default_options": "",
    "weight_decay.presets": "",
    "weight_decay.weight_decay_study": "",
}
"""Module -> folder of results, if it is not the module's name."""


def main_of(study, *arguments):
    return import_module(f"experiments.{study}").main(list(arguments))


@pytest.mark.parametrize("study", STUDIES)
def test_tables_and_figures_are_made_from_the_json_alone(study, tmp_path, capsys, monkeypatch):
    """They are those that come with the project, whose files stay as they are."""
    monkeypatch.setattr(studies, "as_they_finish", lambda function, tasks, jobs: iter(tasks * 0))
    shipped = SHIPPED / (STUDIES[study] or study.partition(".")[2])
    folder = shutil.copytree(shipped, tmp_path / shipped.name)
    tables = [path.relative_to(folder) for path in folder.rglob("table.md")]
    part = [table for table in tables if "scaled_calibrated" not in table.parts]
    for name in ("*.md", "*.png"):
        for path in folder.rglob(name):
            path.unlink()
    protocols = ["scaled", "full"] if study.startswith("table2") else [None]
    for protocol in protocols:
        options = ["--protocol", protocol] if protocol else []
        assert main_of(study, "--report", *options, "--results", str(tmp_path)) == 0
    assert len(part) == len(protocols)
    for table in part:
        text = (folder / table).read_text()
        assert text == (shipped / table).read_text()
    assert text.strip() in capsys.readouterr().out
    figures = {path.relative_to(shipped) for path in shipped.rglob("*.png")}
    assert figures == {path.relative_to(folder) for path in folder.rglob("*.png")}
    assert all((folder / figure).stat().st_size > 1000 for figure in figures)


@pytest.mark.parametrize("study", [study for study in STUDIES if "table2" not in study])
def test_a_report_without_results_says_what_to_do(study, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main_of(study, "--report", "--results", str(tmp_path))
    assert "run without --report first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("study", "options", "finished", "asked"),
    [
        ("predictions.predictive_rivals", ["--seeds", "2"], "digits_0", ["digits_1"]),
        (
            "predictions.out_of_distribution", ["--data", "digits", "--seeds", "2"],
            "digits_0", ["digits_1"],
        ),
        (
            "weight_decay.weight_decay_study", ["--data", "nci1", "--seeds", "2"],
            "nci1_ways_all_0", ["nci1_ways_all_1"],
        ),
        ("uci.regression", ["--data", "yacht", "energy"], "energy", ["yacht"]),
    ],
)  # fmt: skip
def test_what_is_not_there_yet_is_run(study, options, finished, asked, tmp_path, monkeypatch):
    name = STUDIES[study] or study.partition(".")[2]
    (tmp_path / name).mkdir()
    shutil.copy(SHIPPED / name / f"{finished}.json", tmp_path / name)
    found = []

    def as_they_finish(function, tasks, jobs):
        found.extend(task.name for task in tasks)
        return iter([])

    monkeypatch.setattr(studies, "as_they_finish", as_they_finish)
    assert main_of(study, *options, "--results", str(tmp_path)) == 0
    assert found == asked


@dataclass(frozen=True)
class Task:
    name: str


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, capsys, in_this_process):
    def run(task):
        if task.name == "wrong":
            raise ValueError("no such data")
        return {"seconds": {"training": 2.0, "evaluation": 3.0}}

    def report(folder):
        return f"{len(list(folder.glob('*.json')))} runs"

    (tmp_path / "finished.json").write_text("{}")
    tasks = [Task(name) for name in ("finished", "wrong", "last")]
    options = Namespace(report=False, jobs=1)
    assert studies.run_missing(run, tasks, tmp_path, report, options) == 1
    assert in_this_process == tasks[1:]
    shown, said = capsys.readouterr()
    assert said == "wrong: no such data\n"
    assert shown.splitlines()[:2] == ["last: 5 s", "2 runs"]
    assert json.loads((tmp_path / "last.json").read_text())["seconds"]["training"] == 2.0
    assert not (tmp_path / "wrong.json").exists()
    assert studies.run_missing(run, tasks[::2], tmp_path, report, options) == 0


def test_the_helpers_of_tables():
    assert studies.markdown([["a", "b"], ["1", ""]]) == "| a | b |\n|---|---|\n| 1 |  |"
    assert studies.mean_with_error([1.0, 2.0], "{:+.2f}") == "+1.50 ± 0.50"
    assert studies.mean_with_error([1.0], "{:+.2f}") == "+1.00"


def test_ones_own_results_and_those_of_the_project_lie_apart(tmp_path, monkeypatch, capsys):
    def sums():
        files = (path for path in SHIPPED.rglob("*") if path.is_file())
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = sums()
    of_exactness = json.loads((SHIPPED / "exactness/exactness.json").read_text())
    seconds = {"median_seconds": {"one of my own": 7.5}}
    monkeypatch.setattr(modes, "run", lambda config: of_exactness)
    monkeypatch.setitem(bench_curvature.PARTS, "evidence", (lambda config: seconds, {}))
    modes.main([])
    bench_curvature.main(["evidence", "--device", "cpu"])
    tables = capsys.readouterr().out
    assert "one of my own | 7.50" in tables
    assert {path.name for path in tmp_path.iterdir()} == {"results"}
    assert sums() == before
