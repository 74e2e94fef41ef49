"""The study of weight decays: what each way is trained on, and tables from the JSON alone."""

import json
from dataclasses import replace

import pytest
import torch

from experiments.weight_decay import weight_decay_study as study
from experiments.weight_decay.weight_decay_study import Config, Task
from marglik.data.batches import split_batches
from marglik.models import MLP
from marglik.prediction.evaluation import predict_all
from marglik.prediction.predictive import map_predictive

TINY = {100: 8}


@pytest.fixture
def tiny(monkeypatch):
    """A small network and few epochs."""
    problem = replace(study.PROBLEMS["digits"], make_model=lambda: MLP(64, (6,)), epochs=TINY)
    problem = replace(problem, flipped=(0.0,))
    monkeypatch.setitem(study.PROBLEMS, "digits", problem)
    return problem


def labels_of(splits, split):
    return torch.cat([y for _, y in split_batches(splits, split, 64)])


def row(way, nll, size=100, flipped=0.0, **more):
    found = {"nll": nll, "accuracy": 0.9, "held_out": nll + 0.1}
    calibration = {"map_calibration": {"output_temperature": 1.5}}
    return {
        "way": way, "size": size, "flipped": flipped, "seconds": 2.0, "calibration": calibration,
        "MAP": found, "scaled": found, "Laplace": found, "epoch": 8, **more,
    }  # fmt: skip


def ways(seed, learned, size=100):
    rows = [
        row(way, nll, size, seconds=seconds)
        for way, nll, seconds in (
            ("default", 0.375, 2.0),
            ("grid", 0.25, 16.0),
            ("grid, scaled", 0.25, 16.0),
            ("learned", learned, 5.0),
        )
    ]
    return {"config": {"data": "digits", "seed": seed}, "title": "digits, MLP", "rows": rows}


def test_the_data_of_a_task(tiny):
    problem = replace(tiny, epochs={100: 8, 1400: 4})
    plain, noisy = (Task.of(Config(size=100), problem, share) for share in (0.0, 0.2))
    labels, flipped = (labels_of(task.everything, "train") for task in (plain, noisy))
    assert plain.num_examples == len(labels) == 100
    assert (labels != flipped).sum() == 20
    parts = [labels_of(noisy.parted, split) for split in ("train", "validation")]
    assert [len(part) for part in parts] == [80, 20]
    assert torch.cat(parts).bincount().tolist() == flipped.bincount().tolist()
    tests = [labels_of(task.everything, "test") for task in (plain, noisy)]
    assert len(tests[0]) == 397
    torch.testing.assert_close(*tests)
    assert Task.of(Config(size=1400), problem, 0.0).num_examples == 1400


def test_the_ways(tiny, monkeypatch):
    trained = []
    train = Task.train

    def remember(task, splits, prior, *arguments):
        found = train(task, splits, prior, *arguments)
        trained.append((task, split_batches(splits, "train", 1).num_examples, prior, found))
        return found

    monkeypatch.setattr(Task, "train", remember)
    found = study.run(Config(size=100, weight_decays=(5e-4, 5e-1)))
    json.dumps(found)
    rows = {row["way"]: row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 4
    # Two candidates and a learned run on four fifths, then each way on all, none of them twice.
    grids = {rows[way]["chosen"] for way in study.GRIDS}
    fixed = len({5e-4} | grids)
    assert [n for _, n, *_ in trained] == [80] * 3 + [100] * (fixed + 1)
    for way in study.GRIDS:
        held_out = rows[way]["held_out"]
        assert rows[way]["chosen"] == float(min(held_out, key=held_out.get))
    chosen = rows["grid"]
    by_map, by_scaled = (rows[way]["held_out"] for way in study.GRIDS)
    assert all(by_scaled[decay] < nll for decay, nll in by_map.items())
    task, _, _, network = next(
        run for run in trained[3:] if run[2].weight_decay == chosen["chosen"]
    )
    # The scaled MAP of the network trained on all, by hand.
    tau = chosen["calibration"]["map_calibration"]["output_temperature"]
    predict = map_predictive(network.laplace.model)
    batches = split_batches(task.parted, "test", 64)
    p, y = predict_all(predict, batches)
    log_p = torch.log_softmax(p.mean.double().log() / tau, -1)
    nll = -log_p[torch.arange(len(y)), y].mean().item()
    assert chosen["scaled"]["nll"] == pytest.approx(nll, rel=1e-4)
    assert chosen["scaled"]["nll"] != pytest.approx(chosen["MAP"]["nll"], rel=1e-2)
    decays = rows["learned"]["weight_decay"]
    assert len(set(decays.values())) == 4
    assert all(v == pytest.approx(chosen["chosen"]) for v in chosen["weight_decay"].values())


def test_the_table():
    lines = study.table([ways(0, 0.125), ways(1, 0.375)]).splitlines()
    assert (
        "| 100 | 0 % | 2 | learned | 0.250 ± 0.125 | 0.250 ± 0.125 | 0.250 ± 0.125 | 90.0 ± 0.0 "
        "| 1.50 | 1 | 2.5 |"
    ) in lines
    cell = "-0.125 ± 0.125"
    assert f"| 100 | 0 % | default | {cell} | {cell} | {cell} | +0.0 ± 0.0 |" in lines
    cell = "+0.000 ± 0.125"
    assert f"| 100 | 0 % | grid of seven | {cell} | {cell} | {cell} | +0.0 ± 0.0 |" in lines
