"""The attribution study: its score against scipy's correlations, and a tiny task to the end."""

import json
import re

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from experiments.attribution import linear_datamodeling, peers
from experiments.attribution.linear_datamodeling import Config, linear_datamodeling_scores
from experiments.attribution.tasks import Task
from marglik.models import MLP
from tests.random_numbers import normal


def test_the_score_is_a_rank_correlation_over_halves():
    """Of true effects in a convex problem, by loops over halves and queries."""
    N, K, x = 20, 12, normal(20, 3)
    y, queries = x.sum(1) + 0.5 * normal(20, seed=1), normal(4, 3, seed=2)
    targets = queries.sum(1) + 0.5 * normal(4, seed=3)

    def losses(rows):
        H = x[rows].T @ x[rows] + 0.3 * torch.eye(3).double()
        theta = torch.linalg.solve(H, x[rows].T @ y[rows])
        return 0.5 * (queries @ theta - targets).square()

    every = torch.arange(N)
    effects = torch.stack([losses(every != n) - losses(every >= 0) for n in range(N)], 1)
    generator = torch.Generator().manual_seed(0)
    halves = torch.stack([torch.randperm(N, generator=generator) < N // 2 for _ in range(K)])
    retrained = torch.stack([losses(half) for half in halves], 1)
    found = linear_datamodeling_scores(effects, halves, retrained)
    for q in range(4):
        predicted = [sum(float(effects[q, n]) for n in range(N) if half[n]) for half in halves]
        expected = spearmanr(predicted, [-float(loss) for loss in retrained[q]]).statistic
        assert found[q] == pytest.approx(expected, abs=1e-12)
    # Effects of single examples predict halves; the controls do not.
    assert found.mean() > 0.6
    assert linear_datamodeling_scores(-effects, halves, retrained).mean() < -0.6
    shuffled = effects[:, torch.randperm(N, generator=generator)]
    assert linear_datamodeling_scores(shuffled, halves, retrained).mean() < 0.4
    constant = linear_datamodeling_scores(torch.ones(4, N), halves, retrained)
    assert constant.tolist() == [0.0] * 4


def test_a_tiny_task_from_training_to_the_table(monkeypatch, tmp_path, capsys):
    def data(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(64, 4, generator=generator)
        y = (x[:, 0] + 0.3 * torch.randn(64, generator=generator) > 0).long()
        return (x[:40], y[:40]), (x[40:], y[40:])

    task = Task(data, lambda: MLP(4, (5,), 2), 6, lr=0.2, batch_size=10, queries=8, halves=8)
    monkeypatch.setattr(linear_datamodeling, "TASKS", {"tiny": task})
    monkeypatch.setattr(linear_datamodeling, "RETRAINED", tmp_path / "retrained")
    for name in ("kronfluence", "dattri", "trak"):  # optional packages, and slow to import
        monkeypatch.setattr(peers, name, _no_peer(name))
    result = linear_datamodeling.run(Config("tiny", 0)) | {"config": {"data": "tiny", "seed": 0}}
    json.dumps(result)
    by_method = {(m["method"], m["setting"]): m["lds"] for m in result["methods"]}
    assert by_method["marglik", "default"] > 0.2
    assert all(-1 <= value <= 1 for value in by_method.values())
    table = linear_datamodeling.report([result])
    quoted = re.search(r"\*\*(.+?) ±", table)
    assert quoted and float(quoted[1]) == pytest.approx(by_method["marglik", "default"], abs=2e-3)


def _no_peer(name):
    def peer(*arguments):
        yield from ()

    peer.__name__ = name
    return peer


def test_retrained_networks_keep_the_prior_precision():
    """A linear model, where the trained weights are known: the ridge solution with δ of a half."""
    x, y = normal(30, 2).float(), normal(30, 1, seed=1).float()
    task = Task(
        lambda seed: ((x, y), (x, y)), lambda: nn.Linear(2, 1, bias=False), 60, "regression",
        "sgd", 0.05, batch_size=10,
    )  # fmt: skip
    posterior = task.train((x, y), 0)
    posterior.prior_precision = torch.tensor([7.0])
    half = x[:10], y[:10]
    found = task.retrain(posterior, half, 0).weight.detach()
    decay = 7.0 * float(posterior.sigma_noise) ** 2
    for delta, close in ((decay, True), (2 * decay, False)):
        H = half[0].T @ half[0] + delta * torch.eye(2)
        expected = torch.linalg.solve(H, half[0].T @ half[1]).T
        assert torch.allclose(found, expected, atol=1e-3) == close
