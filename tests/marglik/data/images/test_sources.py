"""Digits, CIFAR-10, SVHN and folders of images, from their own files; bad ones named."""

import os
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from jsonargparse import ArgumentParser
from scipy.io import savemat

from marglik.data import CIFAR10, SVHN, Digits, ImageData, ImageFolder
from tests.marglik.data.image_helpers import (
    CLASSES,
    TRAIN,
    assert_same,
    decoded_by_pil,
    encoded,
    image_files,
    keys,
    splits_of,
    without,
    write_folder,
)

FILES = image_files()
# 100 training and 20 test images: ten classes in turn.
PIXELS = np.random.default_rng(0).integers(0, 256, (150, 3, 32, 32), dtype=np.uint8)
LABELS = np.arange(150) % 10
PARTS = {"train": slice(0, 120), "test": slice(120, 150)}


def digits(folder, monkeypatch):
    from sklearn.datasets import load_digits

    pixels = (load_digits().images * 255 / 16).round().astype(np.uint8)[:, None]
    return Digits, pixels, load_digits().target


def cifar10(folder, monkeypatch):
    (folder / "cifar-10-batches-py").mkdir()
    names = {
        "data_batch_1": slice(0, 60),
        "data_batch_2": slice(60, 120),
        "test_batch": PARTS["test"],
    }
    for name, part in names.items():
        stored = {"data": PIXELS[part].reshape(-1, 3072), "labels": LABELS[part].tolist()}
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(stored))
    meta = pickle.dumps({"label_names": list("0123456789")})
    (folder / "cifar-10-batches-py" / "batches.meta").write_bytes(meta)
    # Without their MD5 sums.
    dataset = torchvision.datasets.CIFAR10
    monkeypatch.setattr(dataset, "train_list", [["data_batch_1", None], ["data_batch_2", None]])
    monkeypatch.setattr(dataset, "test_list", [["test_batch", None]])
    meta = {"filename": "batches.meta", "key": "label_names", "md5": None}
    monkeypatch.setattr(dataset, "meta", meta)
    return partial(CIFAR10, folder, False), PIXELS, LABELS


def svhn(folder, monkeypatch):
    for split, part in PARTS.items():
        stored = np.where(LABELS[part] == 0, 10, LABELS[part])[:, None]  # zero is 10 there
        pixels = PIXELS[part].transpose(2, 3, 1, 0)
        savemat(folder / f"{split}_32x32.mat", {"X": pixels, "y": stored.astype(np.uint8)})
    files = {s: [f"http://nowhere/{s}", f"{s}_32x32.mat", None] for s in PARTS}
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", files)
    return partial(SVHN, folder, False), PIXELS, LABELS


def folder_of_images(folder, monkeypatch):
    files = image_files("png")
    parts = [decoded_by_pil(files, split) for split in PARTS]
    pixels, labels = (torch.cat(values).numpy() for values in zip(*parts, strict=True))
    return partial(ImageFolder, write_folder(folder / "pets", files)), pixels, labels


SOURCES = [digits, cifar10, svhn, folder_of_images]


@pytest.fixture(params=SOURCES, ids=lambda make: make.__name__)
def source(request, tmp_path, monkeypatch):
    """A source with its arguments to come, and the pixels and labels that its files hold."""
    return request.param(tmp_path, monkeypatch)


def labelled(pixels, labels):
    return sorted((np.asarray(i).tobytes(), int(k)) for i, k in zip(pixels, labels, strict=True))


def test_all_images_with_their_labels_once(source):
    make, pixels, labels = source
    splits = make(validation=0.25).load()
    parts = splits_of(splits)
    found = [pair for part in parts for pair in labelled(part.images, part.labels)]
    assert sorted(found) == labelled(pixels, labels)
    assert len(parts) == 3 and splits.image_shape == pixels.shape[1:]
    assert all(part.images.is_contiguous() for part in parts)
    for part in parts:  # stratified
        shares = part.labels.bincount(minlength=splits.num_classes) / len(part)
        expected = torch.tensor(labels).bincount() / len(labels)
        assert (shares - expected).abs().max() <= 1 / len(part)
    assert make().load().validation is None


