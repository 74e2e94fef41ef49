"""Does it help to train by natural gradient while the weight decay is learned?

The weight decays of a network on 400 digits are learned online by the evidence. Its steps are taken
by SGD with Nesterov's momentum, by AdamW, by K-FAC with its own damping alone, or by K-FAC whose
damping contains the learned weight decays. The last is natural gradient on the posterior
(`marglik.training.network`). Each optimiser's learning rate is chosen from three on held-out data;
the network is then trained on all data. None or 20 % of the labels are flipped.

The paper has no such experiment. ``make natural-gradient`` runs the missing parts; each seed and
share is a JSON file in ``results/natural_gradient/`` (of the working directory).
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.studies import mean_with_error, one_table_study, quiet_training
from experiments.weight_decay.weight_decay_study import PROBLEMS, Task, Variant
from experiments.weight_decay.weight_decay_study import Config as StudyConfig
from marglik.storage.provenance import environment
from marglik.training.optimizers import KfacConfig, OptimizerConfig

__all__ = ["OPTIMIZERS", "Config", "run", "table"]

KL_CLIP: Mapping[str, Any] = {"norm_control": "kl_clip", "norm_limit": 1e-3, "ema_decay": 0.0}
OPTIMIZERS: Mapping[str, tuple[OptimizerConfig, tuple[float, ...]]] = {
    "SGD": (OptimizerConfig(), (0.03, 0.1, 0.3)),
    "AdamW": (OptimizerConfig(name="adamw"), (1e-3, 3e-3, 1e-2)),
    "K-FAC": (
        OptimizerConfig(name="kfac", kfac=KfacConfig(prior_is_damping=False, **KL_CLIP)),
        (0.03, 0.1, 0.3),
    ),
    "K-FAC, prior as damping": (
        OptimizerConfig(name="kfac", kfac=KfacConfig(**KL_CLIP)),
        (0.03, 0.1, 0.3),
    ),
}
"""Optimisers, each with the learning rates to try."""


@dataclass(frozen=True)
class Config:
    """One seed and one share of flipped labels."""

    seed: int = 0
    flipped: float = 0.0
    data: str = "digits_lenet"
    size: int = 400

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"{self.data}_{self.size}_{round(100 * self.flipped)}_{self.seed}"


CONFIGS = [Config(seed, flipped) for seed in range(5) for flipped in (0.0, 0.2)]


@quiet_training()
def run(config: Config) -> dict[str, Any]:
    """Choose each optimiser's learning rate on held-out data, then train on all data."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    problem = PROBLEMS[config.data]
    study = StudyConfig(config.data, config.seed, size=config.size)
    rows = {}
    for name, (optimizer, rates) in OPTIMIZERS.items():
        validation = {}
        for lr in rates:
            task = Task.of(study, replace(problem, optimizer=_at(optimizer, lr)), config.flipped)
            validation[lr] = _score(task, "parted", "validation")["nll"]
        lr = min(validation, key=validation.__getitem__)
        task = Task.of(study, replace(problem, optimizer=_at(optimizer, lr)), config.flipped)
        rows[name] = {"lr": lr, "validation": validation, **_score(task, "everything", "test")}
    return {
        "config": asdict(config),
        "rows": rows,
        "seconds": time.perf_counter() - started,
        **environment(torch.device("cpu")),
    }


def _at(optimizer: OptimizerConfig, lr: float) -> OptimizerConfig:
    return replace(optimizer, lr=lr)


def _score(task: Task, trained_on: str, split: Any) -> dict[str, float]:
    """NLL (nats) and accuracy of the MAP, evidence per example, processor seconds."""
    try:
        trained = task.train(getattr(task, trained_on), task.learned(Variant()))
    except FloatingPointError:
        return {"nll": float("inf")}  # diverged: another learning rate is chosen
    return {
        **task.metrics(trained.map, split),
        "evidence": trained.result.evidence / trained.laplace.n_data,
        "seconds": trained.seconds,
    }


def table(folder: Path) -> str:
    """Means ± standard errors over seeds, in Markdown; SGD's NLL minus each other, paired."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    lines = [
        "| labels flipped | optimiser | test NLL of the MAP | SGD's NLL minus this | accuracy "
        "| evidence per example | processor seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for flipped in sorted({result["config"]["flipped"] for result in found}):
        runs = [result["rows"] for result in found if result["config"]["flipped"] == flipped]
        for name in OPTIMIZERS:
            rows = [run[name] for run in runs]
            gained = [run["SGD"]["nll"] - run[name]["nll"] for run in runs]
            cells = [
                mean_with_error([row["nll"] for row in rows]),
                "" if name == "SGD" else mean_with_error(gained),
                mean_with_error([row["accuracy"] for row in rows]),
                mean_with_error([row["evidence"] for row in rows]),
                f"{statistics.median(row['seconds'] for row in rows):.1f}",
            ]
            lines.append(f"| {flipped:.0%} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing tasks, and report."""
    return one_table_study("natural_gradient", __doc__ or "", run, CONFIGS, table, arguments)


if __name__ == "__main__":
    sys.exit(main())
