"""Small tables: `MarglikClassifier` and `MarglikRegressor` beside scikit-learn, default options.

Breast cancer, digits and diabetes come with scikit-learn, concrete with the UCI archive. A quarter
of the rows is the test set; each seed divides anew. Every way gets columns (and, in regression,
targets) that are standardised by the training part. Nothing is tuned, neither ours nor theirs:

- MLPClassifier, MLPRegressor: one hidden layer of 100 ReLUs, as scikit-learn has it,
- LogisticRegression; a Gaussian process with the kernel c·RBF + white noise, whose length, c and
  noise its own marginal likelihood learns,
- HistGradientBoosting: trees.

An MLPRegressor and trees give no distribution: theirs is a Gaussian around the prediction, with the
root mean square error of predictions across five folds of the training part. Seconds
are processor seconds. Our number of epochs and the activation were chosen on parts of the training
part of another seed, of six sets.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_predict, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from experiments.data.uci import UCI
from experiments.studies import Result, grouped, markdown, mean_with_error, study
from marglik import MarglikClassifier, MarglikRegressor

Table = tuple[np.ndarray, np.ndarray]


def concrete() -> Table:
    """All rows, standardised; what is divided is divided again here."""
    splits = UCI("concrete").load()
    mean, std = splits.target_scale or (0.0, 1.0)
    parts = zip(splits.train, splits.test, strict=True)
    x, y = (torch.cat(part).double().numpy() for part in parts)
    return x, y[:, 0] * std + mean


CLASSES: dict[str, Callable[[], Any]] = {
    "breast cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "digits": lambda: datasets.load_digits(return_X_y=True),
}
NUMBERS: dict[str, Callable[[], Any]] = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "concrete": concrete,
}
CLASSIFIERS: dict[str, Callable[[int], Any]] = {
    "MarglikClassifier": lambda seed: MarglikClassifier(random_state=seed),
    "MLPClassifier": lambda seed: MLPClassifier(random_state=seed),
    "LogisticRegression": lambda seed: LogisticRegression(),
    "HistGradientBoosting": lambda seed: HistGradientBoostingClassifier(random_state=seed),
}
KERNEL = ConstantKernel() * RBF() + WhiteKernel()
REGRESSORS: dict[str, Callable[[int], Any]] = {
    "MarglikRegressor": lambda seed: MarglikRegressor(random_state=seed),
    "MLPRegressor": lambda seed: MLPRegressor(random_state=seed),
    "GaussianProcess": lambda seed: GaussianProcessRegressor(KERNEL, random_state=seed),
    "HistGradientBoosting": lambda seed: HistGradientBoostingRegressor(random_state=seed),
}


@dataclass(frozen=True)
class Task:
    """One division of one set, for all ways."""

    data: str
    seed: int


def run(task: Task) -> Result:
    """NLL (nats, in the targets' units), and accuracy or RMSE, on the test part, of each way."""
    is_classes = task.data in CLASSES
    x, y = (CLASSES | NUMBERS)[task.data]()
    parts: Any = train_test_split(
        x, y, test_size=0.25, random_state=task.seed, stratify=y if is_classes else None
    )
    x, x_test, y, y_test = parts
    ways = {}
    for name, make in (CLASSIFIERS if is_classes else REGRESSORS).items():
        started = time.process_time()
        model = make_pipeline(StandardScaler(), make(task.seed))
        if is_classes:
            p = model.fit(x, y).predict_proba(x_test)
            scores = {"nll": log_loss(y_test, p), "accuracy": np.mean(p.argmax(1) == y_test)}
        else:
            mean, std = _gaussian(model, x, y, x_test)
            z = (y_test - mean) / std
            nll = 0.5 * z**2 + np.log(std) + 0.5 * np.log(2 * np.pi)
            scores = {"nll": nll.mean(), "rmse": np.mean((y_test - mean) ** 2) ** 0.5}
        ways[name] = {k: float(v) for k, v in scores.items()}
        ways[name]["seconds"] = time.process_time() - started
    return {"examples": len(y), "ways": ways}


def _gaussian(model: Any, x: np.ndarray, y: np.ndarray, x_test: np.ndarray) -> Table:
    """Means and standard deviations of new targets, for standardised targets."""
    last = model[-1]
    if isinstance(last, MarglikRegressor):
        return model.fit(x, y).predict(x_test, return_std=True)
    shift, scale = y.mean(), y.std()
    if isinstance(last, GaussianProcessRegressor):
        mean, std = model.fit(x, (y - shift) / scale).predict(x_test, return_std=True)
        return mean * scale + shift, std * scale
    model = TransformedTargetRegressor(model, transformer=StandardScaler())
    error = np.mean((cross_val_predict(model, x, y, cv=5) - y) ** 2) ** 0.5
    mean = model.fit(x, y).predict(x_test)
    return mean, np.full_like(mean, error)


def table(results: list[Result]) -> str:
    """One row for each set and way."""
    rows = [["set (training rows)", "way", "NLL", "accuracy or RMSE", "seconds"]]
    groups = grouped(results, "data")
    for data in (name for name in CLASSES | NUMBERS if name in groups):
        runs = groups[data]
        for way in runs[0]["ways"]:
            scores = [run["ways"][way] for run in runs]
            other = "accuracy" if data in CLASSES else "rmse"
            cells = [mean_with_error([s[key] for s in scores]) for key in ("nll", other)]
            seconds = f"{np.median([s['seconds'] for s in scores]):.1f}"
            rows.append([f"{data} ({runs[0]['examples']})", way, *cells, seconds])
    return markdown(rows)


main = study(
    "scikit_learn",
    __doc__,
    run,
    lambda options: [Task(data, seed) for data in options.data for seed in range(options.seeds)],
    table,
    problems=CLASSES | NUMBERS,
    seeds=5,
)

if __name__ == "__main__":
    sys.exit(main())
