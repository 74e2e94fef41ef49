"""Stand-ins for the experiments' data, and their runs in this process."""

import io

import numpy as np
import pytest

from experiments import studies
from tests.experiments.data.text_and_graphs import write_uci
from tests.marglik.application.data.image_helpers import encoded, write_archive


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs of studies are not in processes of their own; the names of those that were asked for."""
    asked = []

    def as_they_finish(run, tasks, jobs, threads, shows_epochs):
        for task in tasks:
            asked.append(studies.file_name(task))
            try:
                yield task, studies.record_of(run, task)
            except Exception as error:  # as a process would hand it over
                yield task, error

    monkeypatch.setattr(studies, "as_they_finish", as_they_finish)
    return asked


@pytest.fixture
def tiny_cifar10(tmp_path, monkeypatch):
    """Ten classes, each of its own brightness; experiments find them where the data lies."""
    generator = np.random.default_rng(0)
    files = {
        f"{split}/class{label}/{i:04}.jpg": encoded(
            (25 * label + generator.integers(0, 20, (32, 32, 3))).astype(np.uint8)
        )
        for split, count in (("train", 4), ("test", 1))
        for label in range(10)
        for i in range(count)
    }
    write_archive(tmp_path / "cifar10-jpeg.tar.gz", files)
    monkeypatch.setenv("MARGLIK_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tiny_yacht(tmp_path, monkeypatch):
    """Forty examples of a function of three inputs, as the set yacht of the UCI archive."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 3))
    y = np.sin(x[:, :1]) + 0.1 * generator.normal(size=(40, 1))
    files = {
        "data": np.concatenate([x, y], 1),
        "index_features": np.arange(3),
        "index_target": [3],
        "index_train_0": np.arange(32),
        "index_test_0": np.arange(32, 40),
    }
    texts = {part: io.StringIO() for part in files}
    for part, values in files.items():
        np.savetxt(texts[part], values)
    write_uci(tmp_path / "uci.tar.gz", "yacht", {k: t.getvalue() for k, t in texts.items()})
    monkeypatch.setenv("MARGLIK_DATA", str(tmp_path))
