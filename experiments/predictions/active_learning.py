"""Active learning: which labels to buy, by mutual information, LCMD and six other scores.

A network starts with a few labels at random. After each training, a score chooses the next inputs
of the pool, and the network is trained anew on all labels so far. The trainings are the same for
all scores: `PriorLearner` with default options, and the average of the parameters predicts. Only
the choice of labels differs. The scores:

- mutual information: of a label and the parameters, with the joint choice of a round's inputs (the
  default of `marglik.acquire` for classes);
- LCMD: the distance from labelled inputs, in clusters (the default for regression);
- EPIG: of a label and the labels of other inputs of the pool, also with the joint choice;
- one by one: the mutual information without the joint choice, or the EPIG for regression;
- entropy and margin of the network's class probabilities;
- random;
- ensemble: the mutual information of three networks that are trained alike;
- dropout: the mutual information of 100 dropout masks (p = 0.2), of a network with dropout that is
  trained alike.

The ensemble costs three trainings a round, and dropout two. Their own predictions, by the mean over
networks or masks, are recorded as well. For regression, entropy and margin are left out. The scores
of an ensemble and of dropout increase with the variance of the mean prediction.

The pools: blends of two digits, with the label of either; wrong labels; blurred images of CIFAR-10
(JPEG); clean digits; and five UCI sets. The settings were chosen with seeds 100 and 101. For
CIFAR-10, seed 1 of two scores was also looked at before the joint choice had its present form. LCMD
was chosen for regression with seeds 0 and 1 of the UCI sets concrete and energy. The other seeds of
concrete, and the other sets, were not used for the choice.
``python -m experiments.predictions.active_learning`` runs what is missing.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor, nn
from torchvision.transforms.v2.functional import gaussian_blur

from experiments.data.uci import UCI
from experiments.studies import Result, grouped, markdown, mean_with_error, study
from experiments.weight_decay.training import digits, small_images
from experiments.weight_decay.weight_decay_study import with_dropout
from kfac_backend.likelihoods import likelihood_of
from marglik import Ensemble, OnlineTraining, Posterior, PriorLearner, acquire
from marglik.data import Batches
from marglik.eval_mode import eval_mode
from marglik.models import MLP
from marglik.prediction.acquisition import AcquisitionMethod
from marglik.prediction.links import Prediction, predict_from_outputs
from marglik.prediction.predictive import ModelPredictive, laplace_predictive, map_predictive

DROPOUT, MASKS = 0.2, 100
MEMBERS = 3
BLUR = 8.0
"""Standard deviation in pixels of images of 16 × 16."""
WRONG = 0.2
"""Share of wrong labels."""


@dataclass(frozen=True)
class Pool:
    """Inputs with the labels that an annotator gives them, and test data."""

    x: Tensor
    y: Tensor
    is_ambiguous: Tensor
    """Inputs that are blends or blurred, or whose label is wrong, (M,)."""
    x_test: Tensor
    y_test: Tensor


def clean_digits(seed: int, size: int = 1000) -> Pool:
    """Images of digits. All others are for the test."""
    x, y = digits()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    x, y, none = x.flatten(1)[order], y[order], torch.zeros(size, dtype=torch.bool)
    return Pool(x[:size], y[:size], none, x[size:], y[size:])


def blended_digits(seed: int, size: int = 1000) -> Pool:
    """The second half are means of two digits, each with the label of one of them at random."""
    pool, half = clean_digits(seed, size), size // 2
    generator = torch.Generator().manual_seed(seed)
    partner = half + torch.randperm(size - half, generator=generator)
    takes_own = torch.rand(size - half, generator=generator) < 0.5
    x, y = pool.x.clone(), pool.y.clone()
    x[half:] = (pool.x[half:] + pool.x[partner]) / 2
    y[half:] = torch.where(takes_own, pool.y[half:], pool.y[partner])
    return Pool(x, y, torch.arange(size) >= half, pool.x_test, pool.y_test)


def mislabelled_digits(seed: int, size: int = 1000) -> Pool:
    """Digits, of which a fifth has another class's label."""
    pool = clean_digits(seed, size)
    generator = torch.Generator().manual_seed(seed)
    is_wrong = torch.rand(size, generator=generator) < WRONG
    other = (pool.y + torch.randint(1, 10, (size,), generator=generator)) % 10
    return Pool(pool.x, torch.where(is_wrong, other, pool.y), is_wrong, pool.x_test, pool.y_test)


