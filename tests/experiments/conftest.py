"""A tiny stand-in for the archive of re-encoded CIFAR-10 images."""

import numpy as np
import pytest

from tests.marglik.data.image_helpers import encoded, write_archive


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
