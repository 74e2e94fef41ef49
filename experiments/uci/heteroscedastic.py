"""UCI regression with noise that depends on the input, beside one noise for all inputs.

The network and the protocol are those of `experiments.uci.regression`, with a second output for the
log variance: likelihood "heteroscedastic" with the Fisher information (Immer et al. 2023,
arXiv:2301.05183), one prior precision per tensor, learned by the evidence in the same updates.
"One noise" is "ours" of that study on the same splits, read from its results.

Test log likelihood in nats per example and the target's units; the predictive is the Gaussian with
variance E exp(s) + J Σ Jᵀ.

How the start was chosen, on a held-out fifth of the training part of concrete's split 0 alone
(targets standardised): from a prior precision of 1, 10 and 100 the evidence per example is -0.784,
-0.602 and -0.546, the log likelihood -1.456, -0.719 and -0.419; one noise has -0.084. Before the
first update networks fit the log variances of single examples, whose large weights the fixed point
then accepts; the evidence does tell these starts apart. What did not help there: a tensor of its
own for the log variance's weights, from 100 to 10,000 (-1.281 to -2.016), or a network of its own
for the log variance (-0.767). A precision softplus(f) instead of exp(-s) depends less on the start
(-0.327 from 1, -0.293 from 100), but on yacht's fifth it has 1.798, where exp(-s) has 2.365 and one
noise 2.053.

``make uci-heteroscedastic`` runs the sets that are missing; ``--seeds 2`` two splits of each.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from experiments.data import data_file
from experiments.data.uci import FILE, UCI
from experiments.studies import (
    SHIPPED,
    markdown,
    mean_with_error,
    quiet_training,
    slug,
    standard_error,
    study,
)
from experiments.uci.regression import (
    FOLDERS,
    LR,
    STEPS,
    Config,
    Gaussian,
    Pair,
    Task,
    _float64,
    _metrics,
)
from marglik import Hyperparameters, OnlineTraining, PriorGroups, PriorLearner, laplace_predictive
from marglik.models import MLP
from marglik.storage.provenance import environment

__all__ = ["main", "report", "run", "run_split"]

PRECISION = 100.0
"""Initial prior precision of all tensors, see this module."""

METHODS = "one noise", "heteroscedastic", "heteroscedastic, MAP"


@quiet_training()
def run(task: Task) -> dict[str, Any]:
    """Run the splits of a set, one after the other."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    configs = [Config(task.data, k, STEPS[task.data], LR[task.data]) for k in range(task.splits)]
    return {
        "config": asdict(task),
        "splits": [run_split(config) for config in configs],
        "seconds": time.perf_counter() - started,
        **environment(torch.device("cpu")),
    }


def run_split(config: Config) -> dict[str, Any]:
    """Both networks on a split; metrics in the target's units, nats per example."""
    splits = UCI(FOLDERS[config.dataset], config.split, data_file(FILE)).load()
    (x, y), (x_test, y_test) = ((x.double(), y.double()) for x, y in (splits.train, splits.test))
    found = heteroscedastic(config, (x, y), x_test)
    methods = {name: _metrics(g, splits, y_test) for name, g in found.items()}
    with (SHIPPED / f"uci/{slug(config.dataset)}.json").open() as file:
        recorded = json.load(file)["splits"][config.split]
    methods["one noise"] = recorded["methods"]["ours"]
    return {"config": asdict(config), "num_data": len(y), "methods": methods}


def heteroscedastic(config: Config, data: Pair, x_test: torch.Tensor) -> dict[str, Gaussian]:
    """The linearised predictive and the MAP of one online run."""
    start = time.process_time()
    training = config.training
    torch.manual_seed(config.seed)
    model = MLP(data[0].shape[1], (training.hidden,), 2, "tanh").double()
    loader = training.batches(data, config.seed)
    epochs = math.ceil(config.steps / len(loader))
    optimizer = torch.optim.Adam(model.parameters(), config.lr, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    learner = PriorLearner(
        "heteroscedastic",
        hyperparameters=Hyperparameters(PriorGroups.from_model(model), PRECISION, method="mackay"),
        epochs=epochs,
        every=max(1, epochs // config.updates),
        steps=1,
        average=None,
        curvature_from="pass",
    )
    result = OnlineTraining(
        model,
        optimizer,
        loader,
        learner,
        scheduler=schedule,
        curvature_loader=[data],
        fabric=_float64(),
    ).run()
    assert result.laplace is not None
    found = laplace_predictive(result.laplace)(x_test)
    seconds = time.process_time() - start
    mean, s = model(x_test).detach().chunk(2, -1)
    return {
        "heteroscedastic": Gaussian(found.mean, found.total, seconds, 1),
        "heteroscedastic, MAP": Gaussian(mean, s.exp(), seconds, 1),
    }


def report(found: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown: mean ± standard error over splits."""
    rows, better, worse = [["set", "splits", *METHODS, "gain of heteroscedastic"]], [], []
    for result in found:
        name, own = result["config"]["data"], result["splits"]
        of = {m: [r["methods"][m]["log_likelihood"] for r in own] for m in METHODS}
        gains = [b - a for a, b in zip(of["one noise"], of["heteroscedastic"], strict=True)]
        gain, error = sum(gains) / len(gains), standard_error(gains)
        if len(own) > 1:
            better += [name] * (gain > 2 * error)
            worse += [name] * (gain < -2 * error)
        cells = [mean_with_error(of[m], "{:.3f}") for m in METHODS]
        rows.append([name, str(len(own)), *cells, mean_with_error(gains, "{:+.3f}")])
    return "\n\n".join(
        [
            "# UCI regression with noise that depends on the input",
            "Test log likelihood (nats per example, higher is better), mean ± standard error.",
            f"Better by more than two standard errors: {', '.join(better) or 'none'}; worse: "
            f"{', '.join(worse) or 'none'}. A single split has no standard error.",
            markdown(rows),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing sets, and write the table; returns the exit status."""
    return study(
        "uci_heteroscedastic",
        __doc__,
        run,
        lambda options: [Task(name, options.seeds) for name in options.data],
        report,
        arguments,
        problems=FOLDERS,
        seeds=20,
    )


if __name__ == "__main__":
    sys.exit(main())
