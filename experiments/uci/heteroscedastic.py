"""UCI regression with noise that depends on the input, compared with constant noise.

The same network is trained in six ways, with the same batches, seeds and number of steps. "learned"
trains it with `PriorLearner` and its default options at a constant rate of Adam: the evidence
learns the weight decays and the noise. "learned, cosine" does the same with a rate that falls to 0.
"plain" trains it by maximum likelihood without weight decay, as most people do: Adam with a
cosine schedule holds out a tenth of the training examples and keeps the epoch with the lowest
held-out NLL. A constant noise is then the held-out RMSE of this epoch. "heteroscedastic" networks
have a second output for the log variance.

Data, splits, network and learning rate are those of `experiments.uci.regression`; all in float64.
There are fewer splits than in that study, and fewer steps for larger sets: see `SPLITS` and
`STEPS`. The predictive of "learned" is a Gaussian with the variance E exp(s) + J Σ Jᵀ. Log
likelihoods are in nats per example and in the target's units.

``python -m experiments.uci.heteroscedastic`` runs the sets that are missing.
"""

import math
import sys
import time
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR

from experiments.data.uci import UCI
from experiments.studies import Result, grouped, markdown, mean_with_error, standard_error, study
from experiments.uci.regression import FOLDERS, Gaussian, Pair, Training, metrics_of, training_of
from marglik import OnlineTraining, PriorLearner, laplace_predictive
from marglik.models import MLP

STEPS = 5000
"""Steps of Adam for every network."""
SPLITS = dict.fromkeys(FOLDERS, 3) | {"protein": 2}
"""Number of splits of each set."""
DEVELOPMENT = "concrete", "energy", "yacht"
"""Sets on whose training parts the start was chosen."""
HELD_OUT = 0.1
"""Share of the training examples that "plain" holds out for early stopping."""
LIKELIHOODS = {"one noise": "regression", "heteroscedastic": "heteroscedastic"}
WAYS = "learned", "learned, cosine", "plain"


@dataclass(frozen=True)
class Config:
    """The first splits of a set."""

    data: str
    splits: int = 3
    steps: int = STEPS


def run(config: Config) -> Result:
    """All networks on all splits; metrics in the target's units, nats per example."""
    return {"splits": [run_split(config, k) for k in range(config.splits)]}


def run_split(config: Config, k: int) -> Result:
    """All networks on split k."""
    splits = UCI(FOLDERS[config.data], k).load()
    (x, y), (x_test, y_test) = ((x.double(), y.double()) for x, y in (splits.train, splits.test))
    training = training_of(config.data, config.steps)
    result: Result = {"num_data": len(y), "methods": {}, "learned": {}}
    for outputs, (method, likelihood) in enumerate(LIKELIHOODS.items(), start=1):
        for way in WAYS:
            if way == "plain":
                gaussian = early_stopped(training, outputs, (x, y), x_test, k)
            else:
                gaussian, numbers = learned(
                    training, likelihood, (x, y), x_test, k, "cosine" in way
                )
                result["learned"][f"{method}, {way}"] = numbers
            result["methods"][f"{method}, {way}"] = metrics_of(gaussian, splits, y_test)
    return result


def network(training: Training, num_features: int, outputs: int, seed: int) -> MLP:
    """A new network in float64."""
    torch.manual_seed(seed)
    return MLP(num_features, (training.hidden,), outputs, "tanh").double()


def learned(
    training: Training, likelihood: str, data: Pair, x_test: Tensor, seed: int, cosine: bool
) -> tuple[Gaussian, Result]:
    """Predictions with learned weight decays and noise, and the learned numbers."""
    start = time.process_time()
    outputs = 2 if likelihood == "heteroscedastic" else 1
    model = network(training, data[0].shape[1], outputs, seed)
    loader = training.batches(data, seed)
    optimizer = torch.optim.Adam(model.parameters(), training.lr)
    epochs = math.ceil(training.steps / len(loader))
    # Not None, with which the rate may fall, see `experiments.uci.falling_rate`.
    constant = ConstantLR(optimizer, 1.0)
    schedule = CosineAnnealingLR(optimizer, epochs * len(loader)) if cosine else constant
    learner = PriorLearner(likelihood, epochs=epochs)
    OnlineTraining(model, optimizer, loader, learner, scheduler=schedule).run()
    assert learner.posterior is not None
    prediction = laplace_predictive(learner.posterior)(x_test)
    seconds = time.process_time() - start
    return Gaussian(prediction.mean, prediction.total_uncertainty, seconds, 1), {
        "likelihood": str(learner.likelihood),
        "sigma_noise": learner.state.hyperparameters.sigma_noise.item(),
        "evidence_per_example": learner.evidences[-1] / learner.problem.num_data,
    }


