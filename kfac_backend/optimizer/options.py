"""The options of preconditioning, and their checks."""

from dataclasses import dataclass
from typing import Literal

from kfac_backend.options import check_option, check_positive

__all__ = ["DampingOn", "PreconditionerOptions"]

DampingOn = Literal["factors", "product"]


@dataclass(frozen=True, kw_only=True)
class PreconditionerOptions:
    """How factors become a preconditioner; `CurvatureOptions` says how factors are made.

    The defaults were chosen on two small problems and compared with other optimisers on five
    (`experiments/optimizers/optimizer_comparison.py`).

    Args:
        damping: λ > 0, added to the curvature of the mean loss. Tune it first; 0.03 or 0.1 for
            factors that are noisy.
        damping_on: "factors" adds √λ/π to B and π√λ to A, with π² = (tr A/d_in)/(tr B/d_out), and
            inverts both (by Cholesky, about twenty times cheaper than eigenvectors; Martens &
            Grosse 2015, section 6.3). "product" adds λ to B ⊗ A itself, exactly as a prior of
            precision N·λ would.
        factor_every: number of steps between new factors.
        update_every: number of steps between new preconditioners, from the latest factors.
        ema_decay: ρ of the factors' moving average F ← ρF + (1 − ρ)F_batch, corrected for its
            start; 0 takes only the latest factors, as the paper's experiments do.
        kl_clip: κ in nats, which limits how far a step at the highest learning rate η moves the
            predictions: all preconditioned gradients p̂ of g are scaled by
            min(1, √(κ / (η² Σ⟨p̂, g⟩))) (Ba et al. 2017). `KFAC` preconditions gradients with their
            momentum, so that κ is for the whole step. None sets no limit, as in the paper.
            Regression is taken to have noise 1, so that κ is in squared units of the targets.

    Raises:
        ValueError: an option that is not supported.
    """

    damping: float = 0.01
    damping_on: DampingOn = "factors"
    factor_every: int = 5
    update_every: int = 5
    ema_decay: float = 0.9
    kl_clip: float | None = 0.01

    def __post_init__(self) -> None:
        check_positive("damping", self.damping)
        if self.kl_clip is not None:
            check_positive("kl_clip", self.kl_clip)
        check_option("damping_on", self.damping_on, DampingOn)
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), not {self.ema_decay}.")
        for name in ("factor_every", "update_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}.")
