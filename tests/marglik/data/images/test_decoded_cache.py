"""The cache of decoded images: used, rebuilt, and never half-written."""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from marglik.data import ImageFolder
from marglik.data.images import folder as image_folder
from tests.marglik.data.image_helpers import (
    TRAIN,
    assert_same,
    decoded_by_pil,
    image_files,
    splits_of,
)


def cache_files(tmp_path):
    return sorted((tmp_path / "cache" / "marglik").iterdir())


def forbid_decoding(monkeypatch):
    def decode(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(image_folder, "decode_splits", decode)


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


@pytest.mark.parametrize(
    "damage", ["truncated", "garbage", "other tensors", "a pixel", "a label", "a class"]
)
def test_damaged_cache_is_rebuilt_with_a_warning(source, tmp_path, damage, monkeypatch):
    path = source(image_files())
    first = ImageFolder(path).load()
    (file,) = cache_files(tmp_path)
    whole = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "garbage":
        file.write_bytes(b"garbage")
    elif damage in ("a pixel", "a label", "a class"):
        with safe_open(file, "pt") as content:
            tensors, metadata = (
                {k: content.get_tensor(k) for k in content.keys()},
                content.metadata(),
            )
        if damage == "a class":
            metadata["classes"] = metadata["classes"].replace("cat", "cow")
        else:
            tensors["test_images" if damage == "a pixel" else "train_labels"].view(-1)[0] ^= 1
        save_file(tensors, file, metadata)
    else:
        save_file({"train_images": torch.zeros(1)}, file, metadata={"classes": "[]"})
    with pytest.warns(UserWarning, match="cache .* is damaged"):
        second = ImageFolder(path).load()
    assert_same(first.train, second.train)
    assert cache_files(tmp_path) == [file]
    forbid_decoding(monkeypatch)
    assert_same(ImageFolder(path).load().train, first.train)


def test_cache_that_cannot_be_written_costs_a_warning_only(pets, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be cached"):
        assert len(ImageFolder(pets).load().train) == 3 * TRAIN


def test_cache_that_fails_half_way_leaves_nothing(pets, tmp_path, monkeypatch):
    def disk_full(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr("kfac_backend.files.os.replace", disk_full)
    with pytest.warns(UserWarning, match="No space left"):
        ImageFolder(pets).load()
    assert cache_files(tmp_path) == []


def test_no_cache_is_written_if_not_asked_for(pets, tmp_path):
    ImageFolder(pets, cache=False).load()
    assert not (tmp_path / "cache").exists()
