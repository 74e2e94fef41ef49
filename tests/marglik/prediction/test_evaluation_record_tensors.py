"""The content of evaluation.json for data that are no images: regression, several labels."""

import json
import math

import pytest
import torch
from torch import nn

from marglik import KronLaplace
from marglik.data import Noise, TensorSplits
from marglik.prediction.evaluation_record import EvaluationConfig, evaluate
from marglik.prediction.predictive import laplace_predictive


def tensors(likelihood, validation=True):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :2].sin() if likelihood == "regression" else (x[:, :3] > 0).float()
    parts = [(x[part], y[part]) for part in (slice(30), slice(30, 40), slice(40, 60))]
    return TensorSplits(parts[0], parts[1] if validation else None, parts[2], name="tensors")


def posterior(likelihood, splits):
    torch.manual_seed(0)
    outputs = splits.train[1].shape[1]
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))
    la = KronLaplace(model, likelihood)
    la.fit([splits.train])
    return laplace_predictive(la)


def test_regression():
    splits = tensors("regression")
    predict = posterior("regression", splits)
    found = evaluate({"Laplace": predict}, splits, "regression", batch_size=7)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [found[key] for key in ("classes", "ood", "shift", "uncertain")] == [None] * 4
    assert (found["data"], found["num_test"]) == ("tensors", 20)
    entry = found["predictives"]["Laplace"]
    assert set(entry) == {"metrics", "reliability", "seconds"}
    keys = ["reg/NLL", "reg/RMSE", "cal/coverage50", "cal/coverage90", "cal/coverage95"]
    assert set(entry["metrics"]) == {f"{s}/{key}" for s in ("test", "validation") for key in keys}
    x, y = splits.test
    p = predict(x)
    nll = -torch.distributions.Normal(p.mean, p.total.sqrt()).log_prob(y).sum(1).mean()
    assert entry["metrics"]["test/reg/NLL"] == pytest.approx(float(nll), rel=1e-5)
    rmse = (p.mean - y).square().mean().sqrt()
    assert entry["metrics"]["test/reg/RMSE"] == pytest.approx(float(rmse), rel=1e-5)
    inside = (p.mean - y).abs() <= 0.6744897502 * p.total.sqrt()
    assert entry["metrics"]["test/cal/coverage50"] == pytest.approx(float(inside.float().mean()))
    assert entry["reliability"]["levels"] == pytest.approx([k / 20 for k in range(1, 20)])
    assert len(entry["reliability"]["coverage"]) == 19


def test_bernoulli():
    splits = tensors("bernoulli", validation=False)
    predict = posterior("bernoulli", splits)
    found = evaluate({"Laplace": predict}, splits, "bernoulli", batch_size=7)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    entry = found["predictives"]["Laplace"]
    keys = ["cls/NLL", "cls/accuracy", "cls/Brier", "cal/ECE", "cal/ECE_adaptive"]
    assert set(entry["metrics"]) == {f"test/{key}" for key in keys}
    x, y = splits.test
    p = predict(x).mean
    nll = nn.functional.binary_cross_entropy(p, y, reduction="sum") / 20
    assert entry["metrics"]["test/cls/NLL"] == pytest.approx(float(nll), rel=1e-5)
    assert sum(entry["reliability"]["counts"]) == 60  # of all outputs
    assert sum(entry["entropy"]["test"]) == 60
    assert entry["entropy"]["edges"][-1] == pytest.approx(math.log(2))
    assert found["uncertain"] is None and found["classes"] is None


@pytest.mark.parametrize("likelihood", ["regression", "bernoulli"])
@pytest.mark.parametrize("what", [{"config": EvaluationConfig(shift=True)}, {"ood": Noise()}])
def test_data_without_images_is_neither_shifted_nor_out_of_distribution(likelihood, what):
    splits = tensors(likelihood)
    message = "tensors holds no images; shift and ood are for images. Leave them out"
    with pytest.raises(ValueError, match=message):
        evaluate({"Laplace": posterior(likelihood, splits)}, splits, likelihood, **what)
