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
from marglik.application.data.splits import Splits
from marglik.application.evaluation import in_units
from marglik.application.records import Scores
from marglik.data.batches import Pair
from marglik.prediction.intervals import differences, intervals, of_examples
from marglik.prediction.links import Prediction
from marglik.prediction.metric_types import Difference, Metrics
from marglik.prediction.metrics import compute_metrics, example_scores

LINEAR, TREES = "linear model", "gradient-boosted trees"
FOLDS = 5


def simple_models(train: Pair, test: Pair, likelihood: Likelihood) -> dict[str, Prediction]:
    """Return the test predictions of both models; {} for a likelihood that they do not support."""
    if likelihood.name not in ("classification", "regression", "heteroscedastic"):
        return {}
    with extra("tables"):
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.model_selection import cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

    are_classes = likelihood.kind == "classes"
    linear: Any = LogisticRegression(max_iter=1000) if are_classes else Ridge()
    trees = HistGradientBoostingClassifier if are_classes else HistGradientBoostingRegressor
    models = {
        LINEAR: make_pipeline(StandardScaler(), linear),
        TREES: trees(random_state=0),
    }
    (x, y), (x_test, _) = ([t.double().numpy() for t in part] for part in (train, test))
    y, predictions = y.ravel(), {}
    for name, model in models.items():
        model.fit(x, y)
        if are_classes:
            C = 1 + int(max(train[1].max(), test[1].max()))
            mean = torch.zeros(len(x_test), C, dtype=torch.float64)
            mean[:, model.classes_.astype(int)] = torch.from_numpy(model.predict_proba(x_test))
            aleatoric = torch.special.entr(mean).sum(1)
        else:
            mean = torch.from_numpy(model.predict(x_test))[:, None]
            across = cross_val_predict(model, x, y, cv=min(FOLDS, len(y)))
            aleatoric = torch.full_like(mean, float(np.mean((across - y) ** 2)))
        predictions[name] = Prediction(mean, aleatoric, torch.zeros_like(aleatoric))
    return predictions


def evaluate_simple_models(
    train: Pair, splits: Splits, likelihood: Likelihood, network: Metrics[Tensor]
) -> tuple[dict[str, Scores], dict[str, Difference]]:
    """Return scores of both models, and differences of the NLL between network and model.

    ``train`` are the rows that the network used, also for calibration and posterior. ``network``
    are the scores of its predictive for each test row. A difference is the NLL of the network minus
    the NLL of the model, with the ends of its 95 % interval over the choice of test rows.
    """
    scores, changes = {}, {}
    for name, prediction in simple_models(train, splits.test, likelihood).items():
        prediction, y = in_units(prediction, splits.test[1], splits)
        of_rows = example_scores(prediction, y, likelihood).map(of_examples)
        scores[name] = Scores(compute_metrics(prediction, y, likelihood), intervals(of_rows))
        changes[name] = differences(network, of_rows).nll
    return scores, changes


def simple_models_in_words(
    scores: Mapping[str, Scores], differences: Mapping[str, Difference]
) -> str:
    """Return a text that compares the NLL of these models with the network."""
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
