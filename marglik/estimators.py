"""Estimators with scikit-learn's interface, which predict from arrays or data frames.

`fit` standardises the columns, trains a network with learned weight decays, calibrates its
predictions with held-out examples, and then fits the posterior to all examples. Pipelines,
`GridSearchCV`, `cross_val_score` and `clone` work as with any estimator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from kfac_backend.extras import extra
from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.options import check_fraction
from marglik.data import Batches
from marglik.eval_mode import eval_mode
from marglik.models import MLP
from marglik.prediction.acquisition import AcquisitionMethod, acquire
from marglik.prediction.calibration import calibrate
from marglik.prediction.links import Prediction
from marglik.prediction.predictive import Predictive, laplace_predictive, map_predictive
from marglik.training.learner import PriorLearner
from marglik.training.loop import OnlineTraining
from marglik.training.options import WEIGHT_DECAY

with extra("tables"):
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import LabelEncoder, StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

HIDDEN = (100,)
"""Hidden units of the default network, as in scikit-learn's MLPs."""
FEWEST_HELD_OUT = 20
"""Minimum number of examples for calibration. With fewer, train on all of them."""
PREDICTED_AT_ONCE = 1000
REGRESSIONS = {"regression": 1, "heteroscedastic": 2}
"""Likelihood of the regressor -> number of the network's outputs."""

Network = nn.Module | Callable[[int, int], nn.Module]


