"""The command line as a user meets it: one small run, and every wrong turn in one line."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from marglik import experiment
from marglik.cli import main, preset_names
from marglik.data import ImageBatches
from marglik.models import MLP
from marglik.run_log import read_log
from marglik.training import OnlineTraining

SMALL = [
    "train", "--config", "digits", "--model", "marglik.models.MLP", "--model.in_features", "64",
    "--model.hidden", "[16]", "--epochs", "4", "--prior.every", "2", "--prior.burn_in", "0",
    "--prior.steps", "20", "--no_progress",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    assert main([*SMALL, "--output", str(folder), "--baseline"]) == 0
    return folder


def test_leaves_results_log_plot_and_network(run):
    results = json.loads((run / "results.json").read_text())
    assert results["data"] == "digits"
    assert results["num_data"] == 1438
    assert results["evidence"]["kept"] > results["evidence"]["first"]
    learned = {row["learned"] for row in results["weight_decay"].values()}
    assert len(learned) == len(results["weight_decay"]) == 4
    assert list(results["metrics"]) == [
        "learned, MAP", "learned, Laplace", "initial, MAP", "initial, Laplace",
    ]  # fmt: skip
    for metrics in results["metrics"].values():
        assert set(metrics) == {"test/cls/NLL", "test/cls/accuracy", "test/cal/ECE"}
        assert metrics["test/cls/accuracy"] > 0.8
    assert results["config"]["run"]["epochs"] == 4
    records = read_log(run)
    assert [r["epoch"] for r in records if r["kind"] == "update"] == [2, 4]
    updates = {r["epoch"]: r for r in records if r["kind"] == "update"}
    best = updates[results["evidence"]["epoch"]]
    for name, row in results["weight_decay"].items():
        assert row["learned"] == pytest.approx(best["weight_decay"][name])
    assert (run / "evidence.png").read_bytes().startswith(b"\x89PNG")
    assert "in_features: 64" in (run / "config.yaml").read_text()
    state = load_file(run / "model.safetensors")
    MLP(64, hidden=(16,)).load_state_dict(state)


def test_same_seed_same_run(run, tmp_path):
    config = ["train", "--config", str(run / "config.yaml"), "--no_baseline"]
    assert main([*config, "--output", str(tmp_path / "again")]) == 0
    first, second = (
        json.loads((folder / "results.json").read_text()) for folder in (run, tmp_path / "again")
    )
    assert second["evidence"] == first["evidence"]
    assert second["metrics"]["learned, MAP"] == first["metrics"]["learned, MAP"]
    other = [*SMALL, "--output", str(tmp_path / "other"), "--seed", "1"]
    assert main(other) == 0
    third = json.loads((tmp_path / "other" / "results.json").read_text())
    assert third["evidence"] != first["evidence"]


def test_digits_preset_keeps_its_promise(tmp_path):
    """What `make train` runs: at least 95 % right, evidence up, weight decays apart."""
    assert main(["train", "--config", "digits", "--output", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["metrics"]["learned, MAP"]["test/cls/accuracy"] >= 0.95
    assert results["evidence"]["kept"] > results["evidence"]["first"]
    learned = [row["learned"] for row in results["weight_decay"].values()]
    assert len(set(learned)) == len(learned) == 10


def test_a_failing_baseline_does_not_take_the_results_along(tmp_path, monkeypatch):
    evaluate, labels = experiment._Setup._evaluate, []

    def failing(self, model, laplace, label):
        labels.append(label)
        if label == "initial":
            raise KeyboardInterrupt
        return evaluate(self, model, laplace, label)

    monkeypatch.setattr(experiment._Setup, "_evaluate", failing)
    options = ["--baseline", "--output", str(tmp_path / "run")]
    assert main([*SMALL, *options]) == 130
    assert labels == ["learned", "initial"]
    assert (tmp_path / "run" / "results.json").exists()


def test_table_is_printed(run, tmp_path, capsys):
    validation = ["--data.validation", "0.1", "--curvature.batch_size", "300"]
    options = ["--curvature.fisher", "mc", "--predictive.method", "linearized"]
    assert (
        main(
            [
                *SMALL,
                *validation,
                *options,
                "--tensorboard",
                "--output",
                str(tmp_path),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "log marginal likelihood per example" in printed
    assert "5.0e-04 -> " in printed
    assert "learned, Laplace" in printed and "validation/cls/NLL" in printed
    assert str(tmp_path) in printed
    assert any((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("preset", preset_names())
def test_presets_parse_and_print(preset, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--config", preset, "--print_config"])
    assert stopped.value.code == 0
    assert "weight_decay: 0.0" in capsys.readouterr().out


def test_presets_have_the_paper_and_the_forerunner(capsys):
    printed = {}
    for preset in ("cifar10_paper", "cifar10_redux"):
        with pytest.raises(SystemExit):
            main(["train", "--config", preset, "--print_config"])
        printed[preset] = capsys.readouterr().out
    assert "weight_decay: 0.005\n" in printed["cifar10_paper"]
    assert "burn_in: 0\n" in printed["cifar10_paper"]
    assert "weight_decay: 0.0005\n" in printed["cifar10_redux"]
    assert "burn_in: 20\n" in printed["cifar10_redux"]


def test_every_option_is_documented(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    options = ("prior.structure", "curvature.kfac_approx", "predictive.method", "baseline")
    for option in options:
        assert f"--{option}" in text
    assert "known subclasses: torch.nn.Module" not in text
    for phrase in (
        "one per parameter tensor",
        "labels drawn from the model",
        "initial weight decay",
    ):
        assert phrase in text


def images(folder, sizes=(8, 8), splits=("train", "test")):
    for split in splits:
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            for i, size in enumerate(sizes):
                noise = np.random.default_rng(i).integers(0, 255, (size, size, 3), dtype=np.uint8)
                Image.fromarray(noise).save(folder / split / label / f"{i}.png")
    return folder


FOLDER = ["--data", "marglik.data.ImageFolder", "--data.cache", "false", "--data.path"]
WRONG = {
    "unknown option": (["--nonsense", "3"], "--nonsense"),
    "unknown value": (["--curvature.kfac_approx", "both"], "curvature.kfac_approx"),
    "not a number": (["--epochs", "many"], "epochs"),
    "no update ever": (["--prior.every", "0"], "every must be at least 1, not 0"),
    "no samples": (["--curvature.mc_samples", "0"], "curvature.mc_samples must be at least 1"),
    "nothing left": (["--curvature.rank_tolerance", "1"], "must be in [0, 1), not 1.0"),
    "a tolerance for samples": (
        ["--curvature.rank_tolerance", "0.1", "--curvature.fisher", "mc"],
        "rank_tolerance=0.1 needs likelihood 'classification' and fisher 'exact'",
    ),
    "no epochs": (["--epochs", "0"], "epochs must be at least 1, not 0"),
    "negative weight decay": (["--prior.weight_decay", "-1"], "must be positive, not -1.0"),
    "unknown structure": (["--prior.structure", "blocks"], "prior.structure"),
    "rules that match nothing": (
        ["--prior.structure", "{conv: 'conv*', rest: '*'}"],
        "Prior group 'conv' ('conv*') matches no parameter",
    ),
    "unknown preset": (["--config", "imagenet"], "nor a preset (cifar10_paper"),
    "unknown model": (["--model", "NoSuchNet"], "NoSuchNet"),
    "model of another size": (["--model.in_features", "100"], "64"),
    "wrong number of classes": (["--model.num_classes", "7"], "set --model.num_classes 10"),
    "missing archive": ([*FOLDER, "/no/such.tar.gz"], "'/no/such.tar.gz' does not exist"),
    "validation takes all": (["--data.validation", "1.0"], "validation"),
    "unknown device": (["--accelerator", "tpu"], "accelerator"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_turns_end_in_one_line(case, tmp_path, capsys):
    options, message = WRONG[case]
    assert main([*SMALL, "--output", str(tmp_path / "run"), *options]) == 2
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("marglik: error: ")
    assert message in lines[0]
    assert not (tmp_path / "run").exists()  # refused before any work


def test_no_gpu_is_named(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([*SMALL, "--output", str(tmp_path), "--accelerator", "cuda"]) == 2
    assert "error" in capsys.readouterr().err


def test_broken_archive(tmp_path, capsys):
    broken = tmp_path / "images.tar.gz"
    broken.write_bytes(b"not an archive")
    assert main([*SMALL, *FOLDER, str(broken)]) == 2
    assert "images.tar.gz" in capsys.readouterr().err


def test_layer_without_a_rule(tmp_path, capsys):
    options = ["--model", "tests.marglik.networks.RowLSTM"]
    assert main([*SMALL[:3], *options, "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "(LSTM) has no K-FAC rule. Supported: Linear, Conv2d" in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("TwiceLinear", "'fc' (Linear) runs more than once"),
        ("WithBatchNorm", "(BatchNorm1d) has no K-FAC rule"),
        ("ReturnsTuple", "returns tuple; logits are needed"),
    ],
)
def test_networks_without_a_curvature_are_refused_before_training(
    network, message, tmp_path, capsys
):
    options = ["--model", f"tests.marglik.networks.{network}"]
    assert main([*SMALL[:3], *options, "--output", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_nan_in_training_is_one_line(tmp_path, capsys, monkeypatch):
    batches = ImageBatches.__iter__

    def broken(self):
        for x, y in batches(self):
            yield x * float("nan"), y

    monkeypatch.setattr(ImageBatches, "__iter__", broken)
    assert main([*SMALL, "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip()
    assert "training loss is not finite in epoch 1" in error and "\n" not in error


def test_empty_test_folder(tmp_path, capsys):
    folder = images(tmp_path / "images", splits=("train",))
    assert main([*SMALL, *FOLDER, str(folder)]) == 2
    assert "test" in capsys.readouterr().err


def test_number_of_classes_of_a_folder(tmp_path, capsys):
    """Two classes of images, a network with ten outputs."""
    folder = images(tmp_path / "images", sizes=[8] * 4)
    options = ["--model.in_features", "192", "--output", str(tmp_path / "run")]
    assert main([*SMALL, *FOLDER, str(folder), *options]) == 2
    assert "has 2 classes; set --model.num_classes 2" in capsys.readouterr().err


def test_a_run_is_kept(run, capsys):
    keep = ["--no_overwrite", "--output", str(run)]
    before = (run / "log.jsonl").read_text()
    assert main([*SMALL, *keep]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (run / "log.jsonl").read_text() == before


def test_interrupt_keeps_the_log(tmp_path, capsys, monkeypatch):
    train_epoch = OnlineTraining._train_epoch

    def interrupted(self, epoch):
        if epoch == 3:
            raise KeyboardInterrupt
        return train_epoch(self, epoch)

    monkeypatch.setattr(OnlineTraining, "_train_epoch", interrupted)
    assert main([*SMALL, "--output", str(tmp_path / "run")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert [r["epoch"] for r in read_log(tmp_path / "run")] == [1, 2, 2]


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("MARGLIK_TRACEBACK", "1")
    with pytest.raises(ValueError, match="epochs"):
        main([*SMALL, "--epochs", "0"])


def test_train_is_a_function_too(tmp_path):
    from marglik.config import RunConfig
    from marglik.data import Digits

    torch.manual_seed(0)
    results = experiment.train(
        MLP(64, hidden=(8,)),
        Digits(),
        run=RunConfig(epochs=1, output=str(tmp_path), progress=False),
    )
    assert results["metrics"]["learned, MAP"]["test/cls/NLL"] > 0
