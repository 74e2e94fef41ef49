"""Fit scikit-learn's linear model and trees to a table, to compare them with a network.

They are fitted with default options to the training rows of the network, with the same standardised
columns. For numeric targets, the predictive distribution is a Gaussian around the prediction. Its
standard deviation is the root mean square error in five-fold cross-validation on these rows.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfac_backend.extras import extra
from kfac_backend.likelihoods import Likelihood
from marglik.application.records import Scores
from marglik.data.batches import Pair
from marglik.prediction.intervals import differences, intervals, of_examples
from marglik.prediction.links import Prediction
from marglik.prediction.metric_types import Difference, Metrics
from marglik.prediction.metrics import compute_metrics, example_scores

LINEAR, TREES = "linear model", "gradient-boosted trees"
FOLDS = 5


def simple_models(train: Pair, test: Pair, likelihood: Likelihood) -> dict[str, Prediction]:
    """Return the test predictions of both models; {} for a likelihood that they do not support.

    Args:
        train: rows that the network used for training, calibration or the posterior.
        test: rows to predict.
        likelihood: likelihood of the network. Classification, regression and heteroscedastic are
            supported.
    """
    if likelihood.name not in ("classification", "regression", "heteroscedastic"):
        return {}
    with extra("tables"):
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.model_selection import cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

    (x, y), (x_test, _) = ([t.double().numpy() for t in part] for part in (train, test))
    predictions = {}
    if likelihood.kind == "classes":
        C = 1 + int(max(train[1].max(), test[1].max()))
        linear: Any = LogisticRegression(max_iter=1000)
        for name, model in {
            LINEAR: make_pipeline(StandardScaler(), linear),
            TREES: HistGradientBoostingClassifier(random_state=0),
        }.items():
            model.fit(x, y)
            p = torch.zeros(len(x_test), C, dtype=torch.float64)
            p[:, torch.from_numpy(model.classes_).long()] = torch.from_numpy(
                model.predict_proba(x_test)
            )
            entropy = torch.special.entr(p).sum(1)
            predictions[name] = Prediction(p, entropy, torch.zeros_like(entropy))
        return predictions
    for name, model in {
        LINEAR: make_pipeline(StandardScaler(), Ridge()),
        TREES: HistGradientBoostingRegressor(random_state=0),
    }.items():
        folds = min(FOLDS, len(y))
        variance = np.mean((cross_val_predict(model, x, y[:, 0], cv=folds) - y[:, 0]) ** 2)
        mean = torch.from_numpy(model.fit(x, y[:, 0]).predict(x_test))[:, None]
        aleatoric = torch.full_like(mean, float(variance))
        predictions[name] = Prediction(mean, aleatoric, torch.zeros_like(mean))
    return predictions


def evaluate_simple_models(
    train: Pair, test: Pair, likelihood: Likelihood, network: Metrics[Tensor]
) -> tuple[dict[str, Scores], dict[str, Difference]]:
    """Return scores of both models, and differences of the NLL between network and model.

    Args:
        train: see `simple_models`.
        test: the test rows.
        likelihood: likelihood of the network.
        network: scores of the network's predictive for each test row.

    Returns:
        Name -> scores; and name -> NLL of the network minus NLL of the model, with the ends of its
        95 % interval over the choice of test rows.
    """
    scores, changes = {}, {}
    for name, prediction in simple_models(train, test, likelihood).items():
        of_rows = example_scores(prediction, test[1], likelihood).map(of_examples)
        metrics = compute_metrics(prediction, test[1], likelihood)
        scores[name] = Scores(metrics, intervals(of_rows))
        changes[name] = differences(network, of_rows).nll
    return scores, changes


def simple_models_in_words(
    scores: Mapping[str, Scores], differences: Mapping[str, Difference]
) -> str:
    """Return a text that compares the NLL of these models with the network.

    Args:
        scores: scores of each model.
        differences: name -> NLL of the network minus NLL of the model, lower end, upper end.
    """
    phrases, better = [], []
    for name, (change, low, high) in differences.items():
        nll = scores[name].metrics.nll
        phrases.append(
            f"{name} {nll:.3f} (the network {change:+.3f}, 95 % interval {low:+.3f} to {high:+.3f})"
        )
        if low > 0:
            better.append(name)
    verdict = f"Better than the network here: {' and '.join(better)}." if better else ""
    return (
        f"NLL of scikit-learn's models on the same rows: {'; '.join(phrases)}. {verdict}".rstrip()
    )
