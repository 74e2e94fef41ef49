"""Noise that depends on the input, on small problems: schedules beside maximum likelihood.

The same network is trained with each schedule of `experiments.uci.likelihoods`, and by maximum
likelihood that holds out a fifth of the examples for early stopping ("plain"). The rate of "plain"
falls along a cosine; "plain, constant rate" has no schedule. All train by Adam with the learning
rate 0.01 and batches of 50 examples, for 200 epochs on "wave" and about 1,000 steps on the other
problems. The networks have one or two hidden layers of 50 tanh units, in float64.

The targets are a function of the inputs plus Gaussian noise, whose standard deviation is another
function of the inputs. "diabetes" is scikit-learn's data set, standardised. Every seed has its own
training data, network and batches; for "diabetes" a fifth of the examples are test data.

By default the rate is constant. The cosine was chosen as the candidate for another default, on
"wave" and on the UCI sets with (dev.) in `experiments.uci.likelihoods`, before any result of the
other problems was seen. They did not confirm it. Log likelihoods are in nats per example.

"strength 1" has a constant rate and a strength that is fixed at 1. It became a candidate after all
results with a learned strength were known, and after a trial on "wave" and "noise in steps". It was
added to the shipped results by a later run, with the same code and seeds, which trained only this
way.

``python -m experiments.uci.input_noise`` runs what is missing.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor

from experiments.studies import Result, markdown, mean_with_error, standard_error, study
from experiments.uci.likelihoods import FALLS, FIXED, early_stopped, learned
from experiments.uci.regression import Pair, Training
from kfac_backend.likelihoods import Likelihood, likelihood_of
from marglik import laplace_predictive

EPOCHS = {
    "wave": 200,
    "growing noise": 167,
    "noise in steps": 100,
    "two inputs": 50,
    "diabetes": 125,
}
HELD_OUT = 0.2
"""Share of the training examples that "plain" holds out for early stopping."""
NUM_TEST = 4000
DEVELOPMENT = ("wave",)
"""Problem on which the candidate was chosen; the linear falls were trained only there."""
ALONE = "without_uncertainty"
"""Key of the log likelihood without the uncertainty of the parameters."""
SMALLEST_STRENGTH = 0.001
"""Strength below which the noise hardly depends on the input."""
WAYS = "constant", "last third", "last two thirds", "cosine", FIXED


@dataclass(frozen=True)
class Function:
    """Mean and standard deviation of the targets as functions of the inputs (N, D)."""

    num_data: int
    num_features: int
    span: float
    """Inputs are uniform from −span to span."""
    mean: Callable[[Tensor], Tensor]
    noise: Callable[[Tensor], Tensor]


FUNCTIONS = {
    "wave": Function(
        150, 1, 2.0, lambda x: (2 * x).sin(), lambda x: torch.where(x < 0, 0.05, 0.3).to(x)
    ),
    "growing noise": Function(
        300, 1, 3.0, lambda x: x.sin() + 0.3 * x, lambda x: 0.02 + 0.15 * x.abs()
    ),
    "noise in steps": Function(
        500,
        1,
        2.0,
        lambda x: (3 * x).cos(),
        lambda x: torch.where(x < -1, 0.02, torch.where(x < 1, 0.4, 0.1)).to(x),
    ),
    "two inputs": Function(
        1000,
        2,
        1.0,
        lambda x: (3 * x[:, :1]).sin() + x[:, 1:].square(),
        lambda x: 0.1 * (1.5 * x[:, 1:]).exp(),
    ),
}
PROBLEMS = (*FUNCTIONS, "diabetes")


@dataclass(frozen=True)
class Config:
    """The seeds of a problem, for a number of hidden layers."""

    data: str
    layers: int
    seeds: int = 8
    epochs: int = 200


def run(config: Config) -> Result:
    """All networks of all seeds."""
    return {"runs": [run_seed(config, seed) for seed in range(config.seeds)]}


def run_seed(config: Config, seed: int) -> Result:
    """All networks of a seed."""
    data, (x_test, y_test), truth = problem(config.data, seed)
    likelihood = likelihood_of("heteroscedastic")
    batches = -(-len(data[1]) // 50)
    training = Training(50, config.epochs * batches, 50, 0.01, config.layers)
    found: Result = {"num_data": len(data[1]), "ways": {}}

    def score(likelihood: Likelihood, mean: Tensor, variance: Tensor) -> float:
        return likelihood.log_score(y_test, mean, variance).mean().item()

    def ratio(variance: Tensor) -> dict[str, float]:
        """Root mean square of the logarithm of the learned noise divided by the true one."""
        if truth is None:
            return {}
        return {"noise_error": (variance.sqrt() / truth[1]).log().square().mean().sqrt().item()}

    falls = FALLS["heteroscedastic"] if config.data in DEVELOPMENT else {}
    learners, found["noise_of_steps"] = learned(training, likelihood, data, seed, falls)
    for way, learner in learners.items():
        assert learner.posterior is not None
        prediction = laplace_predictive(learner.posterior)(x_test)
        with torch.no_grad():
            f = learner.posterior.model(x_test)
        of_map = learner.likelihood.moments(f, torch.zeros_like(f), f.new_tensor(1.0))[:2]
        found["ways"][way] = {
            "log_likelihood": score(likelihood, prediction.mean, prediction.total_uncertainty),
            ALONE: score(likelihood, *of_map),
            "rmse": (prediction.mean - y_test).square().mean().sqrt().item(),
            "likelihood": str(learner.likelihood),
            **ratio(of_map[1]),
        }
    for way, falls in {"plain": True, "plain, constant rate": False}.items():
        _, mean, variance = early_stopped(training, likelihood, data, x_test, seed, HELD_OUT, falls)
        found["ways"][way] = {
            "log_likelihood": score(likelihood, mean, variance),
            "rmse": (mean - y_test).square().mean().sqrt().item(),
            **ratio(variance),
        }
    if truth is not None:
        found["best"] = score(likelihood, truth[0], truth[1].square())
    return found


def problem(name: str, seed: int) -> tuple[Pair, Pair, Pair | None]:
    """Training data, test data, and the true means and noises of the test data if known."""
    generator = torch.Generator().manual_seed(seed)
    if name == "diabetes":
        x, y = (torch.as_tensor(part).double() for part in load_diabetes(return_X_y=True))
        order = torch.randperm(len(y), generator=generator)
        test, train = order.split([len(y) // 5, len(y) - len(y) // 5])
        x, y = ((v - v[train].mean(0)) / v[train].std(0) for v in (x, y[:, None]))
        return (x[train], y[train]), (x[test], y[test]), None
    function = FUNCTIONS[name]

    def pair(count: int) -> tuple[Pair, Pair]:
        shape = count, function.num_features
        x = (2 * torch.rand(shape, generator=generator).double() - 1) * function.span
        mean, noise = function.mean(x), function.noise(x)
        y = mean + noise * torch.randn(mean.shape, generator=generator).double()
        return (x, y), (mean, noise)

    train, (test, truth) = pair(function.num_data)[0], pair(NUM_TEST)
    return train, test, truth


def report(results: list[Result]) -> str:
    """The tables as Markdown: mean ± standard error over seeds."""
    order = sorted(results, key=key_of)
    learned_strength = "constant", "cosine"
    ways = *learned_strength, FIXED
    plain = [["problem", "hidden layers", "examples", "seeds", "best possible", "plain"]]
    plain[0] += [f"{way} − plain" for way in ("plain, constant rate", *ways)]
    schedules = [["problem", "hidden layers", "constant"]]
    schedules[0] += [f"{way} − constant" for way in WAYS[1:]]
    outputs = [["problem", "hidden layers", *ways]]
    noises = [["problem", "hidden layers", "plain", *ways]]
    lost = [["problem", "hidden layers", "seeds", *learned_strength]]
    for result in order:
        runs, name = result["runs"], [mark(result), str(result["config"]["layers"])]
        truths = [run["best"] for run in runs if "best" in run]
        own = [str(runs[0]["num_data"]), str(len(runs)), mean_or_blank(truths, "{:.3f}")]
        gains = [difference(runs, way, "plain") for way in ("plain, constant rate", *ways)]
        cells = [mean_or_blank(gain) for gain in gains]
        plain.append([*name, *own, mean_with_error(values(runs, "plain")), *cells])
        cells = [mean_or_blank(difference(runs, way, "constant")) for way in WAYS[1:]]
        schedules.append([*name, mean_with_error(values(runs, "constant")), *cells])
        without = [
            [a - b for a, b in zip(values(runs, way, ALONE), values(runs, way), strict=True)]
            for way in ways
        ]
        outputs.append([*name, *map(mean_or_blank, without)])
        strengths = [
            [likelihood_of(text).parameters["strength"] for text in texts]
            for texts in (values(runs, way, "likelihood") for way in learned_strength)
        ]
        counts = [sum(bool(k < SMALLEST_STRENGTH) for k in of_way) for of_way in strengths]
        lost.append([*name, str(len(runs)), *map(str, counts)])
        if truths:
            errors = [values(runs, way, "noise_error") for way in ("plain", *ways)]
            noises.append([*name, *(mean_with_error(error, "{:.2f}") for error in errors)])
    return "\n\n".join(
        [
            "# Noise that depends on the input",
            "Log likelihood of test data in nats per example (higher is better), mean ± standard "
            "error over seeds. Differences are paired by seed. The default is the constant rate. "
            "The cosine was chosen as a candidate for another default on the problem with (dev.) "
            "and on UCI sets. Strength 1 became a candidate after a trial on wave and noise in "
            "steps. The best possible log likelihood is for the true mean and noise.",
            "Minus early-stopped maximum likelihood",
            markdown(plain),
            *(verdict(order, way, "plain") for way in ways),
            "Minus the constant rate",
            markdown(schedules),
            *(verdict(order, way, "constant") for way in ("cosine", FIXED)),
            "Log likelihood without the uncertainty of the parameters minus the log likelihood "
            "with it",
            markdown(outputs),
            "Root mean square of log(learned noise / true noise)",
            markdown(noises),
            f"Seeds whose learned strength is below {SMALLEST_STRENGTH}, so that all inputs have "
            "the same noise",
            markdown(lost),
        ]
    )


def mean_or_blank(values: list[float], form: str = "{:+.3f}") -> str:
    """The mean ± its standard error, or nothing without values."""
    return mean_with_error(values, form) if values else ""


def key_of(result: Result) -> tuple[int, int]:
    """Position of a result in the tables."""
    return PROBLEMS.index(result["config"]["data"]), result["config"]["layers"]


def mark(result: Result) -> str:
    """The name of a problem."""
    name = result["config"]["data"]
    return name + " (dev.)" * (name in DEVELOPMENT)


def values(runs: list[Result], way: str, key: str = "log_likelihood") -> list[Any]:
    """A value of a way, by seed; none if it was not trained."""
    return [run["ways"][way][key] for run in runs if way in run["ways"]]


def difference(runs: list[Result], way: str, other: str) -> list[float]:
    """Differences of the log likelihood, by seed; none if ``way`` was not trained."""
    gains = values(runs, way)
    return [a - b for a, b in zip(gains, values(runs, other), strict=True)] if gains else []


def verdict(results: list[Result], way: str, other: str) -> str:
    """The problems on which a way differs significantly from another."""
    names: tuple[list[str], list[str]] = [], []
    for result in results:
        gain = difference(result["runs"], way, other)
        if len(gain) > 1 and abs(sum(gain) / len(gain)) > 2 * standard_error(gain):
            names[sum(gain) < 0].append(f"{mark(result)} with {result['config']['layers']}")
    better, worse = (", ".join(part) or "none" for part in names)
    return f"{way} − {other}: higher by more than two standard errors: {better}; lower: {worse}."


main = study(
    "input_noise",
    __doc__,
    run,
    lambda options: [
        Config(name, layers, options.seeds, EPOCHS[name])
        for name in options.data
        for layers in (1, 2)
    ],
    report,
    problems=PROBLEMS,
    seeds=8,
)

if __name__ == "__main__":
    sys.exit(main())
