"""Folders that cannot be written to: the command says so, changes nothing, and goes on later."""

import ctypes
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from tests.faults.copies import command, sleep_until
from tests.faults.damage import STAGES, dict_difference, stage_of
from tests.faults.families import Case, Skipped, Workplace
from tests.faults.runs import Whole, check_same, files_of, fitting, training

__all__ = ["read_only_folders"]

ERROR = "marglik: error: "
AT_RANDOM_TIMES = 10
"""Runs whose folder becomes so while they work."""
MadeSo = Callable[[Path], AbstractContextManager[Callable[[], object]]]
"""Makes a folder so within a context, which yields what the command's process does at its start."""


def read_only_folders(place: Workplace) -> Iterator[Case]:
    """Each stage of runs in a folder of each kind, new runs below one, and one that becomes so."""
    whole = place.whole
    for stage in STAGES:
        for how, made_so in KINDS.items():
            yield Case(f"{stage}: {how}", partial(_of_stage, whole, stage, made_so))
    new = {
        "train": (lambda f: training(f, "--resume"), whole.train),
        "fit": (lambda f: fitting(whole.checkpoint, f), whole.fit),
    }
    for name, (arguments_in, expected) in new.items():
        for how, made_so in KINDS.items():
            run = partial(_new, arguments_in, expected, "runs", made_so)
            yield Case(f"new {name}, the folder above: {how}", run)
        for where, what in {"runs/run": "the folder", "runs": "the folder above"}.items():
            run = partial(_new, arguments_in, expected, where, _a_file)
            yield Case(f"new {name}, {what}: a file in its place", run)
    for i in range(AT_RANDOM_TIMES):
        seconds = whole.seconds * place.random.random()
        run = partial(_becomes_so, place, seconds)
        yield Case(f"run {i}: no right to write after some time", run)


def _of_stage(whole: Whole, stage: str, made_so: MadeSo, scratch: Path) -> str:
    folder, make = stage_of(whole, stage)
    here = shutil.copytree(folder, scratch / "run")
    arguments, expected = make(here)
    return _refused(scratch, here, here, arguments, expected, made_so)


def _new(
    arguments_in: Callable[[Path], list[str]],
    expected: Path,
    where: str,
    made_so: MadeSo,
    scratch: Path,
) -> str:
    """A new run in runs/run, with one of these folders made so."""
    here, folder = scratch / "runs" / "run", scratch / where
    (folder.parent if made_so is _a_file else folder).mkdir(exist_ok=True)
    return _refused(scratch, here, folder, arguments_in(here), expected, made_so)


def _refused(
    scratch: Path,
    here: Path,
    folder: Path,
    arguments: list[str],
    expected: Path,
    made_so: MadeSo,
) -> str:
    """The command ends with one line, or had nothing to write; later it comes to its end.

    Args:
        scratch: where what it prints goes.
        here: the run's folder.
        folder: which cannot be written to, the same or one above.
        arguments: of the command.
        expected: what the run should end like.
        made_so: makes the folder so for a while, and says what the command's process does first.
    """
    before = files_of(here) if here.is_dir() else {}
    with made_so(folder) as first:
        ended = command(arguments, scratch / "printed", first).wait()
        after = files_of(here) if here.is_dir() else {}
    assert after == before, f"changed {dict_difference(before, after)}"
    if ended.status == 0:
        check_same(here, expected)
        return "nothing to write"
    assert ended.status == 2 and ended.error, ended
    assert str(folder) in ended.error and "permissions" in ended.error, ended
    assert ".partial" not in ended.error, f"a name that nobody knows: {ended.error}"
    again = command(arguments, scratch / "printed").wait()
    assert again.status == 0, again
    check_same(here, expected)
    return f"refused: {ended.error.removeprefix(ERROR)}"


def _becomes_so(place: Workplace, seconds: float, scratch: Path) -> str:
    here = scratch / "run"
    copy = command(training(here, "--resume"), scratch / "printed", _obey_permissions)
    sleep_until(time.perf_counter() + seconds)
    with _without_rights(here) if here.exists() else _nothing(here):
        ended = copy.wait()
    if ended.status:
        assert ended.status == 2 and ended.error, ended
        assert str(here) in ended.error and "Permission denied" in ended.error, ended
        assert ".partial" not in ended.error, f"a name that nobody knows: {ended.error}"
    again = command(training(here, "--resume"), scratch / "printed").wait()
    assert again.status == 0, again
    check_same(here, place.whole.train)
    return f"identical: after {seconds:.2f} s, {ended.error.removeprefix(ERROR)}"


@contextmanager
def _nothing(_: Path) -> Iterator[Callable[[], object]]:
    yield lambda: None


@contextmanager
def _mounted_read_only(folder: Path) -> Iterator[Callable[[], object]]:
    _system("mount", "--bind", folder, folder)
    try:
        _system("mount", "-o", "remount,ro,bind", folder)
        yield lambda: None
    finally:
        _system("umount", folder)


@contextmanager
def _immutable(folder: Path) -> Iterator[Callable[[], object]]:
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    _system("chattr", "+i", *folders)
    try:
        yield lambda: None
    finally:
        _system("chattr", "-i", *folders)


@contextmanager
def _without_rights(folder: Path) -> Iterator[Callable[[], object]]:
    modes = {p: p.stat().st_mode for p in (folder, *folder.rglob("*")) if p.is_dir()}
    for path, mode in modes.items():
        path.chmod(mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    try:
        yield _obey_permissions
    finally:
        for path, mode in modes.items():
            if path.exists():
                path.chmod(mode)


@contextmanager
def _a_file(folder: Path) -> Iterator[Callable[[], object]]:
    folder.write_text("something else")
    try:
        yield lambda: None
        assert folder.read_text() == "something else"
    finally:
        folder.unlink()


KINDS: dict[str, MadeSo] = {
    "mounted read-only": _mounted_read_only,
    "immutable": _immutable,
    "no right to write": _without_rights,
}


def _system(*arguments: str | Path) -> None:
    """Run a program.

    Raises:
        Skipped: it is not there, or may not do this here.
    """
    try:
        subprocess.run([*map(str, arguments)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise Skipped(f"{arguments[0]}: {said}") from error


CAP_DAC_OVERRIDE, VERSION = 1, 0x20080522
"""The number of root's right to write where permissions forbid it, and of the call's format."""


def _obey_permissions() -> None:
    """Give up root's right to write everywhere, in this process.

    Raises:
        Skipped: it is not possible here.
    """
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, of two halves
    got = libc.capget(header, rights) == 0
    for i in range(3):
        rights[i] &= ~(1 << CAP_DAC_OVERRIDE)
    if not got or libc.capset(header, rights):
        raise Skipped(f"capset: {os.strerror(ctypes.get_errno())}")
