"""Can K-FAC's defaults be trusted? Beside tuned SGD and AdamW, on five small problems.

SGD and AdamW have six learning rates each. K-FAC has three, and its defaults except for the limit
on the norm of its gradients: the default ("kl_clip", for the current learning rate), "peak_kl_clip"
(for the schedule's highest rate) with two limits, or no limit. All have three seeds and the same
number of steps with batches of 100 (64 with labels). There are two schedules: a warm-up of 5 % and
a cosine, or a constant rate. Choices and tables use losses on validation data and in the last steps
of training, never test data. The paper has no such experiment.

``make optimizer-defaults`` runs the missing parts in a quarter of an hour of one core.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import data_file
from experiments.data.uci import UCI
from experiments.optimizers.training import Candidate, Config, Method, Problem, Schedule, run
from experiments.studies import markdown, study
from marglik.data import Digits
from marglik.data.batches import Splits
from marglik.data.splits import hold_out
from marglik.models import LeNet

__all__ = ["METHODS", "PROBLEMS", "SCHEDULES", "Task", "table"]


def _digits() -> Splits:
    return Digits(validation=0.2).load()


def _autoencoded(highest: float = 1.0) -> Splits:
    """Pixels from 0 to 1, and the same from 0 to the highest as targets."""
    from sklearn.datasets import load_digits  # it takes a second

    digits = load_digits()
    images: Any = digits.images  # pyright: ignore[reportAttributeAccessIssue]
    x = torch.tensor(images, dtype=torch.float32).flatten(1) / 16
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    parts = [(part, highest * part) for part in x.split([1200, 300, 297])]
    return Splits(parts[0], parts[1], parts[2], "digits")


def _concrete() -> Splits:
    return hold_out(UCI("concrete", 0, data_file("uci.tar.gz")).load(), 0.15, 0)[0]


def _tanh_network(*widths: int) -> nn.Sequential:
    pairs = zip(widths, widths[1:], strict=False)
    return nn.Sequential(*[layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())][:-1])


def _squares(f: Tensor, y: Tensor) -> Tensor:
    """½ ‖f − y‖², a mean over examples."""
    return 0.5 * (f - y).square().sum(-1).mean()


def _binary(f: Tensor, y: Tensor) -> Tensor:
    """Cross-entropies (nats), a sum over pixels and a mean over examples."""
    each = nn.functional.binary_cross_entropy_with_logits(f, y, reduction="none")
    return each.sum(-1).mean()


def _small(_: Splits) -> nn.Module:
    return _tanh_network(64, 32, 8, 32, 64)


PROBLEMS = {
    "binary": Problem(
        "autoencoder of digits, cross-entropy", _autoencoded,
        lambda _: _tanh_network(64, 100, 50, 6, 50, 100, 64), "bernoulli", 100, loss=_binary,
    ),
    "squares": Problem(
        "autoencoder of digits, squares", _autoencoded, _small, "regression", 100, loss=_squares
    ),
    "squares16": Problem(
        "... with targets from 0 to 16", partial(_autoencoded, 16.0), _small, "regression", 100,
        loss=_squares,
    ),
    "lenet": Problem("digits, LeNet", _digits, lambda _: LeNet(10, 1, 8), "classification", 64),
    "concrete": Problem(
        "UCI concrete", _concrete, lambda _: _tanh_network(8, 50, 50, 1), "regression", 64,
        loss=_squares,
    ),
}  # fmt: skip


def _kfac(title: str, control: str, limit: float | None = None) -> Method:
    # All that matters here is named, so that another default changes no result.
    options = {"norm_control": control, "norm_limit": limit, "ema_decay": 0.9}
    return Method(title, "nesterov", "reduce", {**options, "factor_every": 10, "update_every": 10})


METHODS: Mapping[str, Method] = {
    "sgd": Method("SGD, Nesterov, best of six rates", "nesterov"),
    "adamw": Method("AdamW, best of six rates", "adamw", weight_decay=1e-2),
    "none": _kfac("K-FAC, no limit", "none"),
    "clip": _kfac("K-FAC, kl_clip 0.001", "kl_clip", 1e-3),
    "peak3": _kfac("K-FAC, peak_kl_clip 0.003", "peak_kl_clip", 3e-3),
    "peak": _kfac("K-FAC, peak_kl_clip 0.01", "peak_kl_clip", 1e-2),
}
RATES = {"sgd": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), "adamw": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)}
KFAC_RATES = (0.03, 0.1, 0.3)
STEPS = 300
SCHEDULES = {
    "cosine": Schedule(STEPS, STEPS // 20),
    "constant": Schedule(STEPS, 0, end=1.0),
}
SEEDS = (1, 2, 3)
DAMPING = 0.1
"""K-FAC's."""