def test_seeds(source):
    make, _, _ = source
    first, same, other = (make(validation=0.25, seed=seed).load() for seed in (0, 0, 1))
    for part, again in zip(splits_of(first), splits_of(same), strict=True):
        assert_same(part, again)
    assert keys(first.train) != keys(other.train)


def test_statistics_are_those_of_the_training_images_alone(source):
    make, _, _ = source
    splits = make(validation=0.25).load()
    if splits.name == "CIFAR-10":
        assert (splits.mean, splits.std) == ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
        return
    x, everything = splits.train.images.double(), torch.cat([s.images for s in splits_of(splits)])
    assert splits.mean == pytest.approx(x.mean((0, 2, 3)).tolist())
    assert splits.std == pytest.approx(x.std((0, 2, 3), correction=0).tolist())
    assert splits.mean != pytest.approx(everything.double().mean((0, 2, 3)).tolist(), rel=1e-6)


@pytest.mark.parametrize("make_source", SOURCES[1:], ids=lambda make: make.__name__)
def test_parts_of_the_data(make_source, tmp_path, monkeypatch):
    make, pixels, _ = make_source(tmp_path, monkeypatch)
    everything = make().load()
    some = min(10, len(everything.test) - everything.num_classes)
    splits = make(validation=0.5, max_train=20, max_test=some).load()
    assert [len(part) for part in splits_of(splits)] == [10, 10, some]
    train, validation, test = map(keys, splits_of(splits))
    assert not train & validation and test <= keys(everything.test)
    # The validation images come from the subset, not from beside it.
    assert train | validation == keys(make(max_train=20).load().train) < keys(everything.train)
    assert_same(make(max_train=len(everything.train)).load().train, everything.train)
    assert_same(make(max_test=some).load_test()[0], splits.test)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_train": 2}, "max_train=2: must lie in 3..30"),
        ({"max_test": 13}, "max_test=13: must lie in 3..12"),
        ({"validation": 0.05}, "validation=0.05: .* 28.* at least 3"),
        ({"validation": float("nan")}, "validation=nan: "),
        ({"validation": 1.0}, "validation=1.0: "),
        ({"seed": 2**32}, "seed=4294967296"),
    ],
)
def test_impossible_parts(pets, arguments, message):
    with pytest.raises(ValueError, match=message):
        ImageFolder(pets, **arguments).load()


@pytest.mark.parametrize("value", [-0.1, 0, 0.001])
def test_a_test_set_that_cannot_be(value):
    with pytest.raises(ValueError, match=f"test_fraction={value}"):
        Digits(test_fraction=value).load()


@pytest.mark.parametrize(
    ("number", "arguments"),
    [(1, {"validation": 0.3}), (2, {"max_train": 4}), (2, {"validation": 0.8})],
)
def test_a_rare_class_is_never_lost(tmp_path, number, arguments):
    files = without(FILES, "train/dog")
    files |= {f"train/dog/{i:03}.jpg": FILES[f"train/dog/{i:03}.jpg"] for i in range(number)}
    folder = write_folder(tmp_path / "pets", files)
    assert len(ImageFolder(folder).load().train) == 2 * TRAIN + number
    with pytest.raises(ValueError, match="'dog' is so rare"):
        ImageFolder(folder, **arguments).load()


def test_a_class_of_few_images_may_be_missing_where_nothing_is_learned(tmp_path):
    """In a small validation set, or among the images that a large subset leaves out."""
    files = without(FILES, "train/dog")
    files |= {f"train/dog/{i:03}.jpg": FILES[f"train/dog/{i:03}.jpg"] for i in range(2)}
    folder = write_folder(tmp_path / "pets", files)
    splits = ImageFolder(folder, validation=0.15).load()
    assert sorted(splits.train.labels.bincount().tolist()) == [2, 8, 9]
    assert ImageFolder(folder, max_train=19).load().train.labels.bincount()[1] == 2


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3)])
def test_greyscale_images_have_one_channel_unless_one_is_coloured(tmp_path, shape):
    grey = image_files("png", shape=(6, 5))
    files = grey | {"test/dog/000.png": encoded(np.full(shape, 7, np.uint8), "png")}
    splits = ImageFolder(write_folder(tmp_path / "pets", files)).load()
    mode = "L" if len(shape) == 2 else "RGB"
    for part, name in ((splits.train, "train"), (splits.test, "test")):
        assert torch.equal(part.images, decoded_by_pil(files, name, mode)[0])


