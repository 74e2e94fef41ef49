"""The study of weight decays: what each way is trained on, and tables from the JSON alone."""

import json
from dataclasses import replace

import pytest
import torch

from experiments.options import SHIPPED
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
        row(way, nll, size, trained_on=data, seconds=seconds)
        for way, nll, seconds in (
            ("default", 0.375, 2.0),
            ("grid", 0.25, 16.0),
            ("grid, scaled", 0.25, 16.0),
            ("learned", learned, 5.0),
        )
        for data in ("four fifths", "all")
    ]
    config = {"data": "digits", "part": "ways", "seed": seed}
    return {"config": config, "title": "digits, MLP", "rows": rows}


def variants(seed, other):
    config = {"data": "digits", "part": "variants", "seed": seed, "variants": ["base", "other"]}
    rows = [row("default", 0.5), row("base", 0.25), row("other", other)]
    return {"config": config, "title": "digits, MLP", "rows": rows}


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
    rows = {(r["flipped"], r["way"], r["trained_on"]): r for r in found["rows"]}
    assert len(rows) == len(found["rows"]) == 8
    # Two candidates and a learned run on four fifths, then each way on all, none of them twice.
    grids = {rows[0.0, way, "all"]["chosen"] for way in study.GRIDS}
    fixed = len({5e-4} | grids)
    assert [n for _, n, *_ in trained] == [80] * 3 + [100] * (fixed + 1)
    for way in study.GRIDS:
        held_out = rows[0.0, way, "all"]["held_out"]
        assert rows[0.0, way, "all"]["chosen"] == float(min(held_out, key=held_out.get))
    chosen = rows[0.0, "grid", "all"]
    by_map, by_scaled = (rows[0.0, way, "all"]["held_out"] for way in study.GRIDS)
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
    decays = rows[0.0, "learned", "all"]["weight_decay"]
    assert len(set(decays.values())) == 4
    assert all(v == pytest.approx(chosen["chosen"]) for v in chosen["weight_decay"].values())


def test_the_variants(tiny, monkeypatch):
    monkeypatch.setitem(study.PROBLEMS, "digits", replace(tiny, epochs={100: 4}))
    names = ("base", "burn-in of half the epochs", "twice the epochs", "T = 0.1")
    found = study.run(Config(part="variants", size=100, variants=names))
    rows = {row["way"]: row for row in found["rows"] if row["flipped"] == 0}
    assert tuple(rows) == ("default", *names)
    assert len({row["MAP"]["nll"] for row in rows.values()}) == len(rows)
    assert all(value == pytest.approx(5e-4) for value in rows["default"]["weight_decay"].values())


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


def test_the_table_of_variants():
    *_, base, other = study.variants_table([variants(0, 0.125), variants(1, 0.375)]).splitlines()
    assert base.startswith("| base | +0.000 / +0.000 | +0.000 ± 0.000 |")
    cell = "+0.000 ± 0.125"
    assert other == f"| other | +0.000 / +0.000 | {cell} | {cell} | {cell} | {cell} | 1.50 | 8 |"


def test_the_readme_has_the_shipped_differences():
    table = (SHIPPED / "weight_decay_study" / "table.md").read_text()
    readme = (SHIPPED.parent / "README.md").read_text()
    rows = table.split("The learned way minus another")[1].split("\n\n")[1].splitlines()
    assert len(rows) > 4
    for row in rows:
        assert row in readme, row
