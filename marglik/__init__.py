"""Laplace marginal likelihoods that learn a weight decay per layer while the network trains.

Names are imported when they are first used, since laplace-torch takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marglik.augmentation import LearnedAugmentation
    from marglik.estimators import MarglikClassifier, MarglikRegressor
    from marglik.laplace import KronLaplace, Laplace
    from marglik.posterior.evidence import EvidenceTerms, log_marginal_likelihood
    from marglik.posterior.posterior import Posterior
    from marglik.posterior.posterior_file import load_posterior, save_posterior
    from marglik.posterior.prior import (
        Hyperparameters,
        PriorGroups,
        precision_to_weight_decay,
        weight_decay_to_precision,
    )
    from marglik.prediction.calibration import calibrate
    from marglik.prediction.ensemble import Ensemble
    from marglik.prediction.links import Prediction
    from marglik.prediction.metrics import compute_metrics, reliability_curve
    from marglik.prediction.predictive import (
        PredictiveConfig,
        laplace_predictive,
        map_predictive,
        predict_all,
    )
    from marglik.prediction.suspicious_labels import SuspiciousLabels, suspicious_labels
    from marglik.prediction.verdict import verdict
    from marglik.report import write_report
    from marglik.training.drop_in import marglik_training
    from marglik.training.learner import PriorLearner, update_prior
    from marglik.training.loop import OnlineResult, OnlineTraining
    from marglik.training.post_hoc import maximize_evidence, minimize_validation_loss
    from marglik.training.schedule import Schedule, settling_rate

__all__ = [
    "Ensemble",
    "EvidenceTerms",
    "Hyperparameters",
    "KronLaplace",
    "Laplace",
    "LearnedAugmentation",
    "MarglikClassifier",
    "MarglikRegressor",
    "OnlineResult",
    "OnlineTraining",
    "Posterior",
    "Prediction",
    "PredictiveConfig",
    "PriorGroups",
    "PriorLearner",
    "Schedule",
    "SuspiciousLabels",
    "calibrate",
    "compute_metrics",
    "laplace_predictive",
    "load_posterior",
    "log_marginal_likelihood",
    "map_predictive",
    "marglik_training",
    "maximize_evidence",
    "minimize_validation_loss",
    "precision_to_weight_decay",
    "predict_all",
    "reliability_curve",
    "save_posterior",
    "settling_rate",
    "suspicious_labels",
    "update_prior",
    "verdict",
    "weight_decay_to_precision",
    "write_report",
]

_MODULES = {
    "Ensemble": "prediction.ensemble",
    "EvidenceTerms": "posterior.evidence",
    "Hyperparameters": "posterior.prior",
    "KronLaplace": "laplace",
    "Laplace": "laplace",
    "LearnedAugmentation": "augmentation.learned",
    "MarglikClassifier": "estimators",
    "MarglikRegressor": "estimators",
    "OnlineResult": "training.loop",
    "OnlineTraining": "training.loop",
    "Posterior": "posterior.posterior",
    "Prediction": "prediction.links",
    "PredictiveConfig": "prediction.predictive",
    "PriorGroups": "posterior.prior",
    "PriorLearner": "training.learner",
    "Schedule": "training.schedule",
    "SuspiciousLabels": "prediction.suspicious_labels",
    "calibrate": "prediction.calibration",
    "compute_metrics": "prediction.metrics",
    "laplace_predictive": "prediction.predictive",
    "load_posterior": "posterior.posterior_file",
    "log_marginal_likelihood": "posterior.evidence",
    "map_predictive": "prediction.predictive",
    "marglik_training": "training.drop_in",
    "maximize_evidence": "training.post_hoc",
    "minimize_validation_loss": "training.post_hoc",
    "precision_to_weight_decay": "posterior.prior",
    "predict_all": "prediction.predictive",
    "reliability_curve": "prediction.metrics",
    "save_posterior": "posterior.posterior_file",
    "settling_rate": "training.schedule",
    "suspicious_labels": "prediction.suspicious_labels",
    "update_prior": "training.learner",
    "verdict": "prediction.verdict",
    "weight_decay_to_precision": "posterior.prior",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'marglik' has no attribute '{name}'")
    return getattr(import_module(f"marglik.{_MODULES[name]}"), name)
