"""`marglik fit`: posteriors for networks that were trained elsewhere."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from marglik.cli import main
from marglik.data import ClassSubset, Digits
from marglik.data.batches import split_batches
from marglik.models import MLP
from marglik.posterior.posterior import Posterior
from marglik.posterior.posterior_file import load_posterior
from marglik.prediction.predictive import PredictiveConfig
from marglik.storage.record_file import read_posterior
from marglik.training.post_hoc import validation_nll
from tests.marglik import threads
from tests.marglik.runs.command_line import (
    DATA,
    HELD_OUT,
    MODEL,
    UNCALIBRATED,
    evaluated,
    is_empty,
    refusal,
)
from tests.marglik.runs.tensor_problems import SIGMA

TENSORS = ["layers.1.weight", "layers.1.bias", "layers.3.weight", "layers.3.bias"]
NUM_DATA = 1039
LAPLACE = "Laplace, probit, uncalibrated"


def fit(checkpoint, folder, *options):
    """Run the command, without a calibration unless asked for; returns what it saved."""
    arguments = ["fit", *DATA, *MODEL, "--checkpoint", str(checkpoint), "--no_progress"]
    assert main([*arguments, *UNCALIBRATED, "--output", str(folder), *options]) == 0
    return read_posterior(folder)


def metrics(folder, *options):
    """Evaluate; returns the metrics of each predictive."""
    assert main(["evaluate", str(folder), "--progress", "false", *options]) == 0
    place = Path(options[-1]) if "--output" in options else folder
    found = evaluated(place)["predictives"]
    return {name: entry["metrics"] for name, entry in found.items()}


@pytest.fixture(scope="module")
def plain(trained, tmp_path_factory):
    """A fit by default, and what is found; not to be written to."""
    folder = tmp_path_factory.mktemp("plain") / "fit"
    with threads.one_thread():
        return folder, fit(trained / "model.safetensors", folder)


def test_evidence_layer_by_layer(checkpoint, tmp_path, capsys):
    folder = tmp_path / "fit"
    found = fit(checkpoint, folder)
    assert list(found["prior_precision"]) == TENSORS
    assert len(set(found["prior_precision"].values())) == 4
    assert found["num_data"] == NUM_DATA
    printed = capsys.readouterr().out
    for name, delta in found["prior_precision"].items():
        assert f"\n{name:<15}       {delta / NUM_DATA:.2e}\n" in printed
    assert f"{found['evidence'] / NUM_DATA:.4f} at the one found" in printed
    assert f"next: marglik evaluate {folder}" in printed
    files = {"config.yaml", "manifest.json", "model.safetensors"}
    files |= {"posterior.json", "posterior.safetensors"}
    assert {path.name for path in folder.iterdir()} == files
    state = load_file(checkpoint)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, state[name])
    # It can be evaluated, on other data too.
    assert metrics(folder, *HELD_OUT, *UNCALIBRATED)[LAPLACE]["test/cls/accuracy"] > 0.7


def test_evidence_with_one_precision(checkpoint, plain, tmp_path):
    one = fit(checkpoint, tmp_path / "one", "--prior.structure", "scalar")
    fixed = fit(checkpoint, tmp_path / "fixed", "--prior.method", "fixed")
    _, every = plain
    assert len(set(one["prior_precision"].values())) == 1
    assert fixed["evidence"] < one["evidence"] < every["evidence"]
    wanted = pytest.approx(dict.fromkeys(TENSORS, 5e-4 * NUM_DATA))  # of the default weight decay
    assert fixed["prior_precision"] == wanted


def test_rules(checkpoint, tmp_path):
    rules = ["--prior.structure", "{inner: 'layers.1.*', outer: '*'}"]
    delta = list(fit(checkpoint, tmp_path / "fit", *rules)["prior_precision"].values())
    assert delta[0] == delta[1] != delta[2] == delta[3]


def test_corrected_eigenvalues(checkpoint, plain, tmp_path):
    options = ["--curvature.corrected", "true", "--prior.method"]
    with pytest.raises(AssertionError):  # of the status: a lower bound would be maximised
        fit(checkpoint, tmp_path / "fit", *options, "evidence")
    corrected = fit(checkpoint, tmp_path / "fit", *options, "fixed")
    assert (plain[1]["corrected"], corrected["corrected"]) == (False, True)
    assert corrected["evidence"] != plain[1]["evidence"]
    assert corrected["curvature"] == plain[1]["curvature"]
    found, other = (
        metrics(folder, *UNCALIBRATED, "--output", str(tmp_path / name))[LAPLACE]
        for name, folder in (("found", tmp_path / "fit"), ("other", plain[0]))
    )
    assert found["test/cls/accuracy"] > 0.7
    assert found != other


@pytest.mark.parametrize("method", ["probit", "mc"])
def test_validation(method, checkpoint, tmp_path):
    """No other single precision predicts the validation data better, by the method asked for."""
    state = load_file(checkpoint)
    for name in TENSORS[2:]:
        state[name] *= 3  # overconfident: else the largest precision of all is the best
    other = tmp_path / "overconfident.safetensors"
    save_file(state, other)
    predictive = ["--predictive.method", method, *UNCALIBRATED]
    found = fit(other, tmp_path / "fit", "--prior.method", "validation", *predictive)
    assert len(set(found["prior_precision"].values())) == 1
    name = f"Laplace, {method}, uncalibrated"
    best = metrics(tmp_path / "fit", *predictive)[name]["validation/cls/NLL"]
    laplace = load_posterior(tmp_path / "fit", MLP(64, (12,), 8))
    delta = laplace.prior_precision
    config = PredictiveConfig(method=method, calibration="none")
    splits = ClassSubset(Digits(validation=0.1), range(8)).load()
    batches = split_batches(splits, "validation", config.batch_size)
    assert best == pytest.approx(validation_nll(laplace, batches, config))
    for factor in (0.01, 0.3, 0.85, 1.15, 3.0, 100.0):  # the methods' optima differ by a tenth
        laplace.prior_precision = factor * delta
        assert best <= validation_nll(laplace, batches, config) + 1e-5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--predictive.calibration", "held_out"], "Calibrated on "),
        (
            ["--predictive.calibration", "held_out", "--data.data.validation", "0"],
            "has no validation set. To calibrate it, provide examples that the network was",
        ),
        ([], "calibration was not asked for"),
    ],
)
def test_what_would_calibrate(options, said, checkpoint, tmp_path, capsys):
    fit(checkpoint, tmp_path / "fit", *options)
    printed = capsys.readouterr().out
    assert said in printed
    assert ("x_validation and y_validation in a TensorFile" in printed) == ("no validation" in said)


def test_the_last_layer_alone(checkpoint, plain, tmp_path):
    found = fit(checkpoint, tmp_path / "fit", "--prior.layers", "last")
    assert list(found["prior_precision"]) == TENSORS[2:]
    last = metrics(tmp_path / "fit", *UNCALIBRATED)
    every = metrics(plain[0], *UNCALIBRATED, "--output", str(tmp_path / "every"))
    assert last["MAP"] == every["MAP"]
    assert last[LAPLACE] != every[LAPLACE]


def test_temperature(checkpoint, tmp_path, capsys):
    options = ["--prior.method", "fixed", "--prior.temperature", "0.5"]
    found = fit(checkpoint, tmp_path / "fit", *options)
    assert found["temperature"] == 0.5
    assert found["prior_precision"][TENSORS[0]] == pytest.approx(5e-4 * NUM_DATA / 0.5)
    assert " 5.00e-04\n" in capsys.readouterr().out


def test_the_saved_options_repeat_the_fit(checkpoint, tmp_path):
    options = ["--curvature.fisher", "mc", "--seed", "4"]
    found = fit(checkpoint, tmp_path / "fit", *options)
    config = tmp_path / "fit" / "config.yaml"
    assert yaml.safe_load(config.read_text())["curvature"]["fisher"] == "mc"
    assert main(["fit", "--config", str(config), "--output", str(tmp_path / "again")]) == 0
    assert read_posterior(tmp_path / "again") == found
    assert fit(checkpoint, tmp_path / "other", *options[:2])["sha256"] != found["sha256"]


def test_other_likelihoods(problem, tmp_path, capsys):
    checkpoint = ["--checkpoint", str(problem.checkpoint), "--no_progress"]
    command = ["fit", *problem.options, *checkpoint, "--output", str(tmp_path / "fit")]
    assert main(command) == 0
    assert "Checkpoint: the prefix 'module.' was removed from all names." in capsys.readouterr().out
    found = read_posterior(tmp_path / "fit")
    assert found["likelihood"] == problem.likelihood
    methods = ["--methods", "[probit, mc, linearised]"]
    predictives = metrics(tmp_path / "fit", *methods)
    assert list(predictives) == [
        "MAP", "MAP, temperature-scaled", "Laplace, probit", "Laplace, mc",
        "Laplace, linearised",
    ]  # fmt: skip
    # The prior of s and τ draws towards the uncalibrated predictive, from which the fit may only
    # go down; what it gives up against the MAP on 30 examples is little.
    key = "validation/reg/NLL" if problem.likelihood == "regression" else "validation/cls/NLL"
    options = ["--methods", "[probit]", "--predictive.calibration", "none"]
    uncalibrated = metrics(tmp_path / "fit", *options)["Laplace, probit, uncalibrated"][key]
    assert predictives["Laplace, probit"][key] < uncalibrated
    for method in ("probit", "mc"):
        assert predictives[f"Laplace, {method}"][key] <= predictives["MAP"][key] + 0.02
    if problem.likelihood == "regression":
        assert found["sigma_noise"] == pytest.approx(SIGMA, rel=0.4)
        assert all(values["test/reg/RMSE"] < 2 * SIGMA for values in predictives.values())
        assert "validation/cal/coverage90" in predictives["MAP"]
        # The MAP predicts with the noise that was found.
        model, tensors = MLP(3, (4,), 2, "tanh"), load_file(problem.data)
        sigma = load_posterior(tmp_path / "fit", model).sigma_noise
        normal = torch.distributions.Normal(model(tensors["x_test"]).detach(), sigma)
        nll = -normal.log_prob(tensors["y_test"]).sum(1).mean().item()
        assert predictives["MAP"]["test/reg/NLL"] == pytest.approx(nll, rel=1e-5)
    else:
        assert all(values["test/cls/accuracy"] > 0.8 for values in predictives.values())
    # The precision by validation, over the old run.
    validation = ["--prior.method", "validation", "--prior.sigma_noise"]
    sigma = "0.2" if problem.likelihood == "regression" else "1"
    assert main([*command, *validation, sigma, "--overwrite"]) == 0
    key = "validation/reg/NLL" if problem.likelihood == "regression" else "validation/cls/NLL"
    assert read_posterior(tmp_path / "fit")["sigma_noise"] == pytest.approx(float(sigma))
    assert not (tmp_path / "fit" / "evaluation.json").exists()  # that was of the old one
    assert key in metrics(tmp_path / "fit")["Laplace, probit"]


def test_bare_checkpoints_of_other_likelihoods(problem, tmp_path):
    command = ["evaluate", str(problem.checkpoint), *problem.options, "--progress", "false"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    assert list(evaluated(tmp_path)["predictives"]) == ["MAP"]


@pytest.mark.parametrize("options", [["--ood", "marglik.data.Noise"], ["--shift=true"]])
def test_tensors_are_no_images(options, problem, tmp_path, capsys):
    path = [str(problem.checkpoint), *problem.options, "--output", str(tmp_path / "out")]
    message = refusal(capsys, "evaluate", *path, *options)
    assert "holds no images; shift and ood are for images. Leave them out." in message
    assert is_empty(tmp_path / "out")


REFUSED = {
    "no such checkpoint": (["--checkpoint", "/no/such.pt"], "No checkpoint at /no/such.pt"),
    "another network": (["--model.hidden", "[9]"], "'layers.1.weight' has shape (12, 64), MLP has"),
    "other classes": (["--data", "marglik.data.Digits"], "has 10 classes; set --model.num_classes"),
    "another likelihood": (["--likelihood", "regression"], "'regression' needs the same shape"),
    "no validation data": (
        ["--data.data.validation", "0", "--prior.method", "validation"],
        "needs validation data, but digits (0, 1, 2, 3, 4, 5, 6, 7) has none",
    ),
    "validation by groups": (
        ["--prior.method", "validation", "--prior.structure", "kind"],
        "prior.method validation tunes one precision for all parameters",
    ),
    "a rule for a layer that is known": (
        ["--prior.layers", "last", "--prior.structure", "{inner: 'layers.1.*', rest: '*'}"],
        "Prior group 'inner' ('layers.1.*') matches no parameter",
    ),
    "no weight decay": (["--prior.weight_decay", "0"], "prior.weight_decay must be positive"),
    "empty batches": (["--batch_size", "0"], "batch_size must be at least 1, not 0"),
    "noise of a classifier": (
        ["--prior.sigma_noise", "0.5"],
        "sigma_noise is 0.5; only regression has",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, checkpoint, tmp_path, capsys):
    options, message = REFUSED[case]
    arguments = [*DATA, *MODEL, "--checkpoint", str(checkpoint), "--no_progress"]
    out = tmp_path / "out"
    assert message in refusal(capsys, "fit", *arguments, "--output", str(out), *options)
    assert is_empty(out)


def test_a_layer_without_a_rule(tmp_path, capsys):
    from tests.marglik.networks import RowLSTM

    torch.save(RowLSTM().state_dict(), tmp_path / "lstm.pt")
    options = ["--model", "tests.marglik.networks.RowLSTM", "--data", "marglik.data.Digits"]
    message = refusal(capsys, "fit", *options, "--checkpoint", str(tmp_path / "lstm.pt"))
    assert "'rnn' (LSTM) has no K-FAC rule" in message


def test_an_interrupt_leaves_the_old_run(checkpoint, plain, tmp_path, capsys, monkeypatch):
    run = shutil.copytree(plain[0], tmp_path / "fit")
    before = {path.name: path.read_bytes() for path in run.iterdir()}

    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(Posterior, "log_marginal_likelihood", interrupted)
    arguments = ["fit", *DATA, *MODEL, "--checkpoint", str(checkpoint), "--output", str(run)]
    assert main([*arguments, "--overwrite", "--no_progress"]) == 130
    assert "interrupted; the same command continues" in capsys.readouterr().err
    left = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert left == before


def test_a_checkpoint_in_the_folder_that_would_be_cleared(run, capsys):
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    arguments = ["--checkpoint", str(run / "model.safetensors"), "--output", str(run)]
    message = refusal(capsys, "fit", *DATA, *MODEL, *arguments, "--overwrite")
    assert "model.safetensors is in the output folder, whose old files are removed" in message
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
