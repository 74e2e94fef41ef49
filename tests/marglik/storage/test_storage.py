"""A run's files come back to the bit; damage is named; nothing needed is overwritten."""

import json
import math
import shutil

import pytest
import torch

from kfac_backend.atomic_files import file_sum
from marglik.application.records import (
    Evidence,
    Example,
    Network,
    Results,
    Scores,
    SuspiciousLabels,
    TensorDecay,
)
from marglik.application.run_folder import (
    RunLog,
    begin_run,
    read_evaluation,
    read_log,
    read_results,
    remove_states,
    write_results,
)
from marglik.prediction.metric_types import Metrics
from marglik.storage.checkpoint import Checkpoints
from marglik.storage.environment import environment
from marglik.storage.record_files import read_record, write_record
from tests.marglik.application.runs.command_line import content
from tests.marglik.states import same

pytestmark = pytest.mark.usefixtures("one_thread")

FOUND = Results(
    identity={"data": "digits", "sizes": [1, 2]},
    networks={
        "learned": Network({"MAP": Scores(Metrics(nll=0.5), Metrics(nll=(0.25, 0.75)))}),
        "plain": Network({}, {"MAP": Metrics(nll=(-0.1, -0.2, 0.0))}),
    },
    num_data=3,
    weight_decay={"weight": TensorDecay(0.1, 0.2, 1.5, 4)},
    evidence=Evidence(-2.0, -1.0, 3),
    environment={"device": "cpu", "versions": {"torch": "2.9"}},
    seconds=1.25,
    suspicious_labels=SuspiciousLabels(3, 1, 1.0, [Example(0, "a", "b", {"score": 1.5})]),
)
RUN = {"data": "digits", "config": {"prior": {"every": 5, "lr": 0.1}, "sizes": (1, 2)}}
STATE = {
    "plain": [None, True, 1, -3, 0.1, -0.0, 1e-320, math.inf, math.nan, "ä\n", 2**100],
    "empty": [{}, [], (), torch.empty(0, 3, dtype=torch.int64)],
    "tuples": (3, (1, 2.5, None), [(), (torch.ones(1),)]),
    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, 2: {-1: "a"}},
    "dtypes": [torch.tensor([[0, 1]], dtype=d) for d in (torch.bfloat16, torch.bool, torch.uint8)],
    "not contiguous": [torch.randn(4, 6)[:, ::2], torch.arange(3.0).expand(2, 3)],
}


def test_a_state_comes_back_to_the_bit(tmp_path):
    states = Checkpoints(tmp_path, run=RUN)
    assert not states.exists()
    with pytest.raises(FileNotFoundError, match="contains no state"):
        states.load()
    states.save({})
    states.save(STATE)
    found = Checkpoints(tmp_path, run=RUN).load()
    assert same(STATE, found)
    for a, b in ((1, True), (0.0, -0.0), ((1,), [1]), (torch.ones(1), torch.ones(1).double())):
        assert not same(a, b)  # negative control


def test_what_would_not_be_read_back_is_refused_at_once(tmp_path):
    Checkpoints(tmp_path).save({"a": 1})
    with pytest.raises(Exception, match="Weights only load failed"):
        Checkpoints(tmp_path).save({"x": object()})
    assert Checkpoints(tmp_path).load() == {"a": 1}


@pytest.mark.parametrize(
    "damage",
    [lambda c: b"", lambda c: c[:-3], lambda c: c.replace(b"\x00\x00\x00@", b"\x00\x00\x00A", 1)],
    ids=["emptied", "cut off", "a number altered"],
)
def test_a_damaged_state_is_named(damage, tmp_path):
    Checkpoints(tmp_path).save({"tensor": torch.full((2, 3), 2.0)})
    path = tmp_path / "state.pt"
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    with pytest.raises(ValueError, match="state.pt is damaged.*--overwrite"):
        Checkpoints(tmp_path).load()


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ({"data": "other"}, "data is other there and digits here"),
        ({"config": {"prior": {"every": 5}, "sizes": [1, 2]}}, "prior.lr is nothing there and 0.1"),
        ({"more": None}, "more is None there and nothing here"),
    ],
)
def test_a_state_of_another_run(there, message, tmp_path):
    Checkpoints(tmp_path, run=RUN | there).save({})
    with pytest.raises(ValueError, match=f"{message}.*Resume with the same options"):
        Checkpoints(tmp_path, run=RUN).load()


