"""A resumed run is the uninterrupted one to the bit; a state that does not fit changes nothing."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_backend.optimizer import KFAC, KfacPreconditioner, PreconditionerOptions
from tests.kfac_backend.networks import Functional
from tests.kfac_backend.optimizer.resumes import (
    CASES,
    fresh,
    steps_that_differ,
    train,
)
from tests.random_numbers import normal

OPTIONS = {"factor_every": 1, "update_every": 1}
REDUCE = {"kfac_approx": "reduce"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_resumes_at_every_step_to_the_bit(case):
    assert steps_that_differ(case) == []


def test_resumes_at_every_step_to_the_bit_on_two_ranks(worlds):
    use = "tests.kfac_backend.optimizer.resumes:of_half_the_cases"
    assert worlds.all(2, use) == [[], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("base", ["sgd", "nadamw"])
def test_resumes_from_a_file_and_needs_the_state(base, dtype):
    """Drawn labels continue, too; without the preconditioner's state the run is another."""
    options = PreconditionerOptions(factor_every=2, update_every=3)

    def anew():
        model = fresh({})[0].to(dtype)
        return model, KFAC(model, "classification", base=base, options=options, fisher="mc")

    def steps(model, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            x = normal(8, 4, seed=number).to(dtype)
            F.cross_entropy(model(x), torch.arange(8) % 4).backward()
            optimizer.step()

    whole, optimizer = anew()
    steps(whole, optimizer, range(5))
    file = io.BytesIO()
    torch.save([whole.state_dict(), optimizer.state_dict()], file)
    steps(whole, optimizer, range(5, 9))
    ends = []
    for without in (False, True):
        second, optimizer = anew()
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        second.load_state_dict(weights)
        if without:
            state["preconditioner"] = optimizer.state_dict()["preconditioner"]
        optimizer.load_state_dict(state)
        assert optimizer.param_groups is optimizer.base.param_groups
        steps(second, optimizer, range(5, 9))
        ends.append(torch.equal(whole[0].weight, second[0].weight))
    assert ends == [True, False]


def trained(layers=None, dtype=torch.float64, base="sgd", options=OPTIONS, **more):
    """A state after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layers or [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)])).to(dtype)
    optimizer = KFAC(
        model, "classification", base=base, options=PreconditionerOptions(**options), **more
    )
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(normal(8, 4).to(dtype)), torch.arange(8) % 4).backward()
        optimizer.step()
    return optimizer


def of_plain_sgd(_):
    p = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    return torch.optim.SGD(p, 0.1).state_dict()


def of_a_wider_momentum(state):
    state["state"][0]["momentum_buffer"] = torch.ones(9, 4)
    return state


WIDER = [nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4)]


def another(*layers, options=OPTIONS, **more):
    """A function that makes the state of another run, in reduce mode."""
    more = {**REDUCE, **more}
    return lambda _: trained(layers, options=options, **more).state_dict()


def of_preconditioner(key, change):
    """A function that changes one entry of a state's preconditioner."""

    def of(state):
        part = state["preconditioner"]
        part[key] = change(part[key])
        return state

    return of


def with_tensor(key, name, which, change):
    """A function that changes one tensor of a state."""

    def of(state):
        tensors = state["preconditioner"][key][name]
        tensors[which] = change(tensors[which])
        return state

    return of


def without_weight(state):
    del state["preconditioner"]["weight"]
    return state


def of_a_gpu(state):
    state["preconditioner"]["generator"] = torch.zeros(16, dtype=torch.uint8)
    return state


REFUSED = {
    "expand into reduce": (another(kfac_approx="expand"), "'expand'"),
    "another Fisher": (another(fisher="exact"), "fisher"),
    "another mean": (another(mean_over="examples"), "mean_over"),
    "another damping": (another(options={**OPTIONS, "damping_on": "product"}), "damping_on"),
    "float32": (another(dtype=torch.float32), "float32"),
    "a wider network": (another(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4)), r"\(9, 4\)"),
    "excluded parameters": (another(exclude=["2.*"]), "'2.weight'"),
    "plain SGD": (of_plain_sgd, "no 'preconditioner'"),
    "another base": (another(base="nadamw"), "another base optimiser"),
    "a wider momentum": (of_a_wider_momentum, r"\(9, 4\)"),
    "a key too few": (without_weight, "its keys are"),
    "another device's random numbers": (of_a_gpu, "device"),
    "a negative weight": (of_preconditioner("weight", lambda _: -1.0), "weight -1"),
    "a weight of NaN": (of_preconditioner("weight", lambda _: float("nan")), "weight nan"),
    "a negative step": (of_preconditioner("step", lambda _: -1), "step -1"),
    "no inverses": (of_preconditioner("inverses", lambda _: {}), "0 inverses"),
    "a block": (
        of_preconditioner("blocks", lambda blocks: {"0.bias": blocks["0.bias"]}), "1 blocks",
    ),
    "a negated B": (with_tensor("blocks", "0.weight", "B", torch.neg), "negative diagonal"),
    "a negated root": (with_tensor("inverses", "0.weight", "L_A", torch.neg), "negative diagonal"),
    "NaN": (with_tensor("blocks", "2.bias", "B", lambda B: B * torch.nan), "not finite"),
    "float32 factors": (with_tensor("blocks", "0.bias", "B", torch.Tensor.float), "float32"),
    "wider factors": (
        with_tensor("blocks", "0.bias", "B", lambda B: torch.eye(9).to(B)), r"\(9, 9\)",
    ),
    "a root that is not square": (
        with_tensor("inverses", "0.bias", "L_B", lambda L: L[:, :2]), "shapes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name):
    make, words = REFUSED[name]
    optimizer = trained(**REDUCE)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(make(copy.deepcopy(before)))
    assert_equal(optimizer.state_dict(), before)


def test_its_own_state_is_taken():
    """Negative control of the refusals: the same state, unchanged."""
    optimizer = trained(**REDUCE)
    state = copy.deepcopy(optimizer.state_dict())
    other = trained(**REDUCE, seed=3)
    other.load_state_dict(state)
    assert_equal(other.state_dict(), state)


def test_a_state_whose_base_has_other_groups_changes_nothing():
    optimizer, fewer = trained(), trained([nn.Linear(4, 4)])
    before = copy.deepcopy(optimizer.state_dict())
    mixed = {**fewer.state_dict(), "preconditioner": before["preconditioner"]}
    with pytest.raises(ValueError, match="another model|group"):
        optimizer.load_state_dict(mixed)
    assert_equal(optimizer.state_dict(), before)


def assert_equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_resumes_with_parameters_that_turn_out_to_have_no_block():
    """Their names are in `names` until the first batch, and in no state's blocks."""
    model, x, y = Functional(False).double(), normal(4, 3), torch.tensor([0, 1, 1, 0])
    options = PreconditionerOptions(**OPTIONS, norm_control="none")
    first = KfacPreconditioner(model, "classification", options)
    with pytest.warns(UserWarning, match="No hook sees the uses of fc.weight"):
        F.cross_entropy(model(x), y).backward()
    first.damping = dict.fromkeys(first.names, 0.1)
    first.step()
    first.detach()
    second = KfacPreconditioner(model, "classification", options)
    second.load_state_dict(first.state_dict())
    model.zero_grad()
    with pytest.warns(UserWarning, match="No hook sees the uses of fc.weight"):
        F.cross_entropy(model(x), y).backward()
    second.step()
    assert list(second.blocks) == ["first.weight", "first.bias"]


def test_factors_of_a_resumed_auto_run_have_their_mode():
    first, second = trained(kfac_approx="auto"), trained(kfac_approx="auto")
    mode = first.preconditioner.factors(8, 1.0).options.kfac_approx
    assert mode in ("expand", "reduce")
    anew = trained(kfac_approx="auto")
    anew.preconditioner._pass.seen = (0, 0, 0, "auto")
    anew.load_state_dict(second.state_dict())
    assert anew.preconditioner.factors(8, 1.0).options.kfac_approx == mode


def test_training_resumes_after_a_refusal():
    """The optimiser that refused a state goes on as if it had not been asked."""
    ends = []
    for refused in (False, True):
        _, whole, optimizer = fresh(OPTIONS)
        train(whole, optimizer, range(2))
        if refused:
            with pytest.raises(ValueError, match="preconditioner"):
                optimizer.load_state_dict(of_plain_sgd(None))
        train(whole, optimizer, range(2, 4))
        ends.append(whole[0].weight.detach())
    assert torch.equal(*ends)
