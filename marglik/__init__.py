"""Laplace marginal likelihoods that learn a weight decay per layer while the network trains.

Names are imported when first used, since laplace-torch takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marglik.drop_in import marglik_training
    from marglik.evidence import EvidenceTerms, log_marginal_likelihood
    from marglik.hyperparameters import Hyperparameters
    from marglik.laplace import KronLaplace
    from marglik.prior import PriorGroups, precision_to_weight_decay, weight_decay_to_precision
    from marglik.schedule import Schedule
    from marglik.training import OnlineResult, OnlineTraining

__all__ = [
    "EvidenceTerms",
    "Hyperparameters",
    "KronLaplace",
    "OnlineResult",
    "OnlineTraining",
    "PriorGroups",
    "Schedule",
    "log_marginal_likelihood",
    "marglik_training",
    "precision_to_weight_decay",
    "weight_decay_to_precision",
]

_MODULES = {
    "EvidenceTerms": "evidence",
    "Hyperparameters": "hyperparameters",
    "KronLaplace": "laplace",
    "OnlineResult": "training",
    "OnlineTraining": "training",
    "PriorGroups": "prior",
    "Schedule": "schedule",
    "log_marginal_likelihood": "evidence",
    "marglik_training": "drop_in",
    "precision_to_weight_decay": "prior",
    "weight_decay_to_precision": "prior",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'marglik' has no attribute '{name}'")
    return getattr(import_module(f"marglik.{_MODULES[name]}"), name)
