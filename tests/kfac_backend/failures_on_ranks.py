"""What goes wrong on one of two ranks, and what each is told; see `tests.worlds`."""

import os
import time

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from kfac_backend import kronecker_factors
from kfac_backend.ranks import Ranks
from tests.kfac_backend.networks import data, network


def told(use) -> str:
    """The error's type and text."""
    try:
        use()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def spread(model: nn.Module) -> nn.Module:
    """A network with one parameter in parts, as tensor parallelism and FSDP2 have them."""
    mesh = init_device_mesh("cpu", (2,))
    model[8].weight = nn.Parameter(distribute_tensor(model[8].weight.detach(), mesh))  # pyright: ignore
    assert isinstance(model[8].weight, DTensor)  # pyright: ignore
    return model


def told_of_each() -> dict[str, str]:
    """What each use says on rank 0; the last ends rank 1."""
    ranks = Ranks()
    first = ranks.rank == 0
    model, (x, y) = network(), data(8)

    def passes(model=model, x=x, **options):
        return kronecker_factors(model, [(x, y)] if len(x) else [], "classification", **options)

    moved = network()
    with torch.no_grad():
        moved[8].weight.mul_(1.0 if first else 1.1)
    other = nn.Sequential(nn.Flatten(), nn.Linear(32, 3 if first else 4)).double()
    uses = {
        "other options": lambda: passes(kfac_approx="expand" if first else "reduce"),
        "another model": lambda: passes(model=other),
        "other weights": lambda: passes(model=moved),
        "no data": lambda: passes(x=x[:0]),
        "one has a value more": lambda: ranks.agree(
            {"a": 1} if first else {"a": 1, "b": 2}, "a test"
        ),
        "under DDP": lambda: passes(model=DistributedDataParallel(model)),
        "in parts": lambda: passes(model=spread(network())),
        "control": passes,
    }
    found = {name: told(use) for name, use in uses.items()}
    of_ranks = ranks.gather(found, "a test")
    if not first:
        os._exit(0)  # as if it were killed: the other is left alone
    found = {
        f"{rank}, {name}": text for rank, of in enumerate(of_ranks) for name, text in of.items()
    }
    return found | {"gone": told(lambda: ranks.gather(0, "a test"))}


def late(seconds: float) -> tuple[str, float]:
    """What a rank is told, and after how long, when rank 1 comes late to a meeting."""
    ranks, start = Ranks(), time.monotonic()
    if ranks.rank == 1:
        time.sleep(seconds)
    return told(lambda: ranks.gather(0, "a test")), time.monotonic() - start
