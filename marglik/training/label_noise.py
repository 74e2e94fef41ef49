"""Learning ε, the share of labels that were drawn at random, while a network trains.

The training labels cannot tell: a network that has not fitted yet is explained by noise, which then
keeps it from fitting, and one that has fitted wrong labels shows none. Nor can the evidence alone,
as Λ and with it its log det fall as ε rises. Labels that the network was not trained on can: after
each epoch ε and a temperature τ together maximise their likelihood, Σ log((1 − ε) p_τ(y) + ε/C).
A network that does not fit yet is explained by a large τ, and not by ε; one that is sure of what it
gets wrong, by ε. τ is dropped, since the network's own scale is the training's to learn.
"""

from typing import Any

import torch
from torch import Tensor

from kfac_backend.engine.calls import forked_random_numbers
from marglik.eval_mode import in_eval_mode
from marglik.prediction.calibration import HeldOut, collected, fit_map
from marglik.prediction.predictive import outputs_of
from marglik.training.state import LearnerState, Problem

NO_NOISE = 1e-3
"""Smaller shares count as none."""


@torch.no_grad()
def learn_label_noise(problem: Problem, state: LearnerState) -> None:
    """Give the likelihood the ε that, with a temperature, makes held-out labels most likely.

    Collective. With several ranks each has a part of every batch; all get the same, to the bit.

    Raises:
        ValueError: no batch, or no target that counts.
    """
    if not problem.learns_label_noise:
        return
    assert problem.held_out is not None  # `Problem.set_held_out` checks it
    likelihood, model, ranks = state.likelihood, problem.model, problem.ranks

    def outputs_and_spread(x: Any, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        f = in_eval_mode(model, outputs_of)(model, x)
        return f, torch.zeros_like(f.flatten(0, -2))[:, None]

    with forked_random_numbers(model):
        f, spread, y = collected(
            outputs_and_spread, problem.held_out, model, likelihood, problem.options.curvature,
            1, ranks,
        )  # fmt: skip
    with torch.enable_grad():
        noise = fit_map(HeldOut(likelihood, f, spread, y, is_sampled=True)).label_noise
    noise = ranks.gather(noise)[0]
    state.likelihood = likelihood.replace(noise=noise if noise >= NO_NOISE else 0.0)
    state.set_decays(problem)
