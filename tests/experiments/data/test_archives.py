"""Archives of data: whole, or refused; images in them as Pillow reads them."""

import gzip
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.data import archives
from experiments.data.archives import members, unpacked
from experiments.data.image_archive import CIFAR10Archive, ImageArchive
from tests.marglik.data.image_helpers import decoded_by_pil, image_files, without, write_archive

FILES = {"a/first.txt": b"1" * 2000, "second.txt": b"2"}


def read(path):
    return members(*unpacked(path, "data.tar.gz", "from somewhere"))


@pytest.mark.parametrize("name", ["data.tar", "data.tar.gz"])
def test_the_files_are_those_of_the_archive(tmp_path, name):
    assert read(write_archive(tmp_path / name, FILES)) == FILES


def cut(share):
    return lambda content: content[: int(share * len(content))]


def flipped(place):
    return lambda content: content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGE = {
    "cut off": cut(0.3), "without its end mark": cut(0.35), "empty": cut(0),
    "no archive": lambda _: b"no", "another header": flipped(10),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("name", ["data.tar", "data.tar.gz"])
def test_damaged_archives(tmp_path, name, case):
    path = write_archive(tmp_path / "whole.tar", FILES)
    content = DAMAGE[case](path.read_bytes())
    (tmp_path / name).write_bytes(content if name == "data.tar" else gzip.compress(content))
    with pytest.raises(ValueError, match=f"{name}' is damaged"):
        read(tmp_path / name)


@pytest.mark.parametrize("change", [cut(0.5), flipped(-8)], ids=["cut off", "wrong sum"])
def test_damaged_gzip(tmp_path, change):
    path = write_archive(tmp_path / "data.tar.gz", FILES)
    path.write_bytes(change(path.read_bytes()) if change is not None else b"")
    with pytest.raises(ValueError, match="data.tar.gz' is damaged"):
        read(path)


def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST", 2**20)
    path = tmp_path / "data.tar.gz"
    path.write_bytes(gzip.compress(bytes(2**21)))
    with pytest.raises(ValueError, match="unpacks to more than 1,048,576 bytes"):
        read(path)


def test_links_and_pipes_are_left_out(tmp_path):
    path = write_archive(tmp_path / "data.tar", FILES)
    with tarfile.open(path, "a") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"link{kind}")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    assert read(path) == FILES


def test_a_missing_file_is_explained(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="none' is not a file. Get data.tar.gz "):
        read(tmp_path / "none")
    monkeypatch.setenv("MARGLIK_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match="elsewhere.data.tar.gz' .*MARGLIK_DATA"):
        read(None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_images_equal_pillows(tmp_path):
    files = image_files()
    order = np.random.default_rng(7).permutation(sorted(files)).tolist()
    path = write_archive(tmp_path / "pets.tar.gz", files, order=order)
    for _ in range(2):  # decoded, and from the cache
        splits = ImageArchive(path).load()
        for images, part in ((splits.train, "train"), (splits.test, "test")):
            pixels, labels = decoded_by_pil(files, part)
            assert torch.equal(images.images, pixels) and torch.equal(images.labels, labels)
    assert (splits.name, splits.classes) == ("pets", ("cat", "dog", "test"))
    assert CIFAR10Archive(path).load().mean == (125.3, 123.0, 113.9)
    assert len(list((tmp_path / "cache/marglik").iterdir())) == 2
    # Another archive of the same name is another.
    dog = {"train/dog/1.jpg": files["test/dog/001.jpg"]}
    write_archive(path, without(files, "train/dog") | dog)
    assert len(ImageArchive(path).load().train) == 21


def test_an_archive_without_such_images(tmp_path):
    with pytest.raises(ValueError, match="pets.tar' has no images train/CLASS/IMAGE"):
        ImageArchive(write_archive(tmp_path / "pets.tar", FILES)).load()


@pytest.mark.slow  # decodes 60,000 images
def test_cifar10_as_jpeg():
    default = Path(__file__).parents[3] / "../shared/data"
    place = Path(os.environ.get("MARGLIK_DATA", default)) / "cifar10-jpeg.tar.gz"
    if not place.exists():
        pytest.skip(f"no {place}: put CIFAR-10 as JPEG files there, or set MARGLIK_DATA")
    splits = ImageArchive(place).load()
    assert (len(splits.train), len(splits.test)) == (50_000, 10_000)
    assert splits.classes[0] == "airplane" and splits.num_classes == 10
    # Lossy as it is, the data has CIFAR-10's customary statistics.
    assert splits.mean == pytest.approx((125.3, 123.0, 113.9), abs=0.3)
    assert splits.std == pytest.approx((63.0, 62.1, 66.7), abs=1)
