"""Predictions of whole data sets, and the content of evaluation.json, by direct computation."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import special
from torch import nn
from torch.testing import assert_close

from marglik import KronLaplace, calibrate
from marglik.application.data.out_of_distribution import OutOfDistributionImages
from marglik.application.data.splits import take
from marglik.application.evaluation import evaluate, predictives_of
from marglik.application.records import Evaluation, from_json, to_json
from marglik.data import Digits, Noise, Splits, out_of_distribution_images
from marglik.prediction.intervals import differences, intervals
from marglik.prediction.links import Prediction
from marglik.prediction.metric_types import Metrics
from marglik.prediction.metrics import (
    compute_metrics,
    example_scores,
    out_of_distribution_metrics,
)
from marglik.prediction.predictive import (
    PredictiveConfig,
    laplace_predictive,
    map_predictive,
    predict_all,
)
from tests.marglik.posteriors import TakesMapping, data, network


def test_batches_of_unequal_size_become_one_prediction():
    x, y = data()
    predict = map_predictive(network())
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    batches = [(x[part], y[part]) for part in order.split([5, 2, 1])]
    found, targets = predict_all(predict, iter(batches))
    assert_close(found.tensors(), predict(x[order]).tensors())
    assert torch.equal(targets, y[order])
    with pytest.raises(ValueError, match="The data is empty: the loader yields no batch"):
        predict_all(predict, [])
    # Batches that are mappings.
    predict = map_predictive(TakesMapping(network()))
    batches = [{"pixels": x[part], "target": y[part]} for part in (slice(3), slice(3, 8))]
    by_key, targets = predict_all(predict, batches, dict_key_y="target")
    assert_close(by_key.mean[order], found.mean)
    assert torch.equal(targets, y)
    with pytest.raises(KeyError, match="no 'labels', but dict_key_y is 'labels'.*Its keys are"):
        predict_all(predict, batches)


# --- the record ---


@pytest.fixture(scope="module")
def digits():
    whole = Digits(validation=0.1).load()
    first = slice(40)
    return replace(
        whole,
        train=take(whole.train, slice(200)),
        train_indices=None,
        validation=take(whole.validation, first),
        test=take(whole.test, first),
    )


def normalised(images, splits):
    return (images.float() - splits.mean[0]) / splits.std[0]


@pytest.fixture(scope="module")
def predictives(digits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    x, y = normalised(digits.train[0], digits), digits.train[1]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    la = KronLaplace(model, "classification", prior_precision=1.0)
    la.fit([(x, y)])
    config = PredictiveConfig("mc", samples=30)
    mc = laplace_predictive(la, config, torch.Generator().manual_seed(0))
    return {"MAP": map_predictive(model), "Laplace, mc": mc}


@pytest.fixture(scope="module")
def record(digits, predictives):
    ood = out_of_distribution_images(Noise(num_images=30), digits)
    return evaluate(predictives, digits, "classification", ood=ood, batch_size=16)[0]


def test_metrics_are_those_of_all_examples_at_once(record, digits, predictives):
    images, labels = digits.test
    for name, predict in predictives.items():
        found = to_json(record.predictives[name].metrics)
        prediction = predict(normalised(images, digits))
        expected = to_json(compute_metrics(prediction, labels, "classification"))
        assert {key: found.pop(key) for key in expected} == pytest.approx(expected, rel=1e-4)
    assert {*found} == {"auroc", "auroc_epistemic", "aupr", "fpr95"}


def test_where_labels_may_be_wrong_the_nll_of_both_kinds_is_there(digits, predictives):
    model, noise, y = predictives["MAP"].model, 0.3, digits.test[1]
    p = model(normalised(digits.test[0], digits)).softmax(-1).double()
    nll = {
        "true": -p.gather(1, y[:, None]).log().mean().item(),
        "observed": -((1 - noise) * p + noise / 10).gather(1, y[:, None]).log().mean().item(),
    }
    for text, labels, other in (
        (f"noisy_classification(noise={noise})", "true", "observed_labels"),
        (f"noisy_classification(noise={noise})", "observed", "true_class"),
        ("noisy_classification(noise=0.01)", "true", None),
    ):
        drawn = noise if labels == "observed" else 0.0
        predict = map_predictive(model, text, label_noise=drawn)
        record, _ = evaluate({"MAP": predict}, digits, text, labels=labels)
        metrics = record.predictives["MAP"].metrics
        assert metrics.nll == pytest.approx(nll[labels], rel=1e-4)
        kinds = {
            "observed_labels": metrics.nll_observed_labels,
            "true_class": metrics.nll_true_class,
        }
        expected = dict.fromkeys(kinds) | ({other: nll[other.split("_")[0]]} if other else {})
        assert kinds == {
            key: value and pytest.approx(value, rel=1e-4) for key, value in expected.items()
        }


def test_what_is_calibrated_has_its_own_label_noise(digits, predictives):
    """The temperature-scaled MAP in the table, and a calibrated predictive before its fit."""
    model, given = predictives["MAP"].model, 0.15
    la = KronLaplace(model, f"noisy_classification(noise={given})")
    x, y = normalised(digits.train[0], digits), digits.train[1].clone()
    y[::2] = torch.randint(10, y[::2].shape, generator=torch.Generator().manual_seed(0))
    la.fit([(x, y)])
    config = PredictiveConfig(labels="observed", layers="last")
    calibrated = calibrate(la, [(x, y)], config)
    scaled = predictives_of(la, [config])["MAP, temperature-scaled"]
    fit = calibrated.calibration_fit.map_calibration
    assert fit.label_noise > 2 * given
    f = model(x).detach() / fit.output_temperature
    q = (1 - fit.label_noise) * f.softmax(-1) + fit.label_noise / 10
    assert_close(scaled(x).mean, q)
    assert scaled.calibration == fit
    plain = laplace_predictive(la, replace(config, calibration="none"))
    assert_close(calibrated.uncalibrated(x).mean, plain(x).mean)


def test_intervals_and_differences_are_of_the_test_set(record, digits, predictives):
    x, y = normalised(digits.test[0], digits), digits.test[1]
    scores = {n: example_scores(p(x), y, "classification") for n, p in predictives.items()}
    for name, entry in record.predictives.items():
        low, high = entry.intervals.auroc
        assert low < entry.metrics.auroc < high
        ends = replace(entry.intervals, auroc=None)
        assert ends == intervals(scores[name]).map(lambda pair: pytest.approx(pair, rel=1e-4))
    assert record.predictives["MAP"].against is None
    against = record.predictives["Laplace, mc"].against
    assert against.predictive == "MAP"
    expected = differences(scores["Laplace, mc"], scores["MAP"])
    assert against.differences == expected.map(lambda d: pytest.approx(d, rel=1e-3, abs=1e-6))


def test_sequences_of_several_lengths_have_no_intervals():
    """As examples alone are independent; of one length each sequence counts as one."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 4, 5).softmax(-1), torch.randint(5, (30, 4))

    def predict(rows):
        return Prediction(rows, *[torch.zeros(rows.shape[:-1])] * 2)

    def found(labels, ignore_index=None):
        splits = Splits(*[(x, labels)] * 3, name="rows", ignore_index=ignore_index)
        found, _ = evaluate({"given": predict}, splits, "classification")
        return found.predictives["given"]

    scores = example_scores(predict(x.flatten(0, 1)), y.flatten(), "classification").nll
    expected = intervals(Metrics(nll=scores.view(30, 4).mean(1))).nll
    assert found(y).intervals.nll == pytest.approx(expected)
    assert expected != pytest.approx(intervals(Metrics(nll=scores)).nll)  # the control
    ragged = y.clone()
    ragged[3, 2:] = -100
    assert found(ragged).intervals == Metrics()
    ragged[:15, 2:] = 5  # by chance as many as three a sequence are left
    assert found(ragged, ignore_index=5).intervals == Metrics()


