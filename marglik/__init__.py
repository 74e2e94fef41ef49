"""Laplace marginal likelihoods that learn a weight decay per layer while the network trains.

Names are imported when first used, since laplace-torch takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marglik.drop_in import marglik_training
    from marglik.evaluation import compute_metrics, predict_all, reliability_curve
    from marglik.evidence import EvidenceTerms, log_marginal_likelihood
    from marglik.hyperparameters import Hyperparameters
    from marglik.laplace import KronLaplace
    from marglik.links import Prediction
    from marglik.post_hoc import maximize_evidence, minimize_validation_loss
    from marglik.posterior_file import load_posterior, save_posterior
    from marglik.predictive import PredictiveConfig, laplace_predictive, map_predictive
    from marglik.prior import PriorGroups, precision_to_weight_decay, weight_decay_to_precision
    from marglik.report import write_report
    from marglik.schedule import Schedule
    from marglik.training import OnlineResult, OnlineTraining

__all__ = [
    "EvidenceTerms",
    "Hyperparameters",
    "KronLaplace",
    "OnlineResult",
    "OnlineTraining",
    "Prediction",
    "PredictiveConfig",
    "PriorGroups",
    "Schedule",
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
    "weight_decay_to_precision",
    "write_report",
]

_MODULES = {
    "EvidenceTerms": "evidence",
    "Hyperparameters": "hyperparameters",
    "KronLaplace": "laplace",
    "OnlineResult": "training",
    "OnlineTraining": "training",
    "Prediction": "links",
    "PredictiveConfig": "predictive",
    "PriorGroups": "prior",
    "Schedule": "schedule",
    "compute_metrics": "evaluation",
    "laplace_predictive": "predictive",
    "load_posterior": "posterior_file",
    "log_marginal_likelihood": "evidence",
    "map_predictive": "predictive",
    "marglik_training": "drop_in",
    "maximize_evidence": "post_hoc",
    "minimize_validation_loss": "post_hoc",
    "precision_to_weight_decay": "prior",
    "predict_all": "evaluation",
    "reliability_curve": "evaluation",
    "save_posterior": "posterior_file",
    "weight_decay_to_precision": "prior",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'marglik' has no attribute '{name}'")
    return getattr(import_module(f"marglik.{_MODULES[name]}"), name)
