"""What is written and printed about a run is in units that people know."""

import math
from dataclasses import asdict

import numpy as np
import pandas
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.distributions import Normal

from marglik import load_posterior
from marglik.application.cli import main
from marglik.data import TableFile
from marglik.models import MLP, Standardised
from marglik.prediction.intervals import mean_interval
from tests.marglik.application.runs.command_line import evaluated, results_of

UNIT = 1024.0  # a power of two, so that standardised targets are the same to the bit


def rows(path, unit=1.0):
    random = np.random.default_rng(0)
    size, rooms = random.normal(100, 20, 240), random.integers(1, 6, 240)
    price = 1000.0 * size + 50_000 * rooms + random.normal(0, 20_000, 240)
    table = pandas.DataFrame({"size": size, "rooms": rooms, "price": price * unit})
    table.to_csv(path, index=False)
    return path


def trained_on(path, folder, *more):
    data = ["--data", "TableFile", "--data.path", str(path)]
    options = [
        "--likelihood",
        "regression",
        "--epochs",
        "4",
        "--prior.every",
        "1",
        "--members",
        "2",
        *(more or ["--baseline"]),
    ]
    model = ["--model", "MLP", "--model.hidden", "[4]", "--no_progress"]
    assert main(["train", *model, *data, *options, "--output", str(folder)]) == 0
    return data


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    """A table and a run on it, and the same in another unit."""
    root = tmp_path_factory.mktemp("houses")
    usual, other = rows(root / "usual.csv"), rows(root / "other.csv", UNIT)
    for path in (usual, other):
        trained_on(path, root / path.stem)
    return usual, root / "usual", root / "other"


def test_what_is_compared_with_may_be_added_later(houses, tmp_path):
    path, run, _ = houses
    trained_on(path, tmp_path, "--no_baseline")
    assert [*results_of(tmp_path).networks] == ["learned"]
    trained_on(path, tmp_path, "--resume", "--baseline")
    at_once, later = results_of(run), results_of(tmp_path)
    assert later.networks.keys() == at_once.networks.keys() == {"learned", "scikit-learn", "plain"}
    assert later.simple_models == at_once.simple_models and later.verdict == at_once.verdict


def test_metrics_are_those_of_the_target_itself(houses, capsys):
    """By the rows of the file, and torch's Gaussian, in float64."""
    path, run, _ = houses
    splits, table = TableFile(path).load(), pandas.read_csv(path)
    price = dict(zip(table["size"].astype("float32"), table["price"], strict=True))
    y, y_train = (
        torch.tensor([price[np.float32(one)] for one in x[:, 0].numpy()]).double()
        for x, _ in (splits.test, splits.train)
    )
    network = Standardised(MLP(2, (4,), 1), [0.0] * 2, [1.0] * 2)
    sigma = load_posterior(run, network).sigma_noise.item()
    std = y_train.std(correction=0)
    with torch.no_grad():
        mean = network(splits.test[0])[:, 0].double() * std + y_train.mean()
    nll = -Normal(mean, sigma * std).log_prob(y)
    rmse = (y - mean).square().mean().sqrt()
    of_train, results = evaluated(run).predictives["MAP"], results_of(run)
    assert results.sigma_noise == pytest.approx([float(sigma * std)], rel=1e-5)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--data", "TableFile", "--data.path", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"{nll.mean():.3f}" in printed and f"{rmse:,.0f}" in printed
    of_evaluate = evaluated(run).predictives["MAP"]
    learned = results.scores["learned, MAP"]
    metrics = [learned.metrics, of_train.metrics, of_evaluate.metrics]
    for found in metrics:
        assert found.nll == pytest.approx(float(nll.mean()), rel=1e-5)
        assert found.rmse == pytest.approx(float(rmse), rel=1e-4)
    for found in (learned.intervals, of_evaluate.intervals):
        assert found.nll == pytest.approx(mean_interval(nll), rel=1e-5)
    assert float(nll.mean()) - math.log(std) < 5 < float(nll.mean())  # the control
    linear = make_pipeline(StandardScaler(), Ridge()).fit(splits.train[0].numpy(), y_train.numpy())
    of_linear = results.scores["scikit-learn, linear model"].metrics.rmse
    residuals = linear.predict(splits.test[0].numpy()) - y.numpy()
    assert of_linear == pytest.approx(np.mean(residuals**2) ** 0.5, rel=1e-5)
    assert "scikit-learn's models on the same rows: linear model" in results.simple_models
    assert results.model == "MLP"  # not what standardises its columns
    page = " ".join((run / "report.html").read_text().split())
    assert f">{rmse:,.0f}<" in page and f">{nll.mean():.4f}<" in page
    assert "unit of the target, lower is better" in page
    assert "Evidence and loss refer to the standardised target of the training" in page
    assert f"by mean {y_train.mean():,.0f} and standard deviation {std:,.0f}" in page


def test_another_unit_changes_what_has_a_unit_alone(houses):
    _, usual, other = houses
    a, b = evaluated(usual), evaluated(other)
    change = {"nll": lambda v: v + math.log(UNIT), "rmse": lambda v: v * UNIT}
    of_a, of_b = results_of(usual), results_of(other)
    pairs = [(a.scores[name], b.scores[name]) for name in a.predictives]
    pairs += [(of_a.scores[name], of_b.scores[name]) for name in of_a.scores]
    assert len(pairs) == 12
    for here, there in pairs:
        for key, value in here.metrics.items():
            expected = change.get(key, lambda v: v)(value)
            assert getattr(there.metrics, key) == pytest.approx(expected, rel=1e-9)
        for key, ends in here.intervals.items():
            expected = tuple(change.get(key, lambda v: v)(end) for end in ends)
            assert getattr(there.intervals, key) == pytest.approx(expected, rel=1e-9)
    fit, same = asdict(of_a.calibration), asdict(of_b.calibration)
    for name in ("nll", "nll_map", "nll_temperature_scaled", "nll_uncalibrated"):
        assert same[name] == pytest.approx(fit[name] + math.log(UNIT), rel=1e-9)
    for name in ("calibration", "map_calibration"):
        assert same[name]["sigma_noise"] == pytest.approx(UNIT * fit[name]["sigma_noise"])
    assert of_b.sigma_noise == pytest.approx([UNIT * sigma for sigma in of_a.sigma_noise])
    for name, same in of_b.networks["plain"].differences.items():
        here = of_a.networks["plain"].differences[name]
        assert same == here.map(lambda ends: pytest.approx(ends, rel=1e-9, abs=1e-12))
    assert of_b.evidence == of_a.evidence
