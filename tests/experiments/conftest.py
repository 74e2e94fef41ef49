"""Stand-ins for the experiments' data, and their runs in this process."""

import io
import tarfile

import numpy as np
import pytest
import torch

from experiments import studies
from tests.marglik.data.image_helpers import encoded, write_archive


@pytest.fixture(autouse=True)
def kept_threads():
    """Runs set how many threads torch uses."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs of studies are not in processes of their own; the tasks that were asked for."""
    asked = []

    def as_they_finish(function, tasks, jobs):
        for task in tasks:
            asked.append(task)
            try:
                yield task, function(task)
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
        for split, count in (("train", 6), ("test", 3))
        for label in range(10)
        for i in range(count)
    }
    write_archive(tmp_path / "cifar10-jpeg.tar.gz", files)
    monkeypatch.setenv("MARGLIK_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def uci_archive(tmp_path, monkeypatch):
    """Writes a set of the UCI archive where experiments find it: a table, and its split 0."""

    def write(name, table, num_train):
        rows, columns = table.shape
        files = {
            "data": table,
            "index_features": np.arange(columns - 1),
            "index_target": [columns - 1],
            "index_train_0": np.arange(num_train),
            "index_test_0": np.arange(num_train, rows),
        }
        with tarfile.open(tmp_path / "uci.tar.gz", "w:gz") as archive:
            for part, values in files.items():
                text = io.BytesIO()
                np.savetxt(text, values)
                member = tarfile.TarInfo(f"uci/{name}/{part}.txt")
                member.size = text.tell()
                text.seek(0)
                archive.addfile(member, text)
        monkeypatch.setenv("MARGLIK_DATA", str(tmp_path))

    return write