def blurred_images(seed: int, size: int = 1000) -> Pool:
    """Images of CIFAR-10 (JPEG) at half their size; the second half of the pool is blurred."""
    x, y = small_images()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[: size + 2000]
    x, y = x[order], y[order]
    is_blurred = torch.arange(size) >= size // 2
    x[:size][is_blurred] = gaussian_blur(x[:size][is_blurred], [15, 15], [BLUR, BLUR])
    return Pool(x[:size], y[:size], is_blurred, x[size:], y[size:])


def blurred_features(seed: int) -> Pool:
    """Frozen features of these images, which the pool's images learn without labels."""
    pool = blurred_images(seed)
    of_pool, of_test = (patch_features(pool.x, x, seed) for x in (pool.x, pool.x_test))
    mean, deviation = of_pool.mean(0), of_pool.std(0)
    x, x_test = ((f - mean) / deviation for f in (of_pool, of_test))
    return replace(pool, x=x, x_test=x_test)


def patch_features(
    pool: Tensor, images: Tensor, seed: int, clusters: int = 64, side: int = 5
) -> Tensor:
    """Similarities of an image's patches to clusters of patches, averaged over its four quarters.

    Source: Coates, Ng & Lee 2011, "An analysis of single-layer networks in unsupervised feature
    learning", with whitened patches and the triangle activation.

    Args:
        pool: images (M, C, H, W) whose patches are clustered.
        images: images (N, C, H, W).
        seed: seed of the patches and of the clusters.
        clusters: number of clusters.
        side: height and width of a patch.

    Returns:
        Features (N, 4 · clusters).
    """

    def patches(x: Tensor) -> Tensor:
        p = F.unfold(x, side).mT  # (N, positions, C · side²)
        p = p - p.mean(-1, keepdim=True)
        return p / (p.var(-1, keepdim=True) + 0.1).sqrt()

    # Step 1: whiten 20,000 patches, and cluster them.
    sample = patches(pool).flatten(0, 1)
    generator = torch.Generator().manual_seed(seed)
    sample = sample[torch.randperm(len(sample), generator=generator)[:20_000]]
    values, vectors = torch.linalg.eigh(torch.cov(sample.T))
    whitening = vectors * (values + 0.1).rsqrt() @ vectors.T
    kmeans = MiniBatchKMeans(clusters, random_state=seed, n_init=1, max_iter=20)  # pyright: ignore
    kmeans.fit(((sample - sample.mean(0)) @ whitening).numpy())
    centers = torch.tensor(kmeans.cluster_centers_)
    # Step 2: the similarity of each patch to each center, averaged over quarters.
    features = []
    for part in images.split(500):
        distance = torch.cdist((patches(part) - sample.mean(0)) @ whitening, centers)
        similarity = F.relu(distance.mean(-1, keepdim=True) - distance).mT
        rows = part.shape[2] - side + 1
        features.append(F.adaptive_avg_pool2d(similarity.unflatten(2, (rows, -1)), 2).flatten(1))
    return torch.cat(features)


def uci(name: str, size: int = 1000) -> Callable[[int], Pool]:
    """The UCI set, by the published split of the seed's number; up to ``size`` rows at random."""

    def pool(seed: int) -> Pool:
        splits = UCI(name, seed % 20).load()
        (x, y), (x_test, y_test) = splits.train, splits.test  # pyright: ignore
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        if len(y) > size:
            x, y = x[order[:size]], y[order[:size]]
        return Pool(x, y, torch.zeros(len(y), dtype=torch.bool), x_test, y_test)

    return pool


@dataclass(frozen=True)
class Problem:
    """A pool, its network and training, and how many labels are bought."""

    title: str
    pool: Callable[[int], Pool]
    make: Callable[[], nn.Module] = lambda: MLP(64, (100,), 10, "tanh")
    likelihood: str = "classification"
    first: int = 20
    number: int = 20
    rounds: int = 6
    epochs: int = 50
    lr: float = 1e-2
    batch_size: int = 20


def uci_problem(name: str, columns: int) -> Problem:
    """A table with numeric targets."""
    make = partial(MLP, columns, (50,), 1, "tanh")
    return Problem(f"UCI {name}", uci(name), make, "regression", epochs=100)


PROBLEMS = {
    "blends": Problem("digits, half of them blends", blended_digits),
    "wrong_labels": Problem("digits, 20 % wrong labels", mislabelled_digits, first=100, rounds=8),
    "blurred": Problem(
        "CIFAR-10 (JPEG), half of the images blurred", blurred_features,
        lambda: nn.Linear(256, 10), first=40, number=40,
    ),
    "clean": Problem("digits, clean", clean_digits),
    "concrete": uci_problem("concrete", 8),
    "yacht": uci_problem("yacht", 6),
    "wine": uci_problem("wine-quality-red", 11),
    "kin8nm": uci_problem("kin8nm", 8),
    "power_plant": uci_problem("power-plant", 4),
}  # fmt: skip
LCMD, EPIG = "LCMD", "EPIG"
MUTUAL_INFORMATION, ONE_BY_ONE = "mutual information", "one by one"
METHODS = (MUTUAL_INFORMATION, ONE_BY_ONE, "entropy", "margin", "random", "ensemble", "dropout")
OF_REGRESSION = (LCMD, EPIG, MUTUAL_INFORMATION, ONE_BY_ONE, "random", "ensemble", "dropout")


