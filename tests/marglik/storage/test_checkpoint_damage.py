"""States that are not whole, altered, of a newer release or of another run; and when one is due."""

import json
import re
import shutil

import pytest
import torch

from marglik.storage.checkpoint import Checkpoints, check_same_run
from tests.marglik.posteriors import fitted

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = {"data": "digits", "config": {"prior": {"every": 5, "lr": 0.1}, "sizes": [1, 2]}}


@pytest.fixture
def folder(tmp_path):
    state = {"number": 2, "tensor": torch.arange(600.0), "factors": fitted().factors}
    Checkpoints(tmp_path, run=RUN).save(state)
    return tmp_path


def file_of(kind, folder):
    (path,) = folder.glob(f"{kind}*")
    return path


def load(folder):
    return Checkpoints(folder, run=RUN).load()


def test_it_loads_undamaged(folder):
    """Negative control of all that follows."""
    assert load(folder)["number"] == 2


@pytest.mark.parametrize("kind", ["state", "tensors", "factors"])
def test_missing_files(kind, folder):
    path = file_of(kind, folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(path.name)):
        load(folder)


@pytest.mark.parametrize("size", [0, 7, 100, -3])
@pytest.mark.parametrize("kind", ["state", "tensors", "factors"])
def test_truncated_files(kind, size, folder):
    path = file_of(kind, folder)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=re.escape(path.name)):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "marglik.checkpoint", "version": 2}', "version 2, this release reads up to 1"),
        ('{"format": "marglik.posterior", "version": 1}', "describes no state of a run"),
        ("[1, 2]", "describes no state of a run"),
        ('{"format": ', "is not JSON"),
        ("\udcff", "is not JSON"),
        ('{"version": ' + "9" * 5000 + "}", "is not JSON .*digits"),
        ("[" * 100_000, "is not JSON .*nested"),
        ('{"format": "marglik.checkpoint"}', "altered"),
        ('{"format": "marglik.checkpoint", "version": "1"}', "altered"),
        ('{"format": "marglik.checkpoint", "version": 1}', "altered"),
    ],
)
def test_other_json(content, message, folder):
    (folder / "state.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("key", ["version", "number", "run", "tensors", "factors", "state"])
def test_a_record_that_lacks_something(key, folder):
    record = json.loads((folder / "state.json").read_text())
    del record[key]
    (folder / "state.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="altered"):
        load(folder)


def test_tensors_of_another_state(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    Checkpoints(other, run=RUN).save({"something": torch.ones(2)})
    file_of("tensors", other).replace(file_of("tensors", folder))
    with pytest.raises(ValueError, match="tensors-1.safetensors"):
        load(folder)


@pytest.mark.parametrize("kind", ["tensors", "factors"])
def test_a_number_that_is_altered(kind, folder):
    """The last bytes are data, which safetensors takes as they are."""
    path = file_of(kind, folder)
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(path.name)):
        load(folder)


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ({"data": "digits2"}, "data is digits2 there, digits here"),
        ({"config": {"prior": {"every": 7, "lr": 0.1}, "sizes": [1, 2]}},
         "config.prior.every is 7 there, 5 here"),
        ({"config": {"prior": {"every": 5}, "sizes": [1, 2]}},
         "config.prior.lr is nothing there, 0.1 here"),
        ({"config": {"prior": {"every": 5, "lr": 0.1, "x": 3}, "sizes": [1, 2]}},
         "config.prior.x is 3 there, nothing here"),
        ({"config": {"prior": {"every": 5, "lr": 0.1}, "sizes": [2, 1]}},
         "config.sizes is [2, 1] there, [1, 2] here"),
        ({"config": {"prior": {}, "sizes": [1, 2]}}, "config.prior.every is nothing there, 5 here"),
        ({"more": None}, "more is None there, nothing here"),
    ],
)  # fmt: skip
def test_a_state_of_another_run(there, message, folder):
    shutil.rmtree(folder)
    Checkpoints(folder, run=RUN | there).save({})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=re.escape(message) + ".*Resume with the options"):
        load(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        Checkpoints(folder, run=RUN).save({})
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tuples_of_options_are_lists_in_a_file(folder):
    sizes = {"config": {"prior": {"every": 5, "lr": 0.1}, "sizes": (1, 2)}}
    Checkpoints(folder, run=RUN | sizes).load()
    check_same_run({"a": (1, (2,)), "b": {}}, {"a": [1, [2]], "b": {}}, folder)


def test_a_state_is_due_when_the_last_is_old_enough(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("marglik.storage.checkpoint.time.monotonic", lambda: now)
    checkpoints = Checkpoints(tmp_path / "new", minutes=2.0)
    always = Checkpoints(tmp_path / "all", minutes=0.0)
    assert always.is_due and not checkpoints.is_due
    now += 119.9
    assert not checkpoints.is_due
    now += 0.1
    assert checkpoints.is_due
    assert not checkpoints.exists()
    checkpoints.save({})
    assert checkpoints.exists() and not checkpoints.is_due
    now += 120
    assert checkpoints.is_due


def test_the_state_is_as_of_the_call(tmp_path):
    """Whoever goes on changing a tensor does not change what was saved."""
    tensor = torch.zeros(3)
    Checkpoints(tmp_path).save({"t": tensor, "again": tensor})
    tensor += 1
    found = Checkpoints(tmp_path).load()
    found["t"] += 1  # nor do two places share memory
    assert found["again"].tolist() == [0, 0, 0]


def test_another_machine_is_a_warning(tmp_path):
    """The state is good, but rounding may differ."""
    Checkpoints(tmp_path, made_with={"threads": 2, "versions": {"torch": "2.15"}}).save({"a": 1})
    here = Checkpoints(tmp_path, made_with={"threads": 2, "versions": {"torch": "2.16"}})
    with pytest.warns(UserWarning, match="begun with versions.torch 2.15 and goes on with 2.16"):
        assert here.load() == {"a": 1}
