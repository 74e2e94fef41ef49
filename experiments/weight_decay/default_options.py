"""Default options on ten small networks: learned weight decays beside none and a tuned grid.

The networks have BatchNorm, GroupNorm, LayerNorm, weight norm or none, and read images, vectors or
tokens; labels are right, or a fifth of those in training and held-out data is wrong. The loop
learns with its default options. Networks without weight decay are trained with the same rates and
average, and by a cosine without an average; seven fixed decays with the same rates and average, of
which the held-out data choose one. The test NLL is at a temperature that the held-out data choose,
with the prior on log τ that `marglik.calibrate` has.
The target: never worse than no decay by more than two standard errors, and better on most.
"""

import argparse
import math
import statistics
import sys
import tarfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from experiments.data import archive
from experiments.studies import markdown, mean_with_error, quiet_training, study
from kfac_backend import CurvatureOptions
from marglik import (
    Hyperparameters,
    OnlineTraining,
    Posterior,
    PriorGroups,
    Schedule,
    settling_rate,
    weight_decay_to_precision,
)
from marglik.prediction.calibration import PRIOR_OF_SHARPNESS
from marglik.storage.provenance import environment

GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SMALLEST = 1e-12
"""Weight decay of "none": positive, since a prior needs a precision."""


class Pooled(nn.Module):
    """A transformer block on tokens, whose outputs are averaged."""

    def __init__(self, tokens: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, 32)
        self.position = nn.Parameter(0.1 * torch.randn(tokens, 32))
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.mix = nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C) of tokens (N, R, width)."""
        x = self.embed(x) + self.position
        h = self.first(x)
        a = torch.softmax(self.query(h) @ self.key(h).transpose(1, 2) / 32**0.5, -1)
        x = x + self.mix(a @ self.value(h))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return self.head(x.mean(1))


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


def normed_weights() -> nn.Module:
    """Convolutions w = g v/‖v‖."""
    model = convolutions(lambda _: nn.Identity(), "flattened")
    for index in (0, 3):
        weight_norm(model[index])  # pyright: ignore[reportIndexIssue]
    return model


def no_norm(width: int) -> nn.Module:
    """In place of a norm."""
    return nn.Identity()


def digits() -> tuple[Tensor, Tensor]:
    """Images (N, 1, 8, 8), standardised, and labels."""
    found: Any = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32)[:, None]
    return (x - x.mean()) / x.std(), torch.tensor(found.target)


def rows_of_digits() -> tuple[Tensor, Tensor]:
    """The images' rows as tokens, (N, 8, 8)."""
    x, y = digits()
    return x[:, 0], y


def cancer() -> tuple[Tensor, Tensor]:
    """569 vectors of 30 features, two classes."""
    found: Any = load_breast_cancer()
    x = torch.tensor(found.data, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), torch.tensor(found.target)


def small_images() -> tuple[Tensor, Tensor]:
    """700 images of each class of CIFAR-10 (JPEG) at half their size, (N, 3, 16, 16)."""
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
    x = torch.stack(pixels).float().view(-1, 16, 16, 3).permute(0, 3, 1, 2).contiguous()
    classes = sorted(set(labels))
    return (x - x.mean()) / x.std(), torch.tensor([classes.index(label) for label in labels])


@dataclass(frozen=True)
class Problem:
    """A network and its data."""

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    examples: int
    epochs: int = 40
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.05


