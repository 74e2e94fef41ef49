"""Files are whole or not there, on a full disk too; damaged ones are an error, never numbers."""

import errno
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from kfac_backend.atomic_files import (
    DiskFullError,
    file_sum,
    read_tensors,
    remove_leftovers,
    temporary_path,
    write_file,
    write_tensors,
)

UMASK = os.umask(0)
os.umask(UMASK)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("work", ["os.fsync", "os.replace", "pathlib.Path.mkdir"])
def test_a_failure_at_any_point_leaves_the_old_file(tmp_path, monkeypatch, number, work):
    def fails(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "folder" / "x.json"
    write_file(path, b"old")
    with monkeypatch.context() as patched:
        patched.setattr(work, fails)
        with pytest.raises(OSError) as caught:
            write_file(path, b"abc")
    assert caught.value.errno == number
    if number == errno.EDQUOT:
        assert isinstance(caught.value, DiskFullError)
        assert f"{path} cannot be written" in str(caught.value)
        assert "it needs 3 bytes" in str(caught.value)
    assert [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()] == [b"old"]


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    """Files of others are not, whatever their names; nor is anything in folders below."""
    inner = tmp_path / "of someone else"
    inner.mkdir()
    gone, below = (temporary_path(of / "model.safetensors") for of in (tmp_path, inner))
    gone.write_bytes(b"half")
    kept = [tmp_path / name for name in (".partial-mine", ".partial-1", ".hidden", "partial-1-2-x")]
    kept.append(below)
    for path in kept:
        path.touch()
    remove_leftovers(tmp_path)
    assert not gone.exists()
    assert all(path.exists() for path in kept)


def tensors():
    return {
        "weight": torch.arange(6.0).view(2, 3),
        "a scalar": torch.tensor(2, dtype=torch.int64),
        "none": torch.zeros(0, 2),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }


def same(found):
    expected = tensors()
    return found.keys() == expected.keys() and all(
        t.dtype == expected[name].dtype and torch.equal(t, expected[name])
        for name, t in found.items()
    )


def test_tensors_come_back(tmp_path):
    path = tmp_path / "x.safetensors"
    of_file = write_tensors(path, tensors(), {"kind": "test"})
    found, metadata = read_tensors(path)
    assert metadata == {"kind": "test"} and of_file == file_sum(path)
    assert same(found)
    assert path.stat().st_mode & 0o777 == 0o666 & ~UMASK  # others may read it, if they may
    assert same(load_file(path))  # so do other programs


@pytest.mark.parametrize("of_others", [False, True])
def test_every_damaged_byte_is_noticed(tmp_path, of_others):
    """Each byte in turn, and each length of a truncated file."""
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors(), {"kind": "test"})
    whole = path.read_bytes()
    damages = [whole[:n] for n in range(0, len(whole), 7)] + [whole + b"x"]
    for place in range(len(whole)):
        damages.append(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    unnoticed = 0
    for damage in damages:
        path.write_bytes(damage)
        try:
            found, metadata = read_tensors(path, kind="test's tensors", of_others=of_others)
        except ValueError as error:
            assert "is not an intact file of test's tensors" in str(error)
            continue
        # Without its checksum's name a file is one of another program.
        assert of_others and "marglik" not in metadata
        unnoticed += 1
    assert unnoticed <= len("marglik")


def test_the_same_tensors_are_the_same_bytes(tmp_path):
    """A resumed run's files are compared; safetensors writes the keys of metadata in any order."""
    several = {name: name for name in ("header", "kind", "version")}
    assert len({write_tensors(tmp_path / "x", tensors(), several) for _ in range(20)}) == 1


def test_files_of_others(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(FileNotFoundError, match="No file of weights at"):
        read_tensors(path, kind="weights")
    save_file(tensors(), path)
    with pytest.raises(ValueError, match="no checksum"):
        read_tensors(path)
    assert same(read_tensors(path, of_others=True)[0])
