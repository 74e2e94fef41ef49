"""The command line itself: help, presets, exit statuses; each command has a file of its own."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from marglik.application.cli import COMMANDS, FIRST_STEP, main, preset_names
from marglik.application.runs import trainings
from marglik.application.runs.printing import progress_lines, say
from tests.marglik.application.runs.command_line import refusal

ROOT = Path(__file__).parents[3]


def test_alone_it_says_how_to_begin(capsys):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == "" and FIRST_STEP in printed.err and FIRST_STEP.split()[-1] in preset_names()
    )
    assert all(name in printed.err for name in COMMANDS)


DIGITS = ["train", "--config", "digits", "--no_progress"]
WRONG = {
    "no such command": (["trian"], ["'trian'", "train", "marglik --help"]),
    "what train needs": (["train"], ["required: model, data.", "marglik train --help"]),
    "an abbreviation": ([*DIGITS, "--epoch", "3"], ["--epoch 3", "marglik train --help"]),
    "no such optimiser": (
        [*DIGITS, "--optimizer.name", "adam"],
        ["optimizer.name", "adam", "'sgd', 'adamw', 'kfac'", "marglik train --help"],
    ),
    "not a number": ([*DIGITS, "--prior.weight_decay", ".nan"], ["prior.weight_decay", "nan"]),
    "no class": (
        [*DIGITS, "--model", "Lenet"], ["--model Lenet", "MLP, LeNet, Standardised", "path"],
    ),
    "no data": (["train", "--model", "MLP", "--data=digits"], ["--data digits", "Digits", "path"]),
    "no network": ([*DIGITS, "--model", "collections.OrderedDict"], ["collections.OrderedDict"]),
    "no option of a class": (
        ["train", "--model", "MLP", "--data", "Digits", "--data.root", "here"],
        ["'root' is not accepted", "--data.help CLASS"],
    ),
    "no preset": (["train", "--config", "digit"], ["digit", "cifar10_redux, digits"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_command_line_is_one_line_with_the_value_and_the_way_out(case, capsys):
    arguments, parts = WRONG[case]
    said = refusal(capsys, *arguments)
    assert len(said) < 700
    for part in parts:
        assert part in said, said


def bomb(before, after):
    """A few lines that stand for a list of 10^8 texts."""
    lists = ["&a0 [x, x, x, x, x, x, x, x, x, x]"]
    lists += [f"&a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 8)]
    keyed = "".join(f"{before}b{i}: {text}\n" for i, text in enumerate(lists))
    return (keyed + after).encode()


CONFIGS = {
    "no mapping": (b"- 1\n", "onfig"),
    "a tag that calls": (b'epochs: !!python/object/apply:os.system ["touch ran"]\n', "python"),
    "a function in place of a class": (
        b"model: {class_path: os.system, init_args: {command: touch ran}}\n", "os.system",
    ),
    "no text": (b"\xff\xfe\x00", "utf-8"),
    "aliases": (bomb("", ""), "aliases (*name), which are not supported; write them out"),
    "aliases in a class": (
        b"data:\n  class_path: Digits\n  init_args:\n" + bomb("    ", ""), "aliases (*name)",
    ),
    "nested too deeply": (b"a: " + 5000 * b"[" + 5000 * b"]", "nesting depth"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_wrong_file_of_options_is_one_line_and_runs_nothing(case, tmp_path, capsys):
    content, part = CONFIGS[case]
    (tmp_path / "options.yaml").write_bytes(content)
    said = refusal(capsys, "train", "--config", str(tmp_path / "options.yaml"))
    assert part in said and len(said) < 1000
    assert not list(tmp_path.rglob("ran")) and not Path("ran").exists()


def test_a_wrong_file_of_a_group_of_options(tmp_path, capsys):
    (tmp_path / "prior.yaml").write_bytes(bomb("", ""))
    assert main([*DIGITS, "--prior", str(tmp_path / "prior.yaml")]) == 2
    assert "aliases" in capsys.readouterr().err


def test_what_comes_from_files_does_nothing_to_the_terminal(tmp_path, capsys):
    names = {"\x1b[31mred\x1b]0;title\x07": np.zeros(2), "\u202etxt.exe": np.zeros(2)}
    np.savez(tmp_path / "data.npz", **names)
    options = ["--data", "TensorFile", "--data.path", str(tmp_path / "data.npz"), "--model", "MLP"]
    said = refusal(capsys, "train", *options)
    assert said.isprintable() and r"\x1b[31mred\x1b]0;title\x07" in said and r"\u202etxt" in said
    say("\x1b[2Jdigits: α\udcff\n± 3")
    assert capsys.readouterr().out == "\\x1b[2Jdigits: α\\udcff\n± 3\n"
    with progress_lines():
        logging.getLogger("marglik").info("evaluating %s", "\x1b[2Jdigits")
    assert capsys.readouterr().err == "evaluating \\x1b[2Jdigits\n"


def test_nobody_reads_what_is_printed(tmp_path, capsys, monkeypatch):
    """As with 2>&-, where Python has no stream."""
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["evaluate", str(tmp_path / "nowhere")]) == 2
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["report", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("command", ["train", "fit", "evaluate"])
def test_what_is_yes_or_no_has_one_form(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help", "all"] if command == "train" else [command, "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("--progress, --no_progress") for line in lines)
    assert command == "evaluate" or any(line.startswith("--overwrite, --no_o") for line in lines)


@pytest.mark.parametrize("joined", [False, True])
def test_short_names_of_our_models(joined, monkeypatch, tmp_path):
    """Torchvision has an MLP, too: ours is meant."""
    import torchvision.ops  # noqa: F401

    built = []

    def train(setup, training, *arguments):
        built.append(training.build())
        raise ValueError("enough")

    monkeypatch.setattr(trainings, "train_network", train)
    model = ["--model=MLP"] if joined else ["--model", "LeNet"]
    output = ["--output", str(tmp_path / "run")]
    assert main(["train", *model, "--data", "Digits", *output]) == 2
    (found,) = built
    assert type(found).__module__.startswith("marglik.models")
    first = next(found.parameters())  # of the size of the data: 8 x 8 pixels in grey
    assert first.shape == ((128, 64) if joined else (6, 1, 5, 5))


def test_what_matters_first_comes_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    brief = capsys.readouterr().out
    assert len(brief.splitlines()) <= 100 and "marglik train --help all" in brief
    assert "--epochs" in brief and "--model" in brief and "--curvature.fisher" not in brief
    with pytest.raises(SystemExit):
        main(["train", "--help", "all"])
    lines = capsys.readouterr().out.splitlines()
    options = [line.split()[0].rstrip(",") for line in lines if line.startswith("  --")]
    first = ["config", "model", "data", "epochs", "batch_size", "output", "resume", "baseline"]
    assert all(options.index(f"--{name}") < 20 for name in first)
    assert options.index("--optimizer.lr") < options.index("--prior.weight_decay") < 35
    of_classes = ("--model", "--data", "--help")
    assert len({o.split("[")[0] for o in options if not o.startswith(of_classes)}) <= 40


@pytest.mark.parametrize("preset", preset_names())
def test_presets_parse_and_print(preset, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--config", preset, "--print_config"])
    assert stopped.value.code == 0
    assert "weight_decay: 0.0" in capsys.readouterr().out


def test_interrupt(capsys, monkeypatch, tmp_path):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("marglik.application.report.write_report", interrupted)
    assert main(["report", str(tmp_path)]) == 130
    printed = capsys.readouterr()
    assert printed.err.strip() == "marglik: interrupted."


def test_warnings_are_a_line_without_our_code(monkeypatch, tmp_path):
    said, before = [], warnings.formatwarning

    def warned(*arguments):
        said.append(warnings.formatwarning("not\x1b[2J settled", RuntimeWarning, "train.py", 3))
        return tmp_path

    monkeypatch.setattr("marglik.application.report.write_report", warned)
    assert main(["report", str(tmp_path)]) == 0
    assert said == ["marglik: warning: not\\x1b[2J settled\n"]
    assert warnings.formatwarning is before


def test_traceback_on_request(monkeypatch, tmp_path):
    assert main(["evaluate", str(tmp_path)]) == 2
    monkeypatch.setenv("MARGLIK_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError, match="No posterior"):
        main(["evaluate", str(tmp_path)])


def test_help_imports_neither_torch_nor_laplace():
    code = (
        "import sys, marglik.application.cli\n"
        "try:\n    marglik.application.cli.main(['--help'])\n"
        "except SystemExit:\n    print('torch' in sys.modules, 'laplace' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert printed.strip().splitlines()[-1] == "False False"
