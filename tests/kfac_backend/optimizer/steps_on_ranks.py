"""What `test_ranks` compares between worlds: called on each rank, see `tests.worlds`."""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.ranks import Ranks
from tests.kfac_backend.networks import data, network

SETTINGS = [
    # name, fisher, options
    ("factors", "exact", {}),
    ("factors", "empirical", {}),
    ("factors, solved once", "exact", {"update_every": 1, "factor_every": 1}),
    ("product", "exact", {"damping_on": "product", "norm_control": "graft"}),
]
STEPS, N = 4, 8
SAVED = 1  # steps before the state: a resumed run first uses its inverses, not new ones


def trained(ranks: Ranks, fisher: str, options: PreconditionerOptions, state=None):
    """The network after some steps, or after the rest of them, and the state in between."""
    model = network()
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


def trained_anew_and_resumed(folder: Path) -> dict[str, Tensor]:
    """Parameters after training, from the start and from another world's state."""
    ranks = Ranks()
    found = {}
    for name, fisher, own in SETTINGS[2 if ranks.size == 4 else 0 :]:
        key = f"{name}, {fisher}"
        options = PreconditionerOptions(**({"factor_every": 2, "update_every": 2} | own))
        model, saved = trained(ranks, fisher, options)
        found |= {f"{key}, {n}": p.detach() for n, p in model.named_parameters()}
        if ranks.rank == 0:
            torch.save(saved, folder / f"{key} of {ranks.size}.pt")
        if ranks.size > 1:
            state = torch.load(folder / f"{key} of {ranks.size // 2}.pt")
            model, _ = trained(ranks, fisher, options, state)
            found |= {f"resumed, {key}, {n}": p.detach() for n, p in model.named_parameters()}
    return found
