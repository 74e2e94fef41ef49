"""Run folders read into plain data, and what is wrong with those that cannot be."""

import json

import pytest

from marglik.report.contents import read_run, read_runs
from marglik.storage.provenance import Provenance
from marglik.storage.run_folder import RunFolder
from tests.marglik.report.fabricate import CONFIG, NUM_DATA, changed, write, write_fit, write_run


def without(folder, name):
    """A copy of a run that has not left a file."""
    copy = folder.with_name(f"{folder.name} without {name}")
    RunFolder(copy).begin("train", Provenance())
    for path in folder.iterdir():
        if path.name not in (name, "manifest.json"):
            write(copy / path.name, path.read_bytes())
    return copy


def test_a_trained_run(tmp_path):
    run = read_run(write_run(tmp_path / "run", layers=3))
    assert (run.data, run.model, run.num_data) == ("digits", "LeNet", NUM_DATA)
    assert run.name == "LeNet on digits"
    assert [record["epoch"] for record in run.epochs] == list(range(1, 41))
    assert [record["epoch"] for record in run.updates] == list(range(5, 41, 5))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert run.evidence_per_example == results["evidence"]["kept"] / NUM_DATA
    name, row = next(iter(results["weight_decay"].items()))
    assert run.layers[name].parameters == row["parameters"]
    assert run.layers[name].effective == row["effective_parameters"]
    assert run.layers[name].weight_decay == row["learned"]
    assert run.initial_weight_decay == 5e-4
    assert run.options["curvature.kfac_approx"] == "expand"
    assert list(run.evaluation["predictives"]) == ["MAP", "Laplace, probit", "Laplace, mc"]


def test_a_fitted_posterior(tmp_path):
    """Weight decay T·δ/N by hand: δ = 1.438, N = 1438."""
    run = read_run(write_fit(tmp_path / "fit"))
    assert run.records == [] and run.results is None and run.evaluation is None
    assert (run.name, run.is_fit) == ("MLP on digits", True)
    assert run.evidence_per_example == -1.0
    layers = list(run.layers.values())
    assert layers[0].weight_decay == pytest.approx(1e-3)
    assert (layers[0].effective, layers[0].parameters) == (20.0, 150)
    tempered = read_run(write_fit(tmp_path / "tempered", temperature=0.5))
    assert next(iter(tempered.layers.values())).weight_decay == pytest.approx(5e-4)
    nameless = read_run(write_fit(tmp_path / "nameless", model=None, data=None))
    assert nameless.name == "nameless"


def test_an_unfinished_run_has_its_log(tmp_path):
    folder = without(write_run(tmp_path / "run", evaluation=None), "results.json")
    run = read_run(folder)
    assert len(run.updates) == 8
    assert run.layers == {} and run.evidence_per_example is None
    assert run.initial_weight_decay == 5e-4


def test_options_of_results_stand_in_for_a_missing_config(tmp_path):
    folder = without(write_run(tmp_path / "run"), "config.yaml")
    assert read_run(folder).options == {"epochs": 40, "seed": 0}


def test_runs_are_named_by_what_differs(tmp_path):
    other = {"curvature": CONFIG["curvature"] | {"kfac_approx": "reduce"}}
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", config=other)]
    runs = read_runs(folders)
    assert [(r.label, r.position, r.alone) for r in runs] == [
        ("expand", 0, False),
        ("reduce", 1, False),
    ]
    assert [(run.label, run.alone) for run in read_runs(folders[:1])] == [("a", True)]


def test_no_folder_and_one_twice(tmp_path):
    with pytest.raises(ValueError, match="needs the folder of a run"):
        read_runs([])
    folder = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="is given twice"):
        read_runs([folder, tmp_path / "run" / ".." / "run"])


def test_folders_that_are_of_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is not the folder of a run: it has none of results.json"):
        read_run(tmp_path)
    file = tmp_path / "results.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="is a file; pass the folder"):
        read_run(file)


BROKEN = {
    "cut off": (
        "results.json",
        '{"data": "dig',
        "results.json is not valid JSON: .* Write it again",
    ),
    "not an object": ("evaluation.json", "[]", "has the format None, not 'marglik.evaluation'"),
    "a line": ("log.jsonl", '{"kind": "epoch", "epoch": 1, "loss"', r"log.jsonl, line 1 is not"),
    "a record without its loss": (
        "log.jsonl",
        '{"kind": "epoch", "epoch": 1, "seconds": 0.1}',
        r"log.jsonl, line 1: 'loss' is a required property",
    ),
    "no epoch": ("log.jsonl", '{"kind": "other"}', "'epoch' is a required property"),
    "yaml": ("config.yaml", "a: [1,", "config.yaml is not valid YAML"),
    "no mapping": ("config.yaml", "- 1", "holds list, not a mapping of options"),
    "no text": ("config.yaml", b"\xff\xfe\x00", "config.yaml is not valid YAML"),
    "no text in JSON": ("results.json", b"\xff\xfe\x00", "results.json is not valid JSON"),
    "digits": (
        "results.json",
        5000 * "9",
        "results.json is not valid .*digits",
    ),
    "digits in YAML": ("config.yaml", f"seed: {5000 * '9'}", "config.yaml is not valid .*digits"),
    "brackets": ("log.jsonl", 100_000 * "[", "log.jsonl, line 1 is not valid JSON: .*too deeply"),
    "a later posterior": (
        "posterior.json",
        '{"format": "marglik.posterior", "version": 2}',
        "has format version 2, this release reads up to 1",
    ),
}