@dataclass(frozen=True)
class Task:
    """All learning rates and seeds of one method on one problem."""

    problem: str
    schedule: str
    method: str

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"{self.problem}_{self.schedule}_{self.method}"


TASKS = [Task(p, s, m) for p in PROBLEMS for s in SCHEDULES for m in METHODS]


def run_one(task: Task) -> dict[str, Any]:
    """Train with all rates and seeds; returns the last losses."""
    rates = RATES.get(task.method, KFAC_RATES)
    config = Config(
        "optimizer_defaults",
        task.problem,
        task.method,
        "search",
        tuple(Candidate(rate, DAMPING) for rate in rates),
        SEEDS,
        SCHEDULES[task.schedule],
        measure_every=STEPS // 10,
    )
    found = run(PROBLEMS[task.problem], METHODS[task.method], config)
    return found | {"schedule": task.schedule}


Found = dict[tuple[str, str, str], dict[float, tuple[float, float]]]
"""Problem, schedule, method -> the last losses of each rate."""


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Last validation and training losses as Markdown: geometric means over the seeds.

    The first table divides the losses of all problems and schedules by the lower of tuned SGD's
    and AdamW's.
    """
    losses: Found = {
        (r["config"]["problem"], r["schedule"], r["config"]["method"]): _losses(r) for r in found
    }
    parts = [_summary(losses)]
    for name, problem in PROBLEMS.items():
        for schedule in SCHEDULES:
            rows = [["", "best", *(f"rate {rate:g}" for rate in KFAC_RATES)]]
            for method in METHODS:
                if of_rates := losses.get((name, schedule, method)):
                    own = [_shown(of_rates[r]) if method not in RATES else "" for r in KFAC_RATES]
                    rows.append([METHODS[method].title, _shown(min(of_rates.values())), *own])
            parts += [f"## {problem.title}, {schedule}", markdown(rows)]
    return "\n\n".join(parts)


def _summary(losses: Found) -> str:
    """Losses of K-FAC over those of tuned SGD or AdamW, whichever is lower, as Markdown.

    The columns are geometric means over the results that exist, the number of lower losses, and
    the highest. A ratio counts as at most 100, also if a seed diverged.
    """
    rows = [["", "validation loss, times", "lower", "highest"]]
    rows[0] += ["training loss, times", "lower", "highest"]
    for name in [name for name in METHODS if name not in RATES]:
        ratios: list[tuple[float, float]] = []
        for problem in PROBLEMS:
            for schedule in SCHEDULES:
                own, *tuned = (losses.get((problem, schedule, m), {}) for m in (name, *RATES))
                if own and all(tuned):
                    best = [min(each[i] for of in tuned for each in of.values()) for i in (0, 1)]
                    ratios += [(each[0] / best[0], each[1] / best[1]) for each in own.values()]
        cells = []
        for i in (0, 1) if ratios else ():
            of = [min(ratio[i], 100.0) for ratio in ratios]
            cells.append(f"{statistics.geometric_mean(of):.2f}")
            cells.append(f"{sum(ratio < 1 for ratio in of)} of {len(of)}")
            cells.append(f"{max(of):.3g}")
        rows.append([METHODS[name].title, *cells])
    return markdown(rows)


def _losses(found: Mapping[str, Any]) -> dict[float, tuple[float, float]]:
    """Rate -> last validation and training loss; infinite if a seed diverged."""
    by_rate: dict[float, list[tuple[float, float]]] = {}
    for curve in found["curves"]:
        last = (math.inf, math.inf)
        if curve["diverged"] is None:
            last = curve["loss"][-1], curve["train loss"][-1]
        by_rate.setdefault(curve["candidate"]["lr"], []).append(last)
    return {
        rate: (_mean([row[0] for row in rows]), _mean([row[1] for row in rows]))
        for rate, rows in by_rate.items()
    }


def _mean(losses: Sequence[float]) -> float:
    return statistics.geometric_mean(losses) if max(losses) < math.inf else math.inf


def _shown(losses: tuple[float, float]) -> str:
    """Validation loss (training loss)."""
    if losses[0] == math.inf:
        return "diverges"
    return f"{losses[0]:.3g} ({losses[1]:.3g})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing tasks, and report."""
    return study("optimizer_defaults", __doc__, run_one, lambda options: TASKS, table, arguments)


if __name__ == "__main__":
    sys.exit(main())
