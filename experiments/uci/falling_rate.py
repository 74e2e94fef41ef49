"""A learning rate that falls at the end, compared with a constant rate, on UCI regression.

The same network is trained with `PriorLearner` and its default options, with the same batches,
seeds and number of steps, at three rates of Adam: constant, falling linearly to zero over the last
fifth of the steps, and over the last third. The parameters are averaged over all steps in each
case. The noise of the steps is measured in the constant training, when the last third begins. By
default `OnlineTraining` lets the rate fall in the last third if this noise exceeds `LARGEST_NOISE`.

The share and the limit were chosen on red wine, energy, naval and yacht. The limit was fixed before
the noise was measured on the other sets.
"""

import math
import sys
from dataclasses import dataclass

from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR

from experiments.data.uci import UCI
from experiments.studies import Result, grouped, markdown, mean_with_error, study
from experiments.uci.heteroscedastic import network
from experiments.uci.regression import FOLDERS, Gaussian, Pair, metrics_of, training_of
from marglik import OnlineTraining, PriorLearner, laplace_predictive
from marglik.training import algorithm
from marglik.training.average import LARGEST_NOISE, noise_of_steps

STEPS = 5000
"""Steps of Adam for every network."""
DEVELOPMENT = "energy", "naval", "red wine", "yacht"
"""Sets on which the share of the steps and the limit were chosen."""
FALLS = {"constant": 0.0, "last fifth": 1 / 5, "last third": 1 / 3}
"""Share of the steps over which the rate falls."""


@dataclass(frozen=True)
class Config:
    """The first splits of a set."""

    data: str
    splits: int = 5
    steps: int = STEPS


def run(config: Config) -> Result:
    """All rates on all splits; log likelihoods in the target's units, nats per example."""
    return {"splits": [run_split(config, k) for k in range(config.splits)]}


def run_split(config: Config, k: int) -> Result:
    """All rates on split k."""
    splits = UCI(FOLDERS[config.data], k).load()
    (x, y), (x_test, y_test) = ((x.double(), y.double()) for x, y in (splits.train, splits.test))
    found: Result = {"num_data": len(y), "rates": {}}
    for rate, share in FALLS.items():
        learner, noise = trained(config, (x, y), k, share)
        assert learner.posterior is not None
        prediction = laplace_predictive(learner.posterior)(x_test)
        gaussian = Gaussian(prediction.mean, prediction.total_uncertainty, 0.0, 1)
        metrics = metrics_of(gaussian, splits, y_test)
        found["rates"][rate] = {
            "log_likelihood": metrics["log_likelihood"],
            "rmse": metrics["rmse"],
            "sigma_noise": learner.state.hyperparameters.sigma_noise.item(),
            "evidence_per_example": learner.evidences[-1] / len(y),
        }
        if not share:
            found["noise_of_steps"] = noise
    return found


def trained(config: Config, data: Pair, seed: int, share: float) -> tuple[PriorLearner, float]:
    """The learner of a network, and the noise of the steps after two thirds of the epochs."""
    training = training_of(config.data, config.steps)
    model = network(training, data[0].shape[1], 1, seed)
    loader = training.batches(data, seed)
    optimizer = Adam(model.parameters(), training.lr)
    epochs = math.ceil(training.steps / len(loader))
    total = epochs * len(loader)

    def factor(step: int) -> float:
        return min(1.0, (1 - step / total) / share) if share else 1.0

    learner = PriorLearner("regression", epochs=epochs)
    schedule = LambdaLR(optimizer, factor)
    loop = OnlineTraining(model, optimizer, loader, learner, scheduler=schedule)
    noise, losses = 0.0, list[float]()
    for epoch in range(1, epochs + 1):
        losses.append(loop.train_epoch()["loss"])
        algorithm.end_of_epoch(learner.problem, learner.state, epoch)
        if epoch == epochs * 2 // 3:
            noise = noise_of_steps(learner.problem, learner.state, losses)
    algorithm.finish(learner.problem, learner.state)
    return learner, noise


def report(results: list[Result]) -> str:
    """The table as Markdown: differences from the constant rate, mean ± standard error."""
    head = ["set", "splits", "noise of the steps", "constant"]
    rows = [[*head, *(f"{rate} − constant" for rate in [*FALLS][1:]), "by the rule − constant"]]
    for name, (result,) in grouped(results, "data").items():
        own = result["splits"]

        def values(rate: str, own: list[Result] = own) -> list[float]:
            return [split["rates"][rate]["log_likelihood"] for split in own]

        constant, third = values("constant"), values("last third")
        noises = [split["noise_of_steps"] for split in own]
        falling = [noise > LARGEST_NOISE for noise in noises]
        ruled = [t if falls else c for c, t, falls in zip(constant, third, falling, strict=True)]
        differences = [
            mean_with_error([b - a for a, b in zip(constant, others, strict=True)], "{:+.4f}")
            for others in (*(values(rate) for rate in [*FALLS][1:]), ruled)
        ]
        mark = name + " (dev.)" * (name in DEVELOPMENT)
        span = f"{min(noises):.2f} to {max(noises):.2f}"
        rows.append([mark, str(len(own)), span, mean_with_error(constant), *differences])
    return "\n\n".join(
        [
            "# A falling learning rate for UCI regression",
            "Test log likelihood in nats per example (higher is better), mean ± standard error "
            "over splits; differences are paired by split. The share and the limit were chosen on "
            "the sets with (dev.). The rule: the rate falls in the last third if the noise of the "
            f"steps exceeds {LARGEST_NOISE} nats.",
            markdown(rows),
        ]
    )


main = study(
    "uci_falling_rate",
    __doc__,
    run,
    lambda options: [Config(name, options.seeds) for name in options.data],
    report,
    problems=FOLDERS,
    seeds=5,
)

if __name__ == "__main__":
    sys.exit(main())
