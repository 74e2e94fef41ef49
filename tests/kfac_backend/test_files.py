"""Files are whole or not there, on a full disk too; damaged ones are an error, never numbers."""

import errno
import os
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from kfac_backend.files import (
    DiskFullError,
    file_sum,
    read_tensors,
    remove_leftovers,
    temporary_path,
    write_file,
    write_tensors,
)
from tests.small_disk import mounted

MESSAGE = r"^{path} cannot be written \({reason}\): {wanted} bytes are wanted, {free} are free\."
UMASK = os.umask(0)
os.umask(UMASK)


def message(path, reason, wanted, free=r"[\d,]+"):
    return MESSAGE.format(path=re.escape(str(path)), reason=reason, wanted=wanted, free=free)


@pytest.mark.parametrize("old", [None, b"what was there"])
def test_a_full_disk(tmp_path, old):
    with mounted(tmp_path / "disk", 64 * 2**10) as disk:
        path = disk / "model.safetensors"
        if old is not None:
            write_file(path, old)
        free = "65,536" if old is None else "61,440"
        wanted = message(path, "No space left on device", "100,000", free)
        with pytest.raises(DiskFullError, match=wanted) as caught:
            write_file(path, bytes(100_000))
        assert "\n" not in str(caught.value)
        assert caught.value.errno == errno.ENOSPC
        assert [p.read_bytes() for p in disk.iterdir()] == ([] if old is None else [old])
        write_file(path, bytes(10_000))  # negative control: there is room for less


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("work", ["os.fsync", "os.replace", "pathlib.Path.mkdir"])
def test_a_failure_at_any_point_leaves_the_old_file(tmp_path, monkeypatch, number, work):
    def fails(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "folder" / "x.json"
    write_file(path, b"old")
    with monkeypatch.context() as patched:
        patched.setattr(work, fails)
        with pytest.raises(OSError, match=re.escape(f"{path} cannot be written")) as caught:
            write_file(path, b"abc")
    assert caught.value.errno == number
    assert isinstance(caught.value, DiskFullError) == (number != errno.EIO)
    assert [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()] == [b"old"]


def test_an_interrupt_leaves_nothing_half_written(tmp_path, monkeypatch):
    def interrupted(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "x", b"abc")
    assert not list(tmp_path.iterdir())


def test_other_errors_name_the_file(tmp_path):
    with pytest.raises(FileExistsError, match=r"/x cannot be written \(File exists\)"):
        write_file(sys.executable + "/x", b"abc")
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError, match=re.escape(f"{tmp_path / 'x'} cannot be written")):
        write_file(tmp_path / "x", b"abc")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    """Files of others are not, whatever their names."""
    inner = tmp_path / "checkpoint" / "learned"
    inner.mkdir(parents=True)
    gone = [temporary_path(folder / "model.safetensors") for folder in (tmp_path, inner)]
    for path in gone:
        path.write_bytes(b"half")
    gone.append(temporary_path(tmp_path / "old"))
    gone[-1].mkdir()
    (gone[-1] / "x").touch()
    kept = [tmp_path / name for name in (".partial-mine", ".partial-1", ".hidden", "partial-1-2-x")]
    for path in kept:
        path.touch()
    remove_leftovers(tmp_path)
    assert not any(path.exists() for path in gone)
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
            found, metadata = read_tensors(path, what="test's tensors", of_others=of_others)
        except ValueError as error:
            assert "is not a whole file of test's tensors" in str(error)
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
        read_tensors(path, what="weights")
    save_file(tensors(), path)
    with pytest.raises(ValueError, match="no checksum"):
        read_tensors(path)
    assert same(read_tensors(path, of_others=True)[0])
