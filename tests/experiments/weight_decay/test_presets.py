"""The presets from end to end at a size of seconds; their table from the JSON alone."""

import numpy as np
import pytest

from experiments.weight_decay import presets
from marglik.cli import main
from marglik.storage.record_file import read_posterior
from tests.experiments.data.text_and_graphs import (
    dart_entries,
    nci1_texts,
    write_dart,
    write_nci1,
)
from tests.marglik.data.image_helpers import encoded, write_archive
from tests.marglik.runs.command_line import results_of


def run(preset, seed, learned, initial):
    metrics = {
        f"{who}, {which}": {"test/cls/NLL": nll + (which != "MAP"), "test/cls/accuracy": 0.5}
        for who, nll in (("learned", learned), ("initial", initial))
        for which in ("MAP", "MAP, temperature-scaled", "Laplace, mc")
    }
    return {"config": {"preset": preset, "seed": seed}, "metrics": metrics, "seconds": 90.0}


def test_the_table():
    runs = [run("gpt_dart", 0, 1.0, 1.5), run("gpt_dart", 1, 2.0, 1.9)]
    (row,) = presets.table(runs).splitlines()[2:]
    assert row == (
        "| GPT, DART, per byte | 1.500 / 1.700 | -0.200 ± 0.300 | 1 of 2 | 50.0 % / 50.0 % "
        "| 2.500 / 2.700 | 2.500 / 2.700 | 2 |"
    )


def test_one_seed_has_no_error():
    assert "| -0.500 | 1 of 1 |" in presets.table([run("vit_cifar10", 0, 1.0, 1.5)])


def test_a_run_that_ends_with_an_error_is_named(monkeypatch):
    monkeypatch.setattr(presets, "marglik", lambda arguments: 2)
    with pytest.raises(RuntimeError, match="gpt_dart.yaml ended with status 2"):
        presets.run(presets.Config("gpt_dart", 0))


SHORT = [
    "--epochs", "1", "--prior.every", "1", "--prior.steps", "5", "--held_out", "0.34",
    "--no_progress",
]  # fmt: skip


def images(folder):
    """Three training images and one test image of each of ten classes."""
    random = np.random.default_rng(0)
    files = {
        f"{split}/{label}/{i}.png": encoded(random.integers(0, 255, (32, 32, 3), np.uint8), "png")
        for split, number in (("train", 3), ("test", 1))
        for label in range(10)
        for i in range(number)
    }
    return write_archive(folder / "images.tar", files)


PRESETS = {
    "vit_cifar10": (
        images,
        ["--data.max_train", "null", "--data.max_test", "null",
         "--model.depth", "1"],
        ["position_embedding", "class_token"],  # its classes are read off the mean
    ),
    "gpt_dart": (
        lambda folder: write_dart(folder / "dart.json.gz", dart_entries(20)),
        ["--data.num_train", "20", "--data.num_test", "4", "--model.depth", "1"],
        ["token_embedding.weight", "head.weight"],  # one tensor
    ),
    "graph_network_nci1": (
        lambda folder: write_nci1(folder / "nci1.tar.gz", nci1_texts(30)),
        ["--model.node_features", "3"],
        ["node_encoder.0.weight", "token_embedding.weight"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_learns_all_weight_decays(preset, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write, options, (there, not_there) = PRESETS[preset]
    path = ["--data.path", str(write(tmp_path))]
    out = ["--output", str(tmp_path / "run")]
    config = ["--config", str(presets.PRESETS / f"{preset}.yaml")]
    assert main(["train", *config, *SHORT, *path, *options, *out]) == 0
    results = results_of(tmp_path / "run")
    learned = {name: row["learned"] for name, row in results["weight_decay"].items()}
    assert set(learned) == set(read_posterior(tmp_path / "run")["prior_precision"])
    assert there in learned and not_there not in learned
    assert len(set(learned.values())) > len(learned) / 2
    assert sum(name.startswith("initial, ") for name in results["metrics"]) == 3
    assert results["calibration"]["num_terms"] >= 7
    assert results["complete"]
