"""Data attribution: how well do scores predict networks that are retrained on half of the data?

The linear datamodeling score (LDS, Park et al. 2023, arXiv:2303.14186) of a query is Spearman's
correlation over random halves of the training data. It compares the sum of the scores of the
examples in a half with the negative loss of the query after training on this half. All methods
share the network, the halves and the retrained networks.

The network has learned weight decays. The retrained networks have the same prior precisions, see
`experiments.attribution.tasks`. Differences between methods are paired by query; ± is the standard
error over the queries of all seeds. The halves are common to all queries of a seed, so errors of
different queries are not independent.

We chose the defaults of `marglik.influence` on Friedman's data and on seeds from 100, none of which
is reported.

``python -m experiments.attribution.linear_datamodeling`` runs what is missing, in about an hour of
one core. Losses of retrained networks are kept in ``data/attribution/``.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from safetensors.torch import load_file, save
from scipy.stats import rankdata
from torch import Tensor, nn

from experiments.attribution import peers
from experiments.attribution.peers import Pair, Setting, losses
from experiments.attribution.tasks import TASKS, Task
from experiments.studies import Result, grouped, markdown, study
from kfac_backend.atomic_files import write_file
from marglik import Posterior, influence

BATCH = 100
MULTIPLES = (0.5, 1.0, 3.0, 6.0)
"""Multiples of the learned δ for the exact blocks."""
RETRAINED = Path("data/attribution")
MEASURED = (
    "digits, MLP",
    "digits, convolutions",
    "digits, convolutions, 20 % wrong",
    "UCI concrete",
    "diabetes",
    "DART, GPT",
    "CIFAR-2 (JPEG), ResNet-9",
)
"""Tasks of the shipped results. The defaults were chosen on Friedman's data, besides seeds from 100
of digits and diabetes."""
EXACT = "exact, per layer"
"""The blocks of the default."""
EKFAC = ("EKFAC", "1 δ")


@dataclass(frozen=True)
class Config:
    """A task and a seed, of the data, the network and the halves."""

    data: str
    seed: int


def linear_datamodeling_scores(
    scores: Float[Tensor, "Q N"],
    halves: Bool[Tensor, "K N"],
    retrained: Float[Tensor, "Q K"],
) -> Float[Tensor, "Q"]:
    """Return Spearman's correlation over halves, for each query.

    Args:
        scores: score of each training example for each query; positive if the example lowers the
            query's loss.
        halves: the examples in each half.
        retrained: losses of the queries after training on each half.
    """
    predicted = scores.double() @ halves.double().T  # (Q, K)
    ranks = [rankdata(part.numpy(), axis=1) for part in (predicted, -retrained.double())]
    a, b = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    # Equal predictions have no ranks. Their correlation is 0, as for random scores.
    return torch.from_numpy((a * b).sum(1) / np.where(norms > 0, norms, 1.0))


@torch.no_grad()
def query_losses(model: nn.Module, queries: Pair, task: Task) -> Float[Tensor, "Q"]:
    """Loss of each query, without σ."""
    return losses(model(queries[0]), queries[1], task.likelihood)


def retrained_losses(
    config: Config, task: Task, posterior: Posterior, train: Pair, queries: Pair
) -> tuple[Bool[Tensor, "K N"], Float[Tensor, "Q K"], float]:
    """Halves, mean losses of the networks retrained on each, and the processor seconds.

    What is retrained is kept in a file, so that an interrupted run continues.
    """
    N = len(train[1])
    generator = torch.Generator().manual_seed(1000 + config.seed)
    chosen = [torch.randperm(N, generator=generator)[: N // 2] for _ in range(task.halves)]
    halves = torch.stack([torch.zeros(N).index_fill(0, half, 1.0).bool() for half in chosen])
    words = "".join(c if c.isalnum() else "_" for c in config.data.lower())
    path = RETRAINED / f"{words}_{config.seed}.safetensors"
    stored = load_file(path) if path.exists() else {}
    done, seconds = [*stored.get("losses", ())], [*map(float, stored.get("seconds", ()))]
    for k in range(len(done), task.halves):
        started = time.process_time()
        part = train[0][chosen[k]], train[1][chosen[k]]
        seeds = (10_000 * (config.seed + 1) + 100 * r + k for r in range(task.repeats))
        networks = [task.retrain(posterior, part, seed) for seed in seeds]
        done.append(torch.stack([query_losses(n, queries, task) for n in networks]).mean(0))
        seconds.append(time.process_time() - started)
        if k % 10 == 9:
            RETRAINED.mkdir(parents=True, exist_ok=True)
            tensors = {"losses": torch.stack(done), "seconds": torch.tensor(seconds)}
            write_file(path, save(tensors))
    return halves, torch.stack(done, 1), sum(seconds)


def ours(posterior: Posterior, train: Pair, queries: Pair) -> Iterator[tuple[str, Setting]]:
    """Settings of `influence`: the defaults, and grids of the damping for each curvature."""
    loader = list(zip(train[0].split(BATCH), train[1].split(BATCH), strict=True))
    learned = posterior.prior_precision

    def scores_of(label: str, posterior: Posterior, multiple: float, **options: Any) -> Setting:
        started = time.process_time()
        posterior.prior_precision = multiple * learned
        try:
            scores = influence(posterior, [queries], loader, **{"damping": "evidence", **options})
        finally:
            posterior.prior_precision = learned
        return label, scores, time.process_time() - started

    default = scores_of("default", posterior, 1.0, damping="auto")
    yield "marglik", default
    of_default = 3.0 if posterior.likelihood.has_sigma else 1.0
    for multiple in MULTIPLES:
        label = f"{multiple:g} δ"
        if multiple == of_default:
            yield "exact, per layer", (label, *default[1:])
        else:
            yield "exact, per layer", scores_of(label, posterior, multiple)
    yield "exact, per tensor", scores_of("1 δ", posterior, 1.0, blocks="tensor")
    # The learner's last curvature is often an estimate. The best EKFAC has an exact one.
    if posterior.options.fisher == "random_signs":
        posterior = Posterior(
            posterior.model, posterior.likelihood, posterior.options.replace(fisher="exact"),
            prior_precision=learned, sigma_noise=posterior.sigma_noise,
        )  # fmt: skip
        posterior.fit(loader)
    # With a large damping the curvature is negligible.
    dot = scores_of("", posterior, 1.0, curvature="kfac", damping=1e9)
    yield "gradient dot product", dot
    for curvature in ("ekfac", "kfac"):
        name = curvature.upper()
        options = {"curvature": curvature}
        yield name, scores_of("0.1 · mean", posterior, 1.0, **options, damping="relative")
        for multiple in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0):
            yield name, scores_of(f"{multiple:g} δ", posterior, multiple, **options)


def run(config: Config) -> Result:
    """Train, retrain, and score all methods."""
    task = TASKS[config.data]
    train, test = task.data(config.seed)
    queries = test[0][: task.queries], test[1][: task.queries]
    posterior = task.train(train, config.seed)
    halves, retrained, seconds = retrained_losses(config, task, posterior, train, queries)
    model, sigma = posterior.model, float(posterior.sigma_noise)
    settings = [*ours(posterior, train, queries)]
    for peer in (peers.kronfluence, peers.dattri, peers.trak):
        # A peer wraps the modules of the network that it gets.
        network = task.make()
        network.load_state_dict(model.state_dict())
        network.eval()
        settings += [
            (peer.__name__, setting)
            for setting in peer(network, train, queries, task.likelihood, sigma)
        ]
    methods = []
    for method, (label, scores, took) in settings:
        by_query = linear_datamodeling_scores(scores.nan_to_num(), halves, retrained)
        methods.append(
            {
                "method": method,
                "setting": label,
                "lds": float(by_query.mean()),
                "error": float(by_query.std()) / len(by_query) ** 0.5,
                "seconds": took,
                "by_query": [round(value, 3) for value in by_query.tolist()],
            }
        )
    return {
        "methods": methods,
        "examples": len(train[1]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "prior_precision": posterior.prior_precision.tolist(),
        "sigma_noise": sigma,
        "test_loss": float(query_losses(model, queries, task).mean()),
        "train_loss": float(query_losses(model, train, task).mean()),
        "retraining_seconds": seconds,
        "retrained": task.halves * task.repeats,
    }


# The tables, from JSON alone

PEERS = ("kronfluence", "dattri", "trak")
OURS = ("marglik", "default")
Key = tuple[str, str]
"""Method and setting."""
Correlations = Mapping[Key, np.ndarray]
"""LDS of each query of all seeds, (seeds · Q,)."""


def report(results: list[Result]) -> str:
    """LDS of each method, with its default and its best damping; differences; seconds."""
    scores = [["task", "gradient dot product"]]
    for peer in PEERS:
        scores[0] += [f"{peer}, default", "best"]
    scores[0] += ["EKFAC, best", "marglik"]
    differences = [["task", "best other", "marglik − best other", "in each seed"]]
    differences[0] += ["best multiple of δ", "marglik − best multiple", "in each seed"]
    costs = [["task", "N", "parameters", "queries", "seeds", "one retraining"]]
    costs[0] += ["kronfluence", "marglik", "EKFAC"]
    for name, own in grouped(results, "data").items():
        by_query = _correlations(own)
        rivals = [key for key in by_query if not _is_exact(key)]
        row = [name, _cell(by_query.get(("gradient dot product", "")))]
        for peer in PEERS:
            keys = [key for key in rivals if key[0] == peer]
            row.append(_cell(by_query.get((peer, "default"))))
            row.append(_with_setting(by_query, _best(by_query, keys)) if keys else "")
        row.append(_with_setting(by_query, _best(by_query, [k for k in rivals if k[0] == "EKFAC"])))
        scores.append([*row, f"**{_cell(by_query[OURS])}**"])
        rival = _best(by_query, rivals)
        multiple = _best(by_query, [key for key in by_query if key[0] == EXACT])
        differences.append([name])
        for label, key in ((", ".join(filter(None, rival)), rival), (multiple[1], multiple)):
            gains = by_query[OURS] - by_query[key]
            of_seeds = (f"{part.mean():+.3f}" for part in np.split(gains, len(own)))
            differences[-1] += [label, _cell(gains, "{:+.3f}"), ", ".join(of_seeds)]
        each = [r["retraining_seconds"] / r["retrained"] for r in own]
        seconds = [_seconds(own, key) for key in (("kronfluence", "default"), OURS, EKFAC)]
        queries = len(by_query[OURS]) // len(own)
        counts = [own[0]["examples"], own[0]["parameters"], queries, len(own)]
        costs.append(
            [name, *(f"{c:,}" for c in counts), f"{statistics.median(each):.2f}", *seconds]
        )
    return "\n\n".join(
        [
            "# Data attribution",
            "Linear datamodeling score, ± standard error over queries, with the best damping in "
            "brackets",
            markdown(scores),
            "Paired differences of the defaults",
            markdown(differences),
            "Processor seconds of one setting, medians over seeds (one thread)",
            markdown(costs),
        ]
    )


def _correlations(own: Sequence[Result]) -> Correlations:
    """The correlations of the settings that all seeds have."""
    of_seeds = [{(m["method"], m["setting"]): m["by_query"] for m in r["methods"]} for r in own]
    common = [key for key in of_seeds[0] if all(key in of_seed for of_seed in of_seeds)]
    return {key: np.concatenate([of_seed[key] for of_seed in of_seeds]) for key in common}


def _is_exact(key: Key) -> bool:
    return key[0] == "marglik" or key[0].startswith("exact")


def _best(by_query: Correlations, keys: Sequence[Key]) -> Key:
    return max(keys, key=lambda key: by_query[key].mean())


def _cell(values: np.ndarray | None, form: str = "{:.3f}") -> str:
    if values is None:
        return ""
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{form.format(values.mean())} ± {error:.3f}"


def _with_setting(by_query: Correlations, key: Key) -> str:
    return f"{_cell(by_query[key])} ({key[1]})"


def _seconds(own: Sequence[Result], key: Key) -> str:
    """Median of a setting's processor seconds; empty if a seed lacks it."""
    seconds = [
        m["seconds"] for r in own for m in r["methods"] if (m["method"], m["setting"]) == key
    ]
    return f"{statistics.median(seconds):.1f}" if seconds else ""


main = study(
    "attribution",
    __doc__,
    run,
    lambda options: [
        Config(name, seed)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for name in options.data
    ],
    report,
    problems=TASKS,
    default=MEASURED,
    seeds=3,
    extra={"--first-seed": {"type": int, "default": 0, "help": "first seed; default: 0"}},
)

if __name__ == "__main__":
    sys.exit(main())
