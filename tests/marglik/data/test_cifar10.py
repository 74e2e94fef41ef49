"""CIFAR-10 from its own files."""

import pickle

import numpy as np
import pytest
import torch
import torchvision

from marglik.data import CIFAR10
from tests.marglik.data.image_helpers import splits_of


@pytest.fixture
def fake_cifar10(tmp_path, monkeypatch):
    """CIFAR-10's file format with a few random images; MD5 sums are not looked at."""
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    names = [f"class {k}" for k in range(10)]
    stored = {}
    for name, count in (("data_batch_1", 60), ("data_batch_2", 60), ("test_batch", 30)):
        labels = [i % 10 for i in range(count)]
        pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        stored[name] = pixels, labels
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    dataset = torchvision.datasets.CIFAR10
    monkeypatch.setattr(dataset, "train_list", [["data_batch_1", None], ["data_batch_2", None]])
    monkeypatch.setattr(dataset, "test_list", [["test_batch", None]])
    monkeypatch.setattr(
        dataset, "meta", {"filename": "batches.meta", "key": "label_names", "md5": None}
    )
    return folder.parent, stored


def test_cifar10_equals_its_files(fake_cifar10):
    root, stored = fake_cifar10
    splits = CIFAR10(root).load()
    for images, names in (
        (splits.train, ["data_batch_1", "data_batch_2"]),
        (splits.test, ["test_batch"]),
    ):
        pixels = np.concatenate([stored[name][0] for name in names]).reshape(-1, 3, 32, 32)
        assert torch.equal(images.images, torch.from_numpy(pixels))
        assert images.labels.tolist() == sum([stored[name][1] for name in names], [])
    assert splits.name == "CIFAR-10"
    assert splits.classes[3] == "class 3"
    assert splits.mean == (125.3, 123.0, 113.9)
    assert splits.std == (63.0, 62.1, 66.7)


def test_cifar10_subsets_and_validation(fake_cifar10):
    splits = CIFAR10(fake_cifar10[0], validation=0.2, max_train=100, max_test=20).load()
    assert [len(s) for s in splits_of(splits)] == [80, 20, 20]
    for images, count in zip(splits_of(splits), (8, 2, 2), strict=True):
        assert images.labels.bincount().tolist() == [count] * 10


@pytest.mark.parametrize("download", [True, False])
def test_cifar10_that_cannot_be_downloaded_says_what_to_do(tmp_path, monkeypatch, download):
    def no_network(self):
        raise OSError("<urlopen error no route to host>\nsecond line")

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", no_network)
    with pytest.raises(FileNotFoundError, match="ImageFolder with an archive") as caught:
        CIFAR10(tmp_path, download=download).load()
    assert str(tmp_path) in str(caught.value)
    assert "cifar-10-batches-py" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ("no route to host" in str(caught.value)) == download
