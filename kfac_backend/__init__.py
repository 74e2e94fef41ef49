"""K-FAC with expand and reduce modes, for torch models and as a backend of laplace-torch.

The backend classes live in `kfac_backend.laplace_interface`.
"""

from kfac_backend.block import EigenBlock, KroneckerBlock
from kfac_backend.factors import kronecker_factors
from kfac_backend.kronecker import KroneckerFactors
from kfac_backend.rows import counted_positions, examples_of_rows
from kfac_backend.rules import register_parameters, register_rule

__all__ = [
    "EigenBlock",
    "KroneckerBlock",
    "KroneckerFactors",
    "counted_positions",
    "examples_of_rows",
    "kronecker_factors",
    "register_parameters",
    "register_rule",
]