PROBLEMS = {
    "BatchNorm, pooled": Problem(lambda: convolutions(nn.BatchNorm2d, "pooled"), digits, 300),
    "BatchNorm, flattened": Problem(lambda: convolutions(nn.BatchNorm2d, "flattened"), digits, 300),
    "MLP": Problem(lambda: mlp(64, 10, no_norm), digits, 1000, epochs=20),
    "convolutions": Problem(lambda: convolutions(no_norm, "flattened"), digits, 1000, epochs=20),
    "MLP, LayerNorm": Problem(lambda: mlp(64, 10, nn.LayerNorm), digits, 400),
    "transformer": Problem(lambda: Pooled(8, 8, 10), rows_of_digits, 600, 40, "adam", 3e-3),
    "weight norm": Problem(normed_weights, digits, 400),
    # The last three were not looked at before the defaults were chosen, but for the limit of
    # scale-invariant weights' decays: GroupNorm showed that 5e-3 was too large.
    "GroupNorm": Problem(
        lambda: convolutions(lambda c: nn.GroupNorm(4, c), "pooled"), digits, 500
    ),
    "vectors, BatchNorm": Problem(lambda: mlp(30, 2, nn.BatchNorm1d), cancer, 300),
    "CIFAR-10 (JPEG), BatchNorm": Problem(
        lambda: convolutions(nn.BatchNorm2d, "flattened", 3, 16), small_images, 4000, epochs=15
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """A problem, and what is compared on it."""

    problem: str
    wrong: float
    seed: int
    part: Literal["default", "grid"]

    @property
    def name(self) -> str:
        """The name of its file."""
        problem = "".join(c if c.isalnum() else "_" for c in self.problem.lower())
        return f"{problem}_{round(100 * self.wrong)}_{self.part}_{self.seed}"


Split = tuple[Tensor, Tensor]


def splits_of(config: Config) -> tuple[Split, Split, Split]:
    """Training, held-out and test data; with wrong labels in the first two."""
    problem = PROBLEMS[config.problem]
    x, y = problem.data()
    generator = torch.Generator().manual_seed(config.seed)
    order = torch.randperm(len(y), generator=generator)
    x, y, classes = x[order], y[order], int(y.max()) + 1
    held_out = 100 if problem.examples <= 400 else 200
    ends = problem.examples, problem.examples + held_out
    wrong = torch.rand(ends[1], generator=generator) < config.wrong
    other = torch.randint(1, classes, (ends[1],), generator=generator)
    noisy = torch.where(wrong, (y[: ends[1]] + other) % classes, y[: ends[1]])
    return (
        (x[: ends[0]], noisy[: ends[0]]),
        (x[ends[0] : ends[1]], noisy[ends[0] :]),
        (x[ends[1] :][:3000], y[ends[1] :][:3000]),
    )


def train(
    config: Config, train_split: Split, weight_decay: float | None, rate: str
) -> tuple[nn.Module, dict[str, Any]]:
    """Train once; None learns the decays with default options."""
    problem = PROBLEMS[config.problem]
    torch.manual_seed(config.seed)
    model = problem.make()
    loader = DataLoader(TensorDataset(*train_split), 50, shuffle=True)
    steps = problem.epochs * len(loader)
    if problem.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), problem.lr, momentum=0.9, nesterov=True
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), problem.lr)
    scheduler = settling_rate(optimizer, steps)
    if rate == "cosine":
        scheduler = CosineAnnealingLR(optimizer, steps)
    learns = weight_decay is None
    schedule = Schedule(
        problem.epochs,
        burn_in=0 if learns else problem.epochs + 1,
        average=None if rate == "cosine" else "last",
    )
    delta = weight_decay_to_precision(5e-4 if learns else weight_decay, problem.examples)
    options = CurvatureOptions(unsupported="diagonal")
    started = time.process_time()
    result = OnlineTraining(
        model,
        optimizer,
        loader,
        "classification",
        Hyperparameters(PriorGroups.from_model(model), delta),
        lambda delta, sigma: Posterior(model, "classification", options, prior_precision=delta),
        schedule,
        scheduler=scheduler,
    ).run()
    found: dict[str, Any] = {"seconds": time.process_time() - started}
    if learns:
        updates = [record for record in result.records if record["kind"] == "update"]
        found |= {
            "weight_decay": updates[-1]["weight_decay"],
            "evidence_per_example": [record["evidence_per_example"] for record in updates],
        }
    return model.eval(), found


@torch.no_grad()
def scores(model: nn.Module, held_out: Split, test: Split) -> dict[str, float]:
    """NLL of held-out and test data at the temperature that suits the former, and accuracy."""
    f_held_out, f = model(held_out[0]), model(test[0])
    grid = torch.logspace(-1, 1.5, 126)
    losses = torch.stack([F.cross_entropy(f_held_out / tau, held_out[1]) for tau in grid])
    prior = 0.5 * PRIOR_OF_SHARPNESS * grid.log().square() / len(f_held_out)
    tau = grid[(losses + prior).argmin()]
    return {
        "nll": F.cross_entropy(f / tau, test[1]).item(),
        "accuracy": (f.argmax(-1) == test[1]).float().mean().item(),
        "held_out_nll": losses.min().item(),
        "tau": tau.item(),
    }