@dataclass(frozen=True)
class Config:
    """A method on one seed of a pool."""

    pool: str
    method: Any
    """One of `METHODS`, or `OF_REGRESSION`."""
    seed: int
    rounds: int | None = None
    """Number of rounds; None for the problem's."""
    epochs: int | None = None


def trained(
    problem: Problem, x: Tensor, y: Tensor, seed: int, epochs: int, dropout: float = 0.0
) -> Posterior:
    """Train a network on the bought labels, as a user does; return its posterior."""
    torch.manual_seed(seed)
    model = problem.make()
    if dropout:
        model = with_dropout(model, dropout)
    batches = Batches(x, y, problem.batch_size, shuffle=True, seed=seed)
    learner = PriorLearner(problem.likelihood, epochs=epochs)
    optimizer = torch.optim.Adam(model.parameters(), problem.lr)
    return OnlineTraining(model, optimizer, batches, learner).run().laplace


def dropout_predictive(posterior: Posterior) -> ModelPredictive:
    """Predict by the mean over dropout masks; the epistemic part is their disagreement."""
    model, likelihood = posterior.model, likelihood_of(posterior.likelihood)

    @torch.no_grad()
    def predict(x: Tensor) -> Prediction:
        torch.manual_seed(0)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        outputs = torch.stack([model(x) for _ in range(MASKS)])
        return predict_from_outputs(outputs, likelihood, posterior.sigma_noise)

    return ModelPredictive(eval_mode(model)(predict), model, likelihood)


def scores_of(
    predict: Callable[[Tensor], Prediction], pool: Pool, likelihood: str
) -> dict[str, float]:
    """Test accuracy, or RMSE, and the mean log-likelihood (nats) of standardised targets."""
    prediction, y = predict(pool.x_test), pool.y_test
    if likelihood == "regression":
        error = prediction.mean - y
        variance = prediction.total_uncertainty
        log_density = -0.5 * (error.square() / variance + (2 * torch.pi * variance).log())
        rmse = error.square().mean().sqrt().item()
        return {"rmse": rmse, "log_likelihood": log_density.mean().item()}
    hits = (prediction.mean.argmax(-1) == y).double().mean().item()
    nll = F.nll_loss(prediction.mean.clamp(min=1e-12).log(), y).item()
    return {"accuracy": hits, "log_likelihood": -nll}


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager without marglik's log, and without warnings of an evidence that falls."""
    logger = logging.getLogger("marglik")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        logger.setLevel(level)


@quiet()
def run(config: Config) -> Result:
    """Buy labels round by round; test the network after each."""
    started, problem = time.process_time(), PROBLEMS[config.pool]
    epochs = problem.epochs if config.epochs is None else config.epochs
    rounds = problem.rounds if config.rounds is None else config.rounds
    pool, name = problem.pool(config.seed), problem.likelihood
    generator = torch.Generator().manual_seed(config.seed)
    bought = torch.randperm(len(pool.y), generator=generator)[: problem.first].tolist()
    curve: list[dict[str, Any]] = []
    for step in range(rounds + 1):
        seeds = [100 * (100 * config.seed + step) + k for k in range(MEMBERS)]
        x, y = pool.x[bought], pool.y[bought]
        posterior = trained(problem, x, y, seeds[0], epochs)
        of_map = map_predictive(posterior.model, name, posterior.sigma_noise)
        of_network = laplace_predictive(posterior) if name == "regression" else of_map
        point: dict[str, Any] = {
            "labels": len(bought),
            "ambiguous": pool.is_ambiguous[bought].double().mean().item(),
            **scores_of(of_network, pool, name),
        }
        curve.append(point)
        source: Any = posterior
        if config.method == "ensemble":
            others = [trained(problem, x, y, seed, epochs) for seed in seeds[1:]]
            models = [posterior.model, *(other.model for other in others)]
            source = Ensemble(models, name, posterior.sigma_noise)
        elif config.method == "dropout":
            source = dropout_predictive(trained(problem, x, y, seeds[1], epochs, DROPOUT))
        if config.method in ("ensemble", "dropout"):
            point["own"] = scores_of(source, pool, name)
        if step == rounds:
            break
        score: AcquisitionMethod = "auto"
        options: dict[str, Any] = {}
        if config.method == MUTUAL_INFORMATION:
            score = "mutual_information"
        elif config.method == EPIG:
            score = "epig"
        elif config.method in ("entropy", "margin", "random"):
            source, score = of_map, config.method
        if config.method == "random":
            options = {"generator": generator}
        elif config.method == ONE_BY_ONE:
            score = "epig" if name == "regression" else "mutual_information"
            options = {"joint": False}
        chosen = acquire(source, pool.x, problem.number, score, labelled=bought, **options)
        bought += chosen.index.tolist()
    return {"curve": curve, "bought": bought, "seconds": time.process_time() - started}


