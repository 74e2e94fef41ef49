"""What studies share: tables from the JSON alone, finished runs, runs that fail."""

import json
import shutil
from argparse import Namespace
from dataclasses import dataclass
from importlib import import_module

import pytest

from experiments import studies
from experiments.options import SHIPPED

STUDIES = [
    "optimizers.graph_network_training",
    "optimizers.optimizer_comparison",
    "optimizers.optimizer_defaults",
    "optimizers.vision_transformer_training",
    "predictions.out_of_distribution",
    "predictions.predictive_rivals",
    "predictions.predictive_study",
    "weight_decay.evidence_from_training",
    "weight_decay.natural_gradient",
    "weight_decay.weight_decay_study",
]


def main_of(study, *arguments):
    return import_module(f"experiments.{study}").main(list(arguments))


@pytest.mark.parametrize("study", STUDIES)
def test_tables_and_figures_are_made_from_the_json_alone(study, tmp_path, capsys, monkeypatch):
    """They are those that come with the project."""
    monkeypatch.setattr(studies, "as_they_finish", lambda function, tasks, jobs: iter(tasks * 0))
    shipped = SHIPPED / study.partition(".")[2]
    folder = tmp_path / shipped.name
    folder.mkdir()
    for path in shipped.glob("*.json"):
        shutil.copy(path, folder)
    assert main_of(study, "--report", "--results", str(tmp_path)) == 0
    table = (folder / "table.md").read_text()
    assert table == (shipped / "table.md").read_text()
    assert table.strip() in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {path.name for path in shipped.iterdir()}
    for figure in folder.glob("*.png"):
        assert figure.stat().st_size > 1000


@pytest.mark.parametrize("study", STUDIES)
def test_a_report_without_results_says_what_to_do(study, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main_of(study, "--report", "--results", str(tmp_path))
    assert "run without --report first" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    ["evidence_from_training", "lora", "natural_gradient", "out_of_distribution"],
)
def test_the_page_quotes_whole_tables(name):
    page = (SHIPPED.parent / "README.md").read_text().splitlines()
    for row in (SHIPPED / name / "table.md").read_text().splitlines():
        assert row in page, row


@pytest.mark.parametrize(
    ("study", "options", "finished", "asked"),
    [
        ("predictions.predictive_rivals", ["--quick"], "digits_0", ["digits_1"]),
        ("predictions.out_of_distribution", ["--quick"], "digits_0", []),
        (
            "predictions.out_of_distribution", ["--data", "digits", "--seeds", "2"],
            "digits_0", ["digits_1"],
        ),
        (
            "weight_decay.weight_decay_study", ["--quick", "--sizes", "100"],
            "digits_ways_100_0", ["digits_ways_100_1"],
        ),
    ],
)  # fmt: skip
def test_what_is_not_there_yet_is_run(study, options, finished, asked, tmp_path, monkeypatch):
    name = study.partition(".")[2]
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
