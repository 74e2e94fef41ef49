"""The content of evaluation.json: its form, and its numbers against direct computation."""

import base64
import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import special, stats
from torch import nn

from marglik import KronLaplace
from marglik.data import (
    CORRUPTIONS,
    SEVERITIES,
    Digits,
    ImageData,
    ImageSet,
    ImageSplits,
    Noise,
    TensorSplits,
    corrupt,
    out_of_distribution_images,
)
from marglik.prediction.evaluation import compute_metrics, example_scores
from marglik.prediction.evaluation_record import compared, evaluate
from marglik.prediction.intervals import differences, intervals
from marglik.prediction.links import Prediction
from marglik.prediction.metrics import classification_metrics, out_of_distribution_metrics
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive, map_predictive

TEST = {"test/cls/NLL", "test/cls/accuracy", "test/cls/Brier", "test/cls/AURC", "test/cal/ECE",
        "test/cal/ECE_adaptive"}  # fmt: skip


OOD = {"ood/AUROC", "ood/AUPR", "ood/FPR95"}


EVERY_KEY = {
    "format", "version", "data", "likelihood", "classes", "num_test", "num_positions",
    "predictives", "ood", "shift", "uncertain", "device", "threads", "python", "versions",
}  # fmt: skip


class Given(ImageData):
    def __init__(self, splits):
        self.splits = splits

    def load(self):
        return self.splits


@pytest.fixture(scope="module")
def digits():
    whole = Digits(validation=0.1).load()
    first = torch.arange(40)
    return replace(
        whole,
        train=whole.train.select(torch.arange(200)),
        validation=whole.validation.select(first),
        test=whole.test.select(first),
    )


def normalised(images, splits):
    return (images.float() - splits.mean[0]) / splits.std[0]


