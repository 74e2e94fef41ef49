"""The paper's Table 2 as a program: one run, several in processes, again, and at full size."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.data import archive, default_source
from experiments.table2 import marglik_cifar10
from experiments.table2 import settings as table2_settings
from experiments.table2.marglik_cifar10 import main, run
from experiments.table2.settings import Config, Protocol
from marglik.storage.record_file import read_posterior
from marglik.storage.run_folder import read_log
from tests.marglik.threads import one_thread

TINY = Protocol(depth=10, widen_factor=1, epochs=2, every=1, monitor=1, held_out=0.34)


def test_a_run(tiny_cifar10, tmp_path):
    config = Config(approach="expand", scale=TINY, predictives=("probit",))
    with one_thread():
        found = run(config, tmp_path / "run")
    json.dumps(found, allow_nan=False)
    assert found["config"]["kfac_approx"] == "expand"
    assert found["config"]["augment"] is True
    assert (found["data"], found["num_data"]) == ("CIFAR-10 (JPEG)", 40)
    assert list(found["metrics"]) == [
        "MAP", "MAP, temperature-scaled", "Laplace, mc", "Laplace, probit",
    ]  # fmt: skip
    assert all("test/cls/NLL" in metrics for metrics in found["metrics"].values())
    records = read_log(tmp_path / "run")
    epochs = [r for r in records if r["kind"] == "epoch"]
    updates = [r for r in records if r["kind"] == "update"]
    curves = found["curves"]
    assert curves["loss"] == [r["loss"] for r in epochs]
    key = "validation/cls/NLL"  # of what is held out
    assert curves["monitor"][key] == [[r["epoch"], r[key]] for r in epochs]
    assert [u["weight_decay"] for u in curves["updates"]] == [u["weight_decay"] for u in updates]
    assert len(curves["updates"][0]["weight_decay"]) == 28
    of_update = found["seconds_per_update"]
    assert of_update["all"] == pytest.approx(sum(of_update[p] for p in of_update if p != "all"))
    assert of_update["pass"] == pytest.approx(sum(u["seconds"]["pass"] for u in updates) / 2)
    best = max(updates, key=lambda u: u["evidence"])
    assert found["evidence_per_example"] == pytest.approx(best["evidence"] / 40)
    assert found["kept_epoch"] == best["epoch"]
    # The posterior stays for other predictives.
    assert read_posterior(tmp_path / "run")["num_data"] == 60
    with one_thread():
        again = run(config, tmp_path / "run")
    assert again["metrics"] == found["metrics"]
    assert again["seconds"] == found["seconds"]  # nothing was trained


def test_the_program(tiny_cifar10, tmp_path, monkeypatch, capsys, in_this_process):
    """A run that fails is named, and others go on."""
    asked = [replace(Config(approach=a, augment=False), scale=TINY) for a in ("reduce", "fixed")]
    wrong = replace(asked[0], seed=7, scale=replace(TINY, max_train=61))
    monkeypatch.setattr(marglik_cifar10, "configs", lambda options: [*asked, wrong])
    with one_thread():
        assert main([]) == 1
    out, err = capsys.readouterr()
    assert "scaled/paper/reduce_plain_seed0: " in out
    assert "scaled/paper/reduce_plain_seed7: max_train=61" in err
    assert "| reduce | no |" in out
    folder = tmp_path / "results" / "table2" / "scaled"
    fixed = json.loads((folder / "paper" / "fixed_plain_seed0.json").read_text())
    assert fixed["metrics"] and fixed["config"]["kfac_approx"] == "reduce"
    assert fixed["curves"]["updates"] == [] and fixed["seconds_per_update"] == {}
    assert (folder / "table.md").read_text().strip() in out
    assert main(["--report"]) == 0
    assert capsys.readouterr().out.startswith((folder / "table.md").read_text().strip())


def test_where_the_images_are(tmp_path, monkeypatch):
    monkeypatch.setenv("MARGLIK_DATA", str(tmp_path))
    assert default_source() == "original"
    archive().write_bytes(b"")
    assert default_source() == "jpeg"


@pytest.mark.slow
@pytest.mark.parametrize("approach", ["expand", "reduce"])
def test_full_size_starts(approach, tmp_path, monkeypatch):
    """The paper's network and settings on the real images: 20 steps, 5 batches of curvature."""
    default = Path(__file__).parents[3] / "../shared/data"
    monkeypatch.setenv("MARGLIK_DATA", os.environ.get("MARGLIK_DATA", str(default.resolve())))
    if not archive().exists():
        pytest.skip(f"needs the images in {archive()} (or MARGLIK_DATA)")
    scale = Protocol(max_train=20 * 128, max_test=20, epochs=1)
    size = 20 * 128 // 5
    of = table2_settings.Settings.of

    def in_five_batches(config):
        settings = of(config)
        return replace(settings, curvature=replace(settings.curvature, batch_size=size))

    monkeypatch.setattr(marglik_cifar10.Settings, "of", staticmethod(in_five_batches))
    found = run(Config("full", approach=approach, scale=scale), tmp_path / "run")
    assert found["settings"]["depth"] == 16
    assert found["num_data"] == 2560
    assert len(found["curves"]["updates"][0]["weight_decay"]) == 50
    update = next(r for r in read_log(tmp_path / "run") if r["kind"] == "update")
    assert update["evidence"] > update["evidence_before"]
    assert found["metrics"]["MAP"]["test/cls/NLL"] < 3
