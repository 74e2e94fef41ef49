"""Laplace marginal likelihoods that learn a weight decay per layer while the network trains."""

from marglik.drop_in import marglik_training
from marglik.evidence import EvidenceTerms, log_marginal_likelihood
from marglik.hyperparameters import Hyperparameters
from marglik.laplace import KronLaplace
from marglik.prior import PriorGroups, precision_to_weight_decay, weight_decay_to_precision
from marglik.training import OnlineResult, OnlineTraining, Schedule

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