def area(curve: Sequence[dict[str, Any]], key: str) -> float:
    """Mean of a metric over the number of labels: the area under its curve, by trapezoids."""
    values = [point[key] for point in curve]
    labels = [point["labels"] for point in curve]
    steps = [b - a for a, b in zip(labels, labels[1:], strict=False)]
    pairs = zip(values, values[1:], steps, strict=False)
    return sum((a + b) / 2 * step for a, b, step in pairs) / (labels[-1] - labels[0])


def tasks(options: argparse.Namespace) -> list[Config]:
    """A seed of all pools, then the next."""
    return [
        Config(name, method, seed)
        for seed in range(options.seeds)
        for name in options.data
        for method in (OF_REGRESSION if PROBLEMS[name].likelihood == "regression" else METHODS)
    ]


def table_of(problem: Problem, runs_of: dict[str, list[Result]]) -> str:
    """The methods on one pool: areas, their paired differences, and last values."""
    is_regression = problem.likelihood == "regression"
    key, form = ("rmse", "{:.3f}") if is_regression else ("accuracy", "{:.3f}")
    by_seed = {m: {r["config"]["seed"]: r for r in runs} for m, runs in runs_of.items()}
    ours = LCMD if LCMD in by_seed else MUTUAL_INFORMATION
    of_ours = by_seed[ours]
    head = ["score", f"area, {key}", f"{ours} − this", f"last {key}",
            "area, log-likelihood", "last log-likelihood", "ambiguous, last (%)",
            f"own area, {key}", "seconds", "seeds"]  # fmt: skip
    rows = [head]
    for method in (m for m in (LCMD, EPIG, *METHODS) if m in by_seed):
        runs = by_seed[method]
        curves = [runs[seed]["curve"] for seed in sorted(runs)]
        both = sorted(set(runs) & set(of_ours))
        gains = [area(of_ours[s]["curve"], key) - area(runs[s]["curve"], key) for s in both]
        own = [[p["own"] | {"labels": p["labels"]} for p in c] for c in curves if "own" in c[0]]
        ambiguous = fmean(100 * curve[-1]["ambiguous"] for curve in curves)
        rows.append([
            method,
            mean_with_error([area(curve, key) for curve in curves], form),
            "" if method == ours else mean_with_error(gains, "{:+.3f}"),
            mean_with_error([curve[-1][key] for curve in curves], form),
            mean_with_error([area(curve, "log_likelihood") for curve in curves]),
            mean_with_error([curve[-1]["log_likelihood"] for curve in curves]),
            f"{ambiguous:.0f}" if curves[0][-1]["ambiguous"] else "",
            mean_with_error([area(curve, key) for curve in own], form) if own else "",
            f"{fmean(run['seconds'] for run in runs.values()):.0f}",
            str(len(runs)),
        ])  # fmt: skip
    curve = of_ours[min(of_ours)]["curve"]
    first, last, number = curve[0]["labels"], curve[-1]["labels"], curve[1]["labels"]
    title = f"{problem.title}: {first} labels, then {len(curve) - 1} rounds of {number - first}"
    return f"**{title}** ({last} in the end)\n\n{markdown(rows)}"


def table(results: list[Result]) -> str:
    """One table for each pool."""
    text = (
        "Test metrics of the same training, on the labels that each score chose. The area is the "
        "mean over the numbers of labels. Differences of areas are paired. \"Own\" is the "
        "prediction by the ensemble, or by the mean over dropout masks. Seconds are processor "
        "seconds of a run."
    )  # fmt: skip
    groups = grouped(results, "pool")
    tables = [
        table_of(problem, grouped(groups[name], "method"))
        for name, problem in PROBLEMS.items()
        if any(result["config"]["method"] in (LCMD, MUTUAL_INFORMATION) for result in groups[name])
    ]
    return "\n\n".join([text, *tables])


main = study(
    "active_learning", __doc__, run, tasks, table, problems=PROBLEMS, seeds=5
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