def test_out_of_distribution_images_are_told_by_the_entropy(digits, predictives):
    predict = predictives["Laplace, mc"]
    turned = digits.test[0].rot90(1, (2, 3)).contiguous()
    ood = OutOfDistributionImages(turned, "turned", None)
    found, _ = evaluate({"mc": predict}, digits, "classification", ood=ood)
    inside, outside = (predict(normalised(x, digits)) for x in (digits.test[0], turned))
    expected, wrong = (
        out_of_distribution_metrics(getattr(inside, name), getattr(outside, name))
        for name in ("entropy", "epistemic")
    )
    metrics = found.predictives["mc"].metrics
    metrics = Metrics(auroc=metrics.auroc, aupr=metrics.aupr, fpr95=metrics.fpr95)
    assert to_json(metrics) == pytest.approx(to_json(expected))
    assert to_json(metrics) != pytest.approx(to_json(wrong))  # negative control


@pytest.mark.parametrize("channels", [1, 4])
def test_most_uncertain_images(channels):
    pixels = torch.randint(256, (16, channels, 5, 4), dtype=torch.uint8)
    images = pixels, torch.arange(16) % 2
    scale = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    splits = Splits(images, None, images, "n", ("a", "b"), **scale)
    predict = map_predictive(nn.Sequential(nn.Flatten(), nn.Linear(20 * channels, 2)))
    found, _ = evaluate({"MAP": predict}, splits, "classification")
    examples, p = found.uncertain.examples, predict(pixels.float())
    entropies = special.entr(p.mean.numpy()).sum(1)
    assert [e.index for e in examples] == sorted(range(16), key=lambda i: -entropies[i])[:12]
    for example in examples:
        i = example.index
        assert (example.label, example.predicted) == ("ab"[i % 2], "ab"[p.mean[i].argmax()])
        assert example.numbers["entropy"] == pytest.approx(entropies[i], rel=1e-4, abs=1e-6)
        start, content = example.image.split(",", 1)
        assert start == "data:image/png;base64"
        shown = np.array(Image.open(io.BytesIO(base64.b64decode(content)))).reshape(5, 4, -1)
        assert np.array_equal(shown, pixels[i].permute(1, 2, 0)[:, :, :3].numpy())


@pytest.mark.parametrize("likelihood", ["regression", "bernoulli"])
def test_other_likelihoods(likelihood):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :2].sin() if likelihood == "regression" else (x[:, :3] > 0).float()
    train, test = ((x[p], y[p]) for p in (slice(40), slice(40, 60)))
    splits = Splits(train, None, test, name="tensors")
    la = KronLaplace(nn.Linear(4, y.shape[1]), likelihood)
    la.fit([train])
    predict = laplace_predictive(la)
    found, _ = evaluate({"Laplace": predict}, splits, likelihood, batch_size=7)
    assert from_json(Evaluation, json.loads(json.dumps(to_json(found), allow_nan=False))) == found
    assert [found.classes, found.ood, found.uncertain] == [None] * 3
    assert (found.data, found.num_test) == ("tensors", 20)
    entry = found.predictives["Laplace"]
    inputs, targets = test
    expected = to_json(compute_metrics(predict(inputs), targets, likelihood))
    assert to_json(entry.metrics) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    if likelihood == "bernoulli":
        assert sum(entry.reliability.counts) == 60
    with pytest.raises(ValueError, match="tensors contains no images, and ood is for images"):
        out_of_distribution_images(Noise(), splits)
