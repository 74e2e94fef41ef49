"""A resumed run is the uninterrupted one to the bit; a state that does not fit changes nothing."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.ranks import Ranks
from tests.marglik.states import same
from tests.random_numbers import normal

OPTIONS = {"factor_every": 1, "update_every": 1}
CASES = [
    {"factor_every": 1, "update_every": 1, "ema_decay": 0.0, "damping_on": "factors"},
    {"factor_every": 5, "update_every": 1, "ema_decay": 0.9, "damping_on": "product"},
    {"factor_every": 2, "update_every": 3, "ema_decay": 0.0, "damping_on": "product"},
    {"factor_every": 3, "update_every": 2, "ema_decay": 0.9, "damping_on": "factors"},
]
"""Steps with factors alone, inverses alone, both, and none."""
STEPS, N = 7, 8


def fresh(options=OPTIONS, wide=8, dtype=torch.float64, **more):
    """A new network, the one that runs, and its optimiser, as at the start of each process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, wide), nn.Tanh(), nn.Linear(wide, 4)).to(dtype)
    whole = DistributedDataParallel(model) if Ranks().size > 1 else model
    options = PreconditionerOptions(**options)
    return model, whole, KFAC(model, "classification", options=options, **more)


def train(whole, optimizer, steps):
    """One step of each number, on its own batch."""
    ranks, dtype = Ranks(), next(whole.parameters()).dtype
    for step in steps:
        x, y = normal(N, 4, seed=step).to(dtype), torch.arange(N) % 4
        own = torch.arange(N).tensor_split(ranks.size)[ranks.rank]
        optimizer.zero_grad()
        F.cross_entropy(whole(x[own]), y[own]).backward()
        optimizer.step()


def steps_that_differ(options) -> list[int]:
    """After which steps a resumed run ends elsewhere than the one that was not stopped."""
    model, whole, optimizer = fresh(options)
    saved = []
    for step in range(STEPS):
        train(whole, optimizer, [step])
        saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    differ = []
    for step, (weights, state) in enumerate(saved[:-1]):
        model, whole, optimizer = fresh(options)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(whole, optimizer, range(step + 1, STEPS))
        last = saved[-1][0]
        if not all(torch.equal(last[name], p) for name, p in model.state_dict().items()):
            differ.append(step)
    return differ


def test_resumes_to_the_bit_where_layers_are_frozen_and_unfrozen():
    """Also right after the unfreezing: the next step makes factors for what has none."""

    def thaw(optimizer, model):
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters()})

    changes = {
        2: thaw,
        3: lambda _, model: model[2].requires_grad_(False),
        5: lambda _, model: model[2].requires_grad_(True),
    }

    def run(state=None, at=0):
        model, whole, optimizer = fresh()
        optimizer.preconditioner.detach()
        model[0].requires_grad_(False)
        options = PreconditionerOptions(factor_every=4, update_every=4)
        optimizer = KFAC(model, "classification", options=options)
        saved = []
        for step in range(STEPS):
            if step in changes:
                changes[step](optimizer, model)
            if step == at and state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
            if step >= at:
                train(whole, optimizer, [step])
        return saved, model.state_dict()

    saved, end = run()
    for step in range(1, STEPS):
        assert same(run(saved[step], step)[1], end), step


