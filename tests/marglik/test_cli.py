"""The command line itself: help, presets, exit statuses; each command has a file of its own."""

import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from marglik.cli import COMMANDS, FIRST_STEP, main
from marglik.commands.completion import SHELLS
from marglik.commands.option_parsing import preset_names

ROOT = Path(__file__).parents[2]


def printed_help(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_names_the_commands(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # else a line may break within a hyphenated word
    text = printed_help(capsys, "--help")
    assert list(COMMANDS) == ["train", "fit", "evaluate", "report"]
    for name, summary in COMMANDS.items():
        assert f"{name} {summary}" in text


def test_alone_it_says_how_to_begin(capsys):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0] == "usage: marglik COMMAND [OPTIONS]"
    assert len(lines) < 15 and max(map(len, lines)) <= 80
    for name, summary in COMMANDS.items():
        assert any(line.split() == [name, *summary.split()] for line in lines)
    assert FIRST_STEP in printed.err and "marglik COMMAND --help" in printed.err
    assert FIRST_STEP.split()[-1] in preset_names()


@cache
def completion(shell):
    pytest.importorskip("shtab", reason="the extra [completion] is not installed")
    with redirect_stdout(StringIO()) as printed, pytest.raises(SystemExit, match="^0$"):
        main(["--completion", shell])
    return printed.getvalue()


@pytest.mark.parametrize("shell", SHELLS)
def test_completions(shell, tmp_path):
    script = completion(shell)
    assert "torch.nn" not in script.replace("torch.nn.modules.module.Module", "")
    words = ["train", "evaluate", "prior.weight_decay", "bf16-mixed", "VisionTransformer"]
    assert all(word in script for word in words)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed, which would read its script")
    path = tmp_path / "script"
    path.write_text(script)
    subprocess.run([shell, "-n", str(path)], check=True)


def test_bash_completes(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    path = tmp_path / "script"
    path.write_text(completion("bash"))
    for given, expected in {
        "tr": ["train"],
        "train --prior.w": ["--prior.weight_decay"],
        "train --precision ": ["32-true", "bf16-mixed", "16-mixed"],
        "train --data D": ["Digits"],
        "evaluate --methods+ nothing": [],
    }.items():
        words = ["marglik", *given.split(" ")]
        state = f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}"
        line = f'source {path}; {state}; _shtab_marglik 2>/dev/null; echo "${{COMPREPLY[@]}}"'
        found = subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True)
        assert found.stdout.split() == expected, given


def test_completion_without_shtab(monkeypatch, capsys):
    monkeypatch.setattr("marglik.commands.completion.find_spec", lambda name: None)
    assert main(["--completion", "bash"]) == 2
    assert "pip install 'marglik[completion]'" in capsys.readouterr().err


def test_version(capsys):
    assert printed_help(capsys, "--version").startswith("marglik ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No command 'trian'; did you mean train? There are train, fit, evaluate and "),
        (["trian", "train"], "No command 'trian'; did you mean train?"),
        (["nothing"], "No command 'nothing'. There are train, fit, evaluate and report."),
        (["--completion", "cmd"], "--completion: invalid choice: 'cmd' (choose from 'bash', 'zsh'"),
        (["--nonsense"], "marglik --help"),
        (["train"], "--model and --data must be given. See marglik train --help."),
        (["fit"], "--model, --data and --checkpoint must be given. See marglik fit --help."),
        (["evaluate"], "PATH must be given. See marglik evaluate --help."),
        (["report"], "FOLDERS must be given. See marglik report --help."),
    ],
)
def test_incomplete_commands(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("marglik: error: ")
    assert message in lines[0]


OPTIONS = {
    "train": (
        ["prior.structure", "curvature.kfac_approx", "predictive.method", "baseline", "ood"],
        ["one per parameter tensor", "labels drawn from the model", "initial weight decay"],
    ),
    "fit": (
        ["checkpoint", "likelihood", "prior.method", "prior.layers", "overwrite"],
        [
            "the last layer alone",
            "state dict that torch.save has written",
            "labels drawn from the model",
        ],
    ),
    "evaluate": (
        ["methods", "predictive.samples", "evaluation.shift", "ood", "seed", "output"],
        [
            "folder that marglik train or marglik fit has written, or a checkpoint",
            "twenty times the work",
        ],
    ),
    "report": (["output"], ["Folders that marglik train, fit or evaluate has written"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command, capsys):
    text = printed_help(capsys, command, "--help")
    options, phrases = OPTIONS[command]
    for option in options:
        assert f"--{option}" in text
    for phrase in phrases:
        assert phrase in text
    assert "known subclasses: torch.nn.Module" not in text


@pytest.mark.parametrize("preset", preset_names())
def test_presets_parse_and_print(preset, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--config", preset, "--print_config"])
    assert stopped.value.code == 0
    assert "weight_decay: 0.0" in capsys.readouterr().out


def test_presets_have_the_paper_and_its_predecessor(capsys):
    printed = {}
    for preset in ("cifar10_paper", "cifar10_redux"):
        with pytest.raises(SystemExit):
            main(["train", "--config", preset, "--print_config"])
        printed[preset] = capsys.readouterr().out
        assert "method: mc\n" in printed[preset]
    assert "weight_decay: 0.005\n" in printed["cifar10_paper"]
    assert "burn_in: 0\n" in printed["cifar10_paper"]
    assert "weight_decay: 0.0005\n" in printed["cifar10_redux"]
    assert "burn_in: 20\n" in printed["cifar10_redux"]


def test_interrupt(capsys, monkeypatch, tmp_path):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("marglik.report.write_report", interrupted)
    assert main(["report", str(tmp_path)]) == 130
    printed = capsys.readouterr()
    assert printed.err.strip() == "marglik: interrupted; what was written so far is kept."


def test_traceback_on_request(monkeypatch, tmp_path):
    assert main(["evaluate", str(tmp_path)]) == 2
    monkeypatch.setenv("MARGLIK_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError, match="No posterior"):
        main(["evaluate", str(tmp_path)])


def test_other_errors_are_not_hidden(monkeypatch, tmp_path):
    """An error in the program itself comes with its traceback."""

    def broken(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr("marglik.report.write_report", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["report", str(tmp_path)])


def test_help_imports_neither_torch_nor_laplace():
    code = (
        "import sys, marglik.cli\n"
        "try:\n    marglik.cli.main(['--help'])\n"
        "except SystemExit:\n    print('torch' in sys.modules, 'laplace' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert printed.strip().splitlines()[-1] == "False False"