class Estimator(BaseEstimator):
    """Base class of the classifier and the regressor.

    Args:
        model: a network, which each fit copies, or a function that returns a network for the
            numbers of columns and outputs. None is an `MLP` with 100 tanh units, in float64.
        likelihood: likelihood of the targets, see the derived class; None is its default.
        epochs: number of passes over the training examples.
        batch_size: number of examples in a step.
        lr: learning rate of Adam. For a regression with little noise it falls in the last third of
            the epochs, see `OnlineTraining`.
        weight_decay: initial weight decay. Each parameter tensor then learns its own weight decay.
        held_out: share of the examples for calibration, which are not used for training. With 0, or
            fewer than 20 such examples, there is no calibration. A classifier then predicts with
            the MAP, and a regressor with the uncalibrated posterior.
        random_state: an int, or a `numpy.random.RandomState`, for reproducible networks.
        device: torch device, such as "cuda".
    """

    _default_likelihood: ClassVar[str]
    weight_decays_: dict[str, float]

    def __init__(
        self,
        model: Network | None = None,
        *,
        likelihood: str | None = None,
        epochs: int = 200,
        batch_size: int = 32,
        lr: float = 1e-2,
        weight_decay: float = WEIGHT_DECAY,
        held_out: float = 0.1,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.likelihood = likelihood
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.held_out = held_out
        self.random_state = random_state
        self.device = device

    @property
    def _likelihood(self) -> Likelihood:
        return likelihood_of(self.likelihood or self._default_likelihood)

    def _fit(self, X: np.ndarray, targets: np.ndarray, num_outputs: int) -> Self:
        """Train on X and targets: class indices (N,) or numbers (N, 1)."""
        check_fraction("held_out", self.held_out)
        seed = int(check_random_state(self.random_state).randint(2**31))
        # Constant columns become 0.
        self.scaler_: Any = StandardScaler().fit(X.reshape(len(X), -1))
        is_classes = self._likelihood.has_labels
        with _seeded(seed):
            self.model_ = self._new_model(X[0].size, num_outputs)
        x = self._inputs(X)
        y = torch.tensor(targets, device=x.device, dtype=torch.int64 if is_classes else x.dtype)
        with _seeded(seed), torch.no_grad(), eval_mode(self.model_):
            C = self.model_(x[:1]).shape[-1]
        if is_classes and self._likelihood.name != "ordinal" and C != num_outputs:
            raise ValueError(
                f"The network has {C} outputs, but there are {num_outputs} classes. Pass a "
                "function of the numbers of columns and outputs that returns a network."
            )

        # Step 1: hold out examples, the same share of each class.
        train: Any = np.arange(len(y))
        validation: Any = []
        if self.held_out * len(y) >= FEWEST_HELD_OUT:
            counts = np.bincount(targets) if is_classes else np.array([len(y)])
            stratify = targets if is_classes and self.held_out * counts.min() >= 1 else None
            train, validation = train_test_split(
                train, test_size=self.held_out, random_state=seed, stratify=stratify
            )

        # Step 2: learn the weights, a weight decay per parameter tensor, and the noise σ.
        batches = Batches(x[train], y[train], self.batch_size, shuffle=True, seed=seed,
                                device=x.device)  # fmt: skip
        optimizer = torch.optim.Adam(self.model_.parameters(), self.lr)
        learner = PriorLearner(self._likelihood, weight_decay=self.weight_decay, epochs=self.epochs)
        held_out = [(x[validation], y[validation])] if len(validation) else None
        with _seeded(seed):  # dropout draws random numbers
            result = OnlineTraining(
                self.model_, optimizer, batches, learner, held_out=held_out
            ).run()
        self.posterior_ = result.laplace
        self.log_marginal_likelihood_ = result.evidence
        names = self.posterior_.fitted_factors().blocks
        self.weight_decays_ = dict(zip(names, learner.weight_decays().tolist(), strict=True))

        # Step 3: calibrate, then fit the posterior to all examples, including the held-out ones.
        if held_out:
            calibrate(self.posterior_, held_out)
            calibrations = self.posterior_.calibrations
            self.posterior_.fit(Batches(x, y, self.batch_size, device=x.device))
            self.posterior_.calibrations = calibrations
        return self

    def _new_model(self, num_columns: int, num_outputs: int) -> nn.Module:
        if self.model is None:
            model: nn.Module = MLP(num_columns, HIDDEN, num_outputs, "tanh").double()
        elif isinstance(self.model, nn.Module):
            model = deepcopy(self.model)
        else:
            model = self.model(num_columns, num_outputs)
        return model.to(self.device)

    def _inputs(self, X: np.ndarray) -> Tensor:
        """Return standardised columns (N, ...) on the device and in the dtype of the network."""
        standardised = self.scaler_.transform(X.reshape(len(X), -1)).reshape(X.shape)
        return torch.tensor(standardised).to(next(self.model_.parameters()))

    def acquire(
        self,
        X: Any,
        number: int,
        method: AcquisitionMethod = "auto",
        *,
        labelled: Any = None,
        joint: bool | None = None,
    ) -> np.ndarray:
        """Return indices (number,) of the rows of X to label next, the best first.

        Args:
            X: the pool of unlabelled rows, with the same columns as in `fit`.
            number: number of rows to choose.
            method: score of a row, see `marglik.acquire`.
            labelled: indices or a mask (N,) of rows that already have labels.
            joint: whether each choice takes into account that the earlier choices will be labelled.
                None does this for the mutual information, EPIG and LCMD, where it is supported.
        """
        x = self._checked_inputs(X)
        chosen = acquire(self.posterior_, x, number, method, labelled=labelled, joint=joint)
        return chosen.index.numpy()

    def _checked_inputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        checked: Any = validate_data(self, X, reset=False, allow_nd=True, dtype="numeric")
        return self._inputs(checked)

    def _predict(self, X: Any) -> Prediction:
        """Return the prediction of standardised targets."""
        x = self._checked_inputs(X)
        predict: Predictive = laplace_predictive(self.posterior_)
        if self._likelihood.has_labels and not self.posterior_.calibrations:
            predict = map_predictive(self.model_, self.posterior_.likelihood)
        parts = x.split(PREDICTED_AT_ONCE)
        return Prediction.cat([predict(part).to("cpu") for part in parts])


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Context manager that seeds torch and restores its random state on exit."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class MarglikClassifier(ClassifierMixin, Estimator):
    """A network with learned weight decays and calibrated class probabilities.

    `fit` sets ``classes_``, ``model_`` (the network, for standardised columns), ``posterior_`` (a
    `marglik.Posterior`), ``weight_decays_`` (name of a parameter tensor -> weight decay) and
    ``log_marginal_likelihood_`` (nats). It has the arguments of `Estimator`.

    Args:
        likelihood: "classification" (the default), or "noisy_classification" if labels may be
            wrong. With "noisy_classification" the held-out examples determine the share of wrong
            labels, ``posterior_.likelihood.parameters["noise"]``.
    """

    _default_likelihood = "classification"
    classes_: np.ndarray

    def fit(self, X: Any, y: Any) -> Self:
        """Train on X (N, ...) and labels y (N,) of any type, and return the estimator.

        Raises:
            ValueError: there is only one class, or a network's outputs do not fit the classes.
        """
        checked: Any = validate_data(self, X, y, allow_nd=True, dtype="numeric")
        X, y = checked
        check_classification_targets(y)
        labels: Any = LabelEncoder().fit(y)
        self.classes_ = labels.classes_
        if len(self.classes_) < 2:
            raise ValueError(
                f"y contains one class, {str(self.classes_[0])!r}. A classifier needs at least two."
            )
        return self._fit(X, labels.transform(y), len(self.classes_))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return class probabilities (N, C), in the order of ``classes_``."""
        return self._predict(X).mean.numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable labels (N,)."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]


class MarglikRegressor(RegressorMixin, Estimator):
    """A network with learned weight decays and learned noise, with Gaussian predictions.

    `fit` sets ``model_`` (the network, for standardised columns and targets), ``posterior_``,
    ``weight_decays_`` and ``log_marginal_likelihood_``, see `MarglikClassifier`. It has the
    arguments of `Estimator`.

    Args:
        likelihood: "regression" (the default) for one noise of all rows, or "heteroscedastic" for
            noise that depends on the columns. The network of "heteroscedastic" has two outputs: the
            mean, and a number whose exponential scales the variance of the noise.
    """

    _default_likelihood = "regression"

    def fit(self, X: Any, y: Any) -> Self:
        """Train on X (N, ...) and numbers y (N,), and return the estimator.

        Raises:
            ValueError: the likelihood is not supported, because its predictions are not Gaussian.
        """
        likelihood = self.likelihood or self._default_likelihood
        if likelihood not in REGRESSIONS:
            raise ValueError(
                f"likelihood={likelihood!r} is not supported, because MarglikRegressor has "
                f"Gaussian predictions. Choose {' or '.join(map(repr, REGRESSIONS))}. For other "
                "likelihoods use PriorLearner or marglik train."
            )
        checked: Any = validate_data(self, X, y, allow_nd=True, dtype="numeric", y_numeric=True)
        X, y = checked
        self.target_scaler_: Any = StandardScaler().fit(y[:, None])
        return self._fit(X, self.target_scaler_.transform(y[:, None]), REGRESSIONS[likelihood])

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return means (N,), and with ``return_std`` standard deviations (N,) of new targets."""
        prediction = self._predict(X)
        mean = self.target_scaler_.inverse_transform(prediction.mean.numpy())[:, 0]
        if not return_std:
            return mean
        std = prediction.total_uncertainty[:, 0].sqrt().numpy()
        return mean, std * self.target_scaler_.scale_[0]

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Return ends (N,) of central intervals that contain targets with probability ``level``."""
        if not 0 < level < 1:
            raise ValueError(f"level={level} is not supported. Pass a number between 0 and 1.")
        mean, std = self.predict(X, return_std=True)
        half = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).item() * std
        return mean - half, mean + half
