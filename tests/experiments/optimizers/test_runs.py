"""Trainings by several optimisers: schedules, searches, targets, and studies."""

import json
import math
from dataclasses import replace

import pytest
import torch

from experiments.data import images
from experiments.optimizers import optimizer_comparison, steps_to_target
from experiments.optimizers import vision_transformer_training as vision_study
from experiments.optimizers.runs import (
    Candidate,
    Config,
    Method,
    Problem,
    Schedule,
    Timing,
    best_candidate,
    quasi_random_search,
    run,
    run_timing,
    settled_at,
)
from experiments.optimizers.steps_to_target import Study, target_of
from kfac_backend.options import Likelihood
from marglik.data.tensors import TensorSplits
from marglik.models import MLP

SCHEDULE = Schedule(8, 2)


def problem(likelihood: Likelihood = "classification", metric="loss"):
    generator = torch.Generator().manual_seed(0)

    def pair(n):
        x = torch.randn(n, 6, generator=generator)
        y = x[:, :3].argmax(1) if likelihood == "classification" else (x[:, :1] > 0).float()
        return x, y

    splits = TensorSplits(pair(40), pair(12), pair(12), "tiny")
    outputs = 3 if likelihood == "classification" else 1
    return Problem("tiny", lambda: splits, lambda _: MLP(6, (5,), outputs), likelihood, 8, metric)


def config(**changes):
    whole = Config("tiny", "method", "search", (Candidate(0.1, 0.1),), (0,), SCHEDULE, 4)
    return replace(whole, **changes)


def test_the_schedule():
    schedule = Schedule(100, 10, "linear", end=0.1, fall=0.5)
    assert [schedule.factor(step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1, 1])
    # Half of the 90 steps after the warm-up: from 1 to 0.1, then constant.
    assert schedule.factor(10 + 22.5) == pytest.approx(0.55)
    assert schedule.factor(55) == schedule.factor(99) == pytest.approx(0.1)
    cosine = Schedule(110, 10)
    assert [cosine.factor(step) for step in (10, 60, 110)] == pytest.approx([1, 0.5, 0])
    assert schedule.times(0.75) == replace(schedule, steps=75, warmup=8)


def test_the_search_is_log_uniform_and_the_same_for_all_methods():
    found = quasi_random_search((1e-2, 1.0), (1e-4, 1e-3), 400)
    assert found == quasi_random_search((1e-2, 1.0), (1e-4, 1e-3), 400)
    rates = torch.tensor([c.lr for c in found]).log10()
    assert -2 <= rates.min() < -1.95 and -0.05 < rates.max() <= 0
    assert rates.mean().item() == pytest.approx(-1, abs=0.1)
    dampings = torch.tensor([c.damping for c in found]).log10()
    assert torch.corrcoef(torch.stack([rates, dampings]))[0, 1].abs() < 0.15
    for number in (6, 8):  # a few cover the range, too
        few = torch.tensor([c.lr for c in found[:number]]).log10()
        assert few.min() < -1.6 and few.max() > -0.4


def test_what_settles_at_a_target_first():
    curves = [
        {"step": [1, 2, 3], "accuracy": [0.1, 0.5, 0.3], "diverged": None,
         "candidate": {"lr": 1.0, "damping": None}},
        {"step": [1, 2, 3], "accuracy": [0.1, 0.2, 0.6], "diverged": None,
         "candidate": {"lr": 2.0, "damping": None}},
        {"step": [1], "accuracy": [0.9], "diverged": "step 2: NaN",
         "candidate": {"lr": 3.0, "damping": None}},
    ]  # fmt: skip
    found = {"metric": "accuracy", "curves": curves, "config": {"method": "m"}}
    # The first curve is above 0.5 for a moment only, and the last one diverged.
    assert [settled_at(c, "accuracy", 0.5) for c in curves] == [None, 3, None]
    assert [settled_at(c, "accuracy", 0.2) for c in curves] == [2, 2, None]
    lower = {"step": [1, 2], "loss": [0.6, 0.4], "diverged": None}
    assert settled_at(lower, "loss", 0.5) == 2
    assert best_candidate(found, 0.05).lr == best_candidate(found, 0.5).lr == 2.0
    assert best_candidate(found, 0.3).lr == 1.0
    assert best_candidate(found).lr == 2.0
    with pytest.raises(ValueError, match="All runs of m diverged"):
        best_candidate({**found, "curves": curves[2:]})
    assert target_of({"metric": "accuracy", "curves": curves[:1] * 2 + curves[1:2]}) == 0.3


@pytest.mark.parametrize("base", ["nesterov", "adamw", "nadamw"])
@pytest.mark.parametrize("mode", [None, "expand", "reduce"])
def test_all_methods_train(base, mode):
    method = Method("method", base, mode, clip=1.0)
    task = config(candidates=(Candidate(0.02, 0.1),), schedule=Schedule(40, 2), measure_every=20)
    (curve,) = run(problem(), method, task)["curves"]
    assert curve["diverged"] is None
    assert curve["step"] == [20, 40]
    assert curve["loss"][-1] < curve["loss"][0] < math.log(3) + 0.3
    assert 0 <= curve["test"]["accuracy"] <= 1


def test_a_divergence_is_kept_with_its_cause():
    method = Method("method", "nesterov", "reduce", {"norm_control": "none"})
    (curve,) = run(problem(), method, config(candidates=(Candidate(1e38, 1e-6),)))["curves"]
    assert curve["diverged"].startswith("step ")
    assert curve["test"] is None
    assert settled_at(curve, "loss", 1e9) is None


def test_average_precision():
    (curve,) = run(
        problem("bernoulli", "average precision"),
        Method("method", "nesterov", "reduce"),
        config(schedule=Schedule(60, 2), measure_every=60),
    )["curves"]
    assert curve["average precision"][-1] > 0.8


