"""The options of preconditioning, and their checks."""

from dataclasses import dataclass
from typing import Literal

from kfac_backend.options import check_option, check_positive

__all__ = ["DampingOn", "NormControl", "PreconditionerOptions"]

DampingOn = Literal["factors", "product"]
NormControl = Literal["none", "kl_clip", "peak_kl_clip"]


@dataclass(frozen=True, kw_only=True)
class PreconditionerOptions:
    """How factors become a preconditioner; `CurvatureOptions` says how factors are made.

    Learning rate and damping must be tuned together. The defaults are compared with tuned SGD and
    AdamW in `experiments/optimizers/optimizer_defaults.py`. Without the moving average the loss
    jumps late in training (`experiments/optimizers/optimizer_comparison.py`).

    Args:
        damping: λ > 0, added to the curvature of the mean loss. Tune it first.
        damping_on: "factors" adds √λ/π to B and π√λ to A, with π² = (tr A/d_in)/(tr B/d_out), and
            inverts both (by Cholesky, about twenty times cheaper than eigenvectors; Martens &
            Grosse 2015, section 6.3). "product" adds λ to B ⊗ A itself, exactly as a prior of
            precision N·λ would.
        factor_every: number of steps between new factors.
        update_every: number of steps between new preconditioners, from the latest factors.
        ema_decay: ρ of the factors' moving average F ← ρF + (1 − ρ)F_batch, corrected for its
            start; 0 takes only the latest factors, as the paper's experiments do.
        norm_control: how the length of steps is limited.

            - "none": not at all, as in the paper.
            - "kl_clip": scale all preconditioned gradients p̂ by min(1, √(κ / (η² Σ⟨p̂, g⟩))), with
              κ = ``norm_limit`` and η the present learning rate (Ba et al. 2017). While this clips,
              steps have the same length at every learning rate, so that a schedule has no effect.
              Momentum keeps gradients that were clipped less at a small rate, so that steps after a
              warm-up can exceed the limit.
            - "peak_kl_clip": the same with the highest learning rate of the schedule, which limits
              gradients alike at all times. It reaches lower training losses, but is worse with
              noisy batches at a constant rate.
        norm_limit: κ in nats; None is 0.01 for "peak_kl_clip" and 0.001 for "kl_clip". Regression
            is taken to have noise 1, so that κ is in squared units of the targets.

    Raises:
        ValueError: an option that is not supported.
    """

    damping: float = 0.1
    damping_on: DampingOn = "factors"
    factor_every: int = 10
    update_every: int = 10
    ema_decay: float = 0.9
    norm_control: NormControl = "kl_clip"
    norm_limit: float | None = None

    def __post_init__(self) -> None:
        check_positive("damping", self.damping)
        check_positive("norm_limit", self.limit)
        check_option("damping_on", self.damping_on, DampingOn)
        check_option("norm_control", self.norm_control, NormControl)
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), not {self.ema_decay}.")
        for name in ("factor_every", "update_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}.")

    @property
    def limit(self) -> float:
        """``norm_limit``, or its default for this ``norm_control``."""
        if self.norm_limit is not None:
            return self.norm_limit
        return 1e-2 if self.norm_control == "peak_kl_clip" else 1e-3
