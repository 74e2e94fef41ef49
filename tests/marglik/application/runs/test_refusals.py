"""Every wrong turn ends in one line that says the way out, before any work; nothing is left."""

import numpy as np
import pytest
import torch
from PIL import Image

from marglik.application.cli import main
from tests.marglik.application.runs.command_line import DATA, MODEL, TRAIN, content, refusal

IMAGES = ["--data", "marglik.data.ImageFolder", "--data.path", "images"]
TRAINS = {
    "model of another size": (
        ["--model.in_features", "9"],
        "does not accept shape (1, 8",
    ),
    "missing folder": (IMAGES, "images/train' is not a folder"),
    "other classes": (["--data", "Digits"], "has 10 classes. Pass --model.num_classes"),
    "a layer without a rule": (
        ["--model", "tests.marglik.networks.QuadraticForms", "--data", "Digits"],
        "(QuadraticForms) has no K-FAC rule. Supported: ",
    ),
}


@pytest.mark.parametrize("case", TRAINS)
def test_train(case, tmp_path, capsys):
    options, message = TRAINS[case]
    before = content(tmp_path)
    assert message in refusal(capsys, *TRAIN, *DATA, *MODEL, "--output", "run", *options)
    assert content(tmp_path) == before


def test_labels_of_the_test_part_alone(tmp_path, capsys):
    def saved(y_test):
        x, y = np.random.default_rng(0).normal(size=(40, 3)).astype("float32"), np.arange(40) % 2
        np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x[:4], y_test=np.array(y_test))

    path = str(tmp_path / "data.npz")
    data = ["--data", "TensorFile", "--data.path", path, "--model", "MLP", "--no_baseline"]
    saved([5, 6, 5, 6])
    message = refusal(capsys, *TRAIN, *data, "--output", str(tmp_path / "run"))
    assert "the label(s) 5, 6, which no training example has" in message
    saved([0, 1, 2, 1])
    with pytest.warns(UserWarning, match=r"have the label\(s\) 2, which"):
        assert main([*TRAIN, *data, "--output", str(tmp_path / "run")]) == 0
    saved([0, 1, 0, 1])
    with pytest.warns(UserWarning, match="held_out=0.9 leaves 4 of 40 examples"):
        assert main([*TRAIN, *data, "--held_out", "0.9", "--output", str(tmp_path / "few")]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_named(capsys):
    message = refusal(capsys, *TRAIN, *DATA, *MODEL, "--accelerator", "cuda")
    assert "--accelerator cuda is not available" in message and "Pass auto or cpu" in message


EVALUATES = {
    "an option of data that are not named": (
        ["--data.path", "x"],
        "--data.path is an option of a class. Pass --data CLASS before it. marglik has the classes",
    ),
    "data of other classes": (["--data", "Digits"], "digits has 10 classes (0, 1, 2, 3, ...), but"),
    "linearised networks of a layer": (
        ["--methods", "[linearised]", "--predictive.layers", "last"],
        "predictive.layers 'last' is not supported by method 'linearised'",
    ),
    "another network": (
        ["--model", "marglik.models.MLP", "--model.in_features", "65", "--model.num_classes", "3"],
        "belongs to another network: 'layers.1.weight' has shape (6, 64) in torch.float32 there",
    ),
}


@pytest.mark.parametrize("case", EVALUATES)
def test_evaluate(case, trained, capsys):
    options, message = EVALUATES[case]
    before = content(trained)
    assert message in refusal(capsys, "evaluate", str(trained), "--no_progress", *options)
    assert content(trained) == before


def test_evaluate_other_things(trained, tmp_path, capsys):
    file = str(trained / "model.safetensors")
    assert "is a file. Pass a folder written by" in refusal(capsys, "evaluate", file)
    photos = ["--data", "marglik.data.ImageFolder", "--data.path"]
    message = refusal(capsys, "evaluate", str(trained), *photos, str(images(tmp_path / "photos")))
    assert "photos has other test examples" in message and "Pass --output" in message
    (tmp_path / "empty").mkdir()
    assert "is not the folder of a run" in refusal(capsys, "report", str(tmp_path / "empty"))


def images(folder):
    for split in ("train", "test"):
        for label in "012":
            (folder / split / label).mkdir(parents=True)
            for i in range(2):
                pixels = np.random.default_rng(i).integers(0, 255, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{i}.png")
    return folder


def test_options_that_someone_else_wrote(run, tmp_path, capsys):
    """They run nothing; that names in them are text is tested in `report`."""
    (run / "results.json").unlink()
    (run / "config.yaml").write_bytes(b'a: !!python/object/apply:os.system ["touch ran"]\n')
    assert "config.yaml cannot be read" in refusal(capsys, "report", str(run))
    assert not (tmp_path / "ran").exists()
