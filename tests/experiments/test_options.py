"""Results of one's own and those that come with the project lie apart, for every experiment."""

import hashlib
import json
from pathlib import Path

import pytest

from experiments.exactness import modes as exactness
from experiments.options import SHIPPED
from experiments.speed import bench_curvature, bench_predictive
from experiments.table2 import marglik_cifar10
from experiments.weight_decay import presets


def interrupted(function, tasks, jobs):
    raise KeyboardInterrupt
    yield  # a generator, as the one in its place


def shipped_sums():
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in SHIPPED.rglob("*")
        if path.is_file()
    }


def of_preset(config):
    predictives = ("MAP", "MAP, temperature-scaled", "Laplace, mc")
    names = [f"{who}, {which}" for who in ("learned", "initial") for which in predictives]
    metrics = {name: {"test/cls/NLL": 7.5, "test/cls/accuracy": 0.5} for name in names}
    config = {"preset": config.preset, "seed": config.seed}
    return {"config": config, "metrics": metrics, "seconds": 90.0}


def one_by_one(function, tasks, jobs):
    for task in tasks:
        yield task, function(task)


def test_only_the_results_that_were_made_here_are_written_and_shown(tmp_path, monkeypatch, capsys):
    before = shipped_sums()
    assert before
    of_table2 = json.loads((SHIPPED / "table2/scaled/paper/fixed_plain_seed0.json").read_text())
    of_table2["metrics"]["MAP"]["test/cls/NLL"] = 7.5
    of_exactness = json.loads((SHIPPED / "exactness/exactness.json").read_text())
    seconds = {"median_seconds": {"one of my own": 7.5}}
    stream = {
        "num_images": 3, "data": "mine", "total_seconds": 7.5, "processor_seconds": 5.0,
        "resident_mebibytes_after_a_tenth": 1.0, "resident_mebibytes_at_most": 1.0,
    }  # fmt: skip
    monkeypatch.setattr(marglik_cifar10, "run", lambda config: of_table2)
    monkeypatch.setattr(marglik_cifar10, "as_they_finish", one_by_one)
    monkeypatch.setattr(presets, "run", of_preset)
    monkeypatch.setattr(presets, "as_they_finish", one_by_one)
    monkeypatch.setattr(exactness, "run", lambda config: of_exactness)
    monkeypatch.setitem(bench_curvature.PARTS, "evidence", (lambda config: seconds, {}))
    monkeypatch.setitem(bench_predictive.PARTS, "stream", lambda config: stream)
    one = ["--seeds", "0", "--approaches", "fixed", "--augment", "off"]
    assert marglik_cifar10.main(one) == 0
    assert presets.main(["--seeds", "0", "--presets", "gpt_dart"]) == 0
    bench_curvature.main(["evidence", "--device", "cpu"])
    bench_predictive.main(["stream", "--device", "cpu"])
    tables = capsys.readouterr().out
    assert "| fixed | no | 7.500 |" in tables and "| reduce |" not in tables
    assert "| 7.500 / 7.500 |" in tables and "VisionTransformer" not in tables
    assert "one of my own | 7.50" in tables and "batch" not in tables
    assert "3 images of mine" in tables and "laplace-torch" not in tables
    exactness.main([])
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.is_file()}
    assert {Path(name).parts[0] for name in found} == {"results"}
    assert {
        "results/table2/scaled/table.md",
        "results/presets/presets.json",
        "results/exactness/exactness.json",
        "results/bench_curvature_cpu/evidence.json",
        "results/bench_predictive_cpu/stream.json",
    } <= found
    assert shipped_sums() == before


def test_what_came_with_the_project_is_nobodys_own(tmp_path, capsys):
    assert marglik_cifar10.main(["--list"]) == 0
    assert all(line.startswith("to do ") for line in capsys.readouterr().out.splitlines())
    assert marglik_cifar10.main(["--list", "--source", "jpeg", "--results", str(SHIPPED)]) == 0
    assert all(line.startswith("finished ") for line in capsys.readouterr().out.splitlines())
    assert marglik_cifar10.main(["--report"]) == 1
    assert "No result in results/table2/scaled" in capsys.readouterr().err
    for program in (presets, exactness):
        with pytest.raises(SystemExit):
            program.main(["--report"])
        assert "--report: no results/" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_interrupt_before_the_first_result_shows_no_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(marglik_cifar10, "as_they_finish", interrupted)
    assert marglik_cifar10.main([]) == 1
    printed = capsys.readouterr()
    assert "|" not in printed.out
    assert printed.out.startswith("18 runs, ")
    assert "interrupted; 0 of 18 runs are finished; the same command resumes." in printed.err
