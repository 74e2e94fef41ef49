"""K-FAC steps on several ranks are those of one process with the batches of all."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.ranks import Ranks
from tests.kfac_backend.networks import data, network


def tied_network():
    """One weight as a convolution's and a transposed one's, and one that is stored inputs first."""
    torch.manual_seed(0)
    down, up = nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 2, 3)
    up.weight = down.weight
    return nn.Sequential(
        down, nn.Tanh(), up, nn.Tanh(), nn.ConvTranspose2d(2, 3, 2), nn.Flatten(), nn.Linear(75, 3)
    ).double()  # fmt: skip


SETTINGS = [
    # name, fisher, options, network
    ("factors", "empirical", {}, network),
    ("factors, solved once", "exact", {"update_every": 1, "factor_every": 1}, network),
    ("product", "exact", {"damping_on": "product"}, network),
    ("two orientations", "empirical", {"factor_every": 1}, tied_network),
]
STEPS, N = 4, 9
SAVED = 1  # steps before the state: a resumed run first uses its inverses, not new ones


def trained(ranks: Ranks, make, fisher: str, options: PreconditionerOptions, state=None):
    """The network after some steps, or after the rest of them, and the state in between."""
    model = make()
    optimizer = KFAC(model, "classification", 0.1, options=options, fisher=fisher)
    steps = range(STEPS)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        steps = range(SAVED, STEPS)
    whole = DistributedDataParallel(model) if ranks.size > 1 else model
    saved = None
    for step in steps:
        x, y = data(N * STEPS)
        own = torch.arange(N * step, N * (step + 1)).tensor_split(ranks.size)[ranks.rank]
        optimizer.zero_grad()
        F.cross_entropy(whole(x[own]), y[own]).backward()
        optimizer.step()
        if step == SAVED - 1:
            saved = copy.deepcopy(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            )
    return model, saved


def trained_with_a_frozen_parameter(ranks: Ranks) -> dict[str, Tensor]:
    """Parameters after steps in some of which one is frozen, so that blocks get other owners."""
    model, (x, y) = network(), data(N * STEPS)
    optimizer = KFAC(model, "classification", 0.1, fisher="exact", factor_every=1, update_every=1)
    for step in range(STEPS):
        first, *_ = model.parameters()
        first.requires_grad_(step not in (1, 2))
        own = torch.arange(N * step, N * (step + 1)).tensor_split(ranks.size)[ranks.rank]
        optimizer.zero_grad()
        F.cross_entropy(model(x[own]), y[own]).backward()
        ranks.sum_(p.grad.mul_(len(own) / N) for p in model.parameters() if p.grad is not None)
        optimizer.step()
    return {f"one frozen, {name}": p.detach() for name, p in model.named_parameters()}


def trained_anew_and_resumed(folder: Path) -> dict[str, Tensor]:
    """Parameters and state after training, from the start and from one process's state."""
    ranks = Ranks()
    found = trained_with_a_frozen_parameter(ranks)
    for name, fisher, own, make in SETTINGS:
        options = PreconditionerOptions(**({"factor_every": 2, "update_every": 2} | own))
        model, saved = trained(ranks, make, fisher, options)
        found |= {f"{name}, {n}": p.detach() for n, p in model.named_parameters()}
        assert saved is not None
        for kind in ("blocks", "inverses"):
            for n, tensors in saved["optimizer"]["preconditioner"][kind].items():
                found |= {f"{name}, {kind} of {n}, {k}": t for k, t in tensors.items()}
        if ranks.size == 1:
            torch.save(saved, folder / f"{name}.pt")
        else:
            model, _ = trained(ranks, make, fisher, options, torch.load(folder / f"{name}.pt"))
            found |= {f"resumed, {name}, {n}": p.detach() for n, p in model.named_parameters()}
    return found


@pytest.fixture(scope="module")
def found(worlds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    use = "tests.kfac_backend.optimizer.test_ranks:trained_anew_and_resumed"
    return {world: worlds.all(world, use, folder) for world in (1, 3)}


def test_steps_are_those_of_one_process_also_when_resumed_from_it(found):
    (alone,) = found[1]
    for of_rank in found[3]:
        assert {name.removeprefix("resumed, ") for name in of_rank} == alone.keys()
        for name, tensor in of_rank.items():
            if "Q_" not in name:  # the signs of eigenvectors are the solver's choice
                expected = alone[name.removeprefix("resumed, ")]
                assert_close(tensor, expected, rtol=1e-9, atol=1e-10, msg=name)


def test_ranks_stay_together(found):
    for of_rank in found[3][1:]:
        for name, tensor in found[3][0].items():
            assert torch.equal(of_rank[name], tensor), name