@pytest.mark.parametrize("name", ["results.json", "evaluation.json", "log.jsonl", "config.yaml"])
def test_a_file_that_was_altered_is_named(name, tmp_path):
    """Any change of one: a bit, a line more, another run's; or that it is gone."""
    folder, other = write_run(tmp_path / "run"), write_run(tmp_path / "other", seed=1)
    path, whole = folder / name, (folder / name).read_bytes()
    position = whole.index(b"0") if b"0" in whole else 0
    flipped = whole[:position] + b"1" + whole[position + 1 :]
    for content in (flipped, whole + b"\n", whole[:-1], (other / name).read_bytes(), b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not as marglik wrote it.*original back"):
            read_run(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing.*Put it back"):
        read_run(folder)
    path.write_bytes(whole)
    read_run(folder)


def test_files_without_a_manifest_or_beside_it_are_named(tmp_path):
    folder = write_run(tmp_path / "run", evaluation=None)
    stray = write_run(tmp_path / "other") / "evaluation.json"
    (folder / "evaluation.json").write_bytes(stray.read_bytes())
    with pytest.raises(ValueError, match="evaluation.json is not from the run in .*Remove it"):
        read_run(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="has no manifest.json, which would have the checksum"):
        read_run(folder)


@pytest.mark.parametrize("name", ["posterior.json", "posterior.safetensors", "model.safetensors"])
def test_a_posterior_that_was_altered_is_named(name, tmp_path):
    folder = write_fit(tmp_path / "fit")
    read_run(folder)
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    with pytest.raises(ValueError, match=name):
        read_run(folder)


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(case, tmp_path):
    name, content, message = BROKEN[case]
    folder = write_run(tmp_path / "run")
    write(folder / name, content)
    with pytest.raises(ValueError, match=message):
        read_run(folder)


def _of_map(evaluation):
    return evaluation["predictives"]["MAP"]


WRONG = {
    "version": (lambda e: e.update(version=2), "has version 2 of marglik.evaluation.*reads ver"),
    "format": (lambda e: e.update(format="other"), "the format 'other', not 'marglik.evaluation'"),
    "text as metric": (
        lambda e: _of_map(e)["metrics"].update(x="high"),
        r"'high' is not of type 'number' \(at \$.predictives.MAP.metrics.x\)",
    ),
    "shift without severity": (
        lambda e: _of_map(e)["metrics"].update({"shift/noise/cls/NLL": 1.0}),
        "shift/noise/cls/NLL",
    ),
    "edges": (
        lambda e: _of_map(e)["entropy"]["edges"].pop(),
        "by its edges, entropy of 'MAP' should have 29 values, but has {'test': 30, 'ood': 30}",
    ),
    "accuracy": (
        lambda e: _of_map(e)["reliability"]["accuracy"].pop(),
        "reliability of 'MAP' should have 15 values, but has {'accuracy': 14}",
    ),
    "no counts": (lambda e: _of_map(e)["reliability"].pop("counts"), "'counts' is a required"),
    "a curve": (
        lambda e: _of_map(e)["roc"]["tpr"].pop(),
        "roc of 'MAP' should have lists of the same length, at least 1, but has {'fpr': 50, 'tpr'",
    ),
    "more right": (
        lambda e: _of_map(e)["classes"]["right"].__setitem__(0, 99),
        "classes of 'MAP': more predictions are right than there are",
    ),
    "classes": (
        lambda e: e["classes"].pop(),
        "classes of 'MAP': 10 counts, 10 right, 9 names",
    ),
    "confusion": (
        lambda e: _of_map(e)["classes"]["confusion"].pop(),
        "the rows of the confusion matrix do not sum to the counts",
    ),
    "an end": (lambda e: _of_map(e)["intervals"].update({"test/x": [1.0]}), "is too short"),
    "remote image": (
        lambda e: e["uncertain"]["examples"][0].update(image="https://example.org/1.png"),
        "'https://example.org/1.png' does not match",
    ),
    "script as image": (
        lambda e: e["uncertain"]["examples"][0].update(image='data:image/png;base64,a" onload'),
        "does not match",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_evaluations_are_named(case, tmp_path):
    change, message = WRONG[case]
    folder = write_run(tmp_path / "run")
    read_run(folder)
    changed(folder / "evaluation.json", change)
    with pytest.raises(ValueError, match=message):
        read_run(folder)


def test_levels_and_coverage_have_one_length(tmp_path):
    folder = write_run(tmp_path / "run", evaluation="regression")
    read_run(folder)
    changed(folder / "evaluation.json", lambda e: _of_map(e)["reliability"]["levels"].pop())
    with pytest.raises(ValueError, match="by its levels, reliability of 'MAP' should have 18"):
        read_run(folder)
