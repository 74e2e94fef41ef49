"""What calibration finds on held-out data; `marglik.prediction.calibration` finds it."""

import math
from dataclasses import dataclass
from typing import Any

from kfac_backend.options import check_positive

__all__ = ["Calibration", "CalibrationFit"]


@dataclass(frozen=True)
class Calibration:
    """The two numbers that `calibrate` fits to held-out data; s = τ = 1 changes nothing.

    Args:
        covariance_scale: s ≥ 0, by which the outputs' covariance is multiplied; 0 is the MAP.
        output_temperature: τ > 0, by which outputs are divided; 1 in regression. It is not the T
            of the likelihood.
        sigma_noise: σ of regression, in place of the posterior's; None for other likelihoods.
    """

    covariance_scale: float = 1.0
    output_temperature: float = 1.0
    sigma_noise: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.covariance_scale < math.inf:
            raise ValueError(
                f"covariance_scale must be 0 (the MAP) or positive, not {self.covariance_scale}."
            )
        check_positive("output_temperature", self.output_temperature)
        if self.sigma_noise is not None:
            check_positive("sigma_noise", self.sigma_noise)

    @property
    def in_words(self) -> str:
        """What the calibration does, in words."""
        outputs = (
            f"outputs divided by {self.output_temperature:.3g}"
            if self.sigma_noise is None
            else f"noise of standard deviation {self.sigma_noise:.3g}"
        )
        if self.covariance_scale == 0:
            return (
                f"s = 0, {outputs}: the covariance did not help, so that epistemic uncertainty is "
                "zero and regression's intervals are all as wide. For out-of-distribution scores "
                "take the uncalibrated predictive"
            )
        return f"covariances times {self.covariance_scale:.3g}, {outputs}"


@dataclass(frozen=True)
class CalibrationFit:
    """A calibration, and NLLs of the held-out data for comparison (nats, mean over loss terms)."""

    calibration: Calibration
    nll: float
    """NLL with the calibration."""
    nll_uncalibrated: float
    """NLL at s = τ = 1, or with the posterior's own σ."""
    map_calibration: Calibration
    """The best calibration with s = 0: the temperature-scaled MAP."""
    nll_scaled_map: float
    """NLL of the temperature-scaled MAP."""
    nll_map: float
    """NLL of the MAP."""
    num_terms: int
    """Number of held-out loss terms (examples, or positions of sequences) that were used."""

    @staticmethod
    def of(content: dict[str, Any]) -> "CalibrationFit":
        """The fit in plain data, as posteriors keep and save it.

        Raises:
            KeyError, TypeError, ValueError: data that is no fit.
        """
        names = ("calibration", "map_calibration")
        made: dict[str, Any] = {name: Calibration(**content[name]) for name in names}
        return CalibrationFit(**content | made)
