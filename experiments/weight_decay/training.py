"""What the studies of weight decays share: small networks and data, a training, scaled scores."""

import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR
from torch.optim.swa_utils import AveragedModel, update_bn

from experiments.data import archive
from kfac_backend import CurvatureOptions
from kfac_backend.atomic_files import write_file
from marglik import OnlineResult, OnlineTraining, Posterior, PriorLearner
from marglik.prediction.calibration import PRIOR_OF_SHARPNESS

CURVATURE = CurvatureOptions(unsupported="diagonal")
DEFAULT = 5e-4
"""Weight decay that learning starts from."""

Split = tuple[Any, Tensor]
"""Inputs, which can be indexed, and labels (N,)."""


# Networks


class Residual(nn.Module):
    """Add the input of a network to its output."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + f(x)."""
        return x + self.layers(x)


def convolutions(
    norm: Callable[[int], nn.Module], head: str, channels: int = 1, size: int = 8
) -> nn.Module:
    """Two convolutions with a norm each; the head reads averages or all positions."""
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    if head == "flattened":
        ends = [nn.Flatten(), nn.Linear(32 * (size // 2) ** 2, 10)]
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), norm(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), norm(32), nn.ReLU(), *ends,
    )  # fmt: skip


def mlp(inputs: int, classes: int, norm: Callable[[int], nn.Module], hidden: int = 64) -> nn.Module:
    """Two hidden layers with a norm each."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, hidden), norm(hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), norm(hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip


def no_norm(width: int) -> nn.Module:
    """In place of a norm."""
    return nn.Identity()


# Data


def digits() -> tuple[Tensor, Tensor]:
    """Images (N, 1, 8, 8), standardised, and labels."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    return (x - x.mean()) / x.std(), torch.tensor(labels)


SMALL_IMAGES = Path("data/small_images.safetensors")
"""In the working directory: decoding the archive takes longer than many a training."""


def small_images() -> tuple[Tensor, Tensor]:
    """700 images of each class of CIFAR-10 (JPEG) at half their size, (N, 3, 16, 16)."""
    if not SMALL_IMAGES.exists():
        pixels, labels = _decoded()
        SMALL_IMAGES.parent.mkdir(exist_ok=True)
        write_file(SMALL_IMAGES, save({"pixels": pixels, "labels": labels}))
    stored = load_file(SMALL_IMAGES)
    x = stored["pixels"].float().view(-1, 16, 16, 3).permute(0, 3, 1, 2).contiguous()
    return (x - x.mean()) / x.std(), stored["labels"]


def _decoded() -> tuple[Tensor, Tensor]:
    """Their pixels (N, 768) as bytes, and labels."""
    pixels, labels = [], []
    with tarfile.open(archive()) as files:
        for member in files:
            parts = member.name.split("/")  # train/CLASS/NNNN.jpg
            if not member.isfile() or parts[0] != "train" or int(parts[2][:4]) >= 700:
                continue
            with Image.open(files.extractfile(member)) as image:  # pyright: ignore
                small = image.convert("RGB").resize((16, 16), Image.Resampling.BOX)
                pixels.append(torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8))
            labels.append(parts[-2])
    classes = sorted(set(labels))
    return torch.stack(pixels), torch.tensor([classes.index(label) for label in labels])


