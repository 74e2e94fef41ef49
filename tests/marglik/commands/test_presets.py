"""The presets of transformers and graph networks, from end to end at a size of seconds."""

import numpy as np
import pytest
from PIL import Image

from marglik.cli import main
from marglik.storage.record_file import read_posterior
from tests.marglik.commands.command_line import results_of
from tests.marglik.data.text_and_graphs import (
    dart_entries,
    nci1_texts,
    write_dart,
    write_nci1,
)

SHORT = [
    "--epochs", "1", "--prior.every", "1", "--prior.steps", "5", "--held_out", "0.34",
    "--predictive.networks", "2", "--no_progress",
]  # fmt: skip


def images(folder):
    """Three training images and one test image of each of ten classes."""
    random = np.random.default_rng(0)
    for split, number in (("train", 3), ("test", 1)):
        for label in range(10):
            (folder / split / str(label)).mkdir(parents=True)
            for i in range(number):
                pixels = random.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / str(label) / f"{i}.png")
    return folder


PRESETS = {
    "vit_cifar10": (
        images,
        ["--data.max_train", "null", "--data.max_test", "null", "--data.cache", "false",
         "--predictive.layers", "last", "--model.depth", "1"],
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
def test_a_preset_learns_all_weight_decays(preset, tmp_path):
    write, options, (there, not_there) = PRESETS[preset]
    path = ["--data.path", str(write(tmp_path))]
    out = ["--output", str(tmp_path / "run")]
    assert main(["train", "--config", preset, *SHORT, *path, *options, *out]) == 0
    results = results_of(tmp_path / "run")
    learned = {name: row["learned"] for name, row in results["weight_decay"].items()}
    assert (
        set(learned)
        == set(results["parameters"])
        == set(read_posterior(tmp_path / "run")["prior_precision"])
    )
    assert there in learned and not_there not in learned
    assert len(set(learned.values())) > len(learned) / 2
    assert sum(name.startswith("initial, ") for name in results["metrics"]) == 3
    assert results["calibration"]["num_terms"] >= 7
    assert results["complete"]
