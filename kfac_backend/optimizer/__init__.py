"""K-FAC as an optimiser: natural gradients from the factors of the training's own passes.

`damped_inverse` has the formulas, `training_pass` the factors of a step, `preconditioner` when
which of both happens, and `kfac` an optimiser made of it.
"""

from kfac_backend.optimizer.kfac import KFAC
from kfac_backend.optimizer.preconditioner import KfacPreconditioner, PreconditionerOptions

__all__ = ["KFAC", "KfacPreconditioner", "PreconditionerOptions"]
