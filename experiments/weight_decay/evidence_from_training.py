"""Do weight decays need curvature passes, or are K-FAC's factors from training enough?

LeNet is trained on 400 or 1,400 digits for 60 epochs by K-FAC-reduce with one sampled label. The
prior is updated every five epochs, by exact passes over the data or from the moving averages of the
training's factors (`OnlineTraining(curvature_from="optimizer")`), which are new every ten steps or
every five. The other digits are the test set, on which the MAP is evaluated. The paper has no such
experiment.

``make evidence-from-training`` runs the missing parts in five minutes of one core.
"""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from experiments.studies import markdown, mean_with_error, quiet_training, study
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.options import CurvatureOptions
from marglik import Hyperparameters, OnlineTraining, Posterior, PriorGroups, Schedule
from marglik.models import LeNet
from marglik.posterior.prior import weight_decay_to_precision
from marglik.storage.provenance import environment
from marglik.training.schedule import CurvatureFrom

__all__ = ["CASES", "Config", "run", "table"]

EPOCHS, BATCH_SIZE, SIZES, SEEDS = 60, 64, (400, 1400), (0, 1)
CASES: dict[str, tuple[CurvatureFrom, int]] = {
    "passes": ("pass", 10),
    "factors every 10 steps": ("optimizer", 10),
    "factors every 5 steps": ("optimizer", 5),
}
"""Source of the curvature, and the steps between new factors."""


@dataclass(frozen=True)
class Config:
    """One number of training examples and one seed."""

    size: int
    seed: int

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"{self.size}_{self.seed}"


CONFIGS = [Config(size, seed) for size in SIZES for seed in SEEDS]


@quiet_training()
def run(config: Config) -> dict[str, Any]:
    """Run all cases, one after the other in this process."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    rows = {name: _row(config, *case) for name, case in CASES.items()}
    return {
        "config": asdict(config),
        "rows": rows,
        "seconds": time.perf_counter() - started,
        **environment(torch.device("cpu")),
    }


def _row(config: Config, curvature_from: CurvatureFrom, every: int) -> dict[str, Any]:
    (x, y), (x_test, y_test) = _digits(config.size)
    torch.manual_seed(config.seed)
    model = LeNet(10, 1, 8)
    generator = torch.Generator().manual_seed(config.seed)
    loader = DataLoader(TensorDataset(x, y), BATCH_SIZE, shuffle=True, generator=generator)
    curvature = CurvatureOptions(kfac_approx="reduce")
    options = PreconditionerOptions(
        damping=0.1, damping_on="product", factor_every=every, update_every=every, ema_decay=0.9,
        norm_control="kl_clip", norm_limit=1e-3,
    )  # fmt: skip
    optimizer = KFAC(
        model, "classification", 0.1, options=options, curvature=curvature.but(fisher="mc"),
        mean_over="examples", seed=config.seed,
    )  # fmt: skip
    precision = weight_decay_to_precision(5e-4, config.size, 1.0)
    hyperparameters = Hyperparameters(PriorGroups.from_model(model), precision)

    def make_posterior(delta: Tensor, sigma: Tensor) -> Posterior:
        return Posterior(model, "classification", curvature, prior_precision=delta)

    started = time.process_time()
    result = OnlineTraining(
        model, optimizer, loader, "classification", hyperparameters, make_posterior,
        Schedule(EPOCHS, 5, 5, 100, average=None), curvature_from=curvature_from,
        scheduler=CosineAnnealingLR(optimizer, EPOCHS * len(loader)),
    ).run()  # fmt: skip
    seconds = time.process_time() - started
    model.eval()
    with torch.no_grad():
        f = model(x_test)
    return {
        "nll": cross_entropy(f, y_test).item(),
        "accuracy": (f.argmax(-1) == y_test).float().mean().item(),
        "evidence": result.evidence / config.size,
        "weight_decay": (hyperparameters.prior_precision / config.size).tolist(),
        "processor_seconds": seconds,
    }


def _digits(size: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The first of 1,400 training digits, and the other 397 for tests."""
    from sklearn.datasets import load_digits  # it takes a second

    digits: Any = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(5))
    x = torch.tensor(digits.images, dtype=torch.float32)[order, None]
    x = (x / 16 - 0.3) / 0.37
    y = torch.tensor(digits.target)[order]
    return (x[:size], y[:size]), (x[1400:], y[1400:])


def table(found: Sequence[dict[str, Any]]) -> str:
    """Means ± standard errors over seeds, in Markdown; times and decays relative to the passes'."""
    lines = [
        ["examples", "updates from", "processor time", "test NLL of the MAP", "accuracy",
         "evidence per example", "weight decays off by a factor of"]
    ]  # fmt: skip
    for size in SIZES:
        runs = [result["rows"] for result in found if result["config"]["size"] == size]
        for name in CASES if runs else ():
            pairs = [(run[name], run["passes"]) for run in runs]
            times = [row["processor_seconds"] / unit["processor_seconds"] for row, unit in pairs]
            lines.append(
                [
                    str(size),
                    name,
                    mean_with_error(times, "{:.2f}"),
                    *(
                        mean_with_error([row[key] for row, _ in pairs])
                        for key in ("nll", "accuracy", "evidence")
                    ),
                    mean_with_error([_off(*pair) for pair in pairs], "{:.1f}"),
                ]
            )
    return markdown(lines)


def _off(row: dict[str, Any], other: dict[str, Any]) -> float:
    """Factor by which weight decays differ, e to the mean |log ratio| over tensors."""
    pairs = zip(row["weight_decay"], other["weight_decay"], strict=True)
    return math.exp(statistics.fmean(abs(math.log(a / b)) for a, b in pairs))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing tasks, and report."""
    return study("evidence_from_training", __doc__, run, lambda options: CONFIGS, table, arguments)


if __name__ == "__main__":
    sys.exit(main())
