"""Several processes, each of which has a part of the data, are refused before any work."""

import subprocess
import sys

import pytest

CODE = """
import sys, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from kfac_backend import kronecker_factors
from kfac_backend.laplace.interface import KfacEF, KfacGGN
from marglik import Hyperparameters, KronLaplace, OnlineTraining, PriorGroups, Schedule
from marglik import laplace_predictive, marglik_training

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
x, y = torch.randn(8, 2), torch.arange(8) % 2
before = KronLaplace(model, "classification")
before.fit([(x, y)])
torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
data = TensorDataset(x, y)
loader = DataLoader(data, 4, sampler=DistributedSampler(data))
steps = 0


class Steps(torch.optim.SGD):
    def step(self, *args):
        global steps
        steps += 1
        return super().step(*args)


def train(model):
    groups = PriorGroups.from_model(model)
    make = lambda delta, sigma: KronLaplace(model, "classification", prior_precision=delta)
    optimizer = Steps(model.parameters(), 0.1)
    return OnlineTraining(model, optimizer, loader, "classification",
                          Hyperparameters(groups, 1.0), make, Schedule(1)).run().evidence


uses = {
    "kronecker_factors": lambda: kronecker_factors(model, loader, "classification").num_data,
    "KronLaplace": lambda: KronLaplace(model, "classification").fit(loader),
    **{f"{B.__name__}.{kind}": lambda B=B, a=(kind, *a): getattr(B(model, "classification"), a[0])(
           x, y, *a[1:])
       for B in (KfacGGN, KfacEF) for kind, *a in (("kron", 8), ("full",), ("diag",))},
    "OnlineTraining": lambda: train(model),
    "OnlineTraining under DDP": lambda: train(DistributedDataParallel(model)),
    "marglik_training": lambda: marglik_training(model, loader, n_epochs=1, optimizer_cls=Steps),
}
for name, use in uses.items():
    try:
        use()
        print(name, "| works")
    except NotImplementedError as error:
        print(name, "|", error)
print("steps", "|", steps > 0)
print("predicts", "|", bool(laplace_predictive(before)(x).mean.isfinite().all()))
torch.distributed.destroy_process_group()
"""


def run(world, folder):
    """What each process printed, as a dictionary."""
    arguments = [sys.executable, "-W", "ignore", "-c", CODE]
    started = [
        subprocess.Popen(
            [*arguments, str(rank), str(world), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    found = []
    for process in started:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        found.append(dict(line.split(" | ") for line in out.splitlines()))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_one_of_several_processes_is_refused(world, tmp_path):
    for found in run(world, tmp_path):
        assert len(found) == 13
        assert found.pop("predicts") == "True"  # with a posterior that is there
        assert found.pop("steps") == str(world == 1)  # nothing was trained in vain
        for name, said in found.items():
            if world == 1:  # control
                assert said == "works", name
            else:
                assert said.startswith("This is one of 2 processes of torch.distributed"), name
                assert "destroy_process_group()" in said
