"""Subsets and validation splits: stratified, disjoint, repeatable, and impossible ones named."""

from functools import partial

import pytest

from marglik.data import CIFAR10, Digits, ImageFolder
from tests.marglik.data.image_helpers import (
    TEST,
    TRAIN,
    assert_same,
    image_files,
    keys,
    splits_of,
    without,
    write_folder,
)


def test_subsets_and_splits_are_stratified_and_disjoint(pets):
    everything = ImageFolder(pets).load()
    source = ImageFolder(pets, validation=0.25, max_train=24, max_test=6)
    splits = source.load()
    assert [len(s) for s in splits_of(splits)] == [18, 6, 6]
    for images, count in zip(splits_of(splits), (6, 2, 2), strict=True):
        assert images.labels.bincount().tolist() == [count] * 3
    train, validation, test = (keys(s) for s in splits_of(splits))
    assert not train & validation and not train & test and not validation & test
    assert train | validation <= keys(everything.train)
    assert test <= keys(everything.test)
    assert_same(source.load().train, splits.train)
    other = ImageFolder(pets, validation=0.25, max_train=24, max_test=6, seed=1).load()
    assert keys(other.train) != train
    # The validation images come from the subset, not from beside it.
    subset = ImageFolder(pets, max_train=24, max_test=6).load()
    assert keys(subset.train) == train | validation
    assert keys(subset.test) == test


def test_labels_stay_with_their_images(pets):
    everything = ImageFolder(pets).load().train
    label = {i.numpy().tobytes(): int(k) for i, k in zip(*vars(everything).values(), strict=True)}
    for images in splits_of(ImageFolder(pets, validation=0.4, max_train=20).load())[:2]:
        assert [label[i.numpy().tobytes()] for i in images.images] == images.labels.tolist()


def test_all_images_may_be_asked_for_by_number(pets):
    splits = ImageFolder(pets, max_train=3 * TRAIN, max_test=3 * TEST).load()
    assert_same(splits.train, ImageFolder(pets).load().train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_train": 2}, "max_train=2: there are 3 classes.*at least 3"),
        ({"max_train": 0}, "max_train=0: "),
        ({"max_test": -1}, "max_test=-1: "),
        ({"max_train": 31}, "max_train=31: there are only 30 images"),
        ({"max_test": 13}, "max_test=13: there are only 12 images"),
        ({"validation": 0.05}, "validation=0.05: .* into 28 and 2.*Choose another"),
        ({"validation": 0.5, "max_train": 3}, "validation=0.5: 3 training images"),
        ({"seed": 2**32}, "seed=4294967296"),
    ],
)
def test_impossible_subsets_are_named(pets, arguments, message):
    with pytest.raises(ValueError, match=message):
        ImageFolder(pets, **arguments).load()


def test_rare_classes_are_named_and_never_lost(tmp_path):
    files = without(image_files(), "train/dog")
    rare = {"train/dog/000.jpg": image_files()["train/dog/000.jpg"]}
    folder = write_folder(tmp_path / "one", {**files, **rare})
    assert len(ImageFolder(folder).load().train) == 2 * TRAIN + 1
    with pytest.raises(ValueError, match="validation=0.3: class 'dog' has 1 image"):
        ImageFolder(folder, validation=0.3).load()
    rare["train/dog/001.jpg"] = image_files()["train/dog/001.jpg"]
    folder = write_folder(tmp_path / "two", {**files, **rare})
    with pytest.raises(ValueError, match="max_train=4: class 'dog' is so rare.*raise max_train"):
        ImageFolder(folder, max_train=4).load()
    with pytest.raises(ValueError, match="validation=0.8: class 'dog' is so rare.*smaller"):
        ImageFolder(folder, validation=0.8).load()


@pytest.mark.parametrize("value", [-0.1, 1.0, 2.0, float("nan")])
@pytest.mark.parametrize(
    ("source", "name"),
    [
        (Digits, "validation"),
        (Digits, "test_fraction"),
        (CIFAR10, "validation"),
        (partial(ImageFolder, "pets"), "validation"),
    ],
    ids=["digits", "digits test", "CIFAR-10", "folder"],
)
def test_fractions_out_of_range_are_named(source, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}: "):
        source(**{name: value})
