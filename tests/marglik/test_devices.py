"""The same posteriors, predictives and runs on CPU and GPU."""

import pytest
import torch
from torch.testing import assert_close

from marglik import KronLaplace
from marglik.application.cli import main
from marglik.application.records import to_json
from marglik.application.run_folder import read_evaluation, read_results
from marglik.posterior.prior import Hyperparameters, PriorGroups
from marglik.posterior_file import load_posterior, save_posterior
from marglik.prediction.calibration import calibrate
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive
from tests.marglik import posteriors
from tests.marglik.application.runs.command_line import DATA, MODEL, TRAIN
from tests.marglik.posteriors import LIKELIHOODS

pytestmark = pytest.mark.gpu
METHODS = {
    "classification": ("probit", "mc"),
    "regression": ("mc",),  # in closed form
    "bernoulli": ("probit",),
}
CUDA = ["--accelerator", "cuda"]


def learned(likelihood, device):
    """A fitted posterior in float64, with hyperparameters of 20 steps on its evidence."""
    model = posteriors.network().to(device)
    laplace = KronLaplace(model, likelihood, kfac_approx="reduce")
    laplace.fit([posteriors.data(likelihood)])  # from the host
    Hyperparameters(PriorGroups.from_model(model), 1.0).update(laplace, 20)
    return laplace


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_evidence_hyperparameters_and_predictions_agree(likelihood):
    x, y = posteriors.data(likelihood)
    found = []
    for device in ("cuda", "cpu"):
        laplace = learned(likelihood, device)
        values = [laplace.log_marginal_likelihood(), laplace.prior_precision]
        for method in METHODS[likelihood]:
            predicted = laplace_predictive(laplace, PredictiveConfig(method))(x.to(device))
            values.append(predicted.mean)  # entropies of "probit" are of samples
        calibrated = calibrate(laplace, [(x, y)], PredictiveConfig(METHODS[likelihood][0]))
        values += [
            torch.as_tensor(value)
            for value in vars(calibrated.calibration).values()
            if value is not None
        ]
        found.append([value.detach().cpu().double() for value in values])
    for on_gpu, on_cpu in zip(*found, strict=True):
        assert_close(on_gpu, on_cpu, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("written", "read"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_posteriors_move_between_devices(written, read, tmp_path):
    laplace = learned("classification", written)
    x = posteriors.data("classification")[0]
    save_posterior(laplace, tmp_path)
    loaded = load_posterior(tmp_path, posteriors.network(seed=1), read)
    before = laplace_predictive(laplace, PredictiveConfig("probit"))(x.to(written))
    after = laplace_predictive(loaded, PredictiveConfig("probit"))(x.to(read))
    assert after.mean.device.type == read
    assert_close(after.mean.cpu(), before.mean.cpu(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--precision", "bf16-mixed"],
        ["--optimizer.name", "kfac", "--optimizer.lr", "0.01"],
        ["--curvature.fisher", "mc", "--predictive.method", "mc"],
        ["--curvature.backward_precision", "tf32"],
    ],
    ids=" ".join,
)
def test_commands_on_the_gpu(options, tmp_path):
    run = tmp_path / "run"
    command = [*TRAIN, *DATA, *MODEL, *CUDA, "--output", str(run), *options]
    assert main(command) == 0
    results = read_results(run)
    assert results.environment["device"].startswith("cuda")
    assert results.scores["learned, MAP"].metrics.accuracy > 0.7
    # A run of the GPU goes on as a posterior of the CPU's.
    metrics = {}
    for device in ("cuda", "cpu"):
        output = tmp_path / device
        arguments = ["--accelerator", device, "--output", str(output), "--no_progress"]
        assert main(["evaluate", str(run), *arguments]) == 0
        metrics[device] = to_json(read_evaluation(output).predictives["MAP"].metrics)
    assert metrics["cpu"] == pytest.approx(metrics["cuda"], rel=0.02, abs=0.02)
