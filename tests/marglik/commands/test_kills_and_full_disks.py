"""What a command that was killed, or found the disk full, leaves: the same command goes on."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from marglik.cli import main
from tests.marglik import threads
from tests.marglik.commands.command_line import DATA, MODEL, TRAIN, UNCALIBRATED
from tests.small_disk import mounted

fit_module = import_module("marglik.runs.fit")
HERE = "tests.marglik.commands.commands_on_ranks"
TENSORS = ("model.safetensors", "posterior.safetensors")
TRAINING = [*TRAIN, *DATA, *MODEL, *UNCALIBRATED, "--checkpoint_minutes", "0"]


def fitting(checkpoint, folder, *more):
    arguments = ["fit", *DATA, *MODEL, *UNCALIBRATED, "--checkpoint", str(checkpoint)]
    return [*arguments, "--no_progress", "--curvature.fisher", "mc", "--output", str(folder), *more]


def names_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def evidence(folder):
    record = json.loads((folder / "posterior.json").read_text())
    return record["evidence"], record["prior_precision"]


def same_posterior(folder, expected):
    assert evidence(folder) == evidence(expected)
    for name in TENSORS:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


FIT_POINTS = {
    "the pass": ("marglik.posterior.posterior.Posterior.fit", 1),
    "the search of the prior": ("marglik.runs.fit._find_prior", 1),
    "the posterior's record": ("marglik.posterior.posterior_file.write_record", 1),
    "the very end": ("shutil.rmtree", 1),
}


@pytest.fixture(scope="module")
def fits(worlds, trained, tmp_path_factory):
    """Fits that were killed, and a whole one."""
    folder = tmp_path_factory.mktemp("fits")
    checkpoint = Path(shutil.copy(trained / "model.safetensors", folder / "net.safetensors"))
    with threads.one_thread():
        assert main(fitting(checkpoint, folder / "whole")) == 0
    for name, point in FIT_POINTS.items():
        arguments = fitting(checkpoint, folder / name)
        (ended,) = worlds.run(1, f"{HERE}:killed_at", *point, arguments)
        assert ended.args == ("ended", -9), ended
    return folder


@pytest.mark.parametrize("name", FIT_POINTS)
def test_a_killed_fit_goes_on_with_the_same_command(name, fits, tmp_path, monkeypatch):
    checkpoint = fits / "net.safetensors"
    folder = shutil.copytree(fits / name, tmp_path / "fit")
    has_state = (folder / "checkpoint" / "fit" / "state.json").exists()
    assert has_state == (name in ("the search of the prior", "the posterior's record"))
    if has_state:
        monkeypatch.setattr("marglik.posterior.posterior.kronecker_factors", None)  # no second pass
    if name == "the very end":  # of a fit that is there
        assert "already holds a run" in refuse(fitting(checkpoint, folder))
        return
    assert main(fitting(checkpoint, folder)) == 0
    same_posterior(folder, fits / "whole")
    assert names_in(folder) == names_in(fits / "whole")


def refuse(arguments):
    """The one line of a command that does not work."""
    with pytest.MonkeyPatch.context() as patched:
        lines = []
        patched.setattr("marglik.cli._print_error", lines.append)
        assert main(arguments) == 2
    (line,) = lines
    assert "\n" not in line
    return line


@pytest.fixture
def cut_off(fits, tmp_path):
    """A fit that was killed after its pass, and how it was begun."""
    folder = shutil.copytree(fits / "the search of the prior", tmp_path / "fit")
    return fitting(fits / "net.safetensors", folder), folder


def test_the_prior_may_be_another_one(cut_off, fits):
    command, folder = cut_off
    assert main([*command, "--prior.method", "fixed"]) == 0
    assert evidence(folder)[0] < evidence(fits / "whole")[0]
    assert "method: fixed" in (folder / "config.yaml").read_text()
    assert names_in(folder) == names_in(fits / "whole")


def test_another_pass_is_another_fit(cut_off, fits):
    command, folder = cut_off
    before = names_in(folder)
    message = refuse([*command, "--curvature.fisher", "exact"])
    assert "config.curvature.fisher is mc there, exact here" in message
    assert "pass --overwrite to start again" in message
    assert names_in(folder) == before - {".lock"}  # which the killed process had
    assert main([*command, "--curvature.fisher", "exact", "--overwrite"]) == 0
    assert names_in(folder) == names_in(fits / "whole")
    assert evidence(folder) != evidence(fits / "whole")


def fill(disk, free):
    """Leave so many bytes."""
    room = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(bytes(room - free))


def test_training_goes_on_when_there_is_room(trained, tmp_path):
    with mounted(tmp_path / "disk", 2**23) as disk:
        folder = disk / "run"
        fill(disk, 160 * 2**10)
        line = refuse([*TRAINING, "--output", str(folder)])
        assert f"{folder / 'checkpoint' / 'learned'}" in line
        assert "bytes are wanted" in line
        assert "the same command with --resume continues from its last checkpoint" in line
        assert not [name for name in names_in(folder) if "partial" in name]
        (disk / "filler").unlink()
        assert main([*TRAINING, "--output", str(folder), "--resume"]) == 0
        same_posterior(folder, trained)
        assert names_in(folder) == names_in(trained)


def test_a_fit_goes_on_when_there_is_room(fits, tmp_path, monkeypatch):
    """Something else fills the disk after the pass."""
    with mounted(tmp_path / "disk", 2**23) as disk:
        command = fitting(fits / "net.safetensors", disk / "run")
        find = fit_module._find_prior

        def find_and_fill(*arguments):
            fill(disk, 8192)
            return find(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(fit_module, "_find_prior", find_and_fill)
            line = refuse(command)
        assert f"{disk / 'run' / 'posterior.safetensors'} cannot be written (No space left" in line
        assert "8,192 are free" in line and "the same command continues" in line
        (disk / "filler").unlink()
        monkeypatch.setattr("marglik.posterior.posterior.kronecker_factors", None)  # no second pass
        assert main(command) == 0
        same_posterior(disk / "run", fits / "whole")
        assert names_in(disk / "run") == names_in(fits / "whole")
