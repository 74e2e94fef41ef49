"""Every wrong turn of `marglik train` ends in one line, before any work."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.marglik.runs.command_line import refusal

SMALL = [
    "train", "--config", "digits", "--model", "marglik.models.MLP", "--model.in_features", "64",
    "--epochs", "4", "--no_progress",
]  # fmt: skip
FOLDER = ["--data", "marglik.data.ImageFolder", "--data.path"]
WRONG = {
    "no update ever": (["--prior.every", "0"], "error: prior.every must be at least 1, not 0."),
    "no epochs": (["--epochs", "0"], "epochs must be at least 1, not 0"),
    "negative weight decay": (["--prior.weight_decay", "-1"], "must be positive, not -1.0"),
    "rules that match nothing": (
        ["--prior.structure", "{conv: 'conv*', rest: '*'}"],
        "Prior group 'conv' ('conv*') matches no parameter",
    ),
    "model of another size": (
        ["--model.in_features", "100"],
        "MLP cannot take inputs of shape (1, 8, 8)",
    ),
    "wrong number of classes": (["--model.num_classes", "7"], "set --model.num_classes 10"),
    "missing folder": ([*FOLDER, "/no/such"], "'/no/such/train' is not a folder"),
    "validation takes all": (["--data.validation", "1.0"], "validation=1.0: must be a fraction in"),
}


def images(folder):
    """Four images of each of two classes, to train with and to test with."""
    for split in ("train", "test"):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            for i in range(4):
                noise = np.random.default_rng(i).integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(noise).save(folder / split / label / f"{i}.png")
    return folder


@pytest.mark.parametrize("case", WRONG)
def test_wrong_turns(case, tmp_path, capsys):
    options, message = WRONG[case]
    assert message in refusal(capsys, *SMALL, "--output", str(tmp_path / "run"), *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("RowLSTM", "(LSTM) has no K-FAC rule. Supported: "),
        ("ReturnsTuple", "returns tuple; logits are needed"),
    ],
)
def test_networks_without_a_curvature(network, message, tmp_path, capsys):
    options = ["--model", f"tests.marglik.networks.{network}", "--output", str(tmp_path / "run")]
    assert message in refusal(capsys, *SMALL[:3], *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_named(tmp_path, capsys):
    options = ["--output", str(tmp_path), "--accelerator", "cuda"]
    message = refusal(capsys, *SMALL, *options)
    assert "--accelerator cuda is not available on this machine" in message
    assert "Pass auto or cpu" in message


def test_number_of_classes_of_a_folder(tmp_path, capsys):
    """Two classes of images, a network with ten outputs."""
    folder = images(tmp_path / "images")
    options = ["--model.in_features", "192", "--output", str(tmp_path / "run")]
    message = refusal(capsys, *SMALL, *FOLDER, str(folder), *options)
    assert "has 2 classes; set --model.num_classes 2" in message
    fits = ["--model.num_classes", "2"]
    message = refusal(capsys, *SMALL, *FOLDER, str(folder), *options, *fits)
    assert "held_out=0.1: 8 examples would be divided into 1 and 7" in message
