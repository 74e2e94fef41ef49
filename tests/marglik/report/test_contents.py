"""Run folders read into plain data, and what to call runs side by side."""

import json

import pytest

from marglik.report.contents import differing, read_runs
from tests.marglik.report.fabricate import (
    NUM_DATA,
    without,
    write,
    write_fit,
    write_run,
)


def read_run(folder):
    (run,) = read_runs([folder])
    return run


def test_a_trained_run(tmp_path):
    run = read_run(write_run(tmp_path / "run", layers=3))
    assert (run.name, run.num_data, run.is_fit) == ("LeNet on digits", NUM_DATA, False)
    assert [record["epoch"] for record in run.epochs] == list(range(1, 41))
    assert [record["epoch"] for record in run.updates] == list(range(5, 41, 5))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert run.evidence_per_example == results["evidence"]["kept"] / NUM_DATA
    assert run.layers == results["weight_decay"]
    assert run.options["curvature.kfac_approx"] == "expand"
    assert list(run.evaluation["predictives"]) == ["MAP", "Laplace, probit", "Laplace, mc"]


def test_a_fitted_posterior(tmp_path):
    run = read_run(write_fit(tmp_path / "fit"))
    assert (run.name, run.is_fit, run.evaluation) == ("MLP on digits", True, {})
    assert run.evidence_per_example == -1.0
    nameless = read_run(write_fit(tmp_path / "nameless", model=None, data=None))
    assert nameless.name == "nameless"


def test_runs_without_some_of_their_files(tmp_path):
    folder = write_run(tmp_path / "run", evaluation=None)
    unfinished = read_run(without(folder, "results.json"))
    assert len(unfinished.updates) == 8
    assert unfinished.layers == {} and unfinished.evidence_per_example is None
    assert read_run(without(folder, "config.yaml")).options == {}


def test_folders_that_are_of_no_run(tmp_path):
    run = write_run(tmp_path / "run")
    (tmp_path / "beside").mkdir()
    for folders, error, message in (
        ([], ValueError, "needs the folder of a run"),
        ([run, run / ".." / run.name], ValueError, "2 times"),
        ([run / "x"], FileNotFoundError, "x does not exist"),
        ([tmp_path / "beside"], ValueError, "it has none of results.json"),
        ([run / "results.json"], ValueError, "results.json is a file"),
    ):
        with pytest.raises(error, match=message):
            read_runs(folders)


def test_what_differs():
    first = {"a": 1, "b": 2, "null": None, "output": "x", "overwrite": True}
    second = {"a": 1, "b": 3, "c": 4, "output": "y", "overwrite": False}
    assert differing([first, second]) == ["b", "c"]
    assert differing([first, first]) == []
    assert differing([{"a": True}, {"a": 1}]) == ["a"]  # 1 == True in Python


LABELS = {
    "a word": ([{"k": {"fisher": "mc"}}, {"k": {"fisher": "exact"}}], ["mc", "exact"]),
    "null": ([{"size": None, "x": 1}, {"size": 3, "x": 1}], ["size null", "size 3"]),
    "not set": ([{"x": 1}, {"x": 1, "size": 3}], ["size (not set)", "size 3"]),
    "two": (
        [{"k": "expand", "prior": {"lr": 1}}, {"k": "reduce", "prior": {"lr": 2}}],
        ["expand, prior.lr 1", "reduce, prior.lr 2"],
    ),
    "classes without their arguments": (
        [
            {"model": {"class_path": "marglik.models.LeNet", "init_args": {"image_size": 8}}},
            {"model": {"class_path": "marglik.models.MLP", "init_args": {"hidden": [4]}}},
        ],
        ["LeNet", "MLP"],
    ),
    "nothing differs": ([{"seed": 0}, {"seed": 0}], ["run 0", "run 1"]),
    "too much differs": ([dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 1)], ["run 0", "run 1"]),
    "too long": ([{"rules": "a" * 60}, {"rules": "b" * 60}], ["run 0", "run 1"]),
    "two of three are alike": ([{"x": 0}, {"x": 0}, {"x": 1}], ["run 0", "run 1", "run 2"]),
}


@pytest.mark.parametrize("case", LABELS)
def test_runs_are_named_by_what_differs(case, tmp_path):
    options, expected = LABELS[case]
    folders = [write_run(tmp_path / f"run {i}", evaluation=None) for i in range(len(options))]
    for folder, one in zip(folders, options, strict=True):
        write(folder / "config.yaml", json.dumps(one))
    runs = read_runs(folders)
    assert [run.label for run in runs] == expected
    assert [(run.style, run.alone) for run in runs] == [(i, False) for i in range(len(runs))]
