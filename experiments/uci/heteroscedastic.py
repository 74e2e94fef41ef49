"""UCI regression with noise that depends on the input, beside one noise for all inputs.

The same network twice, with the same options, batches and seeds: "regression" with a learned σ, and
"heteroscedastic" (the Fisher information, as Immer et al. 2023, arXiv:2301.05183) with a second
output. All options of `PriorLearner` are its defaults, so that a user's training is the same: the
evidence learns the weight decays and σ, or the decays and the numbers n and k of
`kfac_backend.likelihoods.Heteroscedastic`. Data, splits, network and learning rate are those of
`experiments.uci.regression`, whose "ours" has options of its own; all in float64.

Test log likelihood in nats per example and the target's units; the predictive is the Gaussian with
variance E exp(s) + J Σ Jᵀ. The larger sets have fewer splits, and fewer steps than in that study:
see `SPLITS` and `STEPS`.

How the start n = 1, k = 0.01 was chosen: on a held-out fifth of the training part of split 0 of
concrete, energy and yacht alone. Log likelihoods there, with 2,500 steps and standardised targets:

    one noise                        -0.239   1.623   1.883
    n = 1, k = 0.01                  -0.196   1.740   1.779
    n = 0.3, k = 0.01                -0.242   1.684   1.945
    n = 0.3, k = 0.03                -0.193     -     1.881
    n = k = 1, both learned          -0.224   1.724   1.769
    n = k = 1, precision 100         -0.300   1.053   2.401

A fifth of so few examples leaves much to chance. With 5,000 steps yacht's is 2.251 from n = 1, and
2.274 from 0.3. The last row was the start before, with neither number learned: the root mean square
errors of its means are 0.358, 0.297 and 0.202, where one noise has 0.311, 0.047 and 0.036, as the
noise is fitted to single examples before the mean is. What did not help on concrete: a tensor of
its own for the log variance's weights, from a precision of 100 (-0.671), and log variances that
count 1 − γ/N times in the loss, for residuals as unseen data has them (-0.209 to -0.311).

What helped there is that the last update learns n and k, too: n then has the γ parameters in it
that the mean took from the residuals. Over all five fifths of concrete, heteroscedastic gains 0.032
± 0.021 on one noise with it (RMSE 0.304 beside 0.309). On test splits, 5,000 steps, it was only
tried without: five of concrete -0.065 ± 0.050, five of red wine +0.008 ± 0.015. On concrete the
evidence is below that of one noise (by 0.05 to 0.15 nats per example in each split): the weights of
the means and of the small k's u share one prior precision, which suits the latter.

No results come with the project yet.

``make uci-heteroscedastic`` runs the sets that are missing.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from experiments.data import data_file
from experiments.data.uci import FILE, UCI
from experiments.studies import (
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
    Gaussian,
    Pair,
    Training,
    metrics_of,
    outputs_of,
)
from kfac_backend.likelihoods import Likelihood, likelihood_of
from marglik import PriorLearner, laplace_predictive, settling_rate
from marglik.models import MLP
from marglik.storage.provenance import environment
from marglik.training.learner import OBSERVED_STEPS
from marglik.training.steps import NEW_NORM, WeightAverage

__all__ = ["Config", "main", "report", "run", "train_side_by_side"]

STEPS = 5000
"""Steps of Adam for every network."""
SPLITS = dict.fromkeys(FOLDERS, 5) | {"kin8nm": 3, "naval": 3, "power plant": 3, "protein": 2}
"""Number of splits of each set."""
DEVELOPMENT = "concrete", "energy", "yacht"
"""Sets on whose training parts the start was chosen."""
METHODS = "one noise", "heteroscedastic"


@dataclass(frozen=True)
class Config:
    """The first splits of a set."""

    data: str
    splits: int
    steps: int = STEPS

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return slug(self.data)

    @property
    def training(self) -> Training:
        """As in `experiments.uci.regression`; protein is large and has a wider network."""
        large = self.data == "protein"
        return Training(100 if large else 50, self.steps, 512 if large else 128, LR[self.data])


@quiet_training()
def run(config: Config) -> dict[str, Any]:
    """Both networks on all splits; metrics in the target's units, nats per example."""
    torch.set_num_threads(1)
    path = data_file(FILE)
    loaded = [UCI(FOLDERS[config.data], k, path).load() for k in range(config.splits)]
    train, test = (
        [(x.double(), y.double()) for x, y in (getattr(s, part) for s in loaded)]
        for part in ("train", "test")
    )
    splits: list[dict[str, Any]] = [{"methods": {}, "learned": {}} for _ in loaded]
    for method, likelihood in zip(METHODS, ("regression", "heteroscedastic"), strict=True):
        start = time.process_time()
        learners = train_side_by_side(config.training, likelihood, train)
        seconds = (time.process_time() - start) / len(learners)
        for k, learner in enumerate(learners):
            assert learner.posterior is not None
            x, y = test[k]
            of = laplace_predictive(learner.posterior)(x)
            found = Gaussian(of.mean, of.total, seconds, 1)
            splits[k]["methods"][method] = metrics_of(found, loaded[k], y)
            splits[k]["learned"][method] = {
                "likelihood": str(learner.likelihood),
                "sigma_noise": learner.hyperparameters.sigma_noise.item(),
                "evidence_per_example": learner.evidences[-1] / learner.num_data,
            }
    return {
        "config": asdict(config),
        "num_data": len(train[0][1]),
        "splits": splits,
        **environment(torch.device("cpu")),
    }


