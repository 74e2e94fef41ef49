"""The same a thousand times over in one process: nothing is left behind."""

from collections import Counter
from itertools import cycle

import pytest
import torch
from torch import nn

from kfac_backend import kronecker_factors
from marglik.storage.checkpoint import Checkpoints
from tests.faults.soak import soak
from tests.interrupts import everything_of
from tests.marglik.training.online_runs import CASES, make

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:By default `link_approx`"),
]

X, Y = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 2, 3), torch.arange(6) % 3


def network():
    """Attention by its parts, a normalisation, and a layer of each other kind."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return model.double()


SHORT_AND_LONG = [30, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("times", SHORT_AND_LONG)
def test_passes_leave_nothing(times):
    model, before = network(), everything_of(network())
    modes = cycle(["expand", "reduce"])

    def one_pass(i):
        fresh = network() if i % 5 == 0 else model  # what is kept of models goes with them
        options = {"kfac_approx": next(modes), "fisher": "mc" if i % 3 else "exact"}
        assert kronecker_factors(fresh, [(X, Y)], "classification", **options).num_data == 6

    soak(one_pass, times)
    after = everything_of(model)
    assert {k: v for k, v in after.items() if "values" in k} == {
        k: v for k, v in before.items() if "values" in k
    }


@pytest.mark.parametrize("times", SHORT_AND_LONG)
def test_passes_that_fail_leave_nothing(times):
    """An error in the middle, each time in another layer, of the forward or the backward pass."""
    model = network()
    layers = [module for module in model.modules() if not list(module.children())]
    before = everything_of(model)

    failed = Counter()

    def fails():
        raise RuntimeError("in the middle")

    def one_pass(i):
        def hook(_, inputs, output):
            if i % 2:
                raise RuntimeError("in the middle")
            output = output[0] if isinstance(output, tuple) else output
            if output.requires_grad:
                output.register_hook(lambda _: fails())

        layer = layers[i % len(layers)]
        handle = layer.register_forward_hook(hook)
        with_hook = everything_of(model)
        try:
            kronecker_factors(model, [(X, Y)], "classification")
        except RuntimeError as error:
            failed[str(error)] += 1
        assert everything_of(model) == with_hook
        handle.remove()
        assert everything_of(model) == before

    soak(one_pass, times)
    assert set(failed) == {"in the middle"} and failed.total() > times / 2


@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_loops_leave_nothing(times, tmp_path):
    """Of each kind in turn, with states."""
    cases = cycle([name for name in CASES if name != "float16"])
    names = [next(cases) for _ in range(12)] if times > 60 else ["SGD", "K-FAC", "regression"]

    def loop(i):
        states = Checkpoints(tmp_path / str(i % 2), minutes=0, run={"i": i})
        for path in states.folder.glob("*"):
            path.unlink()
        make(names[i % len(names)]).run(states)

    for i in range(len(names)):
        loop(i)  # what a kind keeps for good, it keeps from its first run on
    soak(loop, times)


def test_the_soak_sees_a_leak():
    """Negative control: files, memory and objects."""
    kept = []
    with pytest.raises(AssertionError, match="Held"):
        soak(lambda i: kept.append(open("/dev/null")), 20)  # noqa: SIM115
    for file in kept:
        file.close()
    with pytest.raises(AssertionError, match="Held"):
        soak(lambda i: kept.append(torch.ones(2**17)), 20)
    with pytest.raises(AssertionError, match="Held"):
        soak(lambda i: kept.append([[i]]), 20)
