"""`marglik fit`: a posterior of a network that was trained elsewhere, by the command."""

import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from marglik.application.cli import main
from marglik.application.data.splits import split_batches
from marglik.data import DataSource
from marglik.models import MLP, Standardised
from marglik.post_hoc import maximize_evidence
from marglik.posterior.posterior import Posterior
from marglik.posterior_file import load_posterior
from marglik.specification import build_from_spec
from marglik.storage.model_state import load_pretrained, tensors_of
from marglik.storage.record_files import read_posterior
from tests.marglik.application.runs.command_line import DATA, MODEL, QUIET, metrics, refusal

LAST = ["layers.3.weight", "layers.3.bias"]


@pytest.fixture
def fit(trained, tmp_path):
    """The command's arguments for the trained network's parameters, kept by someone else."""
    checkpoint = shutil.copy(trained / "model.safetensors", tmp_path / "net.safetensors")
    return ["fit", *DATA, *MODEL, *QUIET, "--checkpoint", str(checkpoint)]


@pytest.mark.parametrize("layers", ["last", "all"])
def test_fit_is_what_python_does(fit, layers, trained, tmp_path):
    folder = tmp_path / "fit"
    assert main([*fit, "--output", str(folder), "--layers", layers]) == 0
    record = read_posterior(folder)
    splits = build_from_spec(DataSource, record["data"]["source"]).load()
    model = MLP(64, (6,), 3)
    load_pretrained(model, trained / "model.safetensors")
    for name, p in model.named_parameters():
        p.requires_grad_(layers == "all" or name in LAST)
    posterior = Posterior(model, "classification")
    posterior.fit(split_batches(splits, "train", 128))
    delta = maximize_evidence(posterior).prior_precision
    assert record["prior_precision"] == pytest.approx(delta, rel=1e-4)
    assert list(record["calibrations"]) == ["Laplace, probit", "Laplace, mc"]
    found = metrics(folder)
    assert found["MAP"].accuracy > 0.8 and "Laplace, probit" in found
    again = load_posterior(folder, MLP(64, (6,), 3))
    assert set(again.fitted_factors().blocks) == set(delta)
    assert (folder / "report.html").stat().st_size > 100_000


def test_a_checkpoint_of_standardised_columns_is_named(fit, tmp_path, capsys):
    path = tmp_path / "table.safetensors"
    save_file(tensors_of(Standardised(MLP(64, (6,), 3), [0.0] * 64, [1.0] * 64)), path)
    message = refusal(capsys, *fit, "--checkpoint", str(path), "--output", str(tmp_path / "out"))
    assert "belongs to a network within a marglik.models.Standardised" in message


def test_what_someone_else_keeps_is_not_overwritten(fit, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "posterior.json").write_text("mine")
    message = refusal(capsys, *fit, "--output", str(tmp_path / "out"), "--overwrite")
    assert "contains posterior.json, which marglik did not write" in message
    assert (tmp_path / "out" / "posterior.json").read_text() == "mine"
    message = refusal(capsys, *fit, "--output", str(tmp_path), "--overwrite")
    assert "net.safetensors is in the output folder" in message


@pytest.mark.parametrize("when", ["the pass", "the end"])
def test_the_folder_of_a_fit_that_was_killed_is_used_again(
    when, fit, tmp_path, monkeypatch, capsys
):
    def killed(*arguments, **options):
        if when == "the end":
            (tmp_path / "fit" / "posterior.safetensors").write_text("half")
        raise KeyboardInterrupt

    folder, name = tmp_path / "fit", "save_posterior" if when == "the end" else "maximize_evidence"
    fit += ["--output", str(folder)]
    with monkeypatch.context() as patched:
        patched.setattr(f"marglik.application.runs.fit.{name}", killed)
        assert main(fit) == 130
    if when == "the end":
        message = refusal(capsys, *fit)
        assert "already contains a run (posterior.safetensors). Pass --overwrite, or" in message
        fit += ["--overwrite"]
    assert main(fit) == 0
    before = metrics(folder)
    assert not (folder / "checkpoint").exists()
    message = refusal(capsys, *fit[:-1] if when == "the end" else fit)
    assert (
        "already contains a run (posterior.json). Pass --overwrite, or another --output" in message
    )
    assert main([*fit, "--overwrite"]) == 0  # as it can be when it ended
    assert metrics(folder) == before


class Malicious:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    ("name", "save", "message"),
    [
        ("net.pt", torch.save, "cannot be read as a file of tensors"),
        ("net.safetensors", pickle.dump, "is not an intact file of weights"),
    ],
)
def test_checkpoints_run_no_code(name, save, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with (tmp_path / name).open("wb") as file:
        save(Malicious(), file)
    assert message in refusal(capsys, "fit", *DATA, *MODEL, "--checkpoint", name, *QUIET)
    assert [path.name for path in tmp_path.iterdir()] == [name]
