"""Every example runs from its first cell to its last, and shows what it promises."""

import os
import re
import runpy
from pathlib import Path

import pytest
import torch

from marglik import Posterior

EXAMPLES = Path(__file__).parents[2] / "examples"
DART = "dart-v1.1.1-full-dev.json.gz"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def assert_learned(found, prior):
    """A posterior, weight decays that differ, and calibration that is worth something."""
    assert isinstance(prior.posterior, Posterior)
    assert len(set(prior.learner.weight_decays().tolist())) > 3
    nll = {name: metrics["cls/NLL"] for name, metrics in found.items()}
    assert nll["calibrated Laplace"] < nll["MAP"] + 0.01
    assert all(metrics["cls/accuracy"] > 0.5 for metrics in found.values())


def test_lightning_digits(capsys):
    pytest.importorskip("lightning")
    cells = run("lightning_digits")
    assert_learned(cells["found"], cells["prior"])
    text = (EXAMPLES / "lightning_digits.py").read_text()
    assert all(len(re.findall(rf"# \({i}\)$", text, re.M)) == 1 for i in (1, 2, 3))
    assert "calibrated Laplace" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["DART", "made"])
def test_hugging_face_text(text, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = Path(os.environ.get("MARGLIK_DATA", EXAMPLES.parents[1] / "shared" / "data"))
    if text == "DART" and not (folder / DART).is_file():
        pytest.skip(f"no {folder / DART}: put DART's development split there, or set MARGLIK_DATA")
    monkeypatch.setenv("MARGLIK_DATA", str(folder if text == "DART" else "none"))
    cells = run("hugging_face_text")
    assert_learned(cells["found"], cells["prior"])


def test_bayesian_optimisation(monkeypatch):
    pytest.importorskip("botorch")
    monkeypatch.setenv("SEEDS", "1")
    regrets = run("bayesian_optimisation")["regrets"][0]
    ours, at_random = regrets[:, -1].tolist()
    assert 0 <= ours < 0.5 < at_random
