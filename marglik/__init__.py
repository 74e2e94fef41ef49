"""Learn a weight decay per parameter tensor during training, by Laplace marginal likelihoods.

Names are imported on first use, because some modules take long to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marglik.application.report import write_report as write_report
    from marglik.attribution.influence import influence as influence
    from marglik.attribution.influence import self_influence as self_influence
    from marglik.augmentation import LearnedAugmentation as LearnedAugmentation
    from marglik.drop_in import marglik_training as marglik_training
    from marglik.estimators import MarglikClassifier as MarglikClassifier
    from marglik.estimators import MarglikRegressor as MarglikRegressor
    from marglik.laplace import KronLaplace as KronLaplace
    from marglik.laplace import Laplace as Laplace
    from marglik.post_hoc import maximize_evidence as maximize_evidence
    from marglik.post_hoc import minimize_validation_loss as minimize_validation_loss
    from marglik.posterior.posterior import Posterior as Posterior
    from marglik.posterior.prior import Hyperparameters as Hyperparameters
    from marglik.posterior.prior import PriorGroups as PriorGroups
    from marglik.posterior.prior import precision_to_weight_decay as precision_to_weight_decay
    from marglik.posterior.prior import update_prior as update_prior
    from marglik.posterior.prior import weight_decay_to_precision as weight_decay_to_precision
    from marglik.posterior_file import load_posterior as load_posterior
    from marglik.posterior_file import save_posterior as save_posterior
    from marglik.prediction.acquisition import Acquisition as Acquisition
    from marglik.prediction.acquisition import acquire as acquire
    from marglik.prediction.calibration import calibrate as calibrate
    from marglik.prediction.ensemble import Ensemble as Ensemble
    from marglik.prediction.links import Prediction as Prediction
    from marglik.prediction.metrics import compute_metrics as compute_metrics
    from marglik.prediction.metrics import reliability_curve as reliability_curve
    from marglik.prediction.predictive import PredictiveConfig as PredictiveConfig
    from marglik.prediction.predictive import laplace_predictive as laplace_predictive
    from marglik.prediction.predictive import map_predictive as map_predictive
    from marglik.prediction.predictive import predict_all as predict_all
    from marglik.prediction.suspicious_labels import SuspiciousLabels as SuspiciousLabels
    from marglik.prediction.suspicious_labels import suspicious_labels as suspicious_labels
    from marglik.prediction.verdict import verdict as verdict
    from marglik.training.learner import PriorLearner as PriorLearner
    from marglik.training.loop import OnlineResult as OnlineResult
    from marglik.training.loop import OnlineTraining as OnlineTraining
    from marglik.training.options import DecayPolicy as DecayPolicy
    from marglik.training.options import LearnerOptions as LearnerOptions
    from marglik.training.options import Schedule as Schedule

_MODULES = {
    "Acquisition": "prediction.acquisition",
    "DecayPolicy": "training.options",
    "Ensemble": "prediction.ensemble",
    "Hyperparameters": "posterior.prior",
    "KronLaplace": "laplace",
    "Laplace": "laplace",
    "LearnedAugmentation": "augmentation.learned",
    "LearnerOptions": "training.options",
    "MarglikClassifier": "estimators",
    "MarglikRegressor": "estimators",
    "OnlineResult": "training.loop",
    "OnlineTraining": "training.loop",
    "Posterior": "posterior.posterior",
    "Prediction": "prediction.links",
    "PredictiveConfig": "prediction.predictive",
    "PriorGroups": "posterior.prior",
    "PriorLearner": "training.learner",
    "Schedule": "training.options",
    "SuspiciousLabels": "prediction.suspicious_labels",
    "acquire": "prediction.acquisition",
    "calibrate": "prediction.calibration",
    "compute_metrics": "prediction.metrics",
    "laplace_predictive": "prediction.predictive",
    "influence": "attribution.influence",
    "load_posterior": "posterior_file",
    "map_predictive": "prediction.predictive",
    "marglik_training": "drop_in",
    "maximize_evidence": "post_hoc",
    "minimize_validation_loss": "post_hoc",
    "precision_to_weight_decay": "posterior.prior",
    "predict_all": "prediction.predictive",
    "reliability_curve": "prediction.metrics",
    "save_posterior": "posterior_file",
    "self_influence": "attribution.influence",
    "suspicious_labels": "prediction.suspicious_labels",
    "update_prior": "posterior.prior",
    "verdict": "prediction.verdict",
    "weight_decay_to_precision": "posterior.prior",
    "write_report": "application.report",
}
__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]  # see the imports


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'marglik' has no attribute '{name}'")
    return getattr(import_module(f"marglik.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, for tab completion before any of them is used."""
    return sorted({*globals(), *__all__})
