"""Image data: sources, splits, the cache, and batches against brute force."""

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from jsonargparse import ArgumentParser
from PIL import Image
from torchvision.transforms.v2 import functional as transforms

from marglik.data import (
    CIFAR10,
    Digits,
    ImageBatches,
    ImageData,
    ImageFolder,
    ImageSet,
    ImageSplits,
    crop_and_flip,
)
from marglik.data import image_folder as image_folder_module

CLASSES = ("cat", "dog", "test")  # a class may have a split's name
TRAIN, TEST = 10, 4  # images per class


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads or leaves anything in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def encoded(pixels, suffix="jpg"):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, {"jpg": "JPEG", "png": "PNG"}[suffix])
    return stream.getvalue()


def image_files(suffix="jpg", *, shape=(6, 5, 3), seed=0):
    """Relative path -> bytes of a small data set."""
    generator = np.random.default_rng(seed)
    return {
        f"{split}/{name}/{i:03}.{suffix}": encoded(
            generator.integers(0, 256, shape, dtype=np.uint8), suffix
        )
        for split, count in (("train", TRAIN), ("test", TEST))
        for name in CLASSES
        for i in range(count)
    }


def write_folder(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_archive(path, files, *, directories=(), order=None):
    """A tar archive, compressed as its name says."""
    mode = "w:gz" if path.suffix in {".gz", ".tgz"} else "w"
    with tarfile.open(path, mode) as archive:
        for name in directories:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
        for name in order or files:
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            archive.addfile(info, io.BytesIO(files[name]))
    return path


def decoded_by_pil(files, split, mode="RGB"):
    """Oracle: PIL, one file after the other, in the order of the paths."""
    names = sorted(name for name in files if name.startswith(f"{split}/"))
    images = [np.array(Image.open(io.BytesIO(files[n])).convert(mode)) for n in names]
    pixels = np.stack(images)
    pixels = pixels[:, None] if mode == "L" else pixels.transpose(0, 3, 1, 2)
    labels = [CLASSES.index(name.split("/")[1]) for name in names]
    return torch.from_numpy(pixels), torch.tensor(labels)


def assert_same(images, other):
    assert torch.equal(images.images, other.images)
    assert torch.equal(images.labels, other.labels)


def keys(images):
    """The images as a set of byte strings."""
    return {image.numpy().tobytes() for image in images.images}


def synthetic(counts, size=4, seed=0):
    """counts[k] random images of class k, all different, in random order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=generator)]
    shape = (len(labels), 3, size, size)
    return ImageSet(
        torch.randint(256, shape, generator=generator, dtype=torch.uint8), labels.contiguous()
    )


# ---------------------------------------------------------------- sets


def test_image_set_rejects_other_dtypes_and_shapes():
    images, labels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    assert len(ImageSet(images, labels)) == 2
    with pytest.raises(ValueError, match="float32"):
        ImageSet(images.float(), labels)
    with pytest.raises(ValueError, match=r"\(2, 4, 4\)"):
        ImageSet(images[:, 0], labels)
    with pytest.raises(ValueError, match=r"labels .* \(1,\)"):
        ImageSet(images, labels[:1])
    with pytest.raises(ValueError, match="int32"):
        ImageSet(images, labels.int())


def test_image_splits_reject_what_does_not_fit():
    train, other = synthetic([2, 2]), synthetic([2, 2], size=5)
    arguments = {"classes": ("a", "b"), "mean": (1.0,) * 3, "std": (1.0,) * 3, "name": "x"}
    splits = ImageSplits(train, None, train, **arguments)
    assert splits.image_shape == (3, 4, 4)
    assert splits.num_classes == 2
    with pytest.raises(ValueError, match=r"test images have shape \(3, 5, 5\)"):
        ImageSplits(train, None, other, **arguments)
    with pytest.raises(ValueError, match="labels reach from 0 to 1; with 1 classes"):
        ImageSplits(train, None, train, **{**arguments, "classes": ("a",)})
    with pytest.raises(ValueError, match="mean=.* 1 entries.* 3 channels"):
        ImageSplits(train, None, train, **{**arguments, "mean": (1.0,)})
    with pytest.raises(ValueError, match="std=.* not positive"):
        ImageSplits(train, None, train, **{**arguments, "std": (1.0, 0.0, 1.0)})


# ---------------------------------------------------------------- digits


def test_digits_are_scikit_learns_scaled_to_bytes():
    from sklearn.datasets import load_digits

    splits = Digits(validation=0.25).load()
    assert splits.image_shape == (1, 8, 8)
    assert splits.name == "digits"
    assert (len(splits.test), len(splits.validation)) == (359, 360)
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 1797
    expected = (load_digits().images * 255 / 16).round().astype(np.uint8)
    assert expected.max() == 255
    found = sorted(i.numpy().tobytes() for s in splits_of(splits) for i in s.images)
    assert found == sorted(image.tobytes() for image in expected)


def splits_of(splits):
    return [s for s in (splits.train, splits.validation, splits.test) if s is not None]


def test_digits_statistics_are_those_of_the_training_pixels_alone():
    splits = Digits(validation=0.3).load()
    pixels = splits.train.images.double()
    assert splits.mean == pytest.approx([pixels.mean().item()])
    assert splits.std == pytest.approx([pixels.std(correction=0).item()])
    everything = torch.cat([s.images for s in splits_of(splits)]).double()
    assert splits.mean != pytest.approx([everything.mean().item()], rel=1e-6)


def test_digits_seed_decides_the_split():
    first, same, other = Digits().load(), Digits(seed=0).load(), Digits(seed=1).load()
    assert_same(first.train, same.train)
    assert_same(first.test, same.test)
    assert not torch.equal(first.test.images, other.test.images)
    assert first.validation is None


@pytest.mark.parametrize("value", [-0.1, 1.0, 2.0, float("nan")])
def test_fractions_out_of_range_are_named(value, tmp_path):
    for source in (
        lambda: Digits(validation=value),
        lambda: Digits(test_fraction=value),
        lambda: CIFAR10(validation=value),
        lambda: ImageFolder(tmp_path, validation=value),
    ):
        with pytest.raises(ValueError, match=rf"(validation|test_fraction)={value}: "):
            source()


def test_other_impossible_digit_splits_are_named():
    with pytest.raises(ValueError, match="test_fraction=0"):
        Digits(test_fraction=0)
    with pytest.raises(ValueError, match="test_fraction=0.001: .* into 1795 and 2"):
        Digits(test_fraction=0.001).load()
    with pytest.raises(ValueError, match="validation=0.999: .* each of 10 classes"):
        Digits(validation=0.999).load()
    with pytest.raises(ValueError, match="seed=-1"):
        Digits(seed=-1)


# ---------------------------------------------------------------- CIFAR-10


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


def test_cifar10_that_cannot_be_downloaded_says_what_to_do(tmp_path, monkeypatch):
    def no_network(self):
        raise OSError("<urlopen error no route to host>\nsecond line")

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", no_network)
    for download in (True, False):
        with pytest.raises(FileNotFoundError, match="ImageFolder with an archive") as caught:
            CIFAR10(tmp_path, download=download).load()
        assert str(tmp_path) in str(caught.value)
        assert "cifar-10-batches-py" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert ("no route to host" in str(caught.value)) == download


# ---------------------------------------------------------------- ImageFolder: reading


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


def test_statistics_are_those_of_the_training_images_unless_given(tmp_path):
    folder = write_folder(tmp_path / "pets", image_files())
    splits = ImageFolder(folder, validation=0.3).load()
    pixels = splits.train.images.double()
    assert splits.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert splits.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())
    given = ImageFolder(folder, mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0), name="Pets").load()
    assert (given.mean, given.std, given.name) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "Pets")
    with pytest.raises(ValueError, match="mean="):
        ImageFolder(folder, mean=(1.0,)).load()


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


# ---------------------------------------------------------------- ImageFolder: the cache


def cache_files(tmp_path):
    return sorted((tmp_path / "cache" / "marglik").iterdir())


def forbid_decoding(monkeypatch):
    def decode(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(image_folder_module, "decode_splits", decode)


@pytest.fixture(params=["folder", "archive"])
def source(request, tmp_path):
    """The data set and a function that writes it, possibly with other images."""
    if request.param == "folder":
        return lambda files: write_folder(tmp_path / "pets", files)
    return lambda files: write_archive(tmp_path / "pets.tar.gz", files)


def test_cache_is_used_the_second_time(source, tmp_path, monkeypatch):
    path = source(image_files())
    first = ImageFolder(path, validation=0.2).load()
    (file,) = cache_files(tmp_path)
    assert file.suffix == ".safetensors"
    forbid_decoding(monkeypatch)
    second = ImageFolder(path, validation=0.2).load()
    for images, other in zip(splits_of(first), splits_of(second), strict=True):
        assert_same(images, other)
    assert (second.classes, second.mean, second.std) == (first.classes, first.mean, first.std)
    # Negative control: what the patched decoder does where there is no cache.
    with pytest.raises(AssertionError, match="decoded again"):
        ImageFolder(path, cache=False).load()


def test_cache_is_rebuilt_when_the_source_changes(source, tmp_path):
    path = source(image_files("png"))
    first = ImageFolder(path).load()
    source(image_files("png", seed=1))
    changed = decoded_by_pil(image_files("png", seed=1), "train")
    # Not even the same size hides a change, as long as the time differs.
    for file in [path, *path.rglob("*")]:
        os.utime(file, ns=(10**18, 10**18))
    second = ImageFolder(path).load()
    assert not torch.equal(first.train.images, second.train.images)
    assert torch.equal(second.train.images, changed[0])
    assert len(cache_files(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["truncated", "garbage", "other tensors"])
def test_damaged_cache_is_rebuilt_with_a_warning(source, tmp_path, damage, monkeypatch):
    path = source(image_files())
    first = ImageFolder(path).load()
    (file,) = cache_files(tmp_path)
    whole = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "garbage":
        file.write_bytes(b"garbage")
    else:
        from safetensors.torch import save_file

        save_file({"train_images": torch.zeros(1)}, file, metadata={"classes": "[]"})
    with pytest.warns(UserWarning, match="cache .* is damaged"):
        second = ImageFolder(path).load()
    assert_same(first.train, second.train)
    assert cache_files(tmp_path) == [file]
    forbid_decoding(monkeypatch)
    assert_same(ImageFolder(path).load().train, first.train)


def test_cache_that_cannot_be_written_costs_a_warning_only(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "pets", image_files())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be cached"):
        assert len(ImageFolder(folder).load().train) == 3 * TRAIN


def test_cache_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    def disk_full(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr("marglik.data.decoded_cache.os.replace", disk_full)
    with pytest.warns(UserWarning, match="No space left"):
        ImageFolder(write_folder(tmp_path / "pets", image_files())).load()
    assert cache_files(tmp_path) == []


def test_no_cache_is_written_if_not_asked_for(tmp_path):
    ImageFolder(write_folder(tmp_path / "pets", image_files()), cache=False).load()
    assert not (tmp_path / "cache").exists()


# ---------------------------------------------------------------- ImageFolder: errors


def without(files, prefix):
    return {path: data for path, data in files.items() if not path.startswith(prefix)}


def changed(files, **extra):
    return {**files, **{k.replace("__", "/").replace("_jpg", ".jpg"): v for k, v in extra.items()}}


small = encoded(np.zeros((3, 4, 3), dtype=np.uint8))
deep = io.BytesIO()
Image.fromarray(np.zeros((6, 5), dtype=np.uint16)).save(deep, "PNG")

BAD_FILES = {
    "missing test": (without(image_files(), "test/"), r"lacks test/ .* train/CLASS/IMAGE"),
    "missing train": (without(image_files(), "train/"), r"lacks train/ \(it holds test\)"),
    "no splits": ({"cat/0.jpg": small, "dog/0.jpg": small}, r"lacks train/ and test/ .*cat, dog"),
    "too deep": ({f"a/b/{k}": v for k, v in image_files().items()}, "at most one folder above"),
    "two roots": (
        {f"{top}/{k}": v for k, v in image_files().items() for top in "ab"},
        "has several train/ or test/",
    ),
    "nothing": ({}, "it holds nothing"),
    "class only in train": (without(image_files(), "test/dog"), "'dog' is in train/ but not in"),
    "class only in test": (without(image_files(), "train/dog"), "'dog' is in test/ but not in"),
    "no class folder": (changed(image_files(), train__x_jpg=small), "'train/x.jpg' lies in no"),
    "other size": (
        changed(image_files(), train__dog__004_jpg=small),
        "'train/dog/004.jpg' has 4×3 pixels, but '.*' has 5×6.*resize",
    ),
    "not an image": (
        changed(image_files(), train__dog__004_jpg=b"no image"),
        "'train/dog/004.jpg' cannot be decoded.*Replace it",
    ),
    "truncated image": (
        changed(image_files(), test__dog__001_jpg=image_files()["test/dog/001.jpg"][:-150]),
        "'test/dog/001.jpg' cannot be decoded.*Replace it",
    ),
    "16 bits": (
        changed(image_files(), test__dog__001_jpg=deep.getvalue()),
        r"'test/dog/001.jpg' has more than 8 bits.*I;16",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_bad_files_are_named_in_one_line(tmp_path, case, kind):
    files, message = BAD_FILES[case]
    if kind == "folder":
        (tmp_path / "pets").mkdir()
        path = write_folder(tmp_path / "pets", files)
    else:
        path = write_archive(tmp_path / "pets.tar.gz", files)
    with pytest.raises(ValueError, match=message) as caught:
        ImageFolder(path).load()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()  # nothing half-right is kept


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_empty_class_folder_is_named(tmp_path, kind):
    files = image_files()
    if kind == "folder":
        path = write_folder(tmp_path / "pets", files)
        (path / "train" / "cow").mkdir()
    else:
        path = write_archive(tmp_path / "pets.tar", files, directories=["train/cow"])
    with pytest.raises(ValueError, match="'train/cow' holds no images"):
        ImageFolder(path).load()


def test_split_without_class_folders_is_named(tmp_path):
    path = write_folder(tmp_path / "pets", without(image_files(), "train/"))
    (path / "train").mkdir()
    with pytest.raises(ValueError, match="train/ holds no class folders"):
        ImageFolder(path).load()


def test_missing_path_says_what_is_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist.*train/CLASS/"):
        ImageFolder(tmp_path / "nowhere").load()


def test_what_is_no_archive_is_named(tmp_path):
    (tmp_path / "pets.zip").write_bytes(b"PK\3\4 some other kind of archive" * 50)
    (tmp_path / "empty.tar").write_bytes(b"")
    for name in ("pets.zip", "empty.tar"):
        with pytest.raises(ValueError, match=f"{name}' is neither a folder nor a readable tar"):
            ImageFolder(tmp_path / name).load()


@pytest.mark.parametrize("name", ["pets.tar.gz", "pets.tar"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_archive_is_named(tmp_path, name, share):
    whole = write_archive(tmp_path / name, image_files()).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=f"{name}' is damaged.*Fetch it again"):
        ImageFolder(tmp_path / name).load()


def test_archive_cut_between_two_members_is_named(tmp_path):
    """To tarfile itself such an archive is a complete one."""
    path = write_archive(tmp_path / "pets.tar", image_files())
    with tarfile.open(path) as archive:
        cut = archive.getmembers()[-2].offset
    path.write_bytes(path.read_bytes()[:cut])
    with tarfile.open(path) as archive:
        assert len(archive.getmembers()) == len(image_files()) - 2
    with pytest.raises(ValueError, match="no end mark after.*Fetch it again"):
        ImageFolder(path).load()


def test_archive_with_a_damaged_header_is_named(tmp_path):
    path = write_archive(tmp_path / "pets.tar", image_files())
    with tarfile.open(path) as archive:
        header = archive.getmembers()[20].offset
    data = bytearray(path.read_bytes())
    data[header + 10] ^= 255
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        ImageFolder(path).load()


# ---------------------------------------------------------------- subsets and validation


def test_subsets_and_splits_are_stratified_and_disjoint(tmp_path):
    folder = write_folder(tmp_path / "pets", image_files())
    everything = ImageFolder(folder).load()
    source = ImageFolder(folder, validation=0.25, max_train=24, max_test=6)
    splits = source.load()
    assert [len(s) for s in splits_of(splits)] == [18, 6, 6]
    for images, count in zip(splits_of(splits), (6, 2, 2), strict=True):
        assert images.labels.bincount().tolist() == [count] * 3
    train, validation, test = (keys(s) for s in splits_of(splits))
    assert not train & validation and not train & test and not validation & test
    assert train | validation <= keys(everything.train)
    assert test <= keys(everything.test)
    assert_same(source.load().train, splits.train)
    other = ImageFolder(folder, validation=0.25, max_train=24, max_test=6, seed=1).load()
    assert keys(other.train) != train
    # The validation images come from the subset, not from beside it.
    subset = ImageFolder(folder, max_train=24, max_test=6).load()
    assert keys(subset.train) == train | validation
    assert keys(subset.test) == test


def test_labels_stay_with_their_images(tmp_path):
    folder = write_folder(tmp_path / "pets", image_files())
    everything = ImageFolder(folder).load().train
    label = {i.numpy().tobytes(): int(k) for i, k in zip(*vars(everything).values(), strict=True)}
    for images in splits_of(ImageFolder(folder, validation=0.4, max_train=20).load())[:2]:
        assert [label[i.numpy().tobytes()] for i in images.images] == images.labels.tolist()


def test_all_images_may_be_asked_for_by_number(tmp_path):
    folder = write_folder(tmp_path / "pets", image_files())
    splits = ImageFolder(folder, max_train=3 * TRAIN, max_test=3 * TEST).load()
    assert_same(splits.train, ImageFolder(folder).load().train)


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
def test_impossible_subsets_are_named(tmp_path, arguments, message):
    folder = write_folder(tmp_path / "pets", image_files())
    with pytest.raises(ValueError, match=message):
        ImageFolder(folder, **arguments).load()


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


# ---------------------------------------------------------------- crop and flip


def crop_and_flip_one_by_one(images, top, left, flip, padding):
    """Oracle: pad, slice and mirror each image."""
    _, channels, height, width = images.shape
    results = []
    for image, t, x, mirror in zip(images, top, left, flip, strict=True):
        canvas = torch.zeros(channels, height + 2 * padding, width + 2 * padding).to(images)
        canvas[:, padding : padding + height, padding : padding + width] = image
        window = canvas[:, t : t + height, x : x + width]
        results.append(window.flip(2) if mirror else window)
    return torch.stack(results)


def distortions(n, padding, seed=0):
    generator = torch.Generator().manual_seed(seed)
    top, left = torch.randint(2 * padding + 1, (2, n), generator=generator)
    return top, left, torch.randint(2, (n,), generator=generator).bool()


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (2, 5, 9)])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crop_and_flip_equals_one_image_after_the_other(shape, padding):
    images = torch.randint(256, (50, *shape), dtype=torch.uint8)
    offsets = distortions(50, padding)
    expected = crop_and_flip_one_by_one(images, *offsets, padding)
    assert torch.equal(crop_and_flip(images, *offsets, padding), expected)
    # Negative control: rows and columns are not exchanged.
    if padding:
        top, left, flip = offsets
        assert not torch.equal(crop_and_flip(images, left, top, flip, padding), expected)


def test_crop_and_flip_equals_torchvision():
    images = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8)
    top, left, flip = distortions(20, 4)
    for image, t, x, mirror, result in zip(
        images, top, left, flip, crop_and_flip(images, top, left, flip), strict=True
    ):
        expected = transforms.crop(transforms.pad(image, [4]), int(t), int(x), 32, 32)
        expected = transforms.horizontal_flip(expected) if mirror else expected
        assert torch.equal(result, expected)


def test_crop_and_flip_with_central_offsets_is_the_image():
    images = torch.randint(256, (3, 3, 8, 8), dtype=torch.uint8)
    centre, never = torch.full((3,), 4), torch.zeros(3, dtype=torch.bool)
    assert torch.equal(crop_and_flip(images, centre, centre, never), images)
    assert torch.equal(crop_and_flip(images, centre, centre, ~never), images.flip(3))


# ---------------------------------------------------------------- batches

MEAN, STD = (100.0, 120.0, 140.0), (50.0, 60.0, 70.0)


def normalised(images):
    mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
    return (images.float() - mean) / std


def numbered(n, size=8):
    """Random images, image i labelled i."""
    pixels = torch.randint(256, (n, 3, size, size), dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(n))


def concatenated(loader):
    x, y = zip(*loader, strict=True)
    return torch.cat(x), torch.cat(y)


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "sizes"),
    [(4, False, [4, 4, 2]), (4, True, [4, 4]), (5, True, [5, 5]), (16, False, [10])],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_the_normalised_images(batch_size, drop_last, sizes, shuffle):
    images = numbered(10)
    loader = ImageBatches(images, MEAN, STD, batch_size, shuffle=shuffle, drop_last=drop_last)
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [len(y) for _, y in batches] == sizes
    assert len(loader) == len(sizes)
    assert loader.num_examples == sum(sizes)
    assert len(loader.dataset) == 10
    x, y = concatenated(batches)
    assert x.dtype == torch.float32 and y.dtype == torch.int64
    torch.testing.assert_close(x, normalised(images.images[y]))
    assert len(set(y.tolist())) == sum(sizes)
    assert shuffle or y.tolist() == list(range(sum(sizes)))


def test_augmentation_is_a_crop_and_flip_in_pixel_space_before_normalisation():
    images = numbered(300)
    loader = ImageBatches(images, MEAN, STD, 64, augment="crop_flip", seed=3)
    same = ImageBatches(images, MEAN, STD, 64, augment="crop_flip", seed=3)
    offsets = same._draw_distortions(300)
    x, _ = concatenated(loader)
    expected = crop_and_flip_one_by_one(images.images, *offsets, 4)
    torch.testing.assert_close(x, normalised(expected))
    # Negative controls: not the plain images, and the padding is black, not the mean pixel.
    assert not torch.equal(x, normalised(images.images))
    assert (x == normalised(torch.zeros(1, 3, 1, 1))).float().mean() > 0.2
    assert (x == 0).float().mean() < 0.05
    # All offsets and both directions occur.
    top, left, flip = offsets
    assert top.unique().tolist() == left.unique().tolist() == list(range(9))
    assert 0.4 < flip.float().mean() < 0.6


def test_iterations_differ_and_seeds_repeat_them():
    images = numbered(60)

    def loader(seed, shuffle=True, augment="crop_flip"):
        return ImageBatches(images, MEAN, STD, 16, shuffle=shuffle, augment=augment, seed=seed)

    first, same, other = loader(0), loader(0), loader(1)
    sequences = [[concatenated(batches) for _ in range(3)] for batches in (first, same, other)]
    for (x, y), (x_same, y_same), (_, y_other) in zip(*sequences, strict=True):
        assert torch.equal(x, x_same) and torch.equal(y, y_same)
        assert not torch.equal(y, y_other)
    (x1, y1), (x2, y2), _ = sequences[0]
    assert not torch.equal(y1, y2)
    assert not torch.equal(x1[y1.argsort()], x2[y2.argsort()])  # the distortions differ, too
    plain = loader(0, shuffle=False, augment="none")
    assert torch.equal(concatenated(plain)[0], concatenated(plain)[0])


def test_an_iteration_left_early_draws_as_much_as_a_whole_one():
    """Otherwise a look at the first batch would change the later ones."""
    images = numbered(60)
    left, whole = (
        ImageBatches(images, MEAN, STD, 16, shuffle=True, augment="crop_flip") for _ in range(2)
    )
    next(iter(left))
    list(whole)
    assert torch.equal(concatenated(left)[0], concatenated(whole)[0])


def test_generator_state_resumes_the_sequence():
    images = numbered(40)
    loader = ImageBatches(images, MEAN, STD, 16, shuffle=True, augment="crop_flip")
    list(loader)
    state = loader.generator.get_state()
    expected = concatenated(loader)
    resumed = ImageBatches(images, MEAN, STD, 16, shuffle=True, augment="crop_flip", seed=9)
    resumed.generator.set_state(state)
    assert torch.equal(concatenated(resumed)[0], expected[0])


def test_batches_leave_the_images_and_the_global_generator_alone():
    images = numbered(10)
    kept, state = images.images.clone(), torch.get_rng_state()
    for x, _ in ImageBatches(images, MEAN, STD, 4, shuffle=True, augment="crop_flip"):
        x.zero_()
    assert torch.equal(images.images, kept)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_channels_last_changes_the_memory_layout_only(augment):
    images = numbered(10)
    usual = ImageBatches(images, MEAN, STD, 10, augment=augment)
    other = ImageBatches(images, MEAN, STD, 10, augment=augment, channels_last=True)
    ((x, _),), ((x_other, _),) = usual, other
    assert torch.equal(x, x_other)
    assert x.is_contiguous()
    assert x_other.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"images": synthetic([0, 0])}, "empty"),
        ({"batch_size": 20, "drop_last": True}, "10 images and batch_size=20 leaves no batch"),
        ({"augment": "mixup"}, "augment='mixup'.*crop_flip"),
        ({"mean": (1.0,)}, "mean=.*3 channels"),
        ({"std": (1.0, 0.0, 1.0)}, "std=.*not positive"),
    ],
)
def test_impossible_batches_are_named(arguments, message):
    usual = {"images": numbered(10), "mean": MEAN, "std": STD, "batch_size": 4}
    with pytest.raises(ValueError, match=message):
        ImageBatches(**{**usual, **arguments})


@pytest.mark.gpu
def test_batches_are_the_same_on_the_gpu():
    images = numbered(60, size=32)
    loaders = [
        ImageBatches(images, MEAN, STD, 16, shuffle=True, augment="crop_flip", device=device)
        for device in ("cpu", "cuda")
    ]
    for (x, y), (x_gpu, y_gpu) in zip(*loaders, strict=True):
        assert x_gpu.device.type == y_gpu.device.type == "cuda"
        torch.testing.assert_close(x, x_gpu.cpu())
        assert torch.equal(y, y_gpu.cpu())


# ---------------------------------------------------------------- the command line, real data


def test_constructor_arguments_are_command_line_options(tmp_path):
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageData, "data")
    path = write_folder(tmp_path / "pets", image_files())
    arguments = [f"--data.path={path}", "--data.max_train=9", "--data.mean=[1, 2, 3]"]
    config = parser.parse_args(["--data=marglik.data.ImageFolder", *arguments])
    # Its name from jsonargparse 4.49 on, and before.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    splits = instantiate(config).data.load()
    assert (len(splits.train), splits.mean) == (9, (1.0, 2.0, 3.0))
    for name in ("Digits", "CIFAR10"):
        assert parser.parse_args([f"--data=marglik.data.{name}"]).data.init_args.seed == 0


def test_cifar10_as_jpeg():
    """The archive itself, decoded once: 60,000 images, 200 of them taken."""
    default = Path(__file__).parents[2] / "../shared/data"
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
