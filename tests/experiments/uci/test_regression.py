"""UCI: rivals trained side by side are those trained alone; tables come from the JSON alone."""

import json
import math
import statistics

import pytest
import torch
from torch.testing import assert_close

from experiments.uci import regression as uci
from experiments.uci import report as uci_report
from experiments.uci import rivals as uci_rivals

TRAINING = uci_rivals.Training(hidden=4, steps=12, batch_size=8, lr=0.05)


def data(n=20):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, x[:, :1].sin() + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def trained_alone(weight_decay, seed, order_seed):
    """A plain loop over one network, with Adam's own formulas left to torch's slow form."""
    x, y = data()
    network = TRAINING.network(3, seed)
    optimizer = torch.optim.Adam(network.parameters(), TRAINING.lr, foreach=False)
    loader = TRAINING.batches((x, y), order_seed)
    for step, (a, b) in enumerate([batch for _ in range(4) for batch in loader]):
        for group in optimizer.param_groups:
            group["lr"] = TRAINING.lr * (1 + math.cos(math.pi * step / TRAINING.steps)) / 2
        loss = 0.5 * (network(a) - b).square().mean()
        loss = loss + 0.5 * weight_decay * sum(p.square().sum() for p in network.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def test_side_by_side_is_as_alone():
    together = uci_rivals.train_side_by_side(TRAINING, data(), [0.0, 0.3, 0.3], [5, 5, 7])
    alone = [trained_alone(wd, seed, 5) for wd, seed in ((0.0, 5), (0.3, 5), (0.3, 7))]
    for a, b in zip(together, alone, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert_close(p, q, rtol=1e-8, atol=1e-10)
    # Negative control: neither the weight decay nor the seed is without effect.
    first, second, third = (n.state_dict()["layers.1.weight"] for n in together)
    assert (first - second).abs().max() > 1e-2 and (second - third).abs().max() > 1e-2


def test_grid_search_and_ensemble():
    x_test = data(7)[0]
    found, chosen = uci_rivals.grid_and_ensemble(TRAINING, data(), x_test, 0)
    assert chosen["weight_decay"] in uci_rivals.GRID
    single, ensemble = found["grid search"], found["ensemble of five"]
    assert_close(single.variance, torch.full((7, 1), chosen["sigma_noise"] ** 2).double())
    assert (ensemble.variance > single.variance).all()
    seeds = [0, 100, 200, 300, 400]
    members = uci_rivals.train_side_by_side(TRAINING, data(), [chosen["weight_decay"]] * 5, seeds)
    f = torch.stack([member(x_test) for member in members]).detach()
    assert_close(single.mean, f[0])
    assert_close(ensemble.mean, f.mean(0))
    variance = (f - f.mean(0)).square().mean(0) + chosen["sigma_noise"] ** 2
    assert_close(ensemble.variance, variance)


def test_metrics_are_in_the_targets_units():
    class Splits:
        target_mean, target_std = 30.0, 4.0

    mean, variance = torch.tensor([[0.5], [1.0]]).double(), torch.tensor([[0.25], [1.0]]).double()
    y = torch.tensor([[0.0], [2.0]]).double()
    found = uci._metrics(uci_rivals.Gaussian(mean, variance, 1.0, 1), Splits(), y)
    densities = [
        statistics.NormalDist(30 + 4 * m, 4 * v**0.5).pdf(30 + 4 * t)
        for m, v, t in ((0.5, 0.25, 0.0), (1.0, 1.0, 2.0))
    ]
    assert found["log_likelihood"] == pytest.approx(statistics.mean(map(math.log, densities)))
    assert found["rmse"] == pytest.approx((((4 * 0.5) ** 2 + 4**2) / 2) ** 0.5)


def test_a_split(uci_archive):
    uci_archive("yacht", torch.cat(data(40), 1).numpy(), num_train=32)
    found = json.loads(
        json.dumps(uci.run_split(uci.Config("yacht", 0, steps=40, lr=0.03, updates=4)))
    )
    assert list(found["methods"]) == [
        "ours", "MAP, learned σ", "laplace-torch, post hoc", "grid search", "ensemble of five",
    ]  # fmt: skip
    for metrics in found["methods"].values():
        assert math.isfinite(metrics["log_likelihood"]) and metrics["rmse"] > 0
    ours, single = found["methods"]["ours"], found["methods"]["MAP, learned σ"]
    assert ours["rmse"] == single["rmse"] and ours["log_likelihood"] != single["log_likelihood"]
    learned = found["learned"]
    assert 0 < learned["sigma_noise"] != 1 and len(learned["prior_precision"]) == 4
    assert len(learned["updates"]) == 4


def test_a_set_is_all_of_its_splits(monkeypatch):
    monkeypatch.setattr(uci, "run_split", uci.asdict)
    found = uci.run(uci.Task("protein", 3))
    assert [split["split"] for split in found["splits"]] == [0, 1, 2]
    assert {split["steps"] for split in found["splits"]} == {20_000}
    assert uci_report.RECORDED.keys() == uci.FOLDERS.keys()


def test_the_tables():
    def split(number, ours, grid):
        methods = {
            name: {"log_likelihood": value, "rmse": 0.5, "seconds": 3.0, "trainings": 1}
            for name, value in zip(uci_report.METHODS, (ours, 0.0, 0.0, grid, 0.0), strict=True)
        }
        return {
            "config": {"dataset": "yacht", "split": number},
            "methods": methods,
            "learned": {"sigma_noise": 0.25, "effective_parameters": 31.0},
            "grid search": {"sigma_noise": 0.5},
        }

    splits = [split(0, -1.0, -1.5), split(1, -2.0, -1.9)]
    text = uci_report.report([{"config": {"data": "yacht"}, "splits": splits}])
    assert "| yacht | 2 | -1.25 ± 0.01 | -1.50 ± 0.50 | 0.00 ± 0.00 |" in text
    assert "| yacht | -1.500 ± 0.500 | -1.500 ± 0.500 | +0.200 ± 0.300 |" in text
    assert (
        "Ours has at least the recorded log likelihood for 0 of 1 sets (none), and at least the "
        "grid search's minus one standard error of the difference for 1 of 1 sets (yacht).\n"
    ) in text
    assert "| yacht | 0.250 ± 0.000 | 0.500 ± 0.000 | 31 |" in text