def with_wrong_labels(
    x: Any,
    y: Tensor,
    examples: int,
    held_out: int,
    wrong: float,
    seed: int,
    *,
    structured: bool = False,
) -> tuple[Split, Split, Split]:
    """Training, held-out and at most 3,000 test data of a seed.

    A share of the labels in the first two is changed to another class: uniformly, or if it is
    structured to the next class.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    x, y, classes = x[order], y[order], int(y.max()) + 1
    ends = examples, examples + held_out
    chosen = torch.rand(ends[1], generator=generator) < wrong
    other = torch.randint(1, 2 if structured else classes, (ends[1],), generator=generator)
    noisy = torch.where(chosen, (y[: ends[1]] + other) % classes, y[: ends[1]])
    return (
        (x[: ends[0]], noisy[: ends[0]]),
        (x[ends[0] : ends[1]], noisy[ends[0] :]),
        (x[ends[1] :][:3000], y[ends[1] :][:3000]),
    )


@dataclass
class Batches:
    """Shuffled batches (x, y) of inputs that can be indexed: tensors or graphs."""

    x: Any
    y: Tensor
    batch_size: int

    @property
    def num_examples(self) -> int:
        """N."""
        return len(self.y)

    def __len__(self) -> int:
        return -(-len(self.y) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for which in torch.randperm(len(self.y)).split(self.batch_size):
            yield self.x[which], self.y[which]


# Training


def averaged_model(model: nn.Module) -> AveragedModel:
    """Polynomial-decay average of the parameters with η = 4, as learners have it by default."""

    def include(averages: Any, parameters: Any, before: Any) -> None:
        torch._foreach_lerp_(averages, parameters, 5 / (int(before) + 5))  # t = before + 1

    return AveragedModel(model, multi_avg_fn=include)


@dataclass
class Trained:
    """A network, its cost, and what was learned of its weight decays."""

    model: nn.Module
    seconds: float
    """CPU time."""
    record: dict[str, Any] = field(default_factory=dict)
    result: OnlineResult | None = None
    """Where the decays were learned, or those of another training were taken."""

    @property
    def learner(self) -> PriorLearner:
        """What learned the decays."""
        assert self.result is not None and self.result.learner is not None
        return self.result.learner

    @property
    def posterior(self) -> Posterior:
        """At the network, where its decays were learned."""
        assert self.learner.posterior is not None
        return self.learner.posterior


@dataclass(frozen=True)
class Training:
    """A network, and how it is trained."""

    make: Callable[[], nn.Module]
    epochs: int = 40
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.05
    batch_size: int = 50

    def run(
        self,
        split: Split,
        seed: int,
        decays: float | PriorLearner | None,
        rate: str = "constant",
        after_epoch: Callable[[int, nn.Module], None] | None = None,
        loader: Any = None,
        likelihood: str = "classification",
        held_out: Split | None = None,
        **options: Any,
    ) -> Trained:
        """Train once.

        Args:
            split: the training data.
            seed: of the initial parameters and of the batches' order.
            decays: fixed, in a plain loop; the course of those of another training; None learns
                them with default options.
            rate: "constant", our default, with averaged parameters; "cosine", to zero, or
                "one-cycle", up to twice the rate and to zero: without an average of fixed decays.
            after_epoch: called with the number of an epoch that has ended, and the network.
            loader: of the training data, in place of `Batches`.
            likelihood: of the labels, where decays are learned.
            held_out: from which that likelihood learns the share of wrong labels.
            options: of the learner, where decays are learned.
        """
        torch.manual_seed(seed)
        model = self.make()
        loader = loader or Batches(*split, self.batch_size)
        steps = self.epochs * len(loader)
        optimizer = self._optimizer(model)
        scheduler = None
        if rate == "cosine":
            scheduler = CosineAnnealingLR(optimizer, steps)
        if rate == "one-cycle":
            scheduler = OneCycleLR(optimizer, 2 * self.lr, steps)
        started = time.process_time()
        if isinstance(decays, (int, float)):
            self._train(
                model, loader, optimizer, scheduler, decays, rate == "constant", after_epoch
            )
            return Trained(model.eval(), time.process_time() - started)
        learner = PriorLearner(likelihood, CURVATURE, epochs=self.epochs, **options)
        learner = learner if decays is None else decays.replay()
        result = OnlineTraining(
            model, optimizer, loader, learner, scheduler=scheduler,
            held_out=None if held_out is None else [held_out],
        ).run()  # fmt: skip
        seconds = time.process_time() - started
        if decays is not None:
            return Trained(model.eval(), seconds, result=result)
        updates = [record for record in result.records if record["kind"] == "update"]
        record = {
            "weight_decay": updates[-1]["weight_decay"],
            "evidence_per_example": [update["evidence_per_example"] for update in updates],
        }
        if "ranges" in updates[0]:
            record["path"] = [update["ranges"] for update in updates]
        return Trained(model.eval(), seconds, record, result)

    def warm_up(self, split: Split) -> None:
        """Train for a moment, so that no timed training loads code first."""
        short = replace(self, epochs=2)
        for decays in (DEFAULT, None):
            short.run((split[0][:60], split[1][:60]), 0, decays)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), self.lr)
        return torch.optim.SGD(model.parameters(), self.lr, momentum=0.9, nesterov=True)

    def _train(
        self,
        model: nn.Module,
        loader: Batches,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        decay: float,
        averages: bool,
        after_epoch: Callable[[int, nn.Module], None] | None,
    ) -> None:
        """A plain loop with torch's weight decay, and the learner's average if wanted."""
        for group in optimizer.param_groups:
            group["weight_decay"] = decay
        average = averaged_model(model) if averages else None
        for epoch in range(1, self.epochs + 1):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                if average is not None:
                    average.update_parameters(model)
            if after_epoch is not None:
                after_epoch(epoch, model)
        if average is not None:
            model.load_state_dict(average.module.state_dict())
            update_bn(loader, model)


@dataclass(frozen=True, kw_only=True)
class Problem(Training):
    """A network, how it is trained, and the data."""

    data: Callable[[], tuple[Any, Tensor]]
    examples: int = 0
    """For training; 0 where a study has several numbers of them."""
    held_out: int = 200


# Scores


def scaled_scores(f_held_out: Tensor, y_held_out: Tensor, f: Tensor, y: Tensor) -> dict[str, float]:
    """NLL and accuracy of a mixture, at the temperature that held-out data choose.

    The class probabilities are the mean of softmax(f/τ) over networks; the prior on log τ is that
    of `marglik.calibrate`.

    Args:
        f_held_out: outputs (S, N, C) of S networks on held-out data.
        y_held_out: its labels.
        f: outputs (S, M, C) on test data.
        y: its labels.
    """
    grid = torch.logspace(-1, 1.5, 126)
    losses = torch.stack([mixture_nll(f_held_out / tau, y_held_out) for tau in grid])
    prior = 0.5 * PRIOR_OF_SHARPNESS * grid.log().square() / len(y_held_out)
    tau = grid[(losses + prior).argmin()]
    p = torch.softmax(f / tau, -1).mean(0)
    return {
        "nll": mixture_nll(f / tau, y).item(),
        "raw_nll": mixture_nll(f, y).item(),
        "accuracy": (p.argmax(-1) == y).float().mean().item(),
        "held_out_nll": losses.min().item(),
        "tau": tau.item(),
    }


@torch.no_grad()
def scores_of(
    model: nn.Module, held_out: Split, test: Split, at_a_time: int = 3000
) -> dict[str, float]:
    """Those of `scaled_scores` for one network, which sees so many examples at a time."""
    f_held_out, f = (
        torch.cat([model(part) for part in x.split(at_a_time)])[None] for x, _ in (held_out, test)
    )
    return scaled_scores(f_held_out, held_out[1], f, test[1])


def mixture_nll(f: Tensor, y: Tensor) -> Tensor:
    """NLL (nats, a mean) of the mean over networks of softmax(f), for f (S, N, C) and y (N,)."""
    log_p = torch.log_softmax(f, -1).logsumexp(0) - torch.tensor(float(len(f))).log()
    return F.nll_loss(log_p, y)
