"""A run's state comes back from its folder to the bit, whenever it was cut off; damage is named."""

import errno
import json
import math
import os
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kfac_backend.files import DiskFullError
from marglik.storage import record_file
from marglik.storage.checkpoint import Checkpoints
from tests.marglik.posteriors import fitted
from tests.marglik.same_state import same

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.uint8, torch.bool,
]  # fmt: skip


def there_and_back(state, folder):
    Checkpoints(folder).save(state)
    return Checkpoints(folder).load()


def states(number):
    """A small state with everything in it."""
    return {
        "number": number,
        "tensor": torch.full((2, 3), float(number)),
        "factors": fitted(prior_precision=1.0).factors * float(number),
    }


@pytest.fixture
def folder(tmp_path):
    Checkpoints(tmp_path, run={"seed": 1}).save(states(1))
    Checkpoints(tmp_path, run={"seed": 1}).save(states(2))
    return tmp_path


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


KEYS = st.one_of(st.text(max_size=5), st.integers(-5, 5), st.just("a/b"))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([torch.uint8, torch.float32, torch.float64]).map(
        lambda dtype: torch.randint(99, (2,)).to(dtype)
    ),
)  # fmt: skip
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(state=st.dictionaries(KEYS, NESTED, max_size=4))
def test_round_trip_of_nested_states(state, tmp_path_factory):
    assert same(state, there_and_back(state, tmp_path_factory.mktemp("state")))


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b/c": torch.zeros(1)}, "a/b": {"c": torch.ones(1)}},
        {1: torch.zeros(1), "1": torch.ones(1)},
        {"a": {1: fitted().factors}, "a/1": fitted("regression").factors},
    ],
)
def test_places_with_the_same_name_are_kept_apart(state, tmp_path):
    assert same(state, there_and_back(state, tmp_path))


def test_ordered_dicts_are_dicts(tmp_path):
    state = OrderedDict(b=torch.ones(1), a=1)
    assert same(dict(state), there_and_back(state, tmp_path))


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


@pytest.mark.parametrize("key", [(1, 2), b"x", np.int64(1)])
def test_keys_of_other_types_are_refused(key, folder):
    """A tuple would come back as a list, which is no key."""
    with pytest.raises(TypeError):
        Checkpoints(folder).save({"a": {key: 1}})
    assert Checkpoints(folder, run={"seed": 1}).load()["number"] == 2


def test_only_the_latest_state_is_there(folder):
    (folder / "tensors-9.safetensors").write_bytes(b"of a process that was killed")
    for number in range(3, 7):
        state = states(number)
        state["more"] = [state["factors"]] * (number % 3)
        Checkpoints(folder, run={"seed": 1}).save(state)
        record = json.loads((folder / "state.json").read_text())
        belong = {"state.json", record["tensors"], *record["factors"]}
        assert {path.name for path in folder.iterdir()} == belong
        assert len(belong) == 3 + number % 3
        assert same(state, Checkpoints(folder, run={"seed": 1}).load())


def test_nothing_is_pickled(folder):
    kinds = []
    for path in folder.iterdir():
        content = path.read_bytes()
        if path.suffix == ".json":
            json.loads(content)
        else:  # safetensors: the length of a JSON header, and the header
            length = int.from_bytes(content[:8], "little")
            assert isinstance(json.loads(content[8 : 8 + length]), dict)
        kinds.append(path.suffix)
    assert sorted(kinds) == [".json", ".safetensors", ".safetensors"]


WORK = {
    "write": "os.fsync",
    "replace": "os.replace",
    "unlink": "pathlib.Path.unlink",
}
"""All that `Checkpoints.save` does to files."""


def save_until(stop, late, folder, monkeypatch):
    """Save state 3 with a crash before or after its stop-th piece of work; what was done by then.

    Nothing is tidied up after the crash, as if the process had been killed.
    """
    done = []

    def patched_version(name, real):
        def work(*arguments, **keywords):
            crashes = len(done) == stop
            if late or not crashes:
                real(*arguments, **keywords)
            if crashes:
                raise KeyboardInterrupt
            done.append(name)

        return work

    with monkeypatch.context() as patched:
        for name, target in WORK.items():
            patched.setattr(target, patched_version(name, resolve_name(target)))
        with suppress(KeyboardInterrupt):
            Checkpoints(folder, run={"seed": 1}).save(states(3))
            done.append("all")
    return done


@pytest.mark.parametrize("late", [False, True])
def test_a_crash_at_any_point_leaves_a_whole_state(late, tmp_path, monkeypatch):
    found = []
    for stop in range(100):
        folder = tmp_path / str(stop)
        for number in (1, 2):
            Checkpoints(folder, run={"seed": 1}).save(states(number))
        done = save_until(stop, late, folder, monkeypatch)
        state = Checkpoints(folder, run={"seed": 1}).load()
        assert same(state, states(state["number"]))
        found.append(state["number"])
        Checkpoints(folder, run={"seed": 1}).save(states(4))
        assert same(states(4), Checkpoints(folder, run={"seed": 1}).load())
        assert len(list(folder.iterdir())) == 3
        if done[-1:] == ["all"]:
            break
    # Tensors, factors and the record are written, put in their place and their temporary names
    # tidied up; two old ones go.
    assert done == [*3 * ["write", "replace", "unlink"], "unlink", "unlink", "all"]
    first = 7 + (not late)  # the one that replaces the record
    assert found == [2] * first + [3] * (len(found) - first)


@pytest.mark.parametrize("fails", range(3))
def test_a_full_disk_leaves_the_state_before(fails, folder, monkeypatch):
    """And nothing of half a state, which would keep the disk full; there is room later."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    checkpoints, real, written = Checkpoints(folder, run={"seed": 1}), os.fsync, 0

    def full(file):
        nonlocal written
        written += 1
        if written > fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError, match=["tensors-3", "factors-3", "state.json"][fails]):
            checkpoints.save(states(3))
    assert written == fails + 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    checkpoints.save(states(3))
    assert same(states(3), Checkpoints(folder, run={"seed": 1}).load())
    assert len(list(folder.iterdir())) == 3


def test_a_crash_in_the_first_save_is_no_state(tmp_path, monkeypatch):
    def crashing(*arguments, **keywords):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(record_file, "write_json", crashing)
        with pytest.raises(KeyboardInterrupt):
            Checkpoints(tmp_path).save(states(1))
    assert not Checkpoints(tmp_path).exists()
    with pytest.raises(FileNotFoundError, match="holds no state"):
        Checkpoints(tmp_path).load()
    assert same(states(2), there_and_back(states(2), tmp_path))
