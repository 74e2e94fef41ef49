"""CIFAR-10 and SVHN from their own files."""

import pickle

import numpy as np
import pytest
import torch
import torchvision
from scipy.io import savemat

from marglik.data import CIFAR10, SVHN
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


COUNTS = {"train": 120, "test": 30}


@pytest.fixture
def fake_svhn(tmp_path, monkeypatch):
    """SVHN's file format with a few random images; MD5 sums are not looked at."""
    generator = np.random.default_rng(0)
    stored = {}
    for split, count in COUNTS.items():
        pixels = generator.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
        labels = np.array([[i % 10 + 1] for i in range(count)], dtype=np.uint8)  # 1..10
        stored[split] = pixels, labels
        savemat(tmp_path / f"{split}_32x32.mat", {"X": pixels, "y": labels})
    files = {s: [f"http://nowhere/{s}", f"{s}_32x32.mat", None] for s in COUNTS}
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", files)
    return tmp_path, stored


def test_svhn_equals_its_files(fake_svhn):
    root, stored = fake_svhn
    splits = SVHN(root, download=False).load()
    for images, split in ((splits.train, "train"), (splits.test, "test")):
        pixels, labels = stored[split]
        for i in range(COUNTS[split]):
            expected = torch.from_numpy(pixels[:, :, :, i].copy()).permute(2, 0, 1)
            assert torch.equal(images.images[i], expected)
        assert images.images.is_contiguous()
        assert images.labels.tolist() == [int(k) % 10 for k in labels[:, 0]]  # zero is 10 there
    assert splits.name == "SVHN"
    assert splits.image_shape == (3, 32, 32)
    assert splits.classes == tuple("0123456789")
    assert splits.validation is None


def test_svhn_subsets_validation_and_statistics(fake_svhn):
    root, _ = fake_svhn
    splits = SVHN(root, validation=0.2, max_train=100, max_test=20, seed=3).load()
    assert [len(s) for s in splits_of(splits)] == [80, 20, 20]
    for images, count in zip(splits_of(splits), (8, 2, 2), strict=True):
        assert images.labels.bincount().tolist() == [count] * 10
    pixels = splits.train.images.double()
    assert splits.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert splits.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())


@pytest.mark.parametrize("download", [True, False])
@pytest.mark.parametrize("dataset", [CIFAR10, SVHN])
def test_data_that_cannot_be_downloaded_say_what_to_do(tmp_path, monkeypatch, dataset, download):
    def no_network(self):
        raise OSError("<urlopen error no route to host>\nsecond line")

    torchvisions = getattr(torchvision.datasets, dataset.__name__)
    monkeypatch.setattr(torchvisions, "download", no_network)
    with pytest.raises(FileNotFoundError, match="ImageFolder with an archive") as caught:
        dataset(tmp_path, download=download).load()
    message = str(caught.value)
    if dataset is SVHN:
        assert f"as '{tmp_path / 'train_32x32.mat'}'" in message
        assert torchvisions.split_list["train"][0] in message
    else:
        assert str(tmp_path) in message and "cifar-10-batches-py" in message
    assert "\n" not in message
    assert ("no route to host" in message) == download


def test_svhn_whose_test_file_is_missing_names_that_file(fake_svhn):
    root, _ = fake_svhn
    (root / "test_32x32.mat").unlink()
    with pytest.raises(FileNotFoundError, match="Fetch http://nowhere/test as '.*test_32x32.mat'"):
        SVHN(root, download=False).load()


@pytest.mark.parametrize(
    ("arguments", "message"), [({"validation": 1}, "validation=1"), ({"seed": -1}, "seed=-1")]
)
def test_impossible_arguments_are_named_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        SVHN(**arguments)
