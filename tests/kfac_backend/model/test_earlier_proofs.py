"""A pass over a model that was proved before: cheap, and no trust in one that has changed."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from kfac_backend import kronecker_factors
from kfac_backend.model import earlier_proofs, proof


class Mixing(nn.Module):
    """Mixes the examples of a batch as soon as one of its switches says so."""

    all_mix = False

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("gate", torch.zeros(1))
        self.frozen_gate = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.flag, self.config = False, SimpleNamespace(mix=False, inner={"mix": [0.0]})
        self.act = torch.tanh

    def forward(self, x):
        h = self.act(self.fc(x))
        on = float(self.flag or self.all_mix) + self.config.mix + self.config.inner["mix"][0]
        return self.head(h + (on + self.gate + self.frozen_gate) * self.mean(h))

    def mean(self, h):
        """The mean over the batch."""
        return h.mean(0)


class Scaled(nn.Linear):
    """A layer that is its class as long as its buffer is zero."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.register_buffer("scale", torch.zeros(1))

    def forward(self, input):
        return super().forward(input) + self.scale * (self.weight**2).sum()


class Wide(nn.Module):
    """Reads the weight of its layer if its switch is on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head, self.on = nn.Linear(3, 4), nn.Linear(4, 2), False

    def forward(self, x):
        f = self.head(self.fc(x).tanh())
        return f + F.linear(x, self.fc.weight)[:, :2] if self.on else f


def mixes(module, inputs, output):
    return output + output.mean(0)


def of_class(model):
    kind = type("Other", (Mixing,), {"forward": lambda m, x: m.head(m.fc(x) + m.fc(x).mean(0))})
    model.__class__ = kind


def of_functions(model):
    def act(h):
        return torch.tanh(h) + h.mean(0)

    model.act = act


CHANGES = {
    "buffer": lambda m: m.gate.fill_(1.0),
    "frozen parameter": lambda m: m.frozen_gate.data.fill_(1.0),
    "flag": lambda m: setattr(m, "flag", True),
    "flag of the class": lambda m: setattr(type(m), "all_mix", True),
    "setting": lambda m: setattr(m.config, "mix", True),
    "setting far below": lambda m: m.config.inner["mix"].__setitem__(0, 1.0),
    "function": of_functions,
    "class": of_class,
    "hook": lambda m: m.fc.register_forward_hook(mixes),
    "own forward": lambda m: setattr(m.fc, "forward", lambda x: mixes(m, x, x @ m.fc.weight.T)),
}


def batch(N=12):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return x, torch.arange(N) % 2


def outcome(model, N=12):
    """The blocks of a pass, or the error that it ends with."""
    try:
        blocks = kronecker_factors(model, [batch(N)], "classification").blocks
    except NotImplementedError as error:
        return str(error)
    return {name: block.to_dense() for name, block in blocks.items()}


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    torch.manual_seed(0)
    earlier_proofs._proofs.clear()
    monkeypatch.setattr(Mixing, "all_mix", False)  # puts it back, too


@pytest.fixture
def whole(monkeypatch):
    """How often a whole proof is made."""
    made = []

    def counted(*args):
        made.append(args)
        return find_runs(*args)

    find_runs = proof.find_runs
    monkeypatch.setattr(proof, "find_runs", counted)
    return made


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_mixes_since_the_first_pass_is_found(change):
    model = Mixing().double()
    assert isinstance(outcome(model), dict)
    CHANGES[change](model)
    found = outcome(model)
    assert "the rows of different examples mix" in found or "Layer 'fc' (Linear) computes" in found
    earlier_proofs._proofs.clear()
    assert found == outcome(model)


def test_a_layer_that_leaves_its_class_is_found():
    model = nn.Sequential(Scaled(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    assert isinstance(outcome(model), dict)
    model[0].scale.fill_(1.0)
    assert "computes something other" in outcome(model)


def test_a_parameter_that_is_used_elsewhere_is_found():
    model = Wide().double()
    before = outcome(model)
    model.on = True
    after, anew = outcome(model), outcome(copy.deepcopy(model))
    assert after.keys() == anew.keys()
    for name, block in after.items():
        assert torch.equal(block, anew[name])
    assert not torch.allclose(after["fc.weight"], before["fc.weight"])


def test_without_the_second_proof_changed_numbers_would_go_unseen(monkeypatch):
    """A negative control: it is the proof on two examples that sees a gate that has opened."""
    model = Mixing().double()
    outcome(model)
    CHANGES["buffer"](model)
    monkeypatch.setattr(proof.Proof, "_holds_again", lambda self, x, ignored: True)
    monkeypatch.setattr(proof.Proof, "is_made", lambda self, N: self._is_known)
    assert isinstance(outcome(model), dict)


def test_a_second_pass_makes_no_whole_proof_and_the_same_factors(whole):
    model = Mixing().double()
    first = outcome(model)
    assert len(whole) == 1
    rows = []
    model.fc.register_forward_hook(lambda m, x, y: rows.append(len(y)))
    outcome(model), rows.clear()  # proved anew, with the hook
    assert len(whole) == 2
    second = outcome(model)
    assert len(whole) == 2
    assert rows == [1, 3, 12]  # uses, independence, the pass
    for name, block in first.items():
        assert torch.equal(block, second[name])


def test_new_values_of_the_parameters_need_no_whole_proof(whole):
    model = Mixing().double()
    outcome(model)
    with torch.no_grad():
        for p in (*model.fc.parameters(), *model.head.parameters()):
            p.mul_(1.5)
    again, anew = outcome(model), outcome(copy.deepcopy(model))
    assert len(whole) == 2  # the first, and that of the copy
    for name, block in anew.items():
        assert torch.equal(block, again[name])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.eval(),
        lambda m: m.fc.requires_grad_(False),
        lambda m: m.register_buffer("new", torch.ones(1)),
        lambda m: m.head.register_parameter("bias", None),
        lambda m: parametrize.register_parametrization(m.fc, "weight", nn.Identity()),
    ],
)
def test_another_structure_is_proved_anew(whole, change):
    model = Mixing().double()
    outcome(model)
    change(model)
    outcome(model)
    assert len(whole) == 2


def test_other_shapes_and_dtypes_are_proved_anew(whole):
    model = nn.Sequential(nn.Linear(3, 2)).double()
    for shape in ((12, 3), (12, 5, 3), (12, 3), (12, 5, 3)):
        x = torch.randn(shape, dtype=torch.float64)
        kronecker_factors(model, [(x, torch.zeros(shape[:-1]).long())], "classification")
    assert len(whole) == 2


def test_a_first_batch_of_one_example_leaves_the_rest_for_the_next(whole):
    model = Mixing().double()
    x, y = batch()
    data = [(x[:1], y[:1]), (x, y)]
    first = kronecker_factors(model, data, "classification")
    second = kronecker_factors(model, data, "classification")
    assert len(whole) == 1
    for name, block in first.blocks.items():
        assert torch.equal(block.to_dense(), second.blocks[name].to_dense())
    CHANGES["buffer"](model)
    with pytest.raises(NotImplementedError, match="the rows of different examples mix"):
        kronecker_factors(model, data, "classification")


def test_what_cannot_be_described_is_proved_anew_each_time(whole):
    model = Mixing().double()
    model.generator = (number for number in range(3))
    outcome(model), outcome(model)
    assert len(whole) == 2
    del model.generator
    model.much = list(range(2**20))
    outcome(model), outcome(model)
    assert len(whole) == 4


def test_nothing_holds_on_to_a_model():
    models = [make().double() for make in (Mixing, lambda: nn.Linear(3, 2), Wide)]
    assert all(isinstance(outcome(model), dict) for model in models)
    gone = [weakref.ref(model) for model in models]
    models.clear()
    gc.collect()
    assert [model() for model in gone] == [None] * 3
    assert not len(earlier_proofs._proofs)


def test_a_few_proofs_are_kept(whole):
    model = nn.Sequential(nn.Linear(3, 2)).double()
    for R in range(1, 20):
        x = torch.randn(12, R, 3, dtype=torch.float64)
        kronecker_factors(model, [(x, torch.zeros(12, R).long())], "classification")
    assert len(earlier_proofs._proofs[model]) == earlier_proofs.MOST_PROOFS


def test_the_proof_uses_up_no_random_numbers():
    """Else a run that goes on, and has proved nothing yet, would draw others than one in one go."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double().train()
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        outcome(model)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
