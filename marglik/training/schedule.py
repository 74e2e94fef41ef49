"""Schedule the updates of the prior and the learning of label noise.

Learning converges if the network can follow changes of the weight decays. This needs a learning
rate that stays high, and bounded updates during the whole training. The average of the parameters
removes the noise of the high rate. If the rate falls to zero early, the network stops before its
weight decays have converged, and an average cannot correct this.
"""

from dataclasses import dataclass
from itertools import count
from typing import Literal

from kfac_backend.options import check_option

Keep = Literal["best", "last"]
Average = Literal["last"]
"""The average of the parameters over all steps, with the largest weights on late steps; see
`marglik.training.average`."""
CurvatureFrom = Literal["auto", "pass"]
"""The data of an update's curvature pass. "auto" uses a sample, with random signs if exact passes
would take longer than the training; see `marglik.training.samples`."""

LATE_SHARE = 1 / 3
"""Share of the epochs, at the end of the training, in which label noise is learned."""


@dataclass(frozen=True)
class Schedule:
    """Schedule of the prior's updates, and choice of the final parameters.

    If ``every`` is None and the number of epochs is unknown or exceeded, each of the first epochs
    ends with an update. Later the interval is between 1/``updates`` and 2/``updates`` of the epochs
    so far, and a change of the learning rate also causes an update.

    Args:
        epochs: number of passes over the training data; None if it is not known.
        every: number of epochs between updates. None (null) spreads 20 updates over the epochs.
        burn_in: number of the first epoch that may end with an update.
        steps: number of hyperparameter steps in each update. The number bounds the change in one
            update: 10 steps of Adam with step size 0.1 on log δ change a weight decay by at most a
            factor of e.
        keep: network that the training returns. "last" returns the final network, and updates its
            weight decays once more after the last epoch. "best" returns the parameters of the
            update with the highest evidence, as laplace-torch's loop does. That update may be an
            early one, because the evidence can be high before the network fits the data.
        updates: number of updates if ``every`` is None, at most one per epoch, without the final
            one. 0 keeps the initial weight decays and fits no posterior.
        average: parameters of the network that the training returns. "last" averages the parameters
            over the steps, with the largest weights on late steps. None (null) takes the parameters
            of the last step. There is no average with keep="best", nor if an epoch is a single
            step, because a full batch has no noise.

    Raises:
        ValueError: a number is too small, or an option is not supported.
    """

    epochs: int | None = 100
    every: int | None = None
    burn_in: int = 0
    steps: int = 10
    keep: Keep = "last"
    updates: int = 20
    average: Average | None = "last"

    def __post_init__(self) -> None:
        least_values = {"epochs": 1, "every": 1, "burn_in": 0, "steps": 0, "updates": 0}
        for name, least in least_values.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}.")
        check_option("keep", self.keep, Keep)
        if self.average is not None:
            check_option("average", self.average, Average)

    def is_due(self, epoch: int) -> bool:
        """Return whether an update follows this epoch, from 1, not counting the final update."""
        if epoch < self.burn_in or not self.updates:
            return False
        if self.every is not None:
            return epoch % self.every == 0
        if self.epochs is not None and epoch <= self.epochs:
            # The k-th update follows the first epoch that reaches the share k/U of all.
            passed, then = (e * self.updates // self.epochs for e in (epoch, epoch - 1))
            return passed > then
        spacing = 1 << max(0, (2 * epoch // self.updates).bit_length() - 1)
        return epoch % spacing == 0

    def is_due_within(self, epoch: int) -> bool:
        """Return whether an update follows this epoch, and it is not the last one."""
        return self.is_due(epoch) and epoch != self.epochs

    def is_late(self, epoch: int) -> bool:
        """Return whether this epoch, from 1, ends at the start of the last third or within it.

        If the number of epochs is unknown, epochs are late after as many as there are ``updates``.
        """
        if self.epochs is None:
            return epoch >= self.updates
        return epoch >= self.epochs - round(LATE_SHARE * self.epochs)

    @property
    def num_early(self) -> int:
        """Number of epochs before the first late one."""
        return next(epoch for epoch in count(1) if self.is_late(epoch)) - 1

    @property
    def averages(self) -> bool:
        """Whether the parameters are averaged if an epoch has several steps."""
        return self.average is not None and self.keep == "last"
