"""Every wrong turn ends in one line that says the way out, before any work; nothing is left."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from marglik.report import write_report
from tests.marglik.runs.command_line import DATA, MODEL, TRAIN, content, refusal

IMAGES = ["--data", "marglik.data.ImageFolder", "--data.path", "images"]
TRAINS = {
    "no update ever": (["--prior.every", "0"], "error: prior.every must be at least 1, not 0."),
    "rules that match nothing": (
        ["--prior.structure", "{conv: 'conv*', rest: '*'}"],
        "Prior group 'conv' ('conv*') matches no parameter",
    ),
    "model of another size": (
        ["--model.in_features", "9"],
        "cannot take shape (1, 8",
    ),
    "missing folder": (IMAGES, "images/train' is not a folder"),
    "a layer without a rule": (
        ["--model", "tests.marglik.networks.WithBilinear", "--data", "Digits"],
        "(Bilinear) has no K-FAC rule. Supported: ",
    ),
}


@pytest.mark.parametrize("case", TRAINS)
def test_train(case, tmp_path, capsys):
    options, message = TRAINS[case]
    before = content(tmp_path)
    assert message in refusal(capsys, *TRAIN, *DATA, *MODEL, "--output", "run", *options)
    assert content(tmp_path) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_named(capsys):
    message = refusal(capsys, *TRAIN, *DATA, *MODEL, "--accelerator", "cuda")
    assert "--accelerator cuda is not available" in message and "Pass auto or cpu" in message


FITS = {
    "no such checkpoint": (["--checkpoint", "/no/such.pt"], "No checkpoint at /no/such.pt"),
    "another network": (["--model.hidden", "[9]"], "'layers.1.weight' has shape (6, 64) there"),
    "other classes": (["--data", "marglik.data.Digits"], "has 10 classes; set --model.num_classes"),
    "a bound that is maximised": (["--curvature.corrected", "true"], "makes the evidence a lower"),
    "the folder that would be cleared": (["--output", "."], "net.safetensors is in the output"),
}


@pytest.mark.parametrize("case", FITS)
def test_fit(case, checkpoint, tmp_path, capsys):
    options, message = FITS[case]
    arguments = [*DATA, *MODEL, "--checkpoint", str(checkpoint), "--no_progress"]
    before = content(tmp_path)
    assert message in refusal(capsys, "fit", *arguments, "--output", "out", *options)
    assert content(tmp_path) == before


EVALUATES = {
    "data of other classes": (["--data", "Digits"], "digits has 10 classes (0, 1, 2, 3, ...), and"),
    "an unknown method": (["--methods", "[laplace]"], "Given value: ['laplace']"),
    "linearised networks of a layer": (
        ["--methods", "[linearised]", "--predictive.layers", "last"],
        "predictive.layers 'last' is not for method 'linearised'",
    ),
    "another network": (
        ["--model", "marglik.models.MLP", "--model.in_features", "65", "--model.num_classes", "3"],
        "is of another network: 'layers.1.weight' has shape (6, 64) there, and has shape (128",
    ),
}


@pytest.mark.parametrize("case", EVALUATES)
def test_evaluate(case, trained, capsys):
    options, message = EVALUATES[case]
    before = content(trained)
    assert message in refusal(capsys, "evaluate", str(trained), "--progress", "false", *options)
    assert content(trained) == before


def test_evaluate_other_things(trained, checkpoint, tmp_path, capsys):
    message = refusal(capsys, "evaluate", str(checkpoint))
    assert f"is a file; pass a run's folder. marglik fit --checkpoint {checkpoint}" in message
    photos = ["--data", "marglik.data.ImageFolder", "--data.path"]
    same, larger = images(tmp_path / "photos", 8), images(tmp_path / "larger", 9)
    message = refusal(capsys, "evaluate", str(trained), *photos, str(same))
    assert "photos is not what" in message and "pass --output" in message
    message = refusal(capsys, "evaluate", str(trained), *photos, str(larger))
    assert "image_shape [1, 9, 9]" in message and "image_shape [1, 8, 8]" in message
    (tmp_path / "empty").mkdir()
    assert "is not the folder of a run" in refusal(capsys, "report", str(tmp_path / "empty"))


def images(folder, size):
    for split in ("train", "test"):
        for label in "012":
            (folder / split / label).mkdir(parents=True)
            for i in range(2):
                pixels = np.random.default_rng(i).integers(0, 255, (size, size), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{i}.png")
    return folder


# What comes from outside is only data: no pickle, no YAML tags, no path out of a folder.


class Malicious:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    ("name", "save", "message"),
    [
        ("net.pt", torch.save, "could not be read as a file of tensors"),
        ("net.bin", pickle.dump, "could not be read as a file of tensors"),
        ("net.safetensors", pickle.dump, "is not a whole file of weights"),
    ],
)
def test_checkpoints_run_no_code(name, save, message, tmp_path, capsys):
    with (tmp_path / name).open("wb") as file:
        save(Malicious(), file)
    assert message in refusal(capsys, "fit", *DATA, *MODEL, "--checkpoint", name, "--no_progress")
    assert [path.name for path in tmp_path.iterdir()] == [name]


EVIL = "</script><img src=x onerror=alert(1)>"


def test_options_that_someone_else_wrote(run, tmp_path, capsys):
    """What they hold is text."""
    (run / "results.json").unlink()
    (run / "config.yaml").write_text(json.dumps({EVIL: EVIL}))
    page = write_report([run], str(tmp_path / "page.html")).read_text()
    assert EVIL not in page and "<img src=x" not in page
    (run / "config.yaml").write_bytes(b'a: !!python/object/apply:os.system ["touch ran"]\n')
    assert "config.yaml cannot be read" in refusal(capsys, "report", str(run))
    assert not (tmp_path / "ran").exists()
