"""A run's state comes back from its folder to the bit, whenever it was cut off; damage is named."""

import io
import math
import os
import re
import shutil
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from marglik.storage.checkpoint import Checkpoints
from tests.marglik.posteriors import fitted
from tests.marglik.same_state import same

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = {"data": "digits", "config": {"prior": {"every": 5, "lr": 0.1}, "sizes": [1, 2]}}
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.uint8, torch.bool,
]  # fmt: skip


def there_and_back(state, folder):
    Checkpoints(folder).save(state)
    return Checkpoints(folder).load()


@cache
def some_factors():
    return fitted().factors


def states(number):
    """A small state with everything in it."""
    return {
        "number": number,
        "tensor": torch.full((2, 3), float(number)),
        "factors": some_factors() * float(number),
    }


@pytest.fixture
def folder(tmp_path):
    Checkpoints(tmp_path, run=RUN).save(states(1))
    Checkpoints(tmp_path, run=RUN).save(states(2))
    return tmp_path


def load(folder):
    return Checkpoints(folder, run=RUN).load()


def test_round_trip_of_everything(tmp_path):
    shared = torch.arange(6.0)
    state = {
        "plain": [None, True, False, 1, 0, -3, 0.1, -0.0, 1e-320, math.inf, -math.inf, math.nan],
        "text": ["", "ä\n", '"', "\ud800", "tensor"],
        "empty": [{}, [], (), "", torch.empty(0), torch.empty(0, 3, dtype=torch.int64)],
        "tuples": (3, (1, 2), (1, 2.5, None), [(), (torch.ones(1),)]),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, 2: {-1: "a"}},
        "looks like a file's": {"tensor": "x", "dict": [["a", 1]], "factors": {"list": []}},
        "large": 2**100,
        "dtypes": [torch.tensor([[0, 1], [1, 0]], dtype=dtype) for dtype in DTYPES],
        "0-dim": torch.tensor(math.nan),
        "not contiguous": [torch.randn(4, 6)[:, ::2], torch.randn(3, 2).T, shared.expand(3, 6)],
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "shared": {"a": shared, "b": shared, "c": shared[2:], "d": shared.view(2, 3)},
        "with gradient": torch.ones(2, requires_grad=True),
        "factors": {"best": fitted().factors, 3: [fitted("regression").factors]},
    }
    found = there_and_back(state, tmp_path)
    for name, value in state.items():
        assert same(value, found[name]), name
    assert same(state, found)
    assert not found["with gradient"].requires_grad


def test_comparison_finds_differences():
    """Negative control of ``same``."""
    pairs = [
        (1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ({1: 2}, {True: 2}), ({"a": 1}, {}),
        (math.nan, 1.0), (torch.ones(1), torch.ones(1).double()), (torch.ones(1), torch.ones(())),
        (torch.ones(1), torch.zeros(1)), (fitted().factors, fitted().factors * 2.0),
        ({1: 0, 2: 0}, {2: 0, 1: 0}), ([1], [1, 2]), (None, False), ({1: 0}, {"1": 0}),
    ]  # fmt: skip
    for a, b in pairs:
        assert not same(a, b) and not same(b, a), (a, b)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.zeros(2), "ndarray"), ({1, 2}, "set"), (object(), "object"), (Path("x"), "PosixPath"),
        (1j, "complex"), (b"bytes", "bytes"), (np.int64(3), "int64"), (len, "builtin_function"),
        (torch.float32, "dtype"), (torch.nn.Linear(1, 1), "Linear"),
    ],
)  # fmt: skip
def test_other_types_are_refused_by_their_place(value, kind, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(TypeError, match=f"'/a/3/b/1' of the state is a {kind}.*supported are"):
        Checkpoints(folder).save({"x": torch.ones(1), "a": {3: {"b": ["fine", value]}}})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_without_a_state(tmp_path):
    assert not Checkpoints(tmp_path).exists()
    with pytest.raises(FileNotFoundError, match="holds no state"):
        Checkpoints(tmp_path).load()


DAMAGES = {
    "emptied": lambda content: b"",
    "cut off": lambda content: content[:-3],
    "longer": lambda content: content + b"x",
    "a number altered": lambda content: content.replace(b"\x00\x00\x00@", b"\x00\x00\x00A", 1),
    "another program's": lambda content: b"PK" + bytes(100),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_named(how, folder):
    assert load(folder)["number"] == 2  # the control
    path = folder / "state.pt"
    content = path.read_bytes()
    path.write_bytes(DAMAGES[how](content))
    assert path.read_bytes() != content
    with pytest.raises(ValueError, match="state.pt is not as it was written.*--overwrite"):
        load(folder)


class Malicious:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_no_code_is_run(folder, tmp_path, monkeypatch):
    """Even if whoever wrote the file has written a sum."""
    monkeypatch.chdir(tmp_path)
    stream = io.BytesIO()
    torch.save({"about": "{}", "state": Malicious()}, stream)
    content = stream.getvalue()
    (folder / "state.pt").write_bytes(content + sha256(content).digest())
    with pytest.raises(ValueError, match="holds more than plain data"):
        load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ({"data": "digits2"}, "data is digits2 there, digits here"),
        ({"config": {"prior": {"every": 7, "lr": 0.1}, "sizes": [1, 2]}},
         "config.prior.every is 7 there, 5 here"),
        ({"config": {"prior": {"every": 5}, "sizes": [1, 2]}},
         "config.prior.lr is nothing there, 0.1 here"),
        ({"config": {"prior": {"every": 5, "lr": 0.1}, "sizes": [2, 1]}},
         "config.sizes is [2, 1] there, [1, 2] here"),
        ({"more": None}, "more is None there, nothing here"),
    ],
)  # fmt: skip
def test_a_state_of_another_run(there, message, folder):
    shutil.rmtree(folder)
    Checkpoints(folder, run=RUN | there).save({})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=re.escape(message) + ".*Resume with the options"):
        load(folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


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
    with pytest.warns(
        UserWarning, match="started with versions.torch 2.15 and continues with 2.16"
    ):
        assert here.load() == {"a": 1}
