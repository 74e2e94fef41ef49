"""Tiny runs of the online loop that can be made again, on one rank or several, and what they leave.

The functions at the end are called in each rank of a world, see `tests.worlds`.
"""

import random
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.options import CurvatureOptions
from kfac_backend.ranks import Ranks
from marglik import DecayPolicy, OnlineTraining, PriorLearner, Schedule, marglik_training
from marglik.augmentation import Affine, LearnedAugmentation
from marglik.data import Batches
from marglik.storage.checkpoint import Checkpoints
from marglik.training.loop import OnlineResult

__all__ = ["CASES", "make", "outcome", "run_until", "scaled_fabric"]

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
CASES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "AdamW": {
        "optimizer": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.0),
        "scheduler": partial(ExponentialLR, gamma=0.95),
    },
    "K-FAC": {"kfac": {"ema_decay": 0.5, "factor_every": 2, "update_every": 3}},
    "random labels": {"curvature": {"fisher": "mc"}},
    "regression, MacKay": {"likelihood": "regression", "method": "mackay"},
    "noisy labels": {"likelihood": "noisy_classification", "epochs": 10},
    "corrected": {"corrects": True, "epochs": 6, "every": 1, "keep": "last", "average": "last"},
    "the sampler's generator": {"sampler": True},
    "images": {"images": True},
    "ranges": {"images": True, "augmented": True, "keep": "last"},
    "averaged": {"keep": "last", "average": "last", "epochs": 6, "norm": True},
    "the first is the best": {"scheduler": partial(LambdaLR, lr_lambda=lambda i: 1 + 30 * (i > 6))},
    # With noise-free targets and large steps.
    "a falling rate": {
        "likelihood": "regression",
        "keep": "last",
        "average": "last",
        "epochs": 6,
        "dropout": 0.0,
        "optimizer": partial(torch.optim.Adam, lr=0.3),
        "scheduler": lambda optimizer: None,
    },
    "no update": {"burn_in": 9, "curvature": {"fisher": "mc"}},
    "float16": {"float16": True},
    # Every update moves the decays by less: of those that are due, 1, 2, 4, ... are left out.
    "rests": {"every": None, "rest": 1e9, "keep": "last", "epochs": 8},
}


def make(
    case: str = "SGD",
    seed: int = 0,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    **changes: Any,
) -> OnlineTraining:
    """A run that has not started; the seed is of its initial parameters and of what it draws."""
    options = {"likelihood": "classification", "optimizer": sgd} | CASES[case] | changes
    likelihood, images = options["likelihood"], options.get("images", False)
    is_regression = likelihood == "regression"
    dtype = torch.float32 if images or options.get("float16") else torch.float64
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    if images:
        layers = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)]
    else:
        norm = [nn.BatchNorm1d(6)] if options.get("norm") else []
        dropout = nn.Dropout(options.get("dropout", 0.2))
        layers = [nn.Linear(4, 6), *norm, nn.Tanh(), dropout, nn.Linear(6, 3)]
    model: nn.Module = nn.Sequential(*layers).to(dtype)
    if options.get("augmented"):
        model = LearnedAugmentation(model, [Affine("rotate", "shear")], copies=2)
    if "kfac" in options:
        conditioning = PreconditionerOptions(damping_on="product", **options["kfac"])
        optimizer = KFAC(model, likelihood, 0.02, options=conditioning, fisher="exact")
    else:
        optimizer = options["optimizer"](model.parameters())
    scheduler = options.get("scheduler", partial(CosineAnnealingLR, T_max=12, eta_min=1e-3))
    learner = PriorLearner(
        likelihood,
        CurvatureOptions(**options.get("curvature", {})),
        weight_decay=0.05,
        method=options.get("method", "adam"),
        sigma_noise=0.8 if is_regression else None,
        learn_sigma_noise=is_regression,
        curvature_from=options.get("curvature_from", "pass"),
        rest=options.get("rest", DecayPolicy().rest),
        raise_limit=1.2 if "corrects" in options else None,
        lowering="corrects" in options,
        schedule=Schedule(
            options.get("epochs", 4), every=options.get("every", 2), steps=5,
            burn_in=options.get("burn_in", 0), keep=options.get("keep", "best"),
            average=options.get("average"),
        ),
    )  # fmt: skip
    fabric = scaled_fabric() if options.get("float16") else None
    loader, curvature_loader = options.get("loader"), None
    if options.get("on_ranks"):
        fabric = fabric_of_ranks()
        loader = loader or batches(likelihood, options.get("n", 23), options.get("batch_size", 8))
    elif loader is None:
        loader, curvature_loader = _loaders(options, dtype, seed)
    has_held_out = likelihood == "noisy_classification" or "corrects" in options
    size = 30 if "corrects" in options else 100
    held_out = batches(likelihood, 300, size) if has_held_out else None
    return OnlineTraining(
        model, optimizer, loader, learner, scheduler=scheduler(optimizer),
        curvature_loader=curvature_loader, on_record=on_record, fabric=fabric, held_out=held_out,
    )  # fmt: skip