def early_stopped(
    training: Training, outputs: int, data: Pair, x_test: Tensor, seed: int
) -> Gaussian:
    """Predictions of maximum likelihood at the epoch with the lowest held-out NLL."""
    start = time.process_time()
    x, y = data
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order.split([count := round(HELD_OUT * len(y)), len(y) - count])
    model = network(training, x.shape[1], outputs, seed)
    loader = training.batches((x[rest], y[rest]), seed)
    epochs = math.ceil(training.steps / len(loader))
    optimizer = torch.optim.Adam(model.parameters(), training.lr)
    schedule = CosineAnnealingLR(optimizer, epochs * len(loader))
    lowest, best = math.inf, deepcopy(model.state_dict())
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            loss = loss_of(model(x[held_out]), y[held_out]).item()
        if loss < lowest:
            lowest, best = loss, deepcopy(model.state_dict())
    model.load_state_dict(best)
    with torch.no_grad():
        f = model(x_test)
    # With one output the loss is half of the mean squared error.
    variance = f[:, 1:].exp() if outputs == 2 else torch.full_like(f, 2 * lowest)
    return Gaussian(f[:, :1], variance, time.process_time() - start, 1)


def loss_of(f: Tensor, y: Tensor) -> Tensor:
    """Gaussian NLL of means and log variances (N, 2); half of the squared error of means (N, 1)."""
    if f.shape[1] == 1:
        return F.mse_loss(f, y) / 2
    return F.gaussian_nll_loss(f[:, :1], y, f[:, 1:].exp())


def report(results: list[Result]) -> str:
    """The tables as Markdown: mean ± standard error over splits."""
    columns = [f"{method}, {way}" for method in LIKELIHOODS for way in WAYS]
    comparisons = {
        **{
            f"{method}: {way} − plain": (f"{method}, {way}", f"{method}, plain")
            for method in LIKELIHOODS
            for way in WAYS[:2]
        },
        "learned: heteroscedastic − one noise": ("heteroscedastic, learned", "one noise, learned"),
    }
    scores = [["set", "splits", *columns]]
    differences = [["set", *comparisons]]
    errors, evidences = [["set", *columns]], [["set", *LIKELIHOODS, "better evidence, better test"]]
    verdicts: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in comparisons}
    for name, (result,) in grouped(results, "data").items():
        own = result["splits"]

        def values(key: str, column: str, own: list[Result] = own) -> list[float]:
            return [split["methods"][column][key] for split in own]

        mark = name + " (dev.)" * (name in DEVELOPMENT)
        likelihoods = {column: values("log_likelihood", column) for column in columns}
        scores.append([mark, str(len(own)), *(mean_with_error(v) for v in likelihoods.values())])
        gains = {
            title: [a - b for a, b in zip(likelihoods[one], likelihoods[other], strict=True)]
            for title, (one, other) in comparisons.items()
        }
        differences.append([mark, *(mean_with_error(gain, "{:+.3f}") for gain in gains.values())])
        errors.append([mark, *(mean_with_error(values("rmse", c), "{:.4g}") for c in columns)])
        for title, gain in gains.items():
            mean, error = sum(gain) / len(gain), standard_error(gain)
            if len(own) > 1 and abs(mean) > 2 * error:
                verdicts[title][mean < 0].append(name)
        evidence = [
            [split["learned"][f"{m}, learned"]["evidence_per_example"] for split in own]
            for m in LIKELIHOODS
        ]
        gain = gains["learned: heteroscedastic − one noise"]
        agree = sum((b > a) == (g > 0) for a, b, g in zip(*evidence, gain, strict=True))
        evidences.append([mark, *map(mean_with_error, evidence), f"{agree} of {len(own)}"])
    return "\n\n".join(
        [
            "# UCI regression with noise that depends on the input",
            "Test log likelihood in nats per example (higher is better), mean ± standard error "
            "over splits. The initial noise was chosen on the training parts of the sets with "
            "(dev.).",
            markdown(scores),
            "Differences of the log likelihood, paired by split",
            markdown(differences),
            *(
                f"{title}: higher by more than two standard errors on "
                f"{', '.join(better) or 'no set'}; lower on {', '.join(worse) or 'no set'}."
                for title, (better, worse) in verdicts.items()
            ),
            "RMSE in the target's units",
            markdown(errors),
            "Log evidence per training example (nats, targets standardised), and the number of "
            "splits in which the likelihood with the higher evidence has the higher test log "
            "likelihood",
            markdown(evidences),
        ]
    )


main = study(
    "uci_heteroscedastic",
    __doc__,
    run,
    lambda options: [Config(name, min(options.seeds, SPLITS[name])) for name in options.data],
    report,
    problems=FOLDERS,
    seeds=3,
)

if __name__ == "__main__":
    sys.exit(main())