def train_side_by_side(
    training: Training, likelihood: str, data: Sequence[Pair]
) -> list[PriorLearner]:
    """Train a network for each data set of one size, as `OnlineTraining` would each alone.

    The networks' parameters are parts of stacked ones, so that a step of all costs little more than
    a step of one. Each has a `PriorLearner` with its default options, which makes the updates; what
    it does in a step (`add_to_gradients`) is done here for all of them. A test compares both.
    """
    x, y = (torch.stack(parts) for parts in zip(*data, strict=True))
    is_one = likelihood == "regression"
    networks, learners, orders = [], [], []
    for seed, own in enumerate(data):
        torch.manual_seed(seed)
        outputs = 1 if is_one else 2
        networks.append(MLP(x.shape[2], (training.hidden,), outputs, "tanh").double())
        orders.append(training.batches((own[0], torch.arange(len(own[1]))), seed))
    epochs = math.ceil(training.steps / len(orders[0]))
    together = zip(*(network.parameters() for network in networks), strict=True)
    stacked = [nn.Parameter(torch.stack(parts).detach()) for parts in together]
    for k, (network, own) in enumerate(zip(networks, data, strict=True)):
        for p, of_all in zip(network.parameters(), stacked, strict=True):
            p.data = of_all.data[k]
        learners.append(PriorLearner(likelihood, learn_sigma_noise=is_one, epochs=epochs))
        optimizer = torch.optim.Adam(network.parameters(), training.lr)
        learners[-1].start(network, optimizer, [own], epochs)
    optimizer = torch.optim.Adam(stacked, training.lr, fused=True)
    rate = settling_rate(optimizer, epochs * len(orders[0]))
    schedule, average, norms, step = learners[0].schedule, WeightAverage(), None, 0
    for epoch in range(1, epochs + 1):
        of_all, pulls = _of_all(learners)
        for chosen in zip(*orders, strict=True):
            rows = torch.stack([index for _, index in chosen])[..., None]  # (K, M, 1)
            x_batch = x.gather(1, rows.expand(-1, -1, x.shape[2]))
            optimizer.zero_grad()
            f = outputs_of(stacked, x_batch)
            (of_all.losses(f, y.gather(1, rows)).sum() / rows.shape[1]).backward()
            if schedule.is_averaged(epoch):
                average.add(stacked)
            norms = _add_priors(stacked, pulls, networks, learners, norms, step)
            if step == OBSERVED_STEPS - 1:  # after which the decays have their limits
                of_all, pulls = _of_all(learners)
            optimizer.step()
            rate.step()
            step += 1
        for learner in learners:
            learner.end_of_epoch(epoch)
    if average.count:
        average.add(stacked)
        average.write(stacked)
    for learner in learners:
        learner.end_of_training()
    return learners


def _of_all(learners: Sequence[PriorLearner]) -> tuple[Likelihood, torch.Tensor]:
    """A likelihood with the numbers of all, (K, 1, 1), and the pull of each decay, (K, tensors)."""
    likelihood = likelihood_of(learners[0].likelihood)
    of_all = likelihood.but()
    for name in of_all.numbers:
        numbers = [learner.likelihood.numbers[name] for learner in learners]
        of_all.numbers[name] = torch.stack(numbers)[:, None, None]
    pulls = [
        [learner.gradient_scale * decay for decay in learner.decays_of_parameters()]
        for learner in learners
    ]
    return of_all, torch.tensor(pulls, dtype=torch.float64)


