"""What a run leaves on disk."""

import json

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
    log = RunLog(folder)
    assert read_log(folder.path) == []
    log.write(RECORDS[0])
    assert read_log(folder.path) == RECORDS[:1]
    log.write(RECORDS[1])
    assert read_log(folder.path) == RECORDS[:2]


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
