"""K-FAC with expand and reduce modes, for torch models and as a backend of laplace-torch.

The backend classes live in `kfac_backend.laplace_interface`.
"""

from kfac_backend.block import EigenBlock, KroneckerBlock
from kfac_backend.factors import kronecker_factors
from kfac_backend.kronecker import KroneckerFactors

__all__ = ["EigenBlock", "KroneckerBlock", "KroneckerFactors", "kronecker_factors"]
