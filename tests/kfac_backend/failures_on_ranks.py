"""What goes wrong on one of two ranks, and what each is told; see `tests.worlds`."""

import os
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from kfac_backend import kronecker_factors
from kfac_backend.blocks.block import compute_eigenvalues, decompose_on_ranks
from kfac_backend.distributed import Ranks
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
    wrong = y if first else y + 5
    broken = kronecker_factors(model, [(x, y)], "classification", process_group=None)
    broken.blocks["8.weight"].A.fill_(torch.nan)  # one rank of two has it to solve

    def passes(model=model, y=y, x=x, **options):
        return kronecker_factors(model, [(x, y)] if len(x) else [], "classification", **options)

    moved = network()
    with torch.no_grad():
        moved[8].weight.mul_(1.0 if first else 1.1)
    other = nn.Sequential(nn.Flatten(), nn.Linear(32, 3 if first else 4)).double()
    uses = {
        "a wrong label": lambda: passes(y=wrong),
        "other options": lambda: passes(kfac_approx="expand" if first else "reduce"),
        "another model": lambda: passes(model=other),
        "other weights": lambda: passes(model=moved),
        "no data": lambda: passes(x=x[:0]),
        "eigenvalues": lambda: compute_eigenvalues(broken.blocks.values(), ranks),
        "eigenvectors": lambda: decompose_on_ranks(broken.blocks.values(), ranks),
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


def late(seconds: float, how: str) -> tuple[str, float]:
    """What a rank is told, and after how long, when rank 1 comes late to a meeting."""
    ranks, start = Ranks(), time.monotonic()
    if ranks.rank == 1:
        with ranks.beating() if how == "beating" else nullcontext():
            for _ in range(20):
                time.sleep(seconds / 20)
                if how == "beats":
                    ranks.beat()
    return told(lambda: ranks.gather(0, "a test")), time.monotonic() - start