def test_a_state_is_due_when_the_last_is_old_enough(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("marglik.storage.checkpoint.time.monotonic", lambda: now)
    states = Checkpoints(tmp_path, minutes=2.0)
    now += 119.9
    assert not states.is_due
    now += 0.1
    assert states.is_due
    states.save({})
    assert not states.is_due


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "run"
    begin_run(run, "epochs: 1\n")
    log, records = RunLog(run), [{"kind": "epoch", "loss": 1.5}, {"kind": "update"}]
    for i, record in enumerate(records):
        log.write(record)
        assert read_log(run) == records[: i + 1]  # at once
    write_results(run, FOUND)
    return run


def test_a_record_is_read_as_it_was_written(folder):
    assert (folder / "config.yaml").read_bytes() == b"epochs: 1\n"
    assert read_results(folder) == FOUND
    assert read_evaluation(folder) is None
    write_record(folder / "results.json", {"evidence": {"first": 1.0, "of old": 2.0}})
    with pytest.raises(ValueError, match="another version of marglik .*of old"):
        read_results(folder)
    assert environment(torch.device("cpu"))["versions"]["torch"] in torch.__version__


@pytest.mark.parametrize("damage", [lambda c: b"[", lambda c: c.replace(b"0.5", b"0.6")])
def test_damage_is_one_error(damage, folder):
    path = folder / "results.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="results.json is not a file that marglik wrote"):
        read_record(path)


@pytest.mark.parametrize("name", ["config.yaml", "log.jsonl"])
def test_a_record_speaks_for_the_files_that_it_names(name, folder):
    with (folder / name).open("a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match=f"{name} is missing or does not belong to results.json"):
        read_record(folder / "results.json")


def test_a_record_speaks_of_files_beside_it_alone(tmp_path):
    (tmp_path / "secret").write_text("mine")
    path = tmp_path / "run" / "posterior.json"
    for name in ("../secret", str(tmp_path / "secret")):
        write_record(path, {}, {name: file_sum(tmp_path / "secret")})
        with pytest.raises(ValueError, match="secret is missing or does not belong"):
            read_record(path)


OF_OTHERS = {
    "weights": {"model.safetensors": "mine"},
    "options": {"config.yaml": "mine"},
    "results of another program": {"results.json": '{"accuracy": 1}', "model.safetensors": "mine"},
    "checkpoints of another program": {"checkpoint/epoch1.pt": "mine", "log.jsonl": "{}"},
}


@pytest.mark.parametrize("case", OF_OTHERS)
def test_what_is_not_of_a_run_is_never_overwritten(case, tmp_path):
    for name, text in OF_OTHERS[case].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = content(tmp_path)
    with pytest.raises(FileExistsError, match="which marglik did not write, so the folder is not"):
        begin_run(tmp_path, None, overwrite=True)
    assert content(tmp_path) == before


def test_a_run_is_overwritten_on_request_alone(folder):
    before = content(folder)
    with pytest.raises(FileExistsError, match=r"a run \(results.json\). Pass --overwrite, or"):
        begin_run(folder, None)
    assert content(folder) == before
    Checkpoints(folder / "checkpoint" / "learned").save({})
    (folder / "results.json").unlink()
    with pytest.raises(FileExistsError, match=r"Pass --overwrite, --resume \(of marglik train\)"):
        begin_run(folder, None)
    begin_run(folder, "epochs: 2\n", resume=True)
    assert content(folder).keys() == {"config.yaml", "checkpoint/learned/state.pt"}
    begin_run(folder, "epochs: 2\n", overwrite=True)
    assert content(folder).keys() == {"config.yaml"}


def test_files_of_others_among_the_checkpoints_of_a_run_stay(folder):
    notes = folder / "checkpoint" / "notes.txt"
    Checkpoints(notes.parent / "learned").save({})
    notes.write_text("mine")
    remove_states(folder)
    before = content(folder)
    with pytest.raises(FileExistsError, match="checkpoint contains notes.txt, which marglik did"):
        begin_run(folder, None, overwrite=True)
    assert content(folder) == before
    begin_run(folder, None, resume=True)
    assert notes.read_text() == "mine"


def test_a_folder_in_which_nothing_was_begun_is_free(folder):
    for name in ("results.json", "config.yaml", "log.jsonl"):
        (folder / name).unlink()
    assert [path.name for path in folder.iterdir()] == ["checkpoint"]
    begin_run(folder, "epochs: 1\n")
    assert content(folder).keys() == {"config.yaml"}


LINKS = {
    "a file": ("results.json", "a/results.json"),
    "a file that is gone": ("log.jsonl", "gone"),
    "a folder by the name of a file": ("model.safetensors", "a"),
    "the checkpoints": ("checkpoint", "a"),
    "checkpoints that are gone": ("checkpoint", "gone"),
    "a network's": ("checkpoint/learned", "a/learned"),
    "a state": ("checkpoint/learned/state.pt", "a/learned/state.pt"),
    "in a network's": ("checkpoint/learned/mine", "a"),
    "half of a file": ("checkpoint/learned/.partial-1-2-x", "a/learned/state.pt"),
}


@pytest.mark.parametrize("case", LINKS)
def test_nothing_is_removed_through_a_link(case, folder, tmp_path):
    """Nor written; a link by the name of a file of ours is removed itself."""
    name, target = LINKS[case]
    outside = tmp_path / "outside"
    (outside / "a" / "learned").mkdir(parents=True)
    shutil.copy(folder / "results.json", outside / "a")
    (outside / "a" / "learned" / "state.pt").write_text("mine")
    before = content(outside)
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    if link.is_dir():
        link.rmdir()
    link.unlink(missing_ok=True)
    link.symlink_to(outside / target)
    begin_run(folder, "epochs: 2\n", overwrite=True)
    assert content(outside) == before
    assert not link.is_symlink()
    Checkpoints(folder / "checkpoint" / "learned").save({})
    remove_states(folder)
    assert content(outside) == before
    assert not (folder / "checkpoint").exists()


def test_the_folder_of_a_run_is_no_link(folder, tmp_path):
    before, link = content(folder), tmp_path / "link"
    link.symlink_to(folder)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(FileExistsError, match=f"is a link.*--output {folder}"):
            begin_run(link, None, **options)
    assert content(folder) == before
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")  # of a folder above it may be one
    begin_run(tmp_path / "runs" / "run", None)


def test_a_damaged_record_still_says_whose_it_is(folder):
    (folder / "results.json").write_text(json.dumps({"format": "marglik.results"}))
    begin_run(folder, None, overwrite=True)
    assert content(folder) == {}
