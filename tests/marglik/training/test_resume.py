"""A run that was cut off goes on, in new objects, to what it would have come to, to the bit."""

from copy import deepcopy
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from marglik.storage.checkpoint import Checkpoints
from tests.marglik import threads
from tests.marglik.states import same
from tests.marglik.training.runs import CASES, make, outcome, run_until

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


@cache
def interrupted(case, stop):
    """The state that a run which ends with its stop-th record leaves."""
    with threads.one_thread(), TemporaryDirectory() as folder:
        run_until(stop, Checkpoints(folder, minutes=0), case, seed=0)
        return Checkpoints(folder).load()


def resumed(case, state, folder):
    """The outcome of new objects, of another seed."""
    run, checkpoints = make(case, seed=77), Checkpoints(folder, minutes=0)
    checkpoints.save(state)
    return outcome(run, run.run(checkpoints))


@pytest.mark.parametrize("case", CASES)
def test_interrupted_after_any_record(case, tmp_path):
    """Epochs 1, 2, update 2, epochs 3, 4, update 4: after each, and never, with SGD."""
    num_records = len(uninterrupted(case)["records"])
    expected = {"no update": 4, "averaged": 9, "noisy labels": 15, "rests": 12}
    expected |= {"corrected": 12, "a falling rate": 9}
    assert num_records == expected.get(case, 6)
    stops = {"SGD": range(1, num_records + 2), "averaged": (5, num_records), "noisy labels": (12,)}
    stops["rests"] = (7,)  # in epoch 5, when one of two updates has been left out
    stops["a falling rate"] = 7, 8  # before the first and the second epoch of the fall
    for stop in stops.get(case, (5,)):
        check(case, resumed(case, interrupted(case, stop), tmp_path / str(stop)))


def test_cases_are_what_they_are_called():
    assert uninterrupted("the first is the best")["evidence"][1] == 2
    assert uninterrupted("SGD")["evidence"][1] == 4
    assert uninterrupted("regression, MacKay")["laplace"][1] != 0.8
    assert uninterrupted("a falling rate")["scheduler"]["total_iters"] == 2 * 3
    assert uninterrupted("float16")["precision"]["scale"] == 64.0 * 2**6
    assert uninterrupted("no update")["evidence"][2] == []
    assert "momentum_buffer" in uninterrupted("SGD")["optimizer"]["state"][0]
    for case in CASES.keys() - {"SGD", "random labels"}:  # this one differs in what an update sees
        assert not same(uninterrupted(case)["parameters"], uninterrupted("SGD")["parameters"])


DROPPED = {
    "momentum": ("SGD", "optimizer", "state"),
    "Adam of the hyperparameters": ("SGD", "learner", "hyperparameters", "adam"),
    "hyperparameters": ("regression, MacKay", "learner", "hyperparameters"),
    "torch's generator": ("SGD", "random", 0, "torch"),
    "numpy's generator": ("SGD", "random", 0, "numpy"),
    "Python's generator": ("SGD", "random", 0, "python"),
    "order of the images": ("images", "random", 0, "generators"),
    "parameters": ("SGD", "model"),
    "scheduler": ("SGD", "scheduler"),
    "scale of the loss": ("float16", "precision"),
    "best so far": ("the first is the best", "learner", "best"),
    "average": ("averaged", "learner", "averages"),
    "records": ("SGD", "records"),
    "Adam of the ranges": ("ranges", "learner", "ranges"),
    "evidences": ("SGD", "learner", "evidences_of_steps"),
}


@pytest.mark.parametrize("dropped", DROPPED)
def test_every_part_of_the_state_counts(dropped, tmp_path):
    """Negative control: a resume that forgets a part comes to something else."""
    case, *path, last = DROPPED[dropped]
    whole = deepcopy(interrupted(case, {"averaged": 8}.get(case, 5)))
    state, fresh = whole, make(case, seed=77).state_dict()
    for key in path:
        state, fresh = state[key], fresh[key]
    state[last] = fresh[last]
    assert not same(uninterrupted(case), resumed(case, whole, tmp_path))


def test_workers_that_live_on_are_refused_before_anything_is_done(tmp_path):
    """They draw a seed once, a run that goes on another time: its batches would be others."""
    dataset = TensorDataset(torch.randn(8, 4).double(), torch.zeros(8).long())
    loader = DataLoader(dataset, 8, num_workers=1, persistent_workers=True)
    run, records = make("SGD"), []
    run.curvature_loader, run.on_record = loader, records.append
    with pytest.raises(ValueError, match="Pass persistent_workers=False, or train without"):
        run.run(Checkpoints(tmp_path / "state", minutes=0))
    assert not records and not (tmp_path / "state").exists()
