"""Tiny runs of the online loop that can be made again, and all that is left when they end."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from kfac_backend.laplace_torch.interface import KfacGGN
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from marglik import (
    Hyperparameters,
    KronLaplace,
    OnlineTraining,
    PriorGroups,
    PriorLearner,
    Schedule,
)
from marglik.augmentation import Affine, LearnedAugmentation
from marglik.data import ImageBatches
from marglik.data.images.image_set import ImageSet
from marglik.storage.checkpoint import Checkpoints
from marglik.training.loop import OnlineResult

__all__ = ["CASES", "NUM_RECORDS", "make", "outcome", "run_until"]

NUM_RECORDS = 7
"""Of each run but the averaged: epochs 1, 2, update 2, epochs 3, 4, update 4, and what is after."""

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
cosine = partial(CosineAnnealingLR, T_max=12, eta_min=1e-3)
CASES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "AdamW": {
        "optimizer": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.0),
        "scheduler": partial(ExponentialLR, gamma=0.95),
    },
    "random labels": {"backend_kwargs": {"stochastic": True}},
    "regression": {"likelihood": "regression"},
    "MacKay": {"method": "mackay"},
    "the loader's generator": {"shuffle": "generator"},
    "the sampler's generator": {"shuffle": "sampler"},
    "images": {"images": True},
    "ranges": {"images": True, "augmented": True, "keep": "last"},
    "the last": {"keep": "last"},
    "averaged": {"keep": "last", "average": "last", "epochs": 6, "norm": True},
    "exponential average": {"keep": "last", "average": "ema"},
    "the first is the best": {"scheduler": partial(LambdaLR, lr_lambda=lambda i: 1 + 30 * (i > 6))},
    "no update": {"burn_in": 9, "backend_kwargs": {"stochastic": True}},
    "float16": {"float16": True},
    "K-FAC": {
        "kfac": {"lr": 0.02, "fisher": "mc"},
        "preconditioner": {"ema_decay": 0.5, "factor_every": 2, "update_every": 3},
    },
}


def make(
    case: str,
    seed: int = 0,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    **changes: Any,
) -> OnlineTraining:
    """A run that has not started; the seed is of its initial parameters and of what it draws."""
    options = {"likelihood": "classification", "optimizer": sgd, "scheduler": cosine} | CASES[case]
    options |= changes
    likelihood, images = options["likelihood"], options.get("images", False)
    dtype = torch.float32 if images or options.get("float16") else torch.float64
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    if images:
        layers = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)]
    else:
        norm = [nn.BatchNorm1d(6)] if options.get("norm") else []
        layers = [nn.Linear(4, 6), *norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)]
    model: nn.Module = nn.Sequential(*layers).to(dtype)
    if options.get("augmented"):
        model = LearnedAugmentation(model, [Affine("rotate", "shear")], copies=2)
    loader, curvature_loader = _loaders(options, dtype, seed)

    def make_laplace(delta: Any, sigma: Any) -> KronLaplace:
        kwargs = options.get("backend_kwargs", {})
        return KronLaplace(
            model, likelihood, sigma, delta, backend=KfacGGN, backend_kwargs=kwargs
        )  # fmt: skip

    hyperparameters = Hyperparameters(
        PriorGroups.from_model(model),
        1.0,
        sigma_noise=0.8 if likelihood == "regression" else 1.0,
        learn_sigma_noise=likelihood == "regression",
        method=options.get("method", "adam"),
    )
    schedule = Schedule(
        options.get("epochs", 4),
        every=2,
        steps=5,
        burn_in=options.get("burn_in", 0),
        keep=options.get("keep", "best"),
        average=options.get("average"),
    )
    if "kfac" in options:
        conditioning = PreconditionerOptions(damping_on="product", **options["preconditioner"])
        optimizer = KFAC(model, likelihood, options=conditioning, **options["kfac"])
    else:
        optimizer = options["optimizer"](model.parameters())
    learner = PriorLearner(
        likelihood, hyperparameters=hyperparameters, make_posterior=make_laplace,
        schedule=schedule, curvature_from="pass",
    )  # fmt: skip
    return OnlineTraining(
        model, optimizer, loader, learner, scheduler=options["scheduler"](optimizer),
        curvature_loader=curvature_loader, on_record=on_record,
        fabric=scaled_fabric() if options.get("float16") else None,
    )  # fmt: skip


def scaled_fabric() -> Fabric:
    """Steps in float16, the loss scaled by a factor that grows with every second step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    return Fabric(accelerator="cpu", devices=1, plugins=[precision])


def _loaders(options: dict[str, Any], dtype: torch.dtype, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    if options.get("images"):
        pixels = torch.randint(256, (20, 1, 8, 8), generator=generator, dtype=torch.uint8)
        labels = torch.randint(3, (20,), generator=generator)
        images = ImageSet(pixels, labels)
        make_batches = partial(ImageBatches, images, [128.0], [70.0], shuffle=True, seed=seed)
        augmented = make_batches(batch_size=8, augment="crop_flip")
        return augmented, make_batches(batch_size=5)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64).to(dtype)
    y = x[:, :3].argmax(-1)
    if options["likelihood"] == "regression":
        y = x[:, :3].sin() + 0.1 * torch.randn(20, 3, generator=generator, dtype=dtype)
    dataset = TensorDataset(x, y)
    own = torch.Generator().manual_seed(seed)
    kind = options.get("shuffle", "global")
    if kind == "sampler":
        return DataLoader(dataset, 8, sampler=RandomSampler(dataset, generator=own)), None
    return DataLoader(
        dataset, 8, shuffle=True, generator=own if kind == "generator" else None
    ), None


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
