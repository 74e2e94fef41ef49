"""What a run leaves on disk."""

import json
import sys

import pytest
import torch

from marglik.storage.provenance import Provenance, environment
from marglik.storage.record_file import write_json
from marglik.storage.run_folder import RunFolder
from marglik.storage.run_log import RunLog, read_log

RECORDS = [
    {"kind": "epoch", "epoch": 1, "loss": 1.5, "seconds": 0.1},
    {
        "kind": "update", "epoch": 1, "evidence": -160.0, "weight_decay": {"w": 1e-3, "b": 2e-3},
        "seconds": {"pass": 0.5},
    },
    {"kind": "epoch", "epoch": 2, "loss": 1.2, "seconds": 0.1},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.begin("train", Provenance())
    return run


def test_a_line_per_record_at_once(folder):
    with RunLog(folder) as log:
        assert read_log(folder.path) == []
        log.write(RECORDS[0])
        assert read_log(folder.path) == RECORDS[:1]
        log.write(RECORDS[1])
    assert read_log(folder.path) == RECORDS[:2]


def test_tensorboard_has_the_same_scalars(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RunLog(folder, tensorboard=True) as log:
        for record in RECORDS:
            log.write(record)
    events = accumulator.EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (1, pytest.approx(1.5)),
        (2, pytest.approx(1.2)),
    ]
    assert events.Scalars("weight_decay/b")[0].value == pytest.approx(2e-3)


def test_tensorboard_that_is_not_installed_is_named(folder, monkeypatch):
    for module in ("tensorboard", "tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(
        "lightning.fabric.loggers.tensorboard._TENSORBOARD_AVAILABLE", False, raising=False
    )
    monkeypatch.setattr(
        "lightning.fabric.loggers.tensorboard._TENSORBOARDX_AVAILABLE", False, raising=False
    )
    before = [path.name for path in folder.path.iterdir()]
    with pytest.raises(ValueError, match="needs the package tensorboard: pip install tensorboard"):
        RunLog(folder, tensorboard=True)
    assert [path.name for path in folder.path.iterdir()] == before  # nothing is lost


def test_json_is_whole_or_not_there(tmp_path):
    path = tmp_path / "results.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_environment_names_versions_and_device():
    info = environment(torch.device("cpu"))
    assert info["device"].startswith("cpu")
    assert torch.__version__.startswith(info["versions"]["torch"])
