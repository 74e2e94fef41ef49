"""UCI sets with several likelihoods: schedules of the learning rate beside maximum likelihood.

The same network is trained in several ways, with the same batches, seeds and number of steps.
`PriorLearner` with its default options learns the weight decays and the parameters of the
likelihood. The rate of Adam is constant, or falls to zero by a cosine schedule. For "regression"
and "student_t" it also falls linearly to zero in the last third of the epochs, and for
"heteroscedastic" in the last third or the last two thirds. "strength 1" is "heteroscedastic" with a
constant rate and a strength that is fixed at 1. "former rules" is "student_t" with a constant rate.
Its scale starts at 1, its degrees of freedom start at 4, and a change of the scale changes Adam's
steps (`Likelihood.step_scale`). By default `OnlineTraining` lets
the rate of "regression" and "student_t" fall in the last third if the noise of the steps is large,
and keeps other rates constant. The noise of the steps is measured when the last third begins.

"plain" is maximum likelihood without weight decay, as most people do: Adam with a cosine schedule
holds out a tenth of the training examples and keeps the epoch with the lowest held-out NLL. The σ
of "regression" is then the held-out RMSE of this epoch. A "heteroscedastic" network has a second
output for the log variance. The parameters of other likelihoods, such as the scale of "student_t",
are trained like those of the network, from the default values of the likelihood.

Data, splits, network and learning rate are those of `experiments.uci.regression`; all in float64.
There are fewer steps for larger sets than in that study. The targets of "negative_binomial" and
"poisson" are drawn: the logarithm of the mean is half of the standardised target plus the logarithm
of 10 or 1,000. The r of the negative binomial is 3. Log likelihoods are in nats per example and in
the target's units.

The default of "regression" was chosen on red wine, energy, naval and yacht. Its limit of the noise
was fixed before the noise was measured on the other sets. For "heteroscedastic", the cosine was
chosen as a candidate on the same sets and on "wave" of `experiments.uci.input_noise`, where other
problems did not confirm it. The start of "student_t", and its rate, were chosen on energy, kin8nm,
red wine and yacht. The factor `Likelihood.step_scale` was added after naval had shown that it is
necessary. Concrete, power plant and protein confirm the result.

Some shipped results are from several runs with the same splits and seeds. "strength 1" was trained
by a later run, which trained only this way. For "student_t", maximum likelihood and "former rules"
are from an earlier run. Three sets were repeated, with exactly the same numbers. On protein, the
other ways of "heteroscedastic" are from a former study, and their log likelihoods can differ
slightly from the log likelihoods of the present code.

``python -m experiments.uci.likelihoods`` runs the sets that are missing.
"""

import math
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
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
from marglik.training.decay_policy import set_decays
from marglik.training.problem import Problem
from marglik.training.state import LearnerState

STEPS = 5000
"""Steps of Adam for every network."""
DEVELOPMENT = {
    "regression": ("energy", "naval", "red wine", "yacht"),
    "heteroscedastic": ("energy", "naval", "red wine", "yacht"),
    "student_t": ("energy", "kin8nm", "naval", "red wine", "yacht"),
}
"""Sets on which the default and the candidate of a likelihood were chosen."""
HELD_OUT = 0.1
"""Share of the training examples that "plain" holds out for early stopping."""
CASES = (
    *("regression", "heteroscedastic", "student_t", "negative_binomial 10"),
    *("poisson 10", "poisson 1000"),
)
"""Likelihoods, with the typical rate of drawn counts."""
FALLS = {
    "regression": {"last third": 2},
    "student_t": {"last third": 2},
    "heteroscedastic": {"last third": 2, "last two thirds": 1},
}
"""Linear falls of the rate to zero: the number of thirds of the epochs before each."""
FIXED = "strength 1"
"""Way of "heteroscedastic" with a fixed strength and a constant rate."""
FORMER = "former rules"
"""Way of "student_t" with a constant rate, and with the defaults before `Likelihood.step_scale`."""
DISPERSION = 3.0
"""r of the drawn counts of "negative_binomial"."""


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
        y, y_test = (drawn(name, float(rate) * (z / 2).exp(), generator) for z in (y, y_test))
    training, likelihood = training_of(config.data, config.steps), likelihood_of(name)
    found: Result = {"num_data": len(y), "ways": {}}

    def add(way: str, likelihood: Likelihood, mean: Tensor, variance: Tensor) -> Result:
        score = likelihood.log_score(y_test, mean, variance).mean().item() - math.log(scale)
        rmse = (mean - y_test).square().mean().sqrt().item() * scale
        found["ways"][way] = {"log_likelihood": score, "rmse": rmse}
        return found["ways"][way]

    falls = FALLS.get(name, {})
    learners, found["noise_of_steps"] = learned(training, likelihood, (x, y), k, falls)
    for way, learner in learners.items():
        assert learner.posterior is not None
        prediction = laplace_predictive(learner.posterior)(x_test)
        numbers = add(way, learner.likelihood, prediction.mean, prediction.total_uncertainty)
        numbers["likelihood"] = str(learner.likelihood)
        numbers["sigma_noise"] = learner.state.hyperparameters.sigma_noise.item()
        numbers["evidence_per_example"] = learner.evidences[-1] / len(y)
    fitted, mean, variance = early_stopped(training, likelihood, (x, y), x_test, k)
    add("plain", fitted, mean, variance)["likelihood"] = str(fitted)
    return found


