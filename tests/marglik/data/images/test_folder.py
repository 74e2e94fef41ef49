"""Image folders and archives are read as PIL reads them, one image after the other."""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from marglik.data import ImageFolder, ImageSet
from tests.marglik.data.image_helpers import (
    CLASSES,
    TRAIN,
    assert_same,
    decoded_by_pil,
    image_files,
    splits_of,
    write_archive,
    write_folder,
)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_folder_equals_pil(tmp_path, suffix):
    files = image_files(suffix)
    splits = ImageFolder(write_folder(tmp_path / "pets.v1", files)).load()
    for images, name in ((splits.train, "train"), (splits.test, "test")):
        pixels, labels = decoded_by_pil(files, name)
        assert torch.equal(images.images, pixels)
        assert torch.equal(images.labels, labels)
    assert splits.classes == CLASSES
    assert splits.name == "pets.v1"
    assert splits.validation is None


@pytest.mark.parametrize("name", ["pets.tar.gz", "pets.tgz", "pets.tar"])
@pytest.mark.parametrize("top", ["", "./", "pets/", "./a/"])
def test_archive_equals_pil_in_whatever_order_its_members_come(tmp_path, name, top):
    files = image_files()
    members = {top + path: data for path, data in files.items()}
    order = np.random.default_rng(7).permutation(sorted(members)).tolist()
    archive = write_archive(tmp_path / name, members, order=order)
    splits = ImageFolder(archive, cache=False).load()
    for images, split in ((splits.train, "train"), (splits.test, "test")):
        pixels, labels = decoded_by_pil(files, split)
        assert torch.equal(images.images, pixels)
        assert torch.equal(images.labels, labels)
    assert splits.name == "pets"
    assert list(tmp_path.iterdir()) == [archive]  # neither unpacked nor cached


def test_greyscale_images_have_one_channel_unless_one_is_coloured(tmp_path):
    files = image_files("png", shape=(6, 5))
    grey = ImageFolder(write_folder(tmp_path / "grey", files)).load()
    assert grey.image_shape == (1, 6, 5)
    assert torch.equal(grey.train.images, decoded_by_pil(files, "train", "L")[0])
    files["test/dog/000.png"] = image_files("png")["test/dog/000.png"]
    mixed = ImageFolder(write_folder(tmp_path / "mixed", files)).load()
    assert mixed.image_shape == (3, 6, 5)
    assert torch.equal(mixed.train.images, grey.train.images.expand(-1, 3, -1, -1))
    assert torch.equal(mixed.test.images, decoded_by_pil(files, "test")[0])


def test_statistics_are_those_of_the_training_images_unless_given(pets):
    splits = ImageFolder(pets, validation=0.3).load()
    pixels = splits.train.images.double()
    assert splits.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert splits.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())
    given = ImageFolder(pets, mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0), name="Pets").load()
    assert (given.mean, given.std, given.name) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "Pets")
    with pytest.raises(ValueError, match="mean="):
        ImageFolder(pets, mean=(1.0,)).load()


def test_files_of_desktops_are_ignored_and_others_named(tmp_path):
    files = image_files()
    clutter = {
        "README.md": b"",
        "train/.DS_Store": b"",
        "train/cat/._000.jpg": b"no image",
        "__MACOSX/train/cat/000.jpg": b"no image",
    }
    folder = write_folder(tmp_path / "pets", {**files, **clutter})
    assert_same(ImageFolder(folder).load().train, ImageSet(*decoded_by_pil(files, "train")))
    (folder / "train" / "cat" / "notes.txt").write_text("")
    with pytest.warns(UserWarning, match=r"1 file\(s\) .* 'train/cat/notes.txt'"):
        ImageFolder(folder).load()


def test_images_in_folders_within_a_class_belong_to_it(tmp_path):
    files = image_files()
    files["train/dog/more/000.jpg"] = files["train/dog/000.jpg"]
    splits = ImageFolder(write_folder(tmp_path / "pets", files)).load()
    assert splits.train.labels.bincount().tolist() == [TRAIN, TRAIN + 1, TRAIN]


@pytest.mark.slow  # decodes 60,000 images; smaller archives are read by the tests above
def test_cifar10_as_jpeg():
    """The archive itself, decoded once: 60,000 images, 200 of them taken."""
    default = Path(__file__).parents[3] / "../shared/data"
    place = Path(os.environ.get("MARGLIK_DATA", default)) / "cifar10-jpeg.tar.gz"
    if not place.exists():
        pytest.skip(f"no {place}: put CIFAR-10 as JPEG files there, or set MARGLIK_DATA")
    name = "CIFAR-10 (JPEG)"
    splits = ImageFolder(place, validation=0.25, max_train=200, max_test=100, name=name).load()
    assert splits.name == name
    assert splits.image_shape == (3, 32, 32)
    assert splits.classes[0] == "airplane" and splits.num_classes == 10
    for images, count in zip(splits_of(splits), (15, 5, 10), strict=True):
        assert images.labels.bincount().tolist() == [count] * 10
    everything = ImageFolder(place, name=name).load()  # from the cache
    assert (len(everything.train), len(everything.test)) == (50_000, 10_000)
    # Lossy as it is, the data has CIFAR-10's customary statistics.
    assert everything.mean == pytest.approx((125.3, 123.0, 113.9), abs=0.3)
    assert everything.std == pytest.approx((63.0, 62.1, 66.7), abs=1)
    with tarfile.open(place) as archive:
        member = archive.next()
        while member is not None and not member.isfile():
            member = archive.next()
        assert member is not None
        stream = archive.extractfile(member)
        assert stream is not None
        pixels = np.array(Image.open(stream).convert("RGB")).transpose(2, 0, 1)
    label = everything.classes.index(member.name.split("/")[1])
    candidates = everything.train.images[everything.train.labels == label]
    assert (candidates == torch.from_numpy(pixels)).flatten(1).all(1).any()
