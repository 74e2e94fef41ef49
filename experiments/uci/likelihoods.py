"""UCI sets with several likelihoods, at three learning-rate schedules and by maximum likelihood.

The same network is trained in four ways, with the same batches, seeds and number of steps.
`PriorLearner` with its default options learns the weight decays and the parameters of the
likelihood. The rate of Adam is constant, falls linearly to zero in the last third of the epochs, or
falls to zero by a cosine schedule. By default `OnlineTraining` chooses the first or the second for
"regression", by the noise of the steps. This noise is measured here for every likelihood, when the
last third begins.

"plain" is maximum likelihood without weight decay, as most people do: Adam with a cosine schedule
holds out a tenth of the training examples and keeps the epoch with the lowest held-out NLL. The σ
of "regression" is then the held-out RMSE of this epoch. A "heteroscedastic" network has a second
output for the log variance.

Data, splits, network and learning rate are those of `experiments.uci.regression`; all in float64.
There are fewer steps for larger sets than in that study. The targets of "poisson" are drawn: the
logarithm of the rate is half of the standardised target plus the logarithm of 10 or 1,000. Log
likelihoods are in nats per example and in the target's units.

The share of the steps over which the rate falls and the limit were chosen for "regression" on red
wine, energy, naval and yacht. The limit was fixed before the noise was measured on the other sets.

``python -m experiments.uci.likelihoods`` runs the sets that are missing.
"""

import math
import sys
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Adam
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, PolynomialLR

from experiments.data.uci import UCI
from experiments.studies import Result, grouped, markdown, mean_with_error, standard_error, study
from experiments.uci.regression import FOLDERS, Pair, Training, training_of
from kfac_backend.likelihoods import Likelihood, likelihood_of
from marglik import OnlineTraining, PriorLearner, laplace_predictive
from marglik.models import MLP
from marglik.training import algorithm
from marglik.training.average import LARGEST_NOISE, loss_of_average, noise_of_steps
from marglik.training.problem import Problem
from marglik.training.state import LearnerState

STEPS = 5000
"""Steps of Adam for every network."""
DEVELOPMENT = "energy", "naval", "red wine", "yacht"
"""Sets on which the share of the steps and the limit were chosen."""
HELD_OUT = 0.1
"""Share of the training examples that "plain" holds out for early stopping."""
CASES = "regression", "heteroscedastic", "student_t", "poisson 10", "poisson 1000"
"""Likelihoods, with the typical rate of drawn counts."""
WITH_PLAIN = "regression", "heteroscedastic"
"""Likelihoods that are compared with maximum likelihood."""


@dataclass(frozen=True)
class Config:
    """The first splits of a set."""

    data: str
    case: str
    splits: int = 5
    steps: int = STEPS


def run(config: Config) -> Result:
    """All networks on all splits."""
    return {"splits": [run_split(config, k) for k in range(config.splits)]}


def run_split(config: Config, k: int) -> Result:
    """All networks on split k; log likelihoods in the target's units, nats per example."""
    splits = UCI(FOLDERS[config.data], k).load()
    (x, y), (x_test, y_test) = ((x.double(), y.double()) for x, y in (splits.train, splits.test))
    name, _, rate = config.case.partition(" ")
    scale = (splits.target_scale or (0.0, 1.0))[1]
    if rate:
        generator, scale = torch.Generator().manual_seed(k), 1.0
        y, y_test = (torch.poisson(float(rate) * (z / 2).exp(), generator) for z in (y, y_test))
    training, likelihood = training_of(config.data, config.steps), likelihood_of(name)
    found: Result = {"num_data": len(y), "ways": {}}

    def add(way: str, likelihood: Likelihood, mean: Tensor, variance: Tensor) -> Result:
        score = likelihood.log_score(y_test, mean, variance).mean().item() - math.log(scale)
        rmse = (mean - y_test).square().mean().sqrt().item() * scale
        found["ways"][way] = {"log_likelihood": score, "rmse": rmse}
        return found["ways"][way]

    learners, found["noise_of_steps"] = learned(training, likelihood, (x, y), k)
    for way, learner in learners.items():
        assert learner.posterior is not None
        prediction = laplace_predictive(learner.posterior)(x_test)
        numbers = add(way, learner.likelihood, prediction.mean, prediction.total_uncertainty)
        numbers["likelihood"] = str(learner.likelihood)
        numbers["sigma_noise"] = learner.state.hyperparameters.sigma_noise.item()
        numbers["evidence_per_example"] = learner.evidences[-1] / len(y)
    if config.case in WITH_PLAIN:
        add("plain", likelihood, *early_stopped(training, likelihood, (x, y), x_test, k))
    return found


