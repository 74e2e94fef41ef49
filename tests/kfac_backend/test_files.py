"""Files are whole or not there, on a full disk too; what killed processes leave is removed."""

import errno
import os
import re
import subprocess
import sys

import pytest

from kfac_backend.files import DiskFullError, remove_leftovers, temporary_path, write_file
from tests.small_disk import mounted

MESSAGE = r"^{path} cannot be written \({reason}\): {wanted} bytes are wanted, {free} are free\."


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("work", ["os.fsync", "os.replace", "pathlib.Path.mkdir"])
def test_no_room_at_any_point(tmp_path, monkeypatch, number, work):
    def fails(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "folder" / "x.json"
    with monkeypatch.context() as patched:
        patched.setattr(work, fails)
        with pytest.raises(DiskFullError, match=message(path, os.strerror(number), 3)) as caught:
            write_file(path, b"abc")
    assert caught.value.errno == number
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_other_errors_name_the_file(tmp_path):
    with pytest.raises(FileExistsError, match=r"/x cannot be written \(File exists\)"):
        write_file(sys.executable + "/x", b"abc")
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError, match="Is a directory") as caught:
        write_file(tmp_path / "x", b"abc")
    assert caught.value.errno == errno.EISDIR
    assert str(caught.value).startswith(f"{tmp_path / 'x'} cannot be written")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def of_process(number, folder, monkeypatch, name="model.safetensors"):
    """A temporary file that a process of this number has left."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: number)
        path = temporary_path(folder / name)
    path.write_bytes(b"half")
    return path


def test_leftovers_of_killed_processes_are_removed(tmp_path, monkeypatch):
    """Those of living ones are not, nor files of others."""
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        inner = tmp_path / "checkpoint" / "learned"
        inner.mkdir(parents=True)
        gone = [of_process(killed.pid, folder, monkeypatch) for folder in (tmp_path, inner)]
        gone.append(of_process(os.getpid(), tmp_path, monkeypatch, "of a process before.json"))
        folder = temporary_path(tmp_path / "old")
        folder.mkdir()
        (folder / "x").touch()
        gone.append(folder)
        kept = [of_process(living.pid, inner, monkeypatch)]
        for name in (".partial-mine", ".partial--x", ".hidden", "partial-1-x"):
            kept.append(tmp_path / name)
            kept[-1].touch()
        remove_leftovers(tmp_path)
        assert not [path for path in gone if path.exists()]
        assert all(path.exists() for path in kept)
    finally:
        living.communicate(b"\n")
    remove_leftovers(tmp_path)
    assert not kept[0].exists()


def test_what_this_process_is_writing_stays(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(file):
        remove_leftovers(tmp_path)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    write_file(tmp_path / "x", b"abc")
    assert (tmp_path / "x").read_bytes() == b"abc"
