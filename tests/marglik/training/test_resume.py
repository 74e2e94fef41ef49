"""A run that was cut off goes on, in new objects, to what it would have come to, to the bit."""

from functools import cache

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from marglik.storage.checkpoint import Checkpoints
from tests.marglik import threads
from tests.marglik.same_state import same
from tests.marglik.training.online_runs import CASES, NUM_RECORDS, make, outcome, run_until

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def uninterrupted(case):
    """What is left of a run without checkpoints."""
    with threads.one_thread():
        run = make(case)
        return outcome(run, run.run())


def check(case, found):
    expected = uninterrupted(case)
    assert found.keys() == expected.keys()
    for part, value in expected.items():
        assert same(value, found[part]), part


def resumed(case, checkpoints):
    """The outcome of new objects, of another seed."""
    run = make(case, seed=77)
    return outcome(run, run.run(checkpoints))


@pytest.mark.parametrize("case", CASES)
def test_interrupted_after_any_record(case, tmp_path):
    num_records = len(uninterrupted(case)["records"])
    assert num_records == {"no update": 4, "averaged": 9}.get(case, NUM_RECORDS - 1)
    # After each record, and never, for those that differ most; else after an epoch, and in an
    # update where it takes the optimiser's factors.
    every = case in ("SGD", "averaged")
    for stop in range(1, num_records + 2) if every else (5,):
        folder = tmp_path / str(stop)
        run_until(stop, Checkpoints(folder, minutes=0), case, seed=0)
        check(case, resumed(case, Checkpoints(folder, minutes=0)))


@pytest.mark.parametrize("case", ["images"])
def test_interrupted_after_every_record(case, tmp_path):
    for stop in range(2, NUM_RECORDS):
        run_until(stop, Checkpoints(tmp_path, minutes=0), case, seed=77 * (stop > 2))
    check(case, resumed(case, Checkpoints(tmp_path, minutes=0)))


def test_cases_are_what_they_are_called():
    assert uninterrupted("the first is the best")["evidence"][1] == 2
    assert uninterrupted("SGD")["evidence"][1] == 4
    assert uninterrupted("regression")["laplace"][1] != 0.8
    assert uninterrupted("float16")["precision"]["scale"] == 64.0 * 2**6
    assert uninterrupted("no update")["evidence"][2] == []
    assert "momentum_buffer" in uninterrupted("SGD")["optimizer"]["state"][0]
    others = {case: uninterrupted(case)["parameters"] for case in CASES if case != "SGD"}
    same_training = ("random labels", "the last")  # they differ in what an update sees or keeps
    for case, parameters in others.items():
        assert case in same_training or not same(parameters, uninterrupted("SGD")["parameters"])


def optimizer_state(state, fresh):
    state["optimizer"]["state"] = fresh["optimizer"]["state"]


def adam(state, fresh):
    state["learner"]["hyperparameters"]["adam"] = fresh["learner"]["hyperparameters"]["adam"]


def torch_generator(state, fresh):
    state["random"][0]["torch"] = fresh["random"][0]["torch"]


def loader_generator(state, fresh):
    state["random"][0]["generators"][0] = fresh["random"][0]["generators"][0]


def part(name):
    def drop(state, fresh):
        state[name] = fresh[name]

    return drop


def part_of_learner(name):
    def drop(state, fresh):
        state["learner"][name] = fresh["learner"][name]

    return drop


DROPPED = {
    "momentum": ("SGD", optimizer_state),
    "Adam of the hyperparameters": ("SGD", adam),
    "hyperparameters": ("MacKay", part_of_learner("hyperparameters")),
    "torch's generator": ("SGD", torch_generator),
    "order of the images": ("images", loader_generator),
    "parameters": ("SGD", part("model")),
    "scheduler": ("SGD", part("scheduler")),
    "scale of the loss": ("float16", part("precision")),
    "best so far": ("the first is the best", part_of_learner("best")),
    "exponential average": ("exponential average", part_of_learner("average")),
    "records": ("SGD", part("records")),
    "Adam of the ranges": ("ranges", part_of_learner("ranges")),
    "evidences": ("SGD", part_of_learner("evidences_of_steps")),
}


@pytest.mark.parametrize("dropped", DROPPED)
def test_every_part_of_the_state_counts(dropped, tmp_path):
    """Negative control: a resume that forgets a part comes to something else."""
    case, drop = DROPPED[dropped]
    run_until(4 + (case != "no update"), Checkpoints(tmp_path, minutes=0), case, seed=0)
    state = Checkpoints(tmp_path).load()
    drop(state, make(case, seed=77).state_dict())
    Checkpoints(tmp_path).save(state)
    assert not same(uninterrupted(case), resumed(case, Checkpoints(tmp_path)))


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    first = make("SGD")
    first.run(Checkpoints(tmp_path))
    again = make("SGD", seed=77)
    monkeypatch.setattr(again.network, "epoch", None)
    check("SGD", outcome(again, again.run(Checkpoints(tmp_path))))


def test_a_state_of_another_run_leaves_the_model_alone(tmp_path):
    make("SGD").run(Checkpoints(tmp_path, run={"seed": 0}))
    run = make("SGD", seed=5)
    before = [p.detach().clone() for p in run.model.parameters()]
    with pytest.raises(ValueError, match="seed is 0 there, 5 here"):
        run.run(Checkpoints(tmp_path, run={"seed": 5}))
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_workers_that_live_on_are_refused_before_anything_is_done(tmp_path):
    """They draw a seed once, a run that goes on another time: its batches would be others."""
    dataset = TensorDataset(torch.randn(8, 4).double(), torch.zeros(8).long())
    loader = DataLoader(dataset, 8, num_workers=1, persistent_workers=True)
    run, records = make("SGD"), []
    run.curvature_loader, run.on_record = loader, records.append
    with pytest.raises(ValueError, match="Pass persistent_workers=False, or train without"):
        run.run(Checkpoints(tmp_path / "state", minutes=0))
    assert not records and not (tmp_path / "state").exists()
