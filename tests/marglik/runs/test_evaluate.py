"""`marglik evaluate`: saved posteriors and bare checkpoints; test, shifted and OOD data."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from marglik.cli import main
from marglik.data import Digits, ImageData
from marglik.data.batches import split_batches
from marglik.models import MLP
from marglik.posterior.posterior_file import load_posterior, save_posterior
from marglik.prediction.calibration import calibrate
from marglik.prediction.evaluation_record import IN_SAMPLE
from marglik.prediction.predictive import PredictiveConfig
from marglik.runs.build import build_from_spec
from marglik.storage.record_file import read_posterior
from tests.marglik.runs.command_line import (
    DATA,
    HELD_OUT,
    MODEL,
    TRAIN,
    UNCALIBRATED,
    evaluated,
    refusal,
)

QUIET = ["--progress", "false"]


PREDICTIVES = ["MAP", "MAP, temperature-scaled", "Laplace, probit"]


def metrics(folder):
    return {k: v["metrics"] for k, v in evaluated(folder)["predictives"].items()}


def test_a_run_is_evaluated_as_at_its_end(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    before = evaluated(run)
    (run / "evaluation.json").unlink()
    (run / "report.html").unlink()
    assert main(["evaluate", str(run), *QUIET]) == 0
    after = evaluated(run)
    assert metrics(run) == {k: v["metrics"] for k, v in before["predictives"].items()}
    for key in before.keys() - {"predictives", "config"}:
        assert after[key] == before[key], key
    assert list(metrics(run)) == PREDICTIVES
    assert metrics(run)["MAP"]["test/cls/accuracy"] > 0.7
    printed = capsys.readouterr().out
    assert "digits (0, 1, 2, 3, 4, 5, 6, 7): 288 test examples" in printed
    assert "Laplace, probit" in printed and "test/cls/NLL" in printed
    assert f"Written to {run / 'evaluation.json'}" in printed
    assert "<html" in (run / "report.html").read_text()[:200]


def test_several_methods_on_noise(run, tmp_path, capsys):
    before = (run / "evaluation.json").read_bytes()
    methods = ("probit", "mc", "linearised")
    options = ["--methods", f"[{', '.join(methods)}]", "--predictive.networks", "5", *UNCALIBRATED]
    noise = ["--ood", "marglik.data.Noise", "--ood.num_images", "40"]
    out = tmp_path / "elsewhere"
    assert main(["evaluate", str(run), *QUIET, *options, *noise, "--output", str(out)]) == 0
    found = metrics(out)
    assert list(found) == ["MAP", *(f"Laplace, {m}, uncalibrated" for m in methods)]
    assert len({values["test/cls/NLL"] for values in found.values()}) == 4
    assert all(values["ood/AUROC"] > 0.6 for values in found.values())
    assert evaluated(out)["ood"]["num_examples"] == 40
    assert "out of distribution: 40 of noise" in capsys.readouterr().out
    assert (out / "report.html").exists()
    assert (run / "evaluation.json").read_bytes() == before  # the run's own stays


def test_an_evaluation_replaces_the_last_one(run):
    shifted = ["--methods", "[probit, mc]", "--shift", "true"]
    assert main(["evaluate", str(run), *QUIET, *shifted]) == 0
    found = metrics(run)
    assert list(found) == [*PREDICTIVES, "Laplace, mc"]
    assert all("shift/noise/5/cls/NLL" in values for values in found.values())
    assert main(["evaluate", str(run), *QUIET]) == 0
    assert list(metrics(run)) == PREDICTIVES and evaluated(run)["shift"] is None
    assert main(["report", str(run)]) == 0


def test_held_out_classes(run):
    options = ["--methods", "[mc]", *UNCALIBRATED]
    assert main(["evaluate", str(run), *QUIET, *HELD_OUT, *options]) == 0
    found = evaluated(run)["ood"]
    assert (found["num_examples"], found["score"], found["note"]) == (71, "entropy", None)
    assert metrics(run)["Laplace, mc, uncalibrated"]["ood/AUROC"] > 0.6


def test_shifted_images(checkpoint, tmp_path, capsys):
    options = ["--shift", "true", "--output", str(tmp_path / "out")]
    assert main(["evaluate", str(checkpoint), *DATA, *MODEL, *QUIET, *options]) == 0
    found = metrics(tmp_path / "out")["MAP"]
    shift = evaluated(tmp_path / "out")["shift"]
    for kind in shift["kinds"]:
        for severity in shift["severities"]:
            assert f"shift/{kind}/{severity}/cls/NLL" in found
    assert len(shift["kinds"]) * len(shift["severities"]) == 20
    worst, mildest = (found[f"shift/noise/{s}/cls/accuracy"] for s in (5, 1))
    assert worst < mildest <= found["test/cls/accuracy"] + 0.05
    assert "shift/mean/cls/NLL" in capsys.readouterr().out  # not twenty rows each


def test_a_bare_checkpoint_has_a_map_alone(checkpoint, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(checkpoint), *DATA, *MODEL, *QUIET]) == 0
    assert metrics(tmp_path / "runs" / "net_map") == {"MAP": metrics(trained)["MAP"]}
    assert (tmp_path / "runs" / "net_map" / "report.html").exists()


def test_the_seed_of_sampling(run, tmp_path):
    found = []
    for i, seed in enumerate((0, 0, 1)):
        out = tmp_path / str(i)
        options = ["--predictive.method", "mc", "--predictive.samples", "5", "--seed", str(seed)]
        options += UNCALIBRATED  # a calibrated one may leave the samples out
        assert main(["evaluate", str(run), *QUIET, *options, "--output", str(out)]) == 0
        found.append(metrics(out))
    assert found[0] == found[1] != found[2]
    assert list(found[0]) == ["MAP", "Laplace, mc, uncalibrated"]


def test_what_is_not_calibrated_yet_is_by_the_validation_set(run, tmp_path, capsys):
    """The run has calibrated all layers' uncertainty, not the last one's alone."""
    last, out = ["--predictive.layers", "last"], ["--output", str(tmp_path / "out")]
    before = (run / "posterior.json").read_bytes()
    assert main(["evaluate", str(run), *QUIET, *last, "--methods", "[mc, probit]", *out]) == 0
    assert (run / "posterior.json").read_bytes() == before
    printed = capsys.readouterr().out
    names = ["Laplace, mc, last layer", "Laplace, probit, last layer"]
    assert all(f"{name}: calibrated on 116 held-out loss terms" in printed for name in names)
    assert IN_SAMPLE in printed and IN_SAMPLE in (tmp_path / "out" / "report.html").read_text()
    predictives = evaluated(tmp_path / "out")["predictives"]
    assert list(predictives) == ["MAP", "MAP, temperature-scaled", *names]
    posterior = load_posterior(run, MLP(64, (12,), 8))
    splits = build_from_spec(ImageData, read_posterior(run)["data"]["source"]).load()
    remembered = dict(posterior.calibrations)
    for method, name in zip(("mc", "probit"), names, strict=True):
        config = PredictiveConfig(method, layers="last")
        fit = calibrate(posterior, split_batches(splits, "validation", 256), config).fit
        found = predictives[name]["calibration"]
        for key in ("covariance_scale", "output_temperature"):
            assert found[key] == pytest.approx(getattr(fit.calibration, key), rel=1e-5)
    # The other layers' calibration is still the run's.
    of_map = predictives["MAP"]["metrics"]
    assert main(["evaluate", str(run), *QUIET, *out]) == 0
    assert metrics(tmp_path / "out")["MAP"] == of_map
    found = evaluated(tmp_path / "out")["predictives"]["Laplace, probit"]["calibration"]
    assert found == remembered["Laplace, probit"]["calibration"]
    assert "probit: calibrated" not in capsys.readouterr().out


def test_data_that_may_have_been_trained_on_calibrates_nothing(run, tmp_path, capsys):
    other = [*DATA, "--data.data.seed", "5"]
    last, out = ["--predictive.layers", "last"], ["--output", str(tmp_path / "out")]
    assert main(["evaluate", str(run), *QUIET, *last, *other, *out]) == 0
    assert list(metrics(tmp_path / "out")) == ["MAP", "Laplace, probit, last layer, uncalibrated"]
    assert "that the network was not trained on" in capsys.readouterr().out


def test_a_posterior_that_does_not_say_how_its_network_is_built(trained, tmp_path, capsys):
    folder = tmp_path / "run"
    save_posterior(load_posterior(trained, MLP(64, (12,), 8)), folder)
    assert "does not say how its model is built; pass --model" in refusal(
        capsys, "evaluate", str(folder)
    )
    assert "does not say how its data is built; pass --data" in refusal(
        capsys, "evaluate", str(folder), *MODEL
    )
    assert main(["evaluate", str(folder), *MODEL, *DATA, *QUIET]) == 0
    assert metrics(folder) == metrics(trained)


def test_other_data_of_the_same_classes_is_normalised_as_in_training(run, tmp_path):
    other = ["--data.data.seed", "3", "--data.data.test_fraction", "0.5"]
    assert main(["evaluate", str(run), *QUIET, *DATA, *other, "--output", str(tmp_path)]) == 0
    assert evaluated(tmp_path)["num_test"] > 600
    assert metrics(tmp_path)["MAP"]["test/cls/accuracy"] > 0.7


def test_data_of_another_name_needs_a_folder_of_its_own(run, tmp_path, capsys):
    folder = images(tmp_path / "photos", "01234567", 8)
    photos = ["--data", "marglik.data.ImageFolder", "--data.path"]
    before = (run / "evaluation.json").read_bytes()
    message = refusal(capsys, "evaluate", str(run), *photos, str(folder))
    assert "photos is not what" in message and "pass --output" in message
    assert (run / "evaluation.json").read_bytes() == before
    out = ["--output", str(tmp_path / "out")]
    assert main(["evaluate", str(run), *QUIET, *photos, str(folder), *out]) == 0
    assert evaluated(tmp_path / "out")["data"] == "photos"


def images(folder, classes, size, colour=False):
    for split in ("train", "test"):
        for label in classes:
            (folder / split / label).mkdir(parents=True)
            for i in range(2):
                shape = (size, size, 3) if colour else (size, size)
                pixels = np.random.default_rng(i).integers(0, 255, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{i}.png")
    return folder


def test_a_folder_without_a_posterior(run, capsys):
    (run / "posterior.json").unlink()
    assert "(posterior.json is missing); make one with marglik train or marglik fit" in refusal(
        capsys, "evaluate", str(run)
    )


DIGITS = ["--data", "marglik.data.Digits"]
REFUSED = {
    "data of other classes": (DIGITS, "digits has 10 classes (0, 1, 2, 3, ...), and the network"),
    "another likelihood": (["--likelihood", "regression"], "is for likelihood 'classification'"),
    "an unknown method": (
        ["--methods", "[probit, laplace]"],
        "Given value: ['probit', 'laplace']",
    ),
    "linearised networks of a layer": (
        ["--methods", "[linearised]", "--predictive.layers", "last"],
        "predictive.layers 'last' is not for method 'linearised'",
    ),
    "another network": (
        ["--model", "marglik.models.MLP", "--model.in_features", "65"],
        "is of another network: 'layers.1.weight' has shape (12, 64), MLP has (128, 65)",
    ),
    "out-of-distribution data that are no images": (
        ["--ood", "marglik.data.TensorFile"],
        "marglik.data.TensorFile",
    ),
    "an unknown class held out": (
        [*HELD_OUT[:-1], "[8, ten]"],
        "digits has no class ['ten'], but ['0', '1'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, trained, capsys):
    options, message = REFUSED[case]
    before = {path.name: path.stat().st_mtime_ns for path in trained.iterdir()}
    assert message in refusal(capsys, "evaluate", str(trained), *QUIET, *options)
    assert {path.name: path.stat().st_mtime_ns for path in trained.iterdir()} == before


def test_data_of_another_shape(trained, tmp_path, capsys):
    folder = images(tmp_path / "images", "01234567", 9)
    options = ["--data", "marglik.data.ImageFolder", "--data.path"]
    message = refusal(capsys, "evaluate", str(trained), *options, str(folder))
    assert "shape (1, 9, 9), the network was trained on (1, 8, 8)" in message


class NoImages(ImageData):
    """Digits without a test set."""

    def load(self):
        splits = Digits().load()
        return replace(splits, test=splits.test.select(torch.arange(0)))


def test_an_empty_ood_set(trained, capsys):
    options = ["--ood", f"{__name__}.NoImages"]
    assert "digits has no test images, so the OOD set is empty" in refusal(
        capsys, "evaluate", str(trained), *options
    )


@pytest.mark.parametrize("missing", ["--model", "--data"])
def test_a_checkpoint_needs_model_and_data(missing, checkpoint, capsys):
    options = DATA if missing == "--model" else MODEL
    message = refusal(capsys, "evaluate", str(checkpoint), *options)
    assert message.endswith("net.safetensors is a checkpoint; it needs --model and --data.")


def test_a_checkpoint_of_another_likelihood(checkpoint, capsys):
    options = [*DATA, *MODEL, "--likelihood", "bernoulli"]
    message = refusal(capsys, "evaluate", str(checkpoint), *options)
    assert "likelihood 'bernoulli' needs the same shape" in message


def test_an_interrupt_leaves_the_last_evaluation(run, capsys, monkeypatch):
    before = (run / "evaluation.json").read_bytes()

    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("marglik.prediction.evaluation_record.predict_all", interrupted)
    assert main(["evaluate", str(run), *QUIET]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert (run / "evaluation.json").read_bytes() == before


MY_NET = """
from marglik.models import MLP
class MyNet(MLP):
    pass
"""


def test_a_class_of_ones_own_from_a_saved_configuration(tmp_path, monkeypatch, capsys):
    """Found where the command was started, by `train` at once, by `evaluate` once it is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_net_of_test.py").write_text(MY_NET)
    mine = ["--model", "my_net_of_test.MyNet", *MODEL[2:]]
    assert main([*TRAIN, *DATA, *mine, "--epochs", "1", "--output", "a/b"]) == 0
    assert main(["train", "--config", "a/b/config.yaml", "--output", "again"]) == 0
    message = refusal(capsys, "evaluate", "a/b")
    assert "name it on the command line: --model my_net_of_test.MyNet" in message
    assert main(["evaluate", "a/b", "--model", "my_net_of_test.MyNet", *UNCALIBRATED]) == 0
