"""A command that is killed, finds the disk full or shares its folder: it goes on to the same end.

A write is a file's content that is forced to the disk, a file's new name, or a file or folder that
is removed. Each command runs in a process of its own, which ends at a write or fails there.
"""

import errno
import json
import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from marglik.storage.run_folder import RunFolder, read_log
from tests.marglik.runs.command_line import DATA, MODEL
from tests.marglik.runs.commands_on_ranks import command

HERE = "tests.marglik.runs.test_kills"
KINDS = ("train", "fit")
EXACT = ("model.safetensors", "posterior.safetensors", "posterior.json")


def arguments_of(kind, folder, checkpoint):
    """Two epochs, two updates, a baseline, calibration, all evaluations; or a fit."""
    options = ["--curvature.fisher", "mc", "--no_progress", "--output", str(folder)]
    if kind == "fit":
        return ["fit", *DATA, *MODEL, *options, "--checkpoint", str(checkpoint)]
    short = ["--epochs", "2", "--prior.every", "1", "--prior.steps", "5", "--batch_size", "128"]
    return ["train", *DATA, *MODEL, *options, *short, "--optimizer.lr", "0.05", "--baseline"]


def at_write(number, code, arguments):
    """Run a command; at its write of this number, the process is killed, or from there on all fail.

    Args:
        number: counted from 1; 0 for none.
        code: of the error of a failing write; 0 to be killed, with half of the file on the disk.
        arguments: of the command.

    Returns:
        the number of writes, and what `command` returns.
    """
    seen = 0

    def watched(real, counts):
        def write(*given, **keywords):
            nonlocal seen
            if counts(given[0]):
                seen += 1
                if seen == number and real.__name__ == "fsync":
                    os.ftruncate(given[0], os.fstat(given[0]).st_size // 2)
                if seen == number and not code:
                    os.kill(os.getpid(), signal.SIGKILL)
                if number and seen >= number and code:
                    raise OSError(code, os.strerror(code))
            return real(*given, **keywords)

        return write

    names = ("replace", "rename", "unlink", "rmdir")
    patches = [patch.object(os, n, watched(getattr(os, n), os.path.lexists)) for n in names]
    patches.append(patch.object(os, "fsync", watched(os.fsync, lambda _: True)))
    with ExitStack() as stack:
        stack.enter_context(patch("marglik.storage.checkpoint.MINUTES", 0.0))
        for one in patches:
            stack.enter_context(one)
        found = command(*arguments)
    return seen, *found


@pytest.fixture(scope="module")
def whole(worlds, trained, tmp_path_factory):
    """Folder, number of writes, and network of runs that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    checkpoint = shutil.copy(trained / "model.safetensors", folder / "net.safetensors")
    writes = {}
    for kind in KINDS:
        arguments = arguments_of(kind, folder / kind, checkpoint)
        ((writes[kind], status, *printed),) = worlds.all(1, f"{HERE}:at_write", 0, 0, arguments)
        assert status == 0, printed
    return folder, writes, checkpoint


def without_seconds(value):
    if isinstance(value, list):
        return [without_seconds(v) for v in value]
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if not k.startswith("seconds")}
    return value


def assert_same(folder, expected):
    """Names, network and posterior to the byte; the rest but for seconds."""
    left, right = ({p.name for p in f.iterdir()} - {".lock"} for f in (folder, expected))
    assert left == right
    for name in left & {*EXACT}:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    for name in left & {"results.json", "evaluation.json"}:
        a, b = (json.loads((f / name).read_text()) for f in (folder, expected))
        assert without_seconds(a) == without_seconds(b), name
    assert without_seconds(read_log(folder)) == without_seconds(read_log(expected))
    RunFolder(folder).check()


def go_on(worlds, kind, arguments, folder, expected):
    more = ["--resume"] if kind == "train" else []
    ((status, _, said),) = worlds.all(1, f"{HERE.rpartition('.')[0]}.commands_on_ranks:command",
                                      *arguments, *more)  # fmt: skip
    if kind == "fit" and "already holds a run" in said:  # it was killed once all was done
        assert (folder / "posterior.json").exists()
    else:
        assert status == 0, said
    assert_same(folder, expected)


@pytest.mark.parametrize(
    ("kind", "share"), [("train", 0.02), ("train", 0.4), ("train", 0.97), ("fit", 0.6)]
)
def test_a_killed_command_goes_on(kind, share, worlds, whole, tmp_path):
    folder, writes, checkpoint = whole
    number = max(1, round(share * writes[kind]))
    killed_and_going_on(worlds, kind, number, folder, checkpoint, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_is_killed_at_any_write_goes_on(kind, worlds, whole, tmp_path):
    folder, writes, checkpoint = whole
    for number in range(1, writes[kind] + 1):
        killed_and_going_on(worlds, kind, number, folder, checkpoint, tmp_path / str(number))


def killed_and_going_on(worlds, kind, number, whole, checkpoint, run):
    arguments = arguments_of(kind, run, checkpoint)
    (ended,) = worlds.run(1, f"{HERE}:at_write", number, 0, arguments)
    assert ended.args == ("ended", -signal.SIGKILL), ended
    go_on(worlds, kind, arguments, run, whole / kind)


@pytest.mark.parametrize(
    ("kind", "code"), [("train", errno.ENOSPC), ("train", errno.EROFS), ("fit", errno.ENOSPC)]
)
def test_a_command_whose_disk_fails_says_so_and_goes_on_later(kind, code, worlds, whole, tmp_path):
    folder, writes, checkpoint = whole
    arguments = arguments_of(kind, tmp_path / "run", checkpoint)
    number = writes[kind] // 2
    ((_, status, _, said),) = worlds.all(1, f"{HERE}:at_write", number, code, arguments)
    assert status == 2 and os.strerror(code) in said.splitlines()[-1]
    if code == errno.ENOSPC and kind == "train":
        assert "bytes are wanted" in said and "the same command" in said
    go_on(worlds, kind, arguments, tmp_path / "run", folder / kind)


def test_another_fit_is_refused_unless_it_may_overwrite(worlds, whole, tmp_path):
    """After the pass its prior may be another one, but not the pass itself."""
    folder, writes, checkpoint = whole
    arguments = arguments_of("fit", tmp_path / "run", checkpoint)
    number = writes["fit"] - 8
    (ended,) = worlds.run(1, f"{HERE}:at_write", number, 0, arguments)
    assert ended.args == ("ended", -signal.SIGKILL) and (tmp_path / "run/checkpoint/fit").exists()
    run = "tests.marglik.runs.commands_on_ranks:command"
    exact = [*arguments, "--curvature.fisher", "exact"]
    ((status, _, said),) = worlds.all(1, run, *exact)
    assert status == 2 and "fisher is mc there, exact here" in said and "--overwrite" in said
    ((status, _, said),) = worlds.all(1, run, *arguments, "--prior.method", "fixed")
    assert status == 0, said
    evidence = [
        json.loads((f / "posterior.json").read_text())["evidence"]
        for f in (tmp_path / "run", folder / "fit")
    ]
    assert evidence[0] < evidence[1]
    ((status, _, said),) = worlds.all(1, run, *exact, "--overwrite")
    assert status == 0, said


def written_in_place(path, content):
    """What `write_file` must not be: a kill leaves half of a file under its name."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def at_write_in_place(number, arguments):
    with (
        patch("marglik.storage.run_folder.write_file", written_in_place),
        patch("marglik.storage.checkpoint.write_file", written_in_place),
        patch("marglik.storage.record_file.write_file", written_in_place),
    ):
        return at_write(number, 0, arguments)


def test_files_that_are_written_in_place_do_not_survive(worlds, whole, tmp_path):
    """Negative control."""
    folder, writes, checkpoint = whole
    failures = 0
    for number in (4, 6):
        run = tmp_path / str(number)
        arguments = arguments_of("train", run, checkpoint)
        worlds.run(1, f"{HERE}:at_write_in_place", number, arguments)
        try:
            go_on(worlds, "train", arguments, run, folder / "train")
        except AssertionError:
            failures += 1
    assert failures
