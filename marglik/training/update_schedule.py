"""When the hyperparameters are updated, and which update counts in the end."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["CurvatureFrom", "Keep", "Schedule"]

Keep = Literal["best", "last"]
CurvatureFrom = Literal["pass", "optimizer"]
"""Where an update takes the curvature from: a pass over the data, or K-FAC's moving averages."""


@dataclass(frozen=True)
class Schedule:
    """When the hyperparameters are updated.

    Args:
        epochs: passes over the training data.
        every: epochs between updates.
        burn_in: no update before the end of this epoch.
        steps: hyperparameter steps in each update.
        last_epoch: whether an update follows the last epoch even if ``every`` does not divide it,
            so that the final parameters have an evidence and a posterior.
        keep: "last" ends with the last update; "best" with that of the highest evidence, and puts
            its parameters back into the network, as laplace-torch's loop does. The best update may
            be an early one, made before the network fits the data, where the evidence says little.
    """

    epochs: int = 100
    every: int = 5
    burn_in: int = 0
    steps: int = 100
    last_epoch: bool = True
    keep: Keep = "last"

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("every", 1), ("burn_in", 0), ("steps", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}.")

    def is_due(self, epoch: int) -> bool:
        """Whether an update follows this epoch; epochs count from 1."""
        regular = epoch % self.every == 0 or (self.last_epoch and epoch == self.epochs)
        return regular and epoch >= self.burn_in
