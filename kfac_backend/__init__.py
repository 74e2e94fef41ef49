"""K-FAC with expand and reduce modes, for torch models and as a backend of laplace-torch.

`expand_and_reduce` defines the two modes. Modules with large dependencies are imported on first
use, because importing laplace-torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kfac_backend.blocks.block import EigenBlock, KroneckerBlock
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.curvature import kronecker_factors
from kfac_backend.layers import register_parameters, register_rule
from kfac_backend.layers.rows import counted_positions, examples_of_rows
from kfac_backend.options import CurvatureOptions, PassOptions, TargetOptions

if TYPE_CHECKING:
    from kfac_backend.eigenvalue_correction import corrected_factors
    from kfac_backend.factor_derivatives import BlockDerivative, factor_gradients
    from kfac_backend.laplace_torch.interface import KfacEF, KfacGGN

__all__ = [
    "BlockDerivative",
    "CurvatureOptions",
    "EigenBlock",
    "KfacEF",
    "KfacGGN",
    "KroneckerBlock",
    "KroneckerFactors",
    "PassOptions",
    "TargetOptions",
    "corrected_factors",
    "counted_positions",
    "examples_of_rows",
    "factor_gradients",
    "kronecker_factors",
    "register_parameters",
    "register_rule",
]


_WHEN_FIRST_USED = {
    "BlockDerivative": "kfac_backend.factor_derivatives",
    "KfacEF": "kfac_backend.laplace_torch.interface",
    "KfacGGN": "kfac_backend.laplace_torch.interface",
    "corrected_factors": "kfac_backend.eigenvalue_correction",
    "factor_gradients": "kfac_backend.factor_derivatives",
}


def __getattr__(name: str) -> Any:
    if name in _WHEN_FIRST_USED:
        return getattr(import_module(_WHEN_FIRST_USED[name]), name)
    raise AttributeError(f"module 'kfac_backend' has no attribute '{name}'")