@pytest.fixture(scope="module")
def predictives(digits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    x, y = normalised(digits.train.images, digits), digits.train.labels
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
    ood = Noise(num_images=30)
    return evaluate(predictives, digits, "classification", shift=True, ood=ood, batch_size=16)


def test_form(record):
    assert set(record) == EVERY_KEY
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    expected = {
        "data": "digits", "likelihood": "classification", "num_test": 40, "num_positions": None,
        "classes": [str(digit) for digit in range(10)],
        "shift": {"kinds": list(CORRUPTIONS), "severities": list(SEVERITIES)},
    }  # fmt: skip
    assert expected.items() <= record.items()
    ood = {"name": "noise", "num_examples": 30, "score": "entropy", "note": None}
    assert ood.items() <= record["ood"].items()
    of_test = {key.removeprefix("test/") for key in TEST}
    parts = ["validation", *(f"shift/{k}/{n}" for k in CORRUPTIONS for n in SEVERITIES)]
    expected = TEST | OOD | {f"{part}/{key}" for part in parts for key in of_test}
    assert list(record["predictives"]) == ["MAP", "Laplace, mc"]
    for entry in record["predictives"].values():
        assert set(entry) - {"against"} == {
            "metrics", "intervals", "reliability", "risk_coverage", "roc", "classes", "entropy",
            "seconds",
        }  # fmt: skip
        of_entropy = set(entry["metrics"]) - {"ood/AUROC_epistemic"}
        assert of_entropy == expected and entry["seconds"] > 0
        assert sum(entry["reliability"]["counts"]) == 40


def test_metrics_are_those_of_all_examples_at_once(record, digits, predictives):
    for name, predict in predictives.items():
        found = record["predictives"][name]["metrics"]
        for split in ("test", "validation"):
            images = getattr(digits, split)
            p = predict(normalised(images.images, digits)).mean
            for key, value in classification_metrics(p, images.labels).items():
                assert found[f"{split}/{key}"] == pytest.approx(value, rel=1e-4), key
        for kind in CORRUPTIONS:
            for severity in (1, 5):
                images = normalised(corrupt(digits.test.images, kind, severity), digits)
                p = predict(images).mean
                for key, value in classification_metrics(p, digits.test.labels).items():
                    assert found[f"shift/{kind}/{severity}/{key}"] == pytest.approx(value, rel=1e-4)
    assert found["shift/contrast/5/cls/NLL"] > 1.05 * found["test/cls/NLL"]


def test_intervals_are_of_the_test_set(record, digits, predictives):
    p = {
        name: predict(normalised(digits.test.images, digits))
        for name, predict in predictives.items()
    }
    scores = {n: example_scores(p[n], digits.test.labels, "classification") for n in p}
    for name, entry in record["predictives"].items():
        ends = entry["intervals"]
        expected = {f"test/{key}": value for key, value in intervals(scores[name]).items()}
        assert {k: v for k, v in ends.items() if not k.startswith("ood/")} == {
            key: pytest.approx(value, rel=1e-4) for key, value in expected.items()
        }
        low, high = ends["ood/AUROC"]
        assert low < entry["metrics"]["ood/AUROC"] < high
        assert entry["risk_coverage"]["risk"][-1] == pytest.approx(
            1 - entry["metrics"]["test/cls/accuracy"], abs=1e-6
        )
        assert np.array(entry["classes"]["confusion"]).sum() == 40
        assert entry["roc"]["fpr"][-1] == 1
    assert "against" not in record["predictives"]["MAP"]
    against = record["predictives"]["Laplace, mc"]["against"]
    assert against["predictive"] == "MAP"
    expected = differences(scores["Laplace, mc"], scores["MAP"])
    assert against["differences"] == {
        f"test/{key}": pytest.approx(value, rel=1e-3, abs=1e-6) for key, value in expected.items()
    }


def test_scores_of_two_networks_are_compared_by_example(digits, predictives):
    """As from one forward pass over the whole test set, of one network after the other."""
    networks = {0.0: predictives["MAP"], 1.0: lambda x: shifted(predictives["MAP"](x))}
    found, expected = {}, {}
    for shift, predict in networks.items():
        scores = {}
        evaluate({"MAP": predict}, digits, "classification", batch_size=13, scores=scores)
        found[shift] = scores["MAP"]
        p = predict(normalised(digits.test.images, digits)).mean.double()
        right = p[torch.arange(len(p)), digits.test.labels]
        expected[shift] = -right.log()
        assert torch.allclose(found[shift]["cls/NLL"], expected[shift], rtol=1e-4)
    difference, low, high = compared(found[1.0], found[0.0])["test/cls/NLL"]
    d = expected[1.0] - expected[0.0]
    half = stats.t.ppf(0.975, len(d) - 1) * d.std().item() / len(d) ** 0.5
    ends = (d.mean().item(), d.mean().item() - half, d.mean().item() + half)
    assert (difference, low, high) == pytest.approx(ends, rel=1e-3, abs=1e-6)
    # Negative control: the same values, not of the same examples.
    mixed = {name: values.roll(1) for name, values in found[0.0].items()}
    _, low_mixed, high_mixed = compared(found[1.0], mixed)["test/cls/NLL"]
    assert high_mixed - low_mixed > 1.1 * (high - low)


def shifted(prediction):
    """Another network's: a little less sure of everything."""
    mean = 0.9 * prediction.mean + 0.1 / prediction.mean.shape[-1]
    return Prediction(mean, prediction.aleatoric, prediction.epistemic)


def test_sequences_of_several_lengths_have_no_intervals():
    """As examples alone are independent; of one length each sequence counts as one."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 4, 5).softmax(-1), torch.randint(5, (30, 4))

    def predict(rows):
        return Prediction(rows, *[torch.zeros(rows.shape[:-1])] * 2)

    def found(labels):
        splits = TensorSplits(*[(x, labels)] * 3, name="rows")
        return evaluate({"given": predict}, splits, "classification")["predictives"]["given"]

    scores = example_scores(predict(x.flatten(0, 1)), y.flatten(), "classification")
    expected = intervals(scores, positions=4)
    assert found(y)["intervals"] == {
        f"test/{key}": pytest.approx(ends) for key, ends in expected.items()
    }
    assert expected["cls/NLL"] != intervals(scores)["cls/NLL"]  # the control
    ragged = y.clone()
    ragged[3, 2:] = -100
    assert found(ragged)["intervals"] == {}


def test_out_of_distribution_images_are_told_by_the_entropy(digits, predictives):
    predict = predictives["Laplace, mc"]
    turned = digits.test.images.rot90(1, (2, 3)).contiguous()
    ood = Given(replace(digits, test=ImageSet(turned, digits.test.labels), name="turned"))
    found = evaluate({"mc": predict}, digits, "classification", ood=ood)
    inside, outside = (predict(normalised(x, digits)) for x in (digits.test.images, turned))
    expected, wrong = (
        out_of_distribution_metrics(getattr(inside, name), getattr(outside, name))
        for name in ("entropy", "epistemic")
    )
    metrics = found["predictives"]["mc"]["metrics"]
    assert {key: metrics[key] for key in OOD} == pytest.approx(expected)
    assert {key: metrics[key] for key in OOD} != pytest.approx(wrong)  # negative control


def test_out_of_distribution_images_of_another_shape(digits, predictives):
    pixels = torch.randint(256, (7, 3, 12, 10), dtype=torch.uint8)
    images = ImageSet(pixels, torch.zeros(7, dtype=torch.int64))
    others = Given(ImageSplits(images, None, images, ("a",), (0.0,) * 3, (1.0,) * 3, "others"))
    found = evaluate(predictives, digits, "classification", ood=others)
    note = "resized from 12x10x3 to 8x8x1"
    assert found["ood"]["note"] == note and found["ood"]["num_examples"] == 7
    assert sum(found["predictives"]["MAP"]["entropy"]["ood"]) == 7
    resized, *_ = out_of_distribution_images(others, digits)
    inside, outside = (
        predictives["MAP"](normalised(x, digits)).entropy for x in (digits.test.images, resized)
    )
    expected = out_of_distribution_metrics(inside, outside)["ood/AUROC"]
    assert found["predictives"]["MAP"]["metrics"]["ood/AUROC"] == pytest.approx(expected)
    empty = replace(others.splits, test=images.select(torch.arange(0)))
    with pytest.raises(ValueError, match="others has no test images, so the OOD set is empty"):
        evaluate(predictives, digits, "classification", ood=Given(empty))


def test_histograms_count_all_examples(record, digits, predictives):
    for name, predict in predictives.items():
        histogram = record["predictives"][name]["entropy"]
        assert set(histogram) == {"edges", "test", "ood"}
        assert histogram["edges"] == pytest.approx(np.linspace(0, math.log(10), 31))
        p = predict(normalised(digits.test.images, digits)).mean.double().numpy()
        counts, _ = np.histogram(special.entr(p).sum(1), histogram["edges"])
        assert histogram["test"] == counts.tolist()
        assert (sum(histogram["test"]), sum(histogram["ood"])) == (40, 30)


@pytest.mark.parametrize("classes", [2, 3, 7, 10])
def test_histograms_count_the_ends(classes):
    """Entropies of 0 and, with rounding up or down, of log C."""
    uniform = torch.full((5, classes), 1 / classes)
    rows = torch.cat([torch.eye(classes)[:3], uniform, uniform * (1 + 1e-6), uniform * (1 - 1e-6)])
    splits = TensorSplits(*[(rows, torch.zeros(len(rows)).long())] * 3, name="rows")
    found = evaluate({"given": as_given}, splits, "classification")
    histogram = found["predictives"]["given"]["entropy"]["test"]
    assert sum(histogram) == len(rows)
    assert histogram[0] == min(classes, 3) and histogram[-1] == 15


def as_given(p):
    return Prediction(p, torch.zeros(len(p)), torch.zeros(len(p)))


def pixels_of(example):
    start, content = example["image"].split(",", 1)
    assert start == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content, validate=True))) as image:
        assert image.format == "PNG"
        return np.array(image)


def test_most_uncertain_images(record, digits, predictives):
    found = record["uncertain"]
    assert found["predictive"] == "Laplace, mc"  # the last
    p = predictives["Laplace, mc"](normalised(digits.test.images, digits))
    entropies = special.entr(p.mean.numpy()).sum(1)
    indices = [example["index"] for example in found["examples"]]
    assert indices == sorted(range(40), key=lambda i: -entropies[i])[:12]
    for example in found["examples"]:
        i = example["index"]
        assert example["label"] == str(int(digits.test.labels[i]))
        assert example["predicted"] == str(int(p.mean[i].argmax()))
        assert example["probability"] == pytest.approx(float(p.mean[i].max()), rel=1e-4)
        for part in ("entropy", "aleatoric", "epistemic"):
            assert example[part] == pytest.approx(float(getattr(p, part)[i]), rel=1e-3)
        assert np.array_equal(pixels_of(example), digits.test.images[i, 0].numpy())


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_of_any_channels_are_shown(channels):
    pixels = torch.randint(256, (6, channels, 5, 4), dtype=torch.uint8)
    images = ImageSet(pixels, torch.arange(6) % 2)
    splits = ImageSplits(
        images, None, images, ("a", "b"), (0.0,) * channels, (1.0,) * channels, "n"
    )
    predict = map_predictive(nn.Sequential(nn.Flatten(), nn.Linear(20 * channels, 2)))
    found = evaluate({"MAP": predict}, splits, "classification")
    examples = found["uncertain"]["examples"]
    assert len(examples) == 6
    for example in examples:
        shown = pixels_of(example).reshape(5, 4, -1)
        expected = pixels[example["index"]].permute(1, 2, 0)[:, :, :3]
        assert np.array_equal(shown, expected.numpy())
    assert not any(key.startswith("validation/") for key in found["predictives"]["MAP"]["metrics"])
    assert found["ood"] is None and found["shift"] is None


def test_labelled_images_are_for_classification(digits):
    predict = map_predictive(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "regression")
    with pytest.raises(ValueError, match="The shapes are .*targets \\(40,\\)"):
        evaluate({"MAP": predict}, digits, "regression", ood=Noise(5))


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


@pytest.mark.parametrize("likelihood", ["regression", "bernoulli"])
def test_other_likelihoods(likelihood):
    splits = tensors(likelihood, validation=likelihood == "regression")
    predict = posterior(likelihood, splits)
    found = evaluate({"Laplace": predict}, splits, likelihood, batch_size=7)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [found[key] for key in ("classes", "ood", "shift", "uncertain")] == [None] * 4
    assert (found["data"], found["num_test"]) == ("tensors", 20)
    entry, (x, y) = found["predictives"]["Laplace"], splits.test
    p = predict(x)
    if likelihood == "regression":
        assert set(entry) == {"metrics", "intervals", "reliability", "seconds"}
        nll = -torch.distributions.Normal(p.mean, p.total.sqrt()).log_prob(y).sum(1).mean()
        assert entry["metrics"]["test/reg/NLL"] == pytest.approx(float(nll), rel=1e-5)
        of_validation = compute_metrics(
            predict(splits.validation[0]), splits.validation[1], likelihood
        )
        assert entry["metrics"]["validation/reg/RMSE"] == pytest.approx(of_validation["reg/RMSE"])
        return
    assert not any(key.startswith("validation/") for key in entry["metrics"])
    nll = nn.functional.binary_cross_entropy(p.mean, y, reduction="sum") / 20
    assert entry["metrics"]["test/cls/NLL"] == pytest.approx(float(nll), rel=1e-5)
    assert sum(entry["reliability"]["counts"]) == sum(entry["entropy"]["test"]) == 60  # all outputs
    assert entry["entropy"]["edges"][-1] == pytest.approx(math.log(2))


@pytest.mark.parametrize("what", [{"shift": True}, {"ood": Noise()}])
def test_data_without_images_is_neither_shifted_nor_out_of_distribution(what):
    splits = tensors("bernoulli")
    message = "tensors holds no images; shift and ood are for images. Leave them out"
    with pytest.raises(ValueError, match=message):
        evaluate({}, splits, "bernoulli", **what)