def scaled_fabric() -> Fabric:
    """Steps in float16, the loss scaled by a factor that grows with every second step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    return Fabric(accelerator="cpu", devices=1, plugins=[precision])


def data(likelihood: str, n: int, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64).to(dtype)
    if likelihood == "regression":
        return x, x[:, :3].sin() + 0.1 * torch.randn(n, 3, generator=generator, dtype=dtype)
    y = x[:, :3].argmax(-1)
    if likelihood == "noisy_classification":
        drawn = torch.randint(3, (n,), generator=generator)
        y = torch.where(torch.arange(n) % 4 == 0, drawn, y)
    return x, y


class Noisy(TensorDataset):
    """Draws from numpy and Python, as augmentations do."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + 1e-3 * (np.random.standard_normal() + random.gauss(0, 1)), y


def _loaders(options: dict[str, Any], dtype: torch.dtype, seed: int) -> tuple[Any, Any]:
    if options.get("images"):
        generator = torch.Generator().manual_seed(1)
        pixels = torch.randint(256, (20, 1, 8, 8), generator=generator, dtype=torch.uint8)
        labels, scale = torch.randint(3, (20,), generator=generator), ((128.0,), (70.0,))
        make_batches = partial(
            Batches, pixels, labels, normalisation=scale, shuffle=True, seed=seed
        )
        return make_batches(batch_size=8, augment=True), make_batches(batch_size=5)
    dataset = Noisy(*data(options["likelihood"], 20, dtype))
    if options.get("sampler"):
        own = torch.Generator().manual_seed(seed)
        return DataLoader(dataset, 8, sampler=RandomSampler(dataset, generator=own)), None
    return DataLoader(dataset, 8, shuffle=True), None


def run_until(stop: int, checkpoints: Checkpoints, case: str, seed: int) -> None:
    """Run until the stop-th record (of all, those of before a resume too) interrupts it."""
    seen = []

    def interrupt(record: dict[str, Any]) -> None:
        seen.append(record)
        if len(seen) == stop:
            raise KeyboardInterrupt

    try:
        make(case, seed, interrupt).run(checkpoints)
    except KeyboardInterrupt:
        assert len(seen) == stop


def outcome(run: OnlineTraining, result: OnlineResult) -> dict[str, Any]:
    """All that a run leaves, but for times; and what would be drawn next."""
    state, laplace = run.state_dict(), result.laplace
    parts = ("optimizer", "scheduler", "precision", "learner", "random", "epoch", "probabilities")
    return {
        "parameters": dict(run.model.state_dict()),
        "laplace": [
            laplace.prior_precision, laplace.sigma_noise, laplace.mean,
            laplace.log_marginal_likelihood().detach(),
        ],
        "factors": laplace.factors,
        "evidence": [result.evidence, result.epoch, result.evidences],
        "records": [{k: v for k, v in r.items() if k != "seconds"} for r in result.records],
        **{part: state[part] for part in parts},
    }  # fmt: skip


# --- on several ranks ---