def drawn(name: str, rate: Tensor, generator: torch.Generator) -> Tensor:
    """Counts with this mean; those of "negative_binomial" have the variance μ + μ²/r."""
    if name == "negative_binomial":
        # A gamma number with whole shape r is a sum of r exponential numbers.
        shares = torch.rand(round(DISPERSION), *rate.shape, generator=generator, dtype=rate.dtype)
        rate = rate * -shares.log().mean(0)
    return torch.poisson(rate, generator)


def network(training: Training, likelihood: Likelihood, num_features: int, seed: int) -> MLP:
    """A new network in float64."""
    torch.manual_seed(seed)
    outputs = 2 if likelihood.name == "heteroscedastic" else 1
    return MLP(num_features, (training.hidden,) * training.layers, outputs, "tanh").double()


def learned(
    training: Training,
    likelihood: Likelihood,
    data: Pair,
    seed: int,
    falls_after: Mapping[str, int],
) -> tuple[dict[str, PriorLearner], float | None]:
    """The learner of each schedule, and the noise of the steps (nats per target) if measured.

    Args:
        training: settings of the network and of its steps.
        likelihood: the likelihood, whose parameters are learned.
        data: training data.
        seed: seed of network and batches.
        falls_after: linear falls, as in `FALLS`.
    """
    cosine, constant = (online(training, likelihood, data, seed) for _ in range(2))
    epochs, batches = (
        constant.learner.options.schedule.epochs or 0,
        len(training.batches(data, seed)),
    )
    cosine.scheduler = CosineAnnealingLR(cosine.optimizer, epochs * batches)
    # Not None, with which `OnlineTraining` may let the rate fall.
    constant.scheduler = ConstantLR(constant.optimizer, 1.0)
    loops = {"constant": constant, "cosine": cosine}
    if likelihood.name == "heteroscedastic":
        loops[FIXED] = online(training, likelihood_of("heteroscedastic(strength=1.0)"), data, seed)
        loops[FIXED].scheduler = ConstantLR(loops[FIXED].optimizer, 1.0)
    if likelihood.name == "student_t":
        loops[FORMER] = online(training, likelihood, data, seed)
        loops[FORMER].scheduler = ConstantLR(loops[FORMER].optimizer, 1.0)
        use_former_rules(loops[FORMER].learner)
    problem, state = constant.learner.problem, constant.learner.state
    losses, noise = list[float](), None
    falls = {epochs * thirds // 3: way for way, thirds in falls_after.items()}
    for epoch in range(1, max(falls, default=0) + 1):
        losses.append(constant.train_epoch()["loss"])
        if falls.get(epoch) == "last third":
            noise = noise_of(problem, state, losses)
        algorithm.end_of_epoch(problem, state, epoch)
        if epoch in falls:
            loops[falls[epoch]] = falling = deepcopy(constant)
            falling.scheduler = PolynomialLR(falling.optimizer, (epochs - epoch) * batches)
    for loop in loops.values():
        loop.run()
    return {way: loop.learner for way, loop in loops.items()}, noise


def online(training: Training, likelihood: Likelihood, data: Pair, seed: int) -> OnlineTraining:
    """A new training with the default options of `PriorLearner`."""
    model = network(training, likelihood, data[0].shape[1], seed)
    loader = training.batches(data, seed)
    learner = PriorLearner(likelihood, epochs=math.ceil(training.steps / len(loader)))
    return OnlineTraining(model, Adam(model.parameters(), training.lr), loader, learner)


def use_former_rules(learner: PriorLearner) -> None:
    """Start the likelihood's parameters at their defaults, and do not scale the loss."""
    state = learner.state
    defaults = learner.options.likelihood.parameters
    learned = {name: defaults[name].item() for name in learner.problem.learned_by_evidence}
    state.likelihood = state.likelihood.replace(**learned)
    (part,) = learner.problem.parts
    learner.problem.parts = [replace(part, scales_loss=False)]
    set_decays(learner.problem, state)


def noise_of(problem: Problem, state: LearnerState, losses: list[float]) -> float:
    """The noise of the steps; without a σ, the loss of the steps minus the loss of the average."""
    if state.likelihood.name != "heteroscedastic":
        return noise_of_steps(problem, state, losses)
    latest = losses[-max(1, round((problem.options.schedule.epochs or 0) / 20)) :]
    return math.fsum(latest) / len(latest) - loss_of_average(problem, state)


def early_stopped(
    training: Training,
    likelihood: Likelihood,
    data: Pair,
    x_test: Tensor,
    seed: int,
    held_out: float = HELD_OUT,
    falls: bool = True,
) -> tuple[Likelihood, Tensor, Tensor]:
    """Maximum likelihood at the epoch with the lowest held-out NLL.

    Args:
        training: settings of the network and of its steps.
        likelihood: the likelihood; its parameters are fitted, too.
        data: training data, with the examples that are held out.
        x_test: test inputs.
        seed: seed of network, batches and held-out examples.
        held_out: share of the examples that are held out.
        falls: whether the rate falls along a cosine; else it is constant.

    Returns:
        The likelihood with its fitted parameters, and mean and variance for the test inputs.
    """
    x, y = data
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    validation, rest = order.split([count := round(held_out * len(y)), len(y) - count])
    model = network(training, likelihood, x.shape[1], seed)
    loader = training.batches((x[rest], y[rest]), seed)
    epochs = math.ceil(training.steps / len(loader))
    numbers = Numbers(likelihood)
    optimizer = Adam([*model.parameters(), *numbers.parameters()], training.lr)
    steps = epochs * len(loader)
    schedule = CosineAnnealingLR(optimizer, steps) if falls else ConstantLR(optimizer, 1.0)
    lowest, best = math.inf, deepcopy((model.state_dict(), numbers.state_dict()))
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            (numbers().loss(model(inputs), targets) / len(targets)).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            loss = numbers().loss(model(x[validation]), y[validation]).item() / count
        if loss < lowest:
            lowest, best = loss, deepcopy((model.state_dict(), numbers.state_dict()))
    model.load_state_dict(best[0])
    numbers.load_state_dict(best[1])
    with torch.no_grad():
        f = model(x_test)
        # The loss of "regression" is half of the mean squared error.
        sigma = f.new_tensor(max(0.0, 2 * lowest)).sqrt()
        values = {name: value.item() for name, value in numbers.values().items()}
        fitted = likelihood.replace(**values)
        mean, noise, _ = fitted.moments(f, torch.zeros_like(f), sigma)
    return fitted, mean, noise


class Numbers(nn.Module):
    """The parameters of a likelihood as parameters of a module, in logarithms.

    Those of "heteroscedastic" stay at 1, because the network can express them.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood, self.lowest = likelihood, likelihood.lower_bounds()
        names = [] if likelihood.name == "heteroscedastic" else [*likelihood.to_learn()]
        self.logarithms = nn.ParameterDict(
            {
                name: nn.Parameter((likelihood.parameters[name] - self.lowest[name]).log())
                for name in names
            }
        )

    def values(self) -> dict[str, Tensor]:
        """The present values by name."""
        return {name: self.lowest[name] + log.exp() for name, log in self.logarithms.items()}

    def forward(self) -> Likelihood:
        """The likelihood at these values, differentiable in the logarithms."""
        return self.likelihood.with_parameters(self.values())


def report(results: list[Result]) -> str:
    """The tables as Markdown: mean ± standard error over splits."""
    by_case = grouped(results, "case")
    texts = [
        "# UCI sets with several likelihoods",
        "Test log likelihood in nats per example (higher is better), mean ± standard error over "
        "splits. Differences are paired by split, over the splits that have both. The default of "
        "regression and student_t: the rate falls in the last third if the noise of the steps "
        f"exceeds {LARGEST_NOISE} nats. The default of the other likelihoods is the constant rate. "
        "The defaults of regression and student_t, and the cosine as a candidate for "
        "heteroscedastic, were chosen on the sets with (dev.).",
    ]
    for case in (case for case in CASES if case in by_case):
        default = ["default"] if case in ("regression", "student_t") else []
        other = {"heteroscedastic": [FIXED], "student_t": [FORMER]}.get(case, [])
        falls = [*FALLS.get(case, {}), "cosine", *other, *default]
        ways = [*default, "cosine"] if default else ["constant", *falls]
        texts += [
            f"## {case}",
            markdown(schedules(by_case[case], falls)),
            "Minus early-stopped maximum likelihood",
            markdown(against_plain(by_case[case], ways)),
            *(verdict(by_case[case], way) for way in ways),
        ]
        if case == "regression":
            texts += [
                "Default minus early-stopped maximum likelihood in two parts. The part of the mean "
                "is the logarithm of the ratio of the test RMSEs, which is the difference if each "
                "has its best constant noise. The part of the noise is the rest.",
                markdown(parts_of_difference(by_case[case])),
            ]
    return "\n\n".join(texts)


def schedules(results: list[Result], ways: list[str]) -> list[list[str]]:
    """The rows of the schedules of a likelihood; differences from the constant rate."""
    measured = any(split.get("noise_of_steps") for r in results for split in r["splits"])
    head = ["set", "splits", *["noise of the steps"] * measured, "constant"]
    rows = [[*head, *(f"{way} − constant" for way in ways)]]
    for result in results:
        splits = result["splits"]
        noises = [noise for split in splits if (noise := split.get("noise_of_steps")) is not None]
        constant = mean_with_error([score(split, "constant") for split in splits])
        span = f"{min(noises):.2f} to {max(noises):.2f}" if noises else ""
        gains = [difference(splits, way, "constant") for way in ways]
        cells = [mean_with_error(gain, "{:+.4f}") if gain else "" for gain in gains]
        rows.append([mark(result), str(len(splits)), *[span] * measured, constant, *cells])
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


def parts_of_difference(results: list[Result]) -> list[list[str]]:
    """The rows of the parts of the mean and of the noise in a difference to maximum likelihood."""
    rows = [["set", "splits", "default − plain", "part of the mean", "part of the noise"]]
    for result in results:
        splits = [split for split in result["splits"] if "plain" in split["ways"]]
        gains = difference(splits, "default", "plain")
        pairs = [(split["ways"]["plain"], split["ways"][way_of_default(split)]) for split in splits]
        means = [math.log(plain["rmse"] / ours["rmse"]) for plain, ours in pairs]
        noises = [gain - mean for gain, mean in zip(gains, means, strict=True)]
        cells = [mean_with_error(part, "{:+.4f}") for part in (gains, means, noises)]
        rows.append([mark(result), str(len(splits)), *cells])
    return rows


def difference(splits: list[Result], way: str, other: str) -> list[float]:
    """Differences of the log likelihood, over the splits that have both ways."""
    needed = {"last third" if w == "default" else w for w in (way, other)}
    chosen = [split for split in splits if needed <= {*split["ways"]}]
    return [score(split, way) - score(split, other) for split in chosen]


def score(split: Result, way: str) -> float:
    """The log likelihood of a way, which the noise of the steps may choose."""
    way = way_of_default(split) if way == "default" else way
    return split["ways"][way]["log_likelihood"]


def way_of_default(split: Result) -> str:
    """The schedule of "regression" and "student_t" by default."""
    return "last third" if split["noise_of_steps"] > LARGEST_NOISE else "constant"


def mark(result: Result) -> str:
    """The name of a set."""
    name = result["config"]["data"]
    return name + " (dev.)" * (name in DEVELOPMENT.get(result["config"]["case"], ()))


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
