"""Processes of torch.distributed that use everything that sees data: run by a test.

``python -m tests.marglik.training.ranks_elsewhere FOLDER`` starts one process alone, and two that
each have a part of the data. Each writes ``FOLDER/RANK of WORLD``: what each use said, how many
steps the networks took, and whether a posterior that was there still predicts.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from kfac_backend import kronecker_factors
from kfac_backend.laplace.interface import KfacEF, KfacGGN
from marglik import (
    Hyperparameters,
    KronLaplace,
    OnlineTraining,
    PriorGroups,
    Schedule,
    laplace_predictive,
    marglik_training,
)


class Steps(torch.optim.SGD):
    """SGD that counts its steps."""

    taken = 0

    def step(self, *args):
        Steps.taken += 1
        return super().step(*args)


def train(model, loader):
    def make_laplace(delta, sigma):
        return KronLaplace(model, "classification", prior_precision=delta)

    hyperparameters = Hyperparameters(PriorGroups.from_model(model), 1.0)
    OnlineTraining(
        model, Steps(model.parameters(), 0.1), loader, "classification", hyperparameters,
        make_laplace, Schedule(1),
    ).run()  # fmt: skip


def work(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(8, 2), torch.arange(8) % 2
    before = KronLaplace(model, "classification")
    before.fit([(x, y)])
    store = f"file://{folder / f'store of {world}'}"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=world)
    data = TensorDataset(x, y)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    uses = {
        "kronecker_factors": lambda: kronecker_factors(model, loader, "classification"),
        "KronLaplace": lambda: KronLaplace(model, "classification").fit(loader),
        "OnlineTraining": lambda: train(model, loader),
        "OnlineTraining under DDP": lambda: train(DistributedDataParallel(model), loader),
        "marglik_training": lambda: marglik_training(
            model, loader, n_epochs=1, optimizer_cls=Steps
        ),
    }
    for kind in (KfacGGN, KfacEF):
        backend = kind(model, "classification")
        uses[f"{kind.__name__}.kron"] = lambda backend=backend: backend.kron(x, y, 8)
        uses[f"{kind.__name__}.full"] = lambda backend=backend: backend.full(x, y)
        uses[f"{kind.__name__}.diag"] = lambda backend=backend: backend.diag(x, y)
    said = {}
    for name, use in uses.items():
        try:
            use()
            said[name] = "works"
        except NotImplementedError as error:
            said[name] = str(error)
    predicts = bool(laplace_predictive(before)(x).mean.isfinite().all())
    torch.distributed.destroy_process_group()
    record = {"said": said, "steps": Steps.taken, "predicts": predicts}
    (folder / f"{rank} of {world}").write_text(json.dumps(record))


def main(folder: str) -> int:
    """Fork all processes, since the imports take longer than the work; 1 if one failed."""
    children = []
    for world in (1, 2):
        for rank in range(world):
            child = os.fork()
            if child == 0:
                work(rank, world, Path(folder))
                os._exit(0)
            children.append(child)
    return int(any([os.waitpid(child, 0)[1] for child in children]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
