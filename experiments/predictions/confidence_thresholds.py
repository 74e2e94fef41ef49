"""How many answers `confidence_threshold` gives from N held-out ones, beside the most that can be.

Confidences are drawn from a Beta distribution and are calibrated: an answer of confidence c is
right with probability c. So the risk of each threshold, and the share of all inputs that it
answers, are known. Ours is beside fixed-sequence testing that begins at three times the fewest
answers that can show the risk, and goes on in steps of 10 %, which one early mistake ends.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from experiments.studies import Result, markdown, study
from marglik.prediction.metrics import confidence_threshold

DRAWS = 1000
LEVEL = 0.9


@dataclass(frozen=True)
class Config:
    """Confidences of density Beta(a, b), and the risk to keep with N held-out answers."""

    risk: float
    a: float
    b: float
    N: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"risk_{100 * self.risk:g}_of_{self.N}"


CONFIGS = [
    Config(risk, a, b, N)
    for risk, a, b in ((0.05, 3.0, 1.0), (0.02, 3.0, 0.6))
    for N in (500, 1000, 3000)
]


def coverage_and_risk(config: Config, t: Any) -> tuple[Any, Any]:
    """The share of all inputs whose confidence is t or more, and how many of these are wrong."""
    a, b = config.a, config.b
    coverage = beta.sf(t, a, b)
    return coverage, 1 - a / (a + b) * beta.sf(t, a + 1, b) / coverage


def in_steps(confidence: Tensor, right: Tensor, risk: float) -> float:
    """Fixed-sequence testing of numbers of answers, from three times the fewest on."""
    ordered, order = confidence.sort(descending=True)
    wrong = (~right[order]).cumsum(0)
    threshold, size = math.inf, 3 * math.log(1 - LEVEL) / math.log(1 - risk)
    while (k := int(size)) <= len(order):
        m = int(wrong[k - 1])
        if m == k or beta.ppf(LEVEL, m + 1, k - m) > risk:
            break
        threshold, size = float(ordered[k - 1]), 1.1 * size
    return threshold


PROCEDURES: dict[str, Callable[[Tensor, Tensor, float], float]] = {
    "confidence_threshold": lambda c, right, risk: confidence_threshold(c, right, risk, LEVEL),
    "in steps": in_steps,
}


def run(config: Config) -> Result:
    """Draw held-out answers, and see what each procedure answers of all inputs."""
    random, thresholds = np.random.default_rng(0), {name: [] for name in PROCEDURES}
    for _ in range(DRAWS):
        c = torch.from_numpy(random.beta(config.a, config.b, config.N))
        right = torch.from_numpy(random.random(config.N)) < c
        for name, procedure in PROCEDURES.items():
            thresholds[name].append(min(procedure(c, right, config.risk), 1.0))
    coverage, risk = coverage_and_risk(config, np.linspace(0, 1, 10**5, endpoint=False))
    result: Result = {"best": float(coverage[risk <= config.risk].max())}
    for name, t in thresholds.items():
        shown = np.array(t)[np.array(t) < 1]
        coverage, risk = coverage_and_risk(config, shown)
        result[name] = {
            "coverage": float(coverage.sum() / DRAWS),
            "none": 1 - len(shown) / DRAWS,
            "broken": float((risk > config.risk).sum() / DRAWS),
        }
    return result


def table(results: list[Result]) -> str:
    """A row for each risk and number of held-out answers."""
    rows = [("risk", "N", "best", "procedure", "answered", "no threshold", "risk exceeded")]
    for result in sorted(results, key=lambda r: (-r["config"]["risk"], r["config"]["N"])):
        config = result["config"]
        rows += [
            (
                f"{config['risk']:.0%}", f"{config['N']:,}", f"{result['best']:.2f}", name,
                *(f"{result[name][key]:.2f}" for key in ("coverage", "none", "broken")),
            )
            for name in PROCEDURES
        ]  # fmt: skip
    return markdown(rows)


main = study("confidence_thresholds", __doc__, run, lambda options: CONFIGS, table)

if __name__ == "__main__":
    sys.exit(main())
