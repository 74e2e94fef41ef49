"""A run's folder: who writes into it, whether it is whole, and what is never overwritten."""

import shutil
import subprocess

import pytest
import torch

from marglik.storage.provenance import Provenance, environment
from marglik.storage.record_file import read_record, write_record
from marglik.storage.run_folder import RunFolder, RunLog, read_log

PRESET = Provenance("epochs: 1\n", preset="digits")


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.begin("train", PRESET)
    run.write("results.json", b"{}")
    return run


def content(path):
    return {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}


def test_what_was_written_is_read(folder):
    assert folder.read("results.json") == b"{}"
    assert folder.read("config.yaml") == b"epochs: 1\n"
    assert folder.read("log.jsonl") is None
    folder.write("results.json", b"[]")
    assert folder.read("results.json") == b"[]"
    folder.check()


def test_a_manifest_that_was_altered(folder):
    path = folder.path / "manifest.json"
    whole = path.read_text()
    for other in (whole.replace("digits", "digit5"), whole[:-3], "9" * 5000, ""):
        path.write_text(other)
        for use in (folder.check, lambda: folder.begin("train", PRESET, overwrite=True)):
            with pytest.raises(ValueError, match="manifest.json .*Put the original back"):
                use()


@pytest.mark.parametrize("damage", [b"[", b"", b"{} ", b"oldest"])
def test_a_file_that_is_not_as_it_was_written(damage, folder):
    folder.write("results.json", b"[1]")
    folder.write("results.json", b"[2]")
    (folder.path / "results.json").write_bytes(damage)
    for use in (folder.check, lambda: folder.read("results.json")):
        with pytest.raises(ValueError, match="results.json is not as marglik wrote it"):
            use()
    (folder.path / "log.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="log.jsonl is not from the run"):
        folder.read("log.jsonl")


def test_a_folder_that_is_removed_while_a_command_writes(folder):
    shutil.rmtree(folder.path)
    with pytest.raises(FileNotFoundError, match="was removed.*Start it again"):
        folder.write("log.jsonl", b"")


@pytest.mark.parametrize("name", ["model.safetensors", "config.yaml", "checkpoint"])
def test_what_is_not_of_a_run_is_never_overwritten(name, tmp_path):
    if "." in name:
        (tmp_path / name).write_text("mine")
    else:
        (tmp_path / name).mkdir()
    run = RunFolder(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=f"holds {name} but no manifest.json.*never over"):
            run.begin("train", PRESET, overwrite=overwrite)
    with pytest.raises(FileExistsError, match="never overwritten"):
        run.adopt("evaluate")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / name).rename(tmp_path / "mine")  # a name that no run has is in nobody's way
    run.begin("train", PRESET)


def test_a_run_is_overwritten_by_its_like_alone(folder):
    folder.write("log.jsonl", b"")
    before = content(folder.path)
    with pytest.raises(FileExistsError, match=r"a run \(results.json\); pass --overwrite, or"):
        folder.begin("train", PRESET)
    others = [("train", Provenance()), ("train", Provenance(preset="other")), ("fit", PRESET)]
    for command, provenance in others:
        with pytest.raises(FileExistsError, match="a run of marglik train --config digits, which"):
            folder.begin(command, provenance, overwrite=True)
    assert content(folder.path) == before
    folder.begin("train", PRESET, overwrite=True)
    assert content(folder.path).keys() == {"config.yaml", "manifest.json"}


def test_a_run_that_came_to_nothing_is_in_nobodys_way(tmp_path):
    run = RunFolder(tmp_path)
    run.begin("fit", PRESET)
    run.begin("fit", PRESET)
    (tmp_path / "checkpoint" / "fit").mkdir(parents=True)
    (tmp_path / "checkpoint" / "fit" / "state.pt").touch()
    with pytest.raises(FileExistsError, match="pass --overwrite, --resume to continue it, or"):
        run.begin("fit", PRESET)


def test_two_commands_do_not_meet(tmp_path):
    run = RunFolder(tmp_path / "run")
    with run.locked(), pytest.raises(ValueError, match="Another process runs in"):
        with RunFolder(tmp_path / "run").locked():
            pass
    assert list(tmp_path.iterdir()) == []  # nothing came of it


def test_what_a_killed_process_had_in_work_is_tidied_up(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f".partial-{gone.pid}-1-manifest.json").write_bytes(b"half")
    with RunFolder(tmp_path).locked():
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(28, "No space")]
)
def test_a_folder_that_cannot_be_written_to_is_named_before_any_work(error, tmp_path, monkeypatch):
    def refused(*_):
        raise error

    monkeypatch.setattr("kfac_backend.files.os.fsync", refused)
    with pytest.raises(OSError, match=f"cannot be written.* .{error.strerror}"):
        with RunFolder(tmp_path / "run").locked():
            raise AssertionError("work began")
    assert list(tmp_path.iterdir()) == []


def test_a_record_speaks_of_files_beside_it_alone(tmp_path):
    (tmp_path / "secret").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("../secret", str(tmp_path / "secret")):
        write_record(folder / "posterior.json", {"format": "x", "version": 1}, {name: "0"})
        with pytest.raises(ValueError, match="which is not beside it. Fit again."):
            read_record(folder / "posterior.json", "x", 1, what="posterior", remedy="Fit again.")


RECORDS = [
    {"kind": "epoch", "epoch": 1, "loss": 1.5, "seconds": 0.1},
    {
        "kind": "update", "epoch": 1, "evidence": -160.0, "weight_decay": {"w": 1e-3, "b": 2e-3},
        "seconds": {"pass": 0.5},
    },
    {"kind": "epoch", "epoch": 2, "loss": 1.2, "seconds": 0.1},
]  # fmt: skip


def test_a_line_per_record_at_once(folder):
    log = RunLog(folder)
    assert read_log(folder.path) == []
    log.write(RECORDS[0])
    assert read_log(folder.path) == RECORDS[:1]
    log.write(RECORDS[1])
    assert read_log(folder.path) == RECORDS[:2]


def test_environment_names_versions_and_device():
    info = environment(torch.device("cpu"))
    assert info["device"].startswith("cpu")
    assert torch.__version__.startswith(info["versions"]["torch"])
