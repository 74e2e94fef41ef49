"""What ranks do in tests of the online loop: called in each of them, see `tests.worlds`."""

import os
import signal
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.options import CurvatureOptions
from kfac_backend.ranks import Ranks
from marglik import (
    Hyperparameters,
    OnlineTraining,
    PriorGroups,
    marglik_training,
)
from marglik.data import TensorBatches
from marglik.data.batches import Shard
from marglik.storage.checkpoint import Checkpoints
from marglik.training.learner import PriorLearner

N, EPOCHS = 23, 4
"""Examples: batches of 8, 8 and 7."""


def fabric_of_ranks() -> Fabric:
    """As `marglik train` makes it."""
    ranks = Ranks()
    if ranks.size == 1:
        return Fabric(accelerator="cpu", devices=1)
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
    fabric = Fabric(accelerator="cpu", devices=ranks.size, strategy=strategy)
    fabric.launch()
    return fabric


def data(likelihood: str, n: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    if likelihood == "regression":
        return x, x[:, :3].sin() + 0.1 * torch.randn(n, 3, generator=generator, dtype=x.dtype)
    return x, x[:, :3].argmax(-1)


def make(
    likelihood: str = "classification",
    optimizer: str = "sgd",
    batch_size: int = 8,
    n: int = N,
    dropout: float = 0.0,
    epochs: int = EPOCHS,
    method: str = "adam",
    loader: Any = None,
    **curvature: Any,
) -> OnlineTraining:
    """A run that has not started, on this rank's shard."""
    fabric, ranks = fabric_of_ranks(), Ranks()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)]
    model = nn.Sequential(*layers).double()
    if loader is None:
        shard = Shard(ranks.rank, ranks.size)
        loader = TensorBatches(*data(likelihood, n), batch_size, shuffle=True, seed=3, shard=shard)
    options = CurvatureOptions(**curvature)
    makers = {
        "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.0),
    }
    if optimizer == "kfac":
        made: torch.optim.Optimizer = KFAC(
            model, likelihood, 0.02, mean_over="examples",
            options=PreconditionerOptions(
                damping_on="product", ema_decay=0.5, factor_every=1, update_every=2
            ),
            fisher="exact",
        )  # fmt: skip
    else:
        made = makers[optimizer](model.parameters())

    hyperparameters = Hyperparameters(
        PriorGroups.from_model(model),
        1.0,
        sigma_noise=0.8 if likelihood == "regression" else 1.0,
        learn_sigma_noise=likelihood == "regression",
        method=method,
    )
    return OnlineTraining(
        model, made, loader,
        PriorLearner(
            likelihood, options, hyperparameters=hyperparameters, epochs=epochs, every=2, steps=5
        ),
        scheduler=CosineAnnealingLR(made, T_max=12, eta_min=1e-3), fabric=fabric,
    )  # fmt: skip


def outcome(run: OnlineTraining) -> dict[str, Any]:
    learner = run.learner
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in run._records]
    return {
        "parameters": [p.detach().clone() for p in run.model.parameters()],
        "precision": run.hyperparameters.prior_precision,
        "sigma": run.hyperparameters.sigma_noise,
        "evidences": learner.evidences_of_steps,
        "evidence": learner.evidences[-1],
        "num_data": (run.num_data, learner.posterior.n_data),
        "records": records,
        "probabilities": run.network.probabilities.state_dict(),
        "next": torch.rand(3),
    }


def trained(options: dict[str, Any]) -> dict[str, Any]:
    run = make(**options)
    run.run()
    return outcome(run)


def trained_until(stop: int, folder: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """A run that goes on from a checkpoint if there is one, and ends after so many epochs."""
    run = make(**options)
    states = Checkpoints(folder, minutes=0)
    real = run._train_epoch

    def one_epoch() -> Any:
        if run._epoch == stop:
            raise KeyboardInterrupt
        return real()

    run._train_epoch = one_epoch  # type: ignore[method-assign]
    try:
        run.run(states)
    except KeyboardInterrupt:
        return None
    return outcome(run)


def with_sampler(drop_last: bool, n: int) -> dict[str, Any]:
    """A user's own loader with a DistributedSampler."""
    fabric_of_ranks()
    dataset = TensorDataset(*data("classification", n))
    sampler = DistributedSampler(dataset, drop_last=drop_last)
    return trained({"loader": DataLoader(dataset, 4, sampler=sampler), "epochs": 2})


def with_local_means(options: dict[str, Any]) -> dict[str, Any]:
    """A run whose ranks weigh the same, however many examples each has: a control."""
    run = make(**options)
    run.network._objective = lambda loss, examples, counts: loss / examples  # type: ignore[method-assign]
    run.run()
    return outcome(run)


def with_dropout() -> dict[str, Any]:
    """A run with dropout and labels from the model, and the masks of its first step."""
    run = make(dropout=0.5, fisher="mc")
    masks = []
    dropout = run.model[2]  # type: ignore[index]
    dropout.register_forward_hook(lambda module, args, output: masks.append(output == 0))
    run.run()
    return outcome(run) | {"masks": masks[0][:3]}


def fails(rank: int, how: str) -> None:
    """A run in which one rank is gone, or fails alone, in the second epoch."""
    run = make()
    real = run.network._step

    def step(*arguments: Any, **keywords: Any) -> Any:
        if Ranks().rank == rank and run._epoch == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hung":
                time.sleep(3)
                os._exit(3)
            raise FloatingPointError("one rank alone")
        return real(*arguments, **keywords)

    run.network._step = step  # type: ignore[method-assign]
    run.run()


def disagrees(options: dict[str, Any]) -> None:
    """A run whose second rank has other options."""
    make(**(options if Ranks().rank == 1 else {})).run()


def without_fabric() -> list[str]:
    """What is refused in one of several processes."""
    model, (x, y) = nn.Linear(4, 3), data("classification")
    loader = [(x.float(), y)]
    uses = {
        "marglik_training": lambda: marglik_training(model, loader, n_epochs=1),
        "diagonal": lambda: marglik_training(model, loader, hessian_structure="diag", n_epochs=1),
    }
    said = []
    for use in uses.values():
        try:
            use()
        except (ValueError, NotImplementedError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def in_a_plain_loop(mean_over: str = "examples", more: int = 0) -> dict[str, Any]:
    """`PriorLearner` in a loop of torch's own, in `DistributedDataParallel` on several ranks."""
    ranks = Ranks()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = net if ranks.size == 1 else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    shard = Shard(ranks.rank, ranks.size)
    n = 24 + more * ranks.rank
    loader = TensorBatches(*data("classification", n), 8, shuffle=True, seed=3, shard=shard)
    prior = PriorLearner("classification", every=2, steps=7, weight_decay=1e-2, mean_over=mean_over)
    prior.start(net, optimizer, loader, EPOCHS)
    for epoch in range(1, EPOCHS + 1):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            prior.add_to_gradients()
            optimizer.step()
        prior.end_of_epoch(epoch)
    prior.end_of_training()
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    return parameters | {"decays": prior.weight_decays(), "evidences": prior.evidences}


def drop_in() -> dict[str, Any]:
    """`marglik_training` on this rank's part of the data."""
    fabric, ranks = fabric_of_ranks(), Ranks()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batches = TensorBatches(*data("classification"), 8, shard=Shard(ranks.rank, ranks.size))
    _, model, evidences, losses = marglik_training(
        model, batches, n_epochs=3, n_hypersteps=3, fabric=fabric
    )
    return {"parameters": list(model.state_dict().values()), "said": [evidences, losses]}
