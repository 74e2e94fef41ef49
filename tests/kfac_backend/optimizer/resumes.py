"""A run of K-FAC, stopped and resumed after each of its steps; in one process or on ranks."""

import copy
from itertools import product

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.ranks import Ranks
from tests.random_numbers import normal

EVERY = [(1, 1), (1, 5), (5, 1), (2, 3), (3, 2)]
"""(factor_every, update_every): factors alone in a step, inverses alone, both, none."""
CASES = [
    {"factor_every": f, "update_every": u, "ema_decay": rho, "damping_on": on}
    for (f, u), rho, on in product(EVERY, (0.0, 0.9), ("factors", "product"))
]
STEPS, N = 7, 8


def fresh(options):
    """A new network and its optimiser, as at the start of each process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    whole = DistributedDataParallel(model) if Ranks().size > 1 else model
    return model, whole, KFAC(model, "classification", options=PreconditionerOptions(**options))


def train(whole, optimizer, steps):
    """One step of each number, on its own batch."""
    ranks = Ranks()
    for step in steps:
        x, y = normal(N, 4, seed=step), torch.arange(N) % 4
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


def of_half_the_cases() -> list[tuple[dict, list[int]]]:
    """The cases with what differs in each, where anything does."""
    return [(case, steps) for case in CASES[::2] if (steps := steps_that_differ(case))]