def run(config: Config) -> dict[str, Any]:
    """Train the networks of a part, and test them."""
    torch.set_num_threads(1)
    train_split, held_out, test = splits_of(config)
    ways: dict[str, tuple[float | None, str]] = {
        "learned": (None, "settling"),
        "none": (SMALLEST, "settling"),
        "none, cosine": (SMALLEST, "cosine"),
    }
    if config.part == "grid":
        ways = {f"{decay:g}": (decay, "settling") for decay in GRID}
    found = {}
    with quiet_training():
        for way, (decay, rate) in ways.items():
            model, record = train(config, train_split, decay, rate)
            found[way] = scores(model, held_out, test) | record
    return {
        "config": asdict(config),
        "results": found,
        "seconds": sum(of["seconds"] for of in found.values()),
        **environment(torch.device("cpu")),
    }


def shares(problem: str) -> tuple[float, ...]:
    """Shares of wrong labels; the MLP's go up to 40 %."""
    return (0.0, 0.2, 0.4) if problem == "MLP" else (0.0, 0.2)


def tasks(options: argparse.Namespace) -> list[Config]:
    """The comparison with no decay first, then the grid."""
    parts: tuple[Literal["default", "grid"], ...] = ("default", "grid")
    return [
        Config(problem, wrong, seed, part)
        for part in parts
        for seed in range(options.seeds)
        for problem in options.data
        for wrong in shares(problem)
    ]


def table(found: list[dict[str, Any]]) -> str:
    """Learned minus the others, paired by seed; with the number of problems where it loses."""
    runs: dict[tuple[str, float, int], dict[str, Any]] = defaultdict(dict)
    for of in found:
        config = of["config"]
        runs[config["problem"], config["wrong"], config["seed"]] |= of["results"]
    rivals = ("none", "none, cosine", "grid")
    head = ["network", "wrong", "learned: NLL, accuracy", *(f"− {rival}" for rival in rivals)]
    rows = [[*head, "cost"]]
    losses: dict[str, list[str]] = defaultdict(list)
    judged: set[str] = set()
    for problem in PROBLEMS:
        for wrong in shares(problem):
            seeds = [of for key, of in sorted(runs.items()) if key[:2] == (problem, wrong)]
            seeds = [of for of in seeds if "learned" in of]
            if not seeds:
                continue
            learned = [of["learned"] for of in seeds]
            accuracy = 100 * statistics.fmean(of["accuracy"] for of in learned)
            row = [problem, f"{wrong:.0%}"]
            row.append(f"{mean_with_error([of['nll'] for of in learned])}, {accuracy:.1f} %")
            for rival in rivals:
                pairs = [(of["learned"], rival_of(of, rival)) for of in seeds]
                differences = [a["nll"] - b["nll"] for a, b in pairs if b]
                row.append(mean_with_error(differences, "{:+.3f}") if differences else "")
                if len(differences) > 1:  # one seed has no standard error
                    judged.add(rival)
                if is_worse(differences):
                    losses[rival].append(f"{problem} ({wrong:.0%})")
            cost = statistics.fmean(
                of["learned"]["seconds"] / of["none"]["seconds"] for of in seeds
            )
            rows.append([*row, f"{cost:.1f}"])
    notes = [
        f"\nWorse than {rival} by more than two standard errors: "
        f"{', '.join(losses[rival]) or 'nowhere'}."
        for rival in rivals
        if rival in judged
    ]
    return "\n".join([markdown(rows), *notes])


def rival_of(results: dict[str, Any], rival: str) -> dict[str, float] | None:
    """The results of a rival; of the grid, those of the decay that the held-out data choose."""
    if rival != "grid":
        return results.get(rival)
    grid = [results[f"{decay:g}"] for decay in GRID if f"{decay:g}" in results]
    return min(grid, key=lambda of: of["held_out_nll"]) if grid else None


def is_worse(differences: list[float]) -> bool:
    """Whether their mean is above zero by more than two standard errors."""
    if len(differences) < 2:
        return False
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) > 2 * error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing tasks, and report."""
    return study(
        "default_options", __doc__, run, tasks, table, arguments, problems=PROBLEMS, seeds=3
    )


if __name__ == "__main__":
    sys.exit(main())
