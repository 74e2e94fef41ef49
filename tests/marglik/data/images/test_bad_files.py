"""Bad folders, archives and images are named in one line."""

import gzip
import os
import tarfile

import numpy as np
import pytest
import torch

from marglik.data import ImageFolder
from tests.marglik.data.image_helpers import (
    encoded,
    image_files,
    without,
    write_archive,
    write_folder,
)

FILES = image_files()
SMALL = encoded(np.zeros((3, 4, 3), dtype=np.uint8))
DEEP = encoded(np.zeros((6, 5), dtype=np.uint16), "png")

BAD_FILES = {
    "missing test": (without(FILES, "test/"), r"lacks test/ .* train/CLASS/IMAGE"),
    "missing train": (without(FILES, "train/"), r"lacks train/ \(it holds test\)"),
    "no splits": ({"cat/0.jpg": SMALL, "dog/0.jpg": SMALL}, r"lacks train/ and test/ .*cat, dog"),
    "too deep": ({f"a/b/{k}": v for k, v in FILES.items()}, "at most one folder above"),
    "two roots": (
        {f"{top}/{k}": v for k, v in FILES.items() for top in "ab"},
        "has several train/ or test/",
    ),
    "nothing": ({}, "it holds nothing"),
    "class only in train": (without(FILES, "test/dog"), "'dog' is in train/ but not in"),
    "class only in test": (without(FILES, "train/dog"), "'dog' is in test/ but not in"),
    "no class folder": ({**FILES, "train/x.jpg": SMALL}, "'train/x.jpg' is not in a class"),
    "other size": (
        {**FILES, "train/dog/004.jpg": SMALL},
        "'train/dog/004.jpg' has 4×3 pixels, but '.*' has 5×6.*resize",
    ),
    "not an image": (
        {**FILES, "train/dog/004.jpg": b"no image"},
        "'train/dog/004.jpg' cannot be decoded.*Replace or remove it",
    ),
    "truncated image": (
        {**FILES, "test/dog/001.jpg": FILES["test/dog/001.jpg"][:-150]},
        "'test/dog/001.jpg' cannot be decoded.*Replace or remove it",
    ),
    "16 bits": (
        {**FILES, "test/dog/001.jpg": DEEP},
        r"'test/dog/001.jpg' has more than 8 bits.*I;16",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_named_in_one_line(source, tmp_path, case):
    files, message = BAD_FILES[case]
    path = source(files)
    with pytest.raises(ValueError, match=message) as caught:
        ImageFolder(path).load()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()  # nothing half-right is kept


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_empty_class_folder_is_named(tmp_path, kind):
    if kind == "folder":
        path = write_folder(tmp_path / "pets", FILES)
        (path / "train" / "cow").mkdir()
    else:
        path = write_archive(tmp_path / "pets.tar", FILES, directories=["train/cow"])
    with pytest.raises(ValueError, match="'train/cow' holds no images"):
        ImageFolder(path).load()


def test_split_without_class_folders_is_named(tmp_path):
    path = write_folder(tmp_path / "pets", without(FILES, "train/"))
    (path / "train").mkdir()
    with pytest.raises(ValueError, match="train/ holds no class folders"):
        ImageFolder(path).load()


@pytest.mark.parametrize("place", ["train/cat/pipe.jpg", "test/dog/pipe.jpg"])
def test_pipes_are_left_out(tmp_path, place):
    """Reading one would wait for ever."""
    whole = ImageFolder(write_folder(tmp_path / "whole", FILES)).load()
    folder = write_folder(tmp_path / "pets", FILES)
    os.mkfifo(folder / place)
    with pytest.warns(UserWarning, match=rf"1 file\(s\) .* left out, first '{place}'.*regular"):
        found = ImageFolder(folder).load()
    assert torch.equal(found.train.images, whole.train.images)
    assert torch.equal(found.test.images, whole.test.images)


def test_pipes_in_archives_are_left_out(tmp_path):
    path = write_archive(tmp_path / "pets.tar", FILES)
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("train/cat/pipe.jpg")
        info.type = tarfile.FIFOTYPE
        archive.addfile(info)
    with pytest.warns(UserWarning, match="left out, first 'train/cat/pipe.jpg'"):
        assert len(ImageFolder(path).load().train) == 30


def test_a_pipe_is_no_archive(tmp_path):
    os.mkfifo(tmp_path / "pets.tar")
    with pytest.raises(ValueError, match="neither a folder nor a regular file; pass a folder"):
        ImageFolder(tmp_path / "pets.tar").load()


def test_missing_path_says_what_is_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist.*train/CLASS/"):
        ImageFolder(tmp_path / "nowhere").load()


@pytest.mark.parametrize(
    ("name", "content"),
    [("pets.zip", b"PK\3\4 some other kind of archive" * 50), ("empty.tar", b"")],
    ids=["zip", "empty"],
)
def test_what_is_no_archive_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}' is neither a folder nor a readable tar"):
        ImageFolder(tmp_path / name).load()


@pytest.mark.parametrize("name", ["pets.tar.gz", "pets.tar"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_archive_is_named(tmp_path, name, share):
    whole = write_archive(tmp_path / name, FILES).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=f"{name}' is damaged.*Fetch it again"):
        ImageFolder(tmp_path / name).load()


def test_archive_cut_between_two_members_is_named(tmp_path):
    """To tarfile itself such an archive is a complete one."""
    path = write_archive(tmp_path / "pets.tar", FILES)
    with tarfile.open(path) as archive:
        cut = archive.getmembers()[-2].offset
    path.write_bytes(path.read_bytes()[:cut])
    with tarfile.open(path) as archive:
        assert len(archive.getmembers()) == len(FILES) - 2
    with pytest.raises(ValueError, match="no end mark after.*Fetch it again"):
        ImageFolder(path).load()


def test_archive_with_a_damaged_header_is_named(tmp_path):
    path = write_archive(tmp_path / "pets.tar", FILES)
    with tarfile.open(path) as archive:
        header = archive.getmembers()[20].offset
    data = bytearray(path.read_bytes())
    data[header + 10] ^= 255
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        ImageFolder(path).load()


PIXELS = image_files("bmp")  # whatever the bytes are, they are pixels


def test_an_archive_whose_sum_is_wrong_is_named(tmp_path):
    """Its images can all be decoded: one of them to another."""
    content = write_archive(tmp_path / "pets.tar", PIXELS).read_bytes()
    changed = bytearray(content)
    changed[content.index(PIXELS["test/dog/001.bmp"]) + 80] ^= 1
    compressed = bytearray(gzip.compress(changed))
    path = tmp_path / "pets.tar.gz"
    path.write_bytes(compressed)
    ImageFolder(path, cache=False).load()  # negative control: this is the content's own sum
    compressed[-8:-4] = gzip.compress(content)[-8:-4]
    path.write_bytes(compressed)
    with pytest.raises(ValueError, match="pets.tar.gz' is damaged.*CRC.*Fetch it again"):
        ImageFolder(path).load()
