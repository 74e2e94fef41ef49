"""Predictions of whole data sets, and what is made of them for each likelihood."""

import json
import math

import pytest
import torch
from torch.testing import assert_close

from marglik.prediction.curves import coverage_curve
from marglik.prediction.evaluation import compute_metrics, predict_all, reliability_curve
from marglik.prediction.links import Prediction
from marglik.prediction.metrics import bernoulli_metrics, classification_metrics, regression_metrics
from marglik.prediction.predictive import map_predictive
from tests.marglik.small_laplace import TakesMapping, data, network


def prediction(mean, aleatoric=None, epistemic=None):
    mean = torch.as_tensor(mean, dtype=torch.float64)
    nothing = torch.zeros(len(mean), dtype=torch.float64)
    return Prediction(
        mean,
        nothing if aleatoric is None else aleatoric,
        nothing if epistemic is None else epistemic,
    )


def test_batches_of_unequal_size_become_one_prediction():
    x, y = data()
    predict = map_predictive(network())
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    batches = [(x[part], y[part]) for part in order.split([5, 2, 1])]
    found, targets = predict_all(predict, iter(batches))
    whole = predict(x[order])
    for name in ("mean", "aleatoric", "epistemic"):
        assert_close(getattr(found, name), getattr(whole, name))
    assert torch.equal(targets, y[order])


def test_batches_that_are_mappings():
    x, y = data()
    predict = map_predictive(TakesMapping(network()))
    batches = [{"pixels": x[part], "target": y[part]} for part in (slice(3), slice(3, 8))]
    found, targets = predict_all(predict, batches, dict_key_y="target")
    assert_close(found.mean, map_predictive(network())(x).mean)
    assert torch.equal(targets, y)
    with pytest.raises(KeyError, match="no 'labels'; pass the targets' key as dict_key_y"):
        predict_all(predict, batches)


def test_no_batch():
    with pytest.raises(ValueError, match="The data is empty: the loader yields no batch"):
        predict_all(map_predictive(network()), [])


def test_metrics_over_batches_by_hand():
    """A mean over examples, not over batches."""
    p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.3, 0.7]])
    y = torch.tensor([0, 1, 1, 0])
    batches = [(p[:1], y[:1]), (p[1:], y[1:])]
    found = compute_metrics(*predict_all(prediction, batches), "classification")
    expected = -(math.log(0.8) + math.log(0.4) + math.log(0.9) + math.log(0.3)) / 4
    assert found["cls/NLL"] == pytest.approx(expected)
    assert found["cls/accuracy"] == 0.5
    # Of the bins of width 1/15 no two confidences share one.
    assert found["cal/ECE"] == pytest.approx((0.2 + 0.6 + 0.1 + 0.7) / 4)


def test_metrics_are_those_of_the_likelihood():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(30, 3, generator=generator).double()
    variances = [torch.rand(30, 3, generator=generator).double() + 0.1 for _ in range(2)]
    labels, yes_no = torch.randint(3, (30,), generator=generator), (p > 0.3).double()
    rows = p / p.sum(1, keepdim=True)
    assert compute_metrics(prediction(rows), labels, "classification") == classification_metrics(
        rows, labels
    )
    assert compute_metrics(prediction(p), yes_no, "bernoulli") == bernoulli_metrics(p, yes_no)
    found = compute_metrics(prediction(p, *variances), yes_no, "regression")
    assert found == regression_metrics(p, sum(variances), yes_no)
    # Negative control: without the parameters' variance.
    assert found["reg/NLL"] != regression_metrics(p, variances[0], yes_no)["reg/NLL"]


def test_reliability_of_classes_by_hand():
    p = torch.tensor([[0.9, 0.06, 0.04], [0.32, 0.3, 0.38], [0.06, 0.92, 0.02]])
    curve = reliability_curve(prediction(p), torch.tensor([0, 0, 2]), "classification")
    assert curve["edges"] == pytest.approx([k / 15 for k in range(16)])
    assert [k for k, count in enumerate(curve["counts"]) if count] == [5, 13]
    assert curve["counts"][13] == 2
    assert curve["confidence"][13] == pytest.approx(0.91)
    assert (curve["accuracy"][5], curve["accuracy"][13]) == (0.0, 0.5)
    assert curve["accuracy"][0] is None
    assert json.loads(json.dumps(curve, allow_nan=False)) == curve


def test_reliability_of_bernoulli_outputs_is_that_of_the_predicted_side():
    """.1 predicts a zero with confidence .9; four outputs, all counted."""
    p = torch.tensor([[0.1, 0.9], [0.4, 0.95]])
    curve = reliability_curve(prediction(p), torch.tensor([[0, 0], [1, 1]]), "bernoulli")
    found = {k: count for k, count in enumerate(curve["counts"]) if count}
    assert found == {8: 1, 13: 2, 14: 1}
    assert curve["confidence"][8] == pytest.approx(0.6)
    assert [curve["accuracy"][k] for k in (8, 13, 14)] == [0.0, 0.5, 1.0]


def test_reliability_of_regression_is_the_coverage():
    """Noise of variance .36 and parameters' variance .64 make a σ of one together."""
    targets = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0)).double()
    zero = torch.zeros_like(targets)
    parts = torch.full_like(targets, 0.36), torch.full_like(targets, 0.64)
    curve = reliability_curve(prediction(zero, *parts), targets, "regression")
    assert curve == coverage_curve(zero, torch.ones_like(zero), targets)
    assert curve["coverage"] == pytest.approx(curve["levels"], abs=0.03)
    # Negative control: the noise alone covers too little.
    too_narrow = reliability_curve(prediction(zero, parts[0], zero), targets, "regression")
    assert too_narrow["coverage"][9] < 0.4
