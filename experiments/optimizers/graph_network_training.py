"""Figure 3 of Eschenhagen et al. 2023: a graph network by K-FAC-expand, -reduce and Nesterov's SGD.

The paper uses ogbg-molpcba and five seeds. The target is a mean average precision of .28098 on the
validation data, the reference's median. The reference, tuned Nesterov, reaches it in 31,887 ± 2,070
of 60,000 steps (2.33 ± .22 hours), K-FAC-expand in 16,106 ± 863 (51 %; 57 % of the time),
K-FAC-reduce in 15,566 ± 429 (49 %; 53 %). All have a momentum of .94494 and a weight decay of
1.286e-7. The learning rate has a linear warm-up of 5 % of the steps, then a linear decay to 1e-3 of
its highest value over .8615 of the rest. K-FAC has .75 of the warm-up and steps. Its learning rate
in [.1, 10] and damping in [1e-3, 1] are searched log-uniformly and chosen by the run that reaches
the target first. Factors and inverses are new every 10 steps, from one batch and one MC sample.

Here the data is NCI1, with batches of 64 and a hundredth of the steps, for two cores. Its class is
one Bernoulli target, so that the metric and the code are those of ogbg-molpcba. The target is
defined as in the paper: the median over seeds of the tuned reference's last average precision. The
row "× 0.75" is not in the paper's figure. It is the reference tuned again for .75 of the steps; the
paper says that none of those runs reached its target.

``make graph-network-training`` runs the missing parts.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from experiments.data import data_file
from experiments.data.nci1 import NCI1
from experiments.optimizers import steps_to_target
from experiments.optimizers.runs import Config, Method, Problem, Schedule, Timing
from experiments.optimizers.steps_to_target import Study
from marglik.data.tensors import TensorSplits
from marglik.models import GraphNetwork

__all__ = ["METHODS", "PROBLEMS", "STUDY"]


def _nci1() -> TensorSplits:
    return NCI1(data_file("NCI1.tar.gz"), validation=0.2).load()


def _network(splits: Any, targets: int, dim: int, depth: int) -> GraphNetwork:
    graphs = splits.train[0]
    return GraphNetwork(graphs.nodes.shape[1], targets, graphs.edges.shape[1], dim, depth)


PROBLEMS = {
    "nci1": Problem(
        "NCI1", _nci1, partial(_network, targets=1, dim=32, depth=2),
        "bernoulli", 64, "average precision",
    ),
}  # fmt: skip

MOMENTUM, WEIGHT_DECAY = 0.9449369031171744, 1.2859640541025928e-7
EVERY = {"factor_every": 10, "update_every": 10, "ema_decay": 0.0, "norm_control": "none"}
_method = partial(Method, base="nesterov", momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
METHODS = {
    "nesterov": _method("Nesterov"),
    "nesterov short": _method("Nesterov, × 0.75", pace=0.75),
    "expand": _method("K-FAC-expand", kfac_approx="expand", options=EVERY, pace=0.75),
    "reduce": _method("K-FAC-reduce", kfac_approx="reduce", options=EVERY, pace=0.75),
}
SCHEDULE = Schedule(60_000, 3_000, "linear", end=1e-3, fall=0.861509027839639)
STUDY = Study(
    title="",
    methods=METHODS,
    schedules={"nci1": SCHEDULE.times(0.01)},
    # The paper's range for K-FAC was [.1, 10]. On NCI1 most of it kills the ReLUs, with Nesterov's
    # SGD as with K-FAC; there all methods have the same range, a hundred times lower.
    lr={"nci1": (1e-3, 1.0)},
    damping=(1e-3, 1.0),
    block=20,
    paper={
        "nesterov": ("31,887 ± 2,070", "100", "100"),
        "expand": ("16,106 ± 863", "51", "57"),
        "reduce": ("15,566 ± 429", "49", "53"),
    },
)


def run_one(task: Config | Timing) -> dict[str, Any]:
    """Run a search, the seeds, or the timing."""
    return steps_to_target.run_task(task, PROBLEMS, METHODS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, run the seeds, time, write tables and figures; returns the exit status."""
    return steps_to_target.main(
        arguments,
        name="graph_network_training",
        description=__doc__ or "",
        studies=[STUDY],
        problems=PROBLEMS,
        run_one=run_one,
        data=["nci1"],
        trials=15,
        seeds=5,
    )


if __name__ == "__main__":
    sys.exit(main())