def network(training: Training, likelihood: Likelihood, num_features: int, seed: int) -> MLP:
    """A new network in float64."""
    torch.manual_seed(seed)
    outputs = 2 if likelihood.name == "heteroscedastic" else 1
    return MLP(num_features, (training.hidden,), outputs, "tanh").double()


def learned(
    training: Training, likelihood: Likelihood, data: Pair, seed: int
) -> tuple[dict[str, PriorLearner], float]:
    """The learner of each schedule, and the noise of the steps (nats per target)."""
    cosine, constant = (online(training, likelihood, data, seed) for _ in range(2))
    epochs, batches = (
        constant.learner.options.schedule.epochs or 0,
        len(training.batches(data, seed)),
    )
    cosine.scheduler = CosineAnnealingLR(cosine.optimizer, epochs * batches)
    # Not None, with which `OnlineTraining` may let the rate fall.
    constant.scheduler = ConstantLR(constant.optimizer, 1.0)
    problem, state = constant.learner.problem, constant.learner.state
    losses, early, noise = list[float](), epochs * 2 // 3, 0.0
    for epoch in range(1, early + 1):
        losses.append(constant.train_epoch()["loss"])
        if epoch == early:
            noise = noise_of(problem, state, losses)
        algorithm.end_of_epoch(problem, state, epoch)
    falling = deepcopy(constant)
    falling.scheduler = PolynomialLR(falling.optimizer, (epochs - early) * batches)
    loops = {"constant": constant, "last third": falling, "cosine": cosine}
    for loop in loops.values():
        loop.run()
    return {way: loop.learner for way, loop in loops.items()}, noise


def online(training: Training, likelihood: Likelihood, data: Pair, seed: int) -> OnlineTraining:
    """A new training with the default options of `PriorLearner`."""
    model = network(training, likelihood, data[0].shape[1], seed)
    loader = training.batches(data, seed)
    learner = PriorLearner(likelihood, epochs=math.ceil(training.steps / len(loader)))
    return OnlineTraining(model, Adam(model.parameters(), training.lr), loader, learner)


def noise_of(problem: Problem, state: LearnerState, losses: list[float]) -> float:
    """The noise of the steps; without a σ, the loss of the steps minus the loss of the average."""
    if state.likelihood.has_sigma:
        return noise_of_steps(problem, state, losses)
    latest = losses[-max(1, round((problem.options.schedule.epochs or 0) / 20)) :]
    return math.fsum(latest) / len(latest) - loss_of_average(problem, state)