def of_half_the_cases() -> list[list[int]]:
    return [steps_that_differ(case) for case in CASES[::2]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_resumes_at_every_step_to_the_bit(case):
    assert steps_that_differ(case) == []


def test_resumes_at_every_step_to_the_bit_on_two_ranks(worlds):
    use = "tests.kfac_backend.optimizer.test_state:of_half_the_cases"
    assert worlds.all(2, use) == [[[], []]] * 2


@pytest.mark.parametrize(("base", "dtype"), [("sgd", torch.float32), ("nadamw", torch.float64)])
def test_resumes_from_a_file_and_needs_the_state(base, dtype):
    """Drawn labels continue, too; without the preconditioner's state the run is another."""
    of = {"options": {"factor_every": 2, "update_every": 3}, "base": base, "dtype": dtype}
    _, whole, optimizer = fresh(**of)
    train(whole, optimizer, range(5))
    file = io.BytesIO()
    torch.save([whole.state_dict(), optimizer.state_dict()], file)
    train(whole, optimizer, range(5, 9))
    ends = []
    for without in (False, True):
        _, second, optimizer = fresh(**of)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        second.load_state_dict(weights)
        if without:
            state["preconditioner"] = optimizer.state_dict()["preconditioner"]
        optimizer.load_state_dict(state)
        assert optimizer.param_groups is optimizer.base.param_groups
        train(second, optimizer, range(5, 9))
        ends.append(torch.equal(whole[0].weight, second[0].weight))
    assert ends == [True, False]


def trained(**of):
    """An optimiser after two steps."""
    _, whole, optimizer = fresh(**of)
    train(whole, optimizer, range(2))
    return optimizer


def cast(state):
    """Its numbers in float32, and all else as it was saved."""
    return tree_map_only(
        torch.Tensor, lambda t: t.float() if t.is_floating_point() and t.dim() else t, state
    )


def of_kfac(state, change):
    return {**state, "preconditioner": change(state["preconditioner"])}


def changed(part, name, change):
    """The state with one tensor, block or number of K-FAC changed."""

    def of_part(own):
        return {**own, part: {**own[part], name: change(own[part][name])}}

    return lambda state: of_kfac(state, of_part)


def without_block(part):
    return lambda state: of_kfac(state, lambda own: {**own, part: without(own[part], "0.weight")})


def with_momentum(state, value):
    numbers = {**state["state"][1], "momentum_buffer": state["state"][1]["momentum_buffer"] * value}
    return {**state, "state": {**state["state"], 1: numbers}}


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


def of_fewer(state):
    (group,) = state["param_groups"]
    return {**state, "param_groups": [{**group, "params": group["params"][:2]}]}


REFUSED = {
    "another mode": (lambda _: trained(kfac_approx="reduce").state_dict(), "'reduce'"),
    "another damping": (
        lambda _: trained(options={**OPTIONS, "damping_on": "product"}).state_dict(), "damping_on",
    ),
    "a wider network": (lambda _: trained(wide=9).state_dict(), r"\(9, 4\)"),
    "float32": (lambda _: trained(dtype=torch.float32).state_dict(), "float32"),
    "fewer parameters": (of_fewer, r"1 groups of \[2\] parameters.*1 groups of \[4\]"),
    "momentum in float32": (
        lambda state: {**cast(state), "preconditioner": state["preconditioner"]},
        r"'momentum_buffer' is \(8, 4\) in torch.float32, but its parameter .* in torch.float64",
    ),
    "factors in float32": (
        lambda state: of_kfac(state, cast), "'0.weight' are in torch.float32.*was cast",
    ),
    "nothing": (lambda _: {}, "lacks 'param_groups', 'state', 'preconditioner'. .* empty"),
    **{
        f"no {key}": (
            lambda state, key=key: of_kfac(state, lambda own: without(own, key)),
            f"KfacPreconditioner lacks '{key}'",
        )
        for key in trained().preconditioner.state_dict()
    },
    **{
        f"{factor} times {number}": (
            changed("blocks", "0.weight", lambda block, factor=factor, number=number: {
                **block, factor: block[factor] * number
            }),
            rf"damaged: the factor '0.weight, {factor}' {words}",
        )
        for factor in "BA"
        for number, words in ((float("nan"), "contains NaN"), (-1, "is not positive semi-definite"))
    },
    "B with large entries off the diagonal": (
        changed("blocks", "2.bias", lambda block: {"B": 2 * block["B"].amax() - block["B"]}),
        "damaged: the factor '2.bias, B' is not positive semi-definite",
    ),
    "a block without A": (
        changed("blocks", "0.weight", lambda block: without(block, "A")),
        "the block of '0.weight' has another shape",
    ),
    "no block": (without_block("blocks"), "damaged: '0.weight' has no block or no inverse"),
    "no inverse": (without_block("inverses"), "damaged: '0.weight' has no block or no inverse"),
    "a negative inverse": (
        changed("inverses", "0.bias", lambda one: {kind: -t for kind, t in one.items()}),
        "the inverse of '0.bias', L_B, is not positive and finite",
    ),
    "an infinite weight": (
        changed("weights", "0.bias", lambda _: float("inf")), "averages must be positive and finite"
    ),
    "momentum of NaN": (lambda s: with_momentum(s, float("nan")), "'momentum_buffer' contains NaN"),
    "another base": (lambda _: trained(base="nadamw").state_dict(), "another base optimiser"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, None])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name):
    """The negative control is its own state."""
    make, words = REFUSED.get(name, (None, ""))
    optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    if make is None:
        optimizer.load_state_dict(copy.deepcopy(before))
    else:
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(make(copy.deepcopy(before)))
    assert same(optimizer.state_dict(), before)
