"""Every example runs from its first cell to its last, and shows what its text says."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RUNNER = ROOT / "docs/hooks/run_example.py"
DART = "dart-v1.1.1-full-dev.json.gz"
SHOWN = {
    "digits": ["conv1.weight", "calibrated", "NLL"],
    "heteroscedastic": ["evidence", "on the left"],
    "segmentation": ["Laplace, calibrated", "ECE"],
    "time_series": ["noise 0.2", "coverage90"],
    "alarm": ["own digits", "AUROC"],
    "counts": ["negative_binomial(r=", "Poisson, plain"],
    "survival": ["33% of the times are censored", "coverage50"],
    "thousand_classes": ["factors of 8 MiB", "Laplace, calibrated"],
    "uci_regression": ["made up", "σ =", "coverage90"],
    "cifar10_post_hoc": ["digits", "log evidence per image", "last layer, calibrated"],
    "vision_transformer": ["expand: ", "reduce: ", "calibrated"],
    "gpt_text": ["likes", "nats per byte"],
    "graphs": ["800 graphs of", "calibrated"],
    "kfac_optimizer": ["SGD", "Adam", "K-FAC"],
    "own_layer": ["reduce: relative error", "NotImplementedError", "prior precision"],
    "lightning_digits": ["calibrated Laplace"],
    "hugging_face_text": ["calibrated Laplace"],
    "active_learning": ["random: accuracy", "entropy: accuracy", "mutual_information: accuracy"],
    "bayesian_optimisation": [],
    "lora": ["has other frozen parameters than at the fit", "Laplace, calibrated"],
}
"""What each prints, without any data of other people's."""
NEED = {
    "lightning_digits": ["lightning"],
    "hugging_face_text": ["transformers", "accelerate"],
    "bayesian_optimisation": ["botorch"],
    "lora": ["transformers", "peft"],
}
"""Packages of extras."""
WITHOUT_FIGURE = ("active_learning", "cifar10_post_hoc", "gpt_text", "own_layer", *NEED)
CHECK = """
assert len(set(prior.learner.weight_decays().tolist())) > 3
assert found["calibrated Laplace"].nll < found["MAP"].nll + 0.01
assert all(metrics.accuracy > 0.5 for metrics in found.values())
"""
"""That weight decays were learned, and that the calibration is worth something."""
CHECKS = {
    "lightning_digits": CHECK,
    "hugging_face_text": CHECK,
    "active_learning": "assert accuracy > 0.8 and blends < 0.3",  # of the mutual information
    "bayesian_optimisation": "assert 0 <= regrets[0, 0, -1] < 0.5 < regrets[0, 1, -1]",
}
"""Run as a last cell."""


def test_every_example_is_run_and_begins_with_what_the_gallery_shows():
    """A title and a first paragraph."""
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert {script.stem for script in scripts} == set(SHOWN)
    for script in scripts:
        cell, title, empty, first, *_ = script.read_text().splitlines()
        assert cell == "# %% [markdown]" and title.startswith("# # "), script.name
        assert empty == "#" and first.startswith("# "), script.name


def run(script, folder, **environment):
    """Cells with their outputs; on one core."""
    quiet = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONWARNINGS": "ignore", "SEEDS": "1"}
    done = subprocess.run(
        [sys.executable, str(RUNNER), str(script), str(folder)],
        cwd=folder, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), **quiet,
             **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "cells.json").read_text())


def skip_unless_installed(name):
    for package in NEED.get(name, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_example_runs(name, tmp_path):
    skip_unless_installed(name)
    script = tmp_path / f"{name}.py"
    text = (EXAMPLES / f"{name}.py").read_text()
    script.write_text(f"{text}\n# %%\n{CHECKS.get(name, '')}\n")
    cells = run(script, tmp_path)
    printed = "\n".join(cell.get("output", "") for cell in cells)
    assert [words for words in SHOWN[name] if words not in printed] == [], printed
    figures = [figure for cell in cells for figure in cell.get("figures", ())]
    assert all((tmp_path / figure).stat().st_size > 1000 for figure in figures)
    assert figures or name in WITHOUT_FIGURE
    if name == "own_layer":  # reduce is exact there, expand is not
        reduce, expand = map(float, re.findall(r"relative error (\S+)", printed))
        assert reduce < 1e-12 < 0.1 < expand
    if name == "kfac_optimizer":
        losses = dict(re.findall(r"^(\S+).* last epoch (\S+) nats", printed, re.M))
        assert float(losses["K-FAC"]) < min(float(losses["SGD,"]), float(losses["Adam"]))
    if name == "lora":
        before, after = map(float, re.search(r"(-\d.*) -> (-\d.*) nats", printed).groups())
        assert after > before
        rows = dict(re.findall(r"^(MAP.*?|Laplace.*?) +(\d+\.\d+) ", printed, re.MULTILINE))
        assert set(rows) == {"MAP", "MAP, temperature", "Laplace", "Laplace, calibrated"}
        assert all(0 < float(nll) < 2 for nll in rows.values())
        assert re.search(r"(\d+) KiB, the network (\d+) KiB: True", printed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_notebook_runs(name, tmp_path, monkeypatch):
    """In a kernel of its own, as a reader runs it."""
    import nbformat
    from nbclient import NotebookClient

    skip_unless_installed(name)
    for variable, value in {"OMP_NUM_THREADS": "1", "SEEDS": "1", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("MARGLIK_DATA", raising=False)
    content = nbformat.read(EXAMPLES / f"notebooks/{name}.ipynb", as_version=4)
    nbformat.validate(content)
    kernel = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(content, timeout=600, kernel_name="python3", resources=kernel).execute()
    printed = json.dumps([cell.get("outputs") for cell in content.cells], ensure_ascii=False)
    assert [words for words in SHOWN[name] if words not in printed] == [], printed
    assert "image/png" in printed or name in WITHOUT_FIGURE