def early_stopped(
    training: Training, likelihood: Likelihood, data: Pair, x_test: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance of maximum likelihood at the epoch with the lowest held-out NLL."""
    x, y = data
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order.split([count := round(HELD_OUT * len(y)), len(y) - count])
    model = network(training, likelihood, x.shape[1], seed)
    loader = training.batches((x[rest], y[rest]), seed)
    epochs = math.ceil(training.steps / len(loader))
    optimizer = Adam(model.parameters(), training.lr)
    schedule = CosineAnnealingLR(optimizer, epochs * len(loader))
    lowest, best = math.inf, deepcopy(model.state_dict())
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            (likelihood.loss(model(inputs), targets) / len(targets)).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            loss = likelihood.loss(model(x[held_out]), y[held_out]).item() / count
        if loss < lowest:
            lowest, best = loss, deepcopy(model.state_dict())
    model.load_state_dict(best)
    with torch.no_grad():
        f = model(x_test)
        # The loss of "regression" is half of the mean squared error.
        sigma = f.new_tensor(max(0.0, 2 * lowest)).sqrt()
        mean, noise, _ = likelihood.moments(f, torch.zeros_like(f), sigma)
    return mean, noise


def report(results: list[Result]) -> str:
    """The tables as Markdown: mean ± standard error over splits."""
    by_case = grouped(results, "case")
    texts = [
        "# UCI sets with several likelihoods",
        "Test log likelihood in nats per example (higher is better), mean ± standard error over "
        "splits. Differences are paired by split, over the splits that have both. The default of "
        "regression: the rate falls in the last third if the noise of the steps exceeds "
        f"{LARGEST_NOISE} nats. (The rule) shows what the same rule would do for other "
        "likelihoods, whose default is a constant rate. The rule was chosen for regression on the "
        "sets with (dev.).",
    ]
    for case in (case for case in CASES if case in by_case):
        rule = "default" if case == "regression" else "(the rule)"
        default = "default" if case == "regression" else "constant"
        texts += [f"## {case}", markdown(schedules(by_case[case], rule))]
        if case in WITH_PLAIN:
            ways = dict.fromkeys((default, rule, "cosine"))
            texts += [
                "Minus early-stopped maximum likelihood",
                markdown(against_plain(by_case[case], [*ways])),
                *(verdict(by_case[case], way) for way in ways),
            ]
    return "\n\n".join(texts)


def schedules(results: list[Result], rule: str) -> list[list[str]]:
    """The rows of the schedules of a likelihood; differences from the constant rate."""
    ways = ["last third", "cosine", rule]
    head = ["set", "splits", "noise of the steps", "constant"]
    rows = [[*head, *(f"{way} − constant" for way in ways)]]
    for result in results:
        splits = result["splits"]
        noises = [split["noise_of_steps"] for split in splits if "noise_of_steps" in split]
        constant = mean_with_error([score(split, "constant") for split in splits])
        span = f"{min(noises):.2f} to {max(noises):.2f}" if noises else ""
        gains = [difference(splits, way, "constant") for way in ways]
        cells = [mean_with_error(gain, "{:+.4f}") if gain else "" for gain in gains]
        rows.append([mark(result), str(len(splits)), span, constant, *cells])
    return rows


def against_plain(results: list[Result], ways: list[str]) -> list[list[str]]:
    """The rows of a likelihood beside maximum likelihood."""
    rows = [["set", "splits", "plain", *(f"{way} − plain" for way in ways)]]
    for result in results:
        splits = [split for split in result["splits"] if "plain" in split["ways"]]
        plain = mean_with_error([score(split, "plain") for split in splits])
        gains = [difference(splits, way, "plain") for way in ways]
        cells = [mean_with_error(gain, "{:+.3f}") if gain else "" for gain in gains]
        rows.append([mark(result), str(len(splits)), plain, *cells])
    return rows


def verdict(results: list[Result], way: str) -> str:
    """The sets on which a way differs significantly from maximum likelihood."""
    sets: tuple[list[str], list[str]] = [], []
    for result in results:
        gain = difference(result["splits"], way, "plain")
        if len(gain) > 1 and abs(math.fsum(gain) / len(gain)) > 2 * standard_error(gain):
            sets[math.fsum(gain) < 0].append(result["config"]["data"])
    better, worse = (", ".join(names) or "no set" for names in sets)
    return f"{way} − plain: higher by more than two standard errors on {better}; lower on {worse}."


def difference(splits: list[Result], way: str, other: str) -> list[float]:
    """Differences of the log likelihood, over the splits that have both ways."""
    needed = {"last third" if w in ("default", "(the rule)") else w for w in (way, other)}
    chosen = [split for split in splits if needed <= {*split["ways"]}]
    return [score(split, way) - score(split, other) for split in chosen]


def score(split: Result, way: str) -> float:
    """The log likelihood of a way, which the noise of the steps may choose."""
    if way in ("default", "(the rule)"):
        way = "last third" if split["noise_of_steps"] > LARGEST_NOISE else "constant"
    return split["ways"][way]["log_likelihood"]


def mark(result: Result) -> str:
    """The name of a set."""
    name = result["config"]["data"]
    return name + " (dev.)" * (name in DEVELOPMENT)


main = study(
    "uci_likelihoods",
    __doc__,
    run,
    lambda options: [
        Config(name, case, options.seeds) for case in options.cases for name in options.data
    ],
    report,
    problems=FOLDERS,
    seeds=5,
    extra={"--cases": {"nargs": "*", "choices": CASES, "default": list(CASES)}},
)

if __name__ == "__main__":
    sys.exit(main())
