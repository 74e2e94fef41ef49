"""When the prior is updated, when label noise is learned, and which rate the average needs.

Learning settles if the network can follow the decays that are found: at a learning rate that stays
high, with updates all along that are bounded. The average of the parameters takes the noise of that
rate out. A rate that falls to zero early freezes a network before its decays are found, and the
average of a frozen network changes nothing.
"""

from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from torch.optim.lr_scheduler import LambdaLR

from kfac_backend.options import check_option

Keep = Literal["best", "last"]
Average = Literal["last"]
"""The average of the parameters over all steps, late ones most; see `marglik.training.average`."""
CurvatureFrom = Literal["auto", "pass"]
"""Which pass over the data an update makes: with "auto" over a sample, and by random signs if
exact ones would take longer than the training; see `marglik.training.samples`."""

LATE_SHARE = 1 / 3
"""Of the epochs: those in which label noise is learned."""


@dataclass(frozen=True)
class Schedule:
    """When the prior is updated, and which parameters the training ends with.

    Args:
        epochs: passes over the training data; None if their number is not known.
        every: epochs between updates; None (null) spreads ``updates`` over the epochs. Where their
            number is not known, or exceeded, an update follows each epoch at first, and later each
            tenth to twentieth (2/``updates`` to 1/``updates``) of the epochs so far, and each
            change of the learning rate.
        burn_in: no update before the end of this epoch.
        steps: hyperparameter steps in each update. Few bound what one update changes: Adam's 10
            steps of 0.1 on log δ change a weight decay by a factor of e at most.
        keep: "last" ends with an update, also if none is due after the last epoch; "best" with the
            update of the highest evidence, and puts its parameters back into the network, as
            laplace-torch's loop does. The best update may be an early one, made before the network
            fits the data, where the evidence says little.
        updates: number of updates, at most one per epoch, and without the one that ends training.
            0 keeps the decays as they are, and fits no posterior, not even at the end.
        average: "last" ends with the average of the parameters over the steps, late ones most; None
            (null) with the parameters of the last step. There is no average with keep="best", nor
            where an epoch is a single step: there is no noise to take out of a full batch.

    Raises:
        ValueError: a number that is too small, or an option that is not supported.
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
        """Whether an update follows this epoch, from 1; that which ends training is not meant."""
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
        """Whether an update follows this epoch, which is not the last one."""
        return self.is_due(epoch) and epoch != self.epochs

    def is_late(self, epoch: int) -> bool:
        """Whether the end of this epoch, from 1, begins or lies in the last third of the epochs.

        Where the number of epochs is not known, it is late after as many as there are ``updates``.
        """
        if self.epochs is None:
            return epoch >= self.updates
        return epoch >= self.epochs - round(LATE_SHARE * self.epochs)

    @property
    def num_early(self) -> int:
        """How many epochs come before the first late one."""
        return next(epoch for epoch in count(1) if self.is_late(epoch)) - 1

    @property
    def averages(self) -> bool:
        """Whether the parameters are averaged, where an epoch has several steps."""
        return self.average is not None and self.keep == "last"


def settling_rate(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """The learning rate of the three phases: constant for half of the steps, then 0.6 of it.

    The rate stays high enough for the parameters to follow each update; the average takes the
    noise out at the end, which a decay of the rate would do otherwise.
    """
    return LambdaLR(optimizer, lambda step: 1.0 if 2 * step < num_steps else 0.6)
