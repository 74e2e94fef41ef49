"""K-FAC as an optimiser: natural gradients from the factors of the training's own passes.

`damped_inverse` has the formulas, `training_pass` computes the factors of a step, `preconditioner`
schedules both, and `kfac` is the optimiser.
"""

from kfac_backend.optimizer.kfac import KFAC
from kfac_backend.optimizer.preconditioner import KfacPreconditioner, PreconditionerOptions

__all__ = ["KFAC", "KfacPreconditioner", "PreconditionerOptions"]
