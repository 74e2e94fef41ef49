"""A resumed run is the uninterrupted one to the bit; a state that does not fit changes nothing."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_backend.optimizer import KFAC, KfacPreconditioner, PreconditionerOptions
from kfac_backend.ranks import Ranks
from tests.kfac_backend.networks import with_an_unseen_weight
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


def of_plain_sgd(_):
    return torch.optim.SGD([nn.Parameter(torch.ones(2)) for _ in range(4)], 0.1).state_dict()


REFUSED = {
    "another mode": (lambda _: trained(kfac_approx="reduce").state_dict(), "'reduce'"),
    "another damping": (
        lambda _: trained(options={**OPTIONS, "damping_on": "product"}).state_dict(), "damping_on",
    ),
    "a wider network": (lambda _: trained(wide=9).state_dict(), r"\(9, 4\)"),
    "float32": (lambda _: trained(dtype=torch.float32).state_dict(), "float32"),
    "plain SGD": (of_plain_sgd, "another optimiser or K-FAC: the likelihood is None there"),
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


def test_resumes_with_parameters_that_turn_out_to_have_no_block():
    """Their names are in `names` until the first batch, and in no state's blocks."""
    model, x, y = with_an_unseen_weight(), normal(4, 3), torch.tensor([0, 1, 1, 0])
    options = PreconditionerOptions(**OPTIONS, kl_clip=None)
    state = None
    for _ in range(2):
        preconditioner = KfacPreconditioner(model, "classification", options)
        if state is not None:
            preconditioner.load_state_dict(state)
        with pytest.warns(UserWarning, match="No hook sees the uses of fc.weight"):
            F.cross_entropy(model(x), y).backward()
        preconditioner.damping = dict.fromkeys(preconditioner.names, 0.1)
        preconditioner.step()
        preconditioner.detach()
        state = preconditioner.state_dict()
    assert list(preconditioner.blocks) == ["first.weight", "first.bias"]