def test_timing_alternates_the_methods():
    methods = {"a": Method("a", "nesterov"), "b": Method("b", "nesterov", "reduce")}
    found = run_timing(problem(), methods, Timing("tiny", ("a", "b"), 10, blocks=3))
    for name in methods:
        times = found["step_seconds"][name]
        assert 0 < times["low"] <= times["median"] <= times["high"]


TINY = {"tiny": problem()}
STUDY = Study(
    title=", tiny",
    methods={
        "sgd": Method("SGD", "nesterov"),
        "reduce": Method("K-FAC-reduce", "nesterov", "reduce", pace=0.75),
        "given": Method("K-FAC-expand", "nesterov", "expand"),
    },
    schedules={"tiny": SCHEDULE},
    lr={"tiny": (1e-2, 1e-1), "reduce": (1e-3, 1e-2)},
    damping=(1e-2, 1.0),
    block=10,
    paper={"sgd": ("100", "100", "100")},
    given={"given": 0.5},
)


def run_tiny(task):
    return steps_to_target.run_task(task, TINY, STUDY.methods)


def command(folder, *arguments):
    return steps_to_target.main(
        [*arguments, "--results", str(folder)],
        name="study", description="A study.", studies=[STUDY], problems=TINY, run_one=run_tiny,
        data=["tiny"], trials=3, seeds=2,
    )  # fmt: skip


def test_a_study_is_resumed_and_its_tables_are_made_from_the_json_alone(
    tmp_path, capsys, in_this_process
):
    assert command(tmp_path) == 0
    tasks = {task.name: task for task in in_this_process}
    assert len(tasks) == len(in_this_process) == 6
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("study/*.json")}
    assert set(files) == set(tasks)
    # The searches' ranges, and what is taken from them.
    rates = {
        name: [c.lr for c in tasks[f"tiny_{name}_search"].candidates] for name in ("sgd", "reduce")
    }
    assert min(rates["sgd"]) > 1e-2 > max(rates["reduce"])
    best = best_candidate(files["tiny_sgd_search"])
    assert tasks["tiny_sgd_seeds"].candidates == (best,)
    assert tasks["tiny_given_seeds"].candidates == (Candidate(best.lr, 0.5),)
    target = target_of(files["tiny_sgd_seeds"])
    chosen = best_candidate(files["tiny_reduce_search"], target)
    assert tasks["tiny_reduce_seeds"].candidates == (chosen,)
    assert files["tiny_reduce_seeds"]["curves"][0]["step"][-1] == 6
    table = (tmp_path / "study" / "table.md").read_text()
    assert f"Target: loss {target:.4f}" in table
    # Again: nothing runs; a file that is gone is run anew.
    in_this_process.clear()
    (tmp_path / "study" / "tiny_reduce_search.json").unlink()
    assert command(tmp_path) == 0
    assert [task.name for task in in_this_process] == ["tiny_reduce_search"]
    in_this_process.clear()
    capsys.readouterr()
    assert command(tmp_path, "--report") == 0
    assert in_this_process == []
    assert capsys.readouterr().out.startswith("## tiny, tiny")


def curve_of(losses, lr=0.1):
    return {
        "step": list(range(10, 10 * len(losses) + 10, 10)), "loss": losses, "diverged": None,
        "test": {"loss": losses[-1]}, "candidate": {"lr": lr, "damping": 0.5},
    }  # fmt: skip


def test_the_table():
    def file(method, *curves):
        names = {"problem": "tiny", "method": method, "part": "seeds"}
        return {"config": names, "problem": "Tiny", "metric": "loss", "curves": curves}

    found = [
        file("sgd", curve_of([0.5, 0.4, 0.3, 0.25]), curve_of([0.5, 0.4, 0.3, 0.25])),
        file("reduce", curve_of([0.5, 0.25]), curve_of([0.5, 0.5])),
        {
            "config": {"problem": "tiny", "methods": ["sgd", "reduce"]},
            "step_seconds": {"sgd": {"median": 0.1}, "reduce": {"median": 0.15}},
        },
    ]
    lines = steps_to_target.table(found, STUDY, "tiny").splitlines()
    assert (
        "| SGD | 2 of 2 | 40 ± 0 | 100 | 1.00 | 100 | 0.2500 ± 0.0000 | 0.2500 ± 0.0000 | 0.1 "
        "| 0.5 | 100 | 100 | 100 |"
    ) in lines
    assert (
        "| K-FAC-reduce | 1 of 2 | 20 | 50 | 1.50 | 75 | 0.3750 ± 0.1250 | 0.3750 ± 0.1250 | 0.1 "
        "| 0.5 | – | – | – |"
    ) in lines


def test_the_comparison():
    """Its networks fit their data, of which only the digits are always here."""
    task = config(schedule=Schedule(2, 1), measure_every=2)
    for name in ("reduce", "soap"):
        if name == "soap":
            pytest.importorskip("pytorch_optimizer")
        method = optimizer_comparison.METHODS[name]
        (curve,) = run(optimizer_comparison.PROBLEMS["digits"], method, task)["curves"]
        assert curve["diverged"] is None
    assert set(optimizer_comparison.STUDY.schedules) == set(optimizer_comparison.PROBLEMS)


def test_the_vision_transformer_trains(tiny_cifar10, monkeypatch):
    small = images("jpeg", max_train=60, max_test=20, validation=0.5)
    monkeypatch.setattr(vision_study, "images", lambda *_, **__: small)
    whole = replace(vision_study.PROBLEMS["cifar10"], batch_size=8)
    (curve,) = run(whole, vision_study.METHODS["reduce each"], config(measure_every=8))["curves"]
    assert curve["diverged"] is None
