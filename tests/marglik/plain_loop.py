"""A training loop as users write it, with the learner's two lines."""

from collections.abc import Callable
from math import inf
from typing import Any

from torch import nn
from torch.nn.functional import cross_entropy

from marglik import PriorLearner

__all__ = ["learn"]


def learn(
    model: nn.Module,
    optimizer: Any,
    prior: PriorLearner,
    data: Any,
    epochs: int,
    *,
    scheduler: Any = None,
    loss: Callable[..., Any] = cross_entropy,
    held_out: Any = None,
    clip: float = inf,
    after_step: Callable[[], None] = lambda: None,
) -> PriorLearner:
    """Train from the first epoch to the last; returns the learner."""
    prior.start(model, optimizer, data, epochs, held_out=held_out)
    for _ in range(epochs):
        for x, y in data:
            model.train()
            optimizer.zero_grad()
            loss(model(x), y).backward()
            if clip < inf:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            after_step()
    prior.finish()
    return prior