@torch.no_grad()
def _add_priors(
    stacked: Sequence[torch.Tensor],
    pulls: torch.Tensor,
    networks: Sequence[MLP],
    learners: Sequence[PriorLearner],
    norms: torch.Tensor | None,
    step: int,
) -> torch.Tensor:
    """What `PriorLearner.add_to_gradients` does, for all networks; returns their running norms."""
    gradients = [p.grad for p in stacked if p.grad is not None]
    if step < OBSERVED_STEPS:  # the learners look at these themselves
        for k, (network, learner) in enumerate(zip(networks, learners, strict=True)):
            for p, gradient in zip(network.parameters(), gradients, strict=True):
                p.grad = gradient[k].clone()
            learner.add_to_gradients()
            for p, gradient in zip(network.parameters(), gradients, strict=True):
                assert p.grad is not None
                gradient[k] = p.grad
    else:
        for j, (p, gradient) in enumerate(zip(stacked, gradients, strict=True)):
            gradient += pulls[:, j].view(-1, *[1] * (p.dim() - 1)) * p
    norm = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)  # (K,)
    norms = norm if norms is None else norms
    clip = learners[0].schedule.clip
    if step >= OBSERVED_STEPS and clip is not None:
        factor = (clip * norms / norm).clamp(max=1)
        for gradient in gradients:
            gradient *= factor.view(-1, *[1] * (gradient.dim() - 1))
        norm = norm * factor
    return norms.lerp(norm, NEW_NORM)


def report(found: Sequence[dict[str, Any]]) -> str:
    """The tables as Markdown: mean ± standard error over splits."""
    rows = [["set", "splits", *METHODS, "gain of heteroscedastic", "RMSE, one noise", "RMSE"]]
    evidences = [["set", *METHODS, "better evidence, better test"]]
    better, worse = [], []
    for name in FOLDERS:
        own = [s for result in found if result["config"]["data"] == name for s in result["splits"]]
        if not own:
            continue

        def of(key: str, kind: str, own: list[dict[str, Any]] = own) -> list[list[float]]:
            return [[r[kind][m][key] for r in own] for m in METHODS]

        one, per_input = of("log_likelihood", "methods")
        gains = [b - a for a, b in zip(one, per_input, strict=True)]
        gain, error = sum(gains) / len(gains), standard_error(gains)
        if len(own) > 1:
            better += [name] * (gain > 2 * error)
            worse += [name] * (gain < -2 * error)
        mark = name + " (dev.)" * (name in DEVELOPMENT)
        cells = [mean_with_error(values) for values in (one, per_input)]
        errors = [mean_with_error(values, "{:.4g}") for values in of("rmse", "methods")]
        rows.append([mark, str(len(own)), *cells, mean_with_error(gains, "{:+.3f}"), *errors])
        evidence = of("evidence_per_example", "learned")
        agree = sum((b > a) == (g > 0) for a, b, g in zip(*evidence, gains, strict=True))
        evidences.append([name, *map(mean_with_error, evidence), f"{agree} of {len(own)}"])
    return "\n\n".join(
        [
            "# UCI regression with noise that depends on the input",
            "Test log likelihood (nats per example, higher is better) and RMSE (the target's "
            "units), mean ± standard error over splits; gains are paired by split. On sets marked "
            "(dev.) the start was chosen, on training parts alone.",
            f"Better by more than two standard errors: {', '.join(better) or 'none'}; worse: "
            f"{', '.join(worse) or 'none'}. A single split has no standard error.",
            markdown(rows),
            "Log evidence per training example (nats, targets standardised), and in how many "
            "splits the higher evidence has the higher test log likelihood",
            markdown(evidences),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing sets, and write the table; returns the exit status."""
    return study(
        "uci_heteroscedastic",
        __doc__,
        run,
        lambda options: [Config(name, min(options.seeds, SPLITS[name])) for name in options.data],
        report,
        arguments,
        problems=FOLDERS,
        seeds=5,
    )


if __name__ == "__main__":
    sys.exit(main())