@pytest.mark.parametrize("dataset", [CIFAR10, SVHN])
@pytest.mark.parametrize("download", [True, False])
def test_data_that_cannot_be_downloaded(tmp_path, monkeypatch, dataset, download):
    def no_network(self):
        raise OSError("<urlopen error no route to host>\nsecond line")

    monkeypatch.setattr(getattr(torchvision.datasets, dataset.__name__), "download", no_network)
    wanted = {CIFAR10: "cifar-10-batches-py", SVHN: "train_32x32.mat"}[dataset]
    with pytest.raises(FileNotFoundError, match=f"(?s){tmp_path}.*{wanted}.*ImageFolder") as caught:
        dataset(tmp_path, download=download).load()
    assert ("no route to host" in str(caught.value)) == download
    assert "\n" not in str(caught.value)


SMALL = encoded(np.zeros((3, 4, 3), dtype=np.uint8))
DEEP = encoded(np.zeros((6, 5), dtype=np.uint16), "png")
BAD = {
    "no test": (without(FILES, "test/"), "test' is not a folder.*train/CLASS/IMAGE"),
    "no train": (without(FILES, "train/"), "train' is not a folder"),
    "no classes": ({"train/x.jpg": SMALL, "test/y.jpg": SMALL}, "class folder"),
    "an empty class": (FILES | {"train/cow/notes.txt": b""}, "cow"),
    "a class of train alone": (without(FILES, "test/dog"), "'dog' is in one of .*--ood"),
    "a class of test alone": (without(FILES, "train/dog"), "'dog' is in one of"),
    "another size": (
        FILES | {"train/dog/004.jpg": SMALL},
        "'train/dog/004.jpg' has 4×3 pixels, but 'train/cat/000.jpg' has 5×6.*Resize",
    ),
    "no image": (FILES | {"train/dog/4.jpg": b"no image"}, "'train/dog/4.jpg' cannot be decoded"),
    "half an image": (
        FILES | {"test/dog/1.jpg": FILES["test/dog/001.jpg"][:-150]},
        "'test/dog/1.jpg' cannot be decoded",
    ),
    "16 bits": (FILES | {"test/dog/1.png": DEEP}, r"'test/dog/1.png' has more than 8 bits.*I;16"),
    "PostScript": (
        FILES | {"train/cat/x.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 6\n"},
        "'train/cat/x.png' cannot be decoded",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case, tmp_path):
    files, message = BAD[case]
    folder = write_folder(tmp_path / "pets", files)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        ImageFolder(folder).load()
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_image_file_is_not_opened(pets):
    """A pipe would never end; of three gigabytes, Pillow's decoders read some at once."""
    os.mkfifo(pets / "train/cat/pipe.jpg")
    with pytest.raises(ValueError, match="'train/cat/pipe.jpg' is no regular file"):
        ImageFolder(pets).load()
    (pets / "train/cat/pipe.jpg").unlink()
    with (pets / "test/dog/large.webp").open("wb") as file:
        file.write(encoded(np.zeros((6, 5, 3), dtype=np.uint8), "webp"))
        file.truncate(3 * 2**30)
    with pytest.raises(
        ValueError, match="'test/dog/large.webp' is no .* at most 268,435,456 bytes"
    ):
        ImageFolder(pets).load()


def test_the_constructors_arguments_are_options_of_the_command_line(pets):
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageData, "data")
    options = ["--data=ImageFolder", f"--data.path={pets}", "--data.max_train=9"]
    splits = parser.instantiate(parser.parse_args(options)).data.load()
    assert (len(splits.train), splits.name, splits.classes) == (9, "pets", CLASSES)
    for name in ("Digits", "CIFAR10", "SVHN", "Noise"):
        assert parser.parse_args([f"--data=marglik.data.{name}"]).data.init_args.seed == 0