def fabric_of_ranks() -> Fabric:
    """As `marglik train` makes it."""
    ranks = Ranks()
    if ranks.size == 1:
        return Fabric(accelerator="cpu", devices=1)
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
    fabric = Fabric(accelerator="cpu", devices=ranks.size, strategy=strategy)
    fabric.launch()
    return fabric


def batches(likelihood: str, n: int, batch_size: int) -> Batches:
    """This rank's shard, in the order of one process."""
    return Batches(*data(likelihood, n), batch_size, shuffle=True, seed=3, ranks=Ranks())


def on_ranks(case: str, options: dict[str, Any], kind: str = "") -> dict[str, Any]:
    """What a run leaves on this rank.

    Args:
        case: of `CASES`.
        options: changes of it.
        kind: "local means" weighs ranks the same, however many examples each has: a control.
    """
    if options.get("differs") and Ranks().rank == 1:
        options = options | options["differs"]
    if "sampler" in options:
        fabric_of_ranks()
        dataset = TensorDataset(*data("classification", options["n"]))
        sampler = DistributedSampler(dataset, drop_last=options["sampler"] == "drops")
        options = options | {"loader": DataLoader(dataset, 4, sampler=sampler)}
    run = make(case, **{"dropout": 0.0, "on_ranks": True, "keep": "last", **options})
    masks: list[torch.Tensor] = []
    run.model[2].register_forward_hook(lambda *given: masks.append(given[2] == 0))  # type: ignore[index]
    if kind == "local means":
        run._mean_over_ranks = lambda loss, examples, _: loss / examples  # type: ignore[method-assign]
    result = run.run()
    found = outcome(run, result)
    kept = ("parameters", "laplace", "evidence", "records", "probabilities")
    drawn = {"mask": masks[0][:3], "next": torch.rand(3)}
    noise = float(run.learner.likelihood.parameters.get("noise", 0.0))
    for record in found["records"]:
        record.pop("likelihood", None)  # a text, with all digits of the noise
    learned = {"n": run.learner.problem.num_data, "noise": noise}
    learned["epoch"] = getattr(getattr(run.train_loader, "sampler", None), "epoch", None)
    return {name: found[name] for name in kept} | learned | drawn


def until(stop: int, folder: str, case: str) -> dict[str, Any] | None:
    """A run that goes on from a checkpoint if there is one, and ends before the epoch ``stop``."""
    run = make(case, dropout=0.0, on_ranks=True, keep="last")
    real = run.train_epoch

    def one_epoch() -> Any:
        if run._epoch == stop:
            raise KeyboardInterrupt
        return real()

    run.train_epoch = one_epoch  # type: ignore[method-assign]
    try:
        return {"parameters": outcome(run, run.run(Checkpoints(folder, minutes=0)))["parameters"]}
    except KeyboardInterrupt:
        return None


def fails(rank: int) -> None:
    """A run in which one rank fails alone, in the second epoch."""
    run = make(on_ranks=True)
    real = run._step

    def step(*arguments: Any) -> Any:
        if Ranks().rank == rank and run._epoch == 1:
            raise FloatingPointError("one rank alone")
        return real(*arguments)

    run._step = step  # type: ignore[method-assign]
    run.run()


def without_fabric() -> str:
    """What is refused in one of several processes."""
    try:
        marglik_training(nn.Linear(4, 3), [(torch.zeros(4, 4), torch.zeros(4).long())], n_epochs=1)
    except ValueError as error:
        return str(error)
    return ""


def in_a_plain_loop(loss_mean_over: str) -> dict[str, Any]:
    """`PriorLearner` in a loop of torch's own, in `DistributedDataParallel` on several ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = net if Ranks().size == 1 else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    loader = batches("classification", 24, 8)
    prior = PriorLearner(
        "classification", every=2, steps=7, weight_decay=1e-2, loss_mean_over=loss_mean_over
    )
    prior.start(net, optimizer, loader, 4)
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    prior.finish()
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    return parameters | {"decays": prior.weight_decays(), "evidences": prior.evidences}
