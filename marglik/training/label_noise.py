"""Learning ε, the share of labels that were drawn at random, while a network trains.

The training labels cannot tell: a network that has not fitted yet is explained by noise, which then
keeps it from fitting, and one that has fitted wrong labels shows none. Nor can the evidence alone,
as Λ and with it its log det fall as ε rises. Labels that the network was not trained on can: after
each epoch ε and a temperature τ together maximise their likelihood, Σ log((1 − ε) p_τ(y) + ε/C).
A network that does not fit yet is explained by a large τ, and not by ε; one that is sure of what it
gets wrong, by ε. τ is dropped, since the network's own scale is the training's to learn.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.calls import forked_random_numbers
from kfac_backend.likelihoods import Likelihood
from kfac_backend.options import TargetOptions
from kfac_backend.ranks import Ranks
from marglik.eval_mode import in_eval_mode
from marglik.prediction.calibration import HeldOut, collected, fit_map
from marglik.prediction.predictive import outputs_of

NO_NOISE = 1e-3
"""Smaller shares count as none."""


@torch.no_grad()
def held_out_label_noise(
    likelihood: Likelihood,
    model: nn.Module,
    batches: Iterable[Any],
    targets: TargetOptions,
    ranks: Ranks,
) -> Likelihood:
    """The likelihood with the ε that, with a temperature, makes held-out labels most likely.

    Args:
        likelihood: one with label noise.
        model: the network, which was not trained on these labels.
        batches: held-out (x, y), or mappings, whose labels are as wrong as those of training.
        targets: how batches give their targets.
        ranks: the ranks that each have a part of every batch; all get the same, to the bit.

    Raises:
        ValueError: no batch, or no target that counts.
    """

    def outputs_and_spread(x: Any, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        f = in_eval_mode(model, outputs_of)(model, x)
        return f, torch.zeros_like(f.flatten(0, -2))[:, None]

    with forked_random_numbers(model):
        f, spread, y = collected(outputs_and_spread, batches, model, likelihood, targets, 1, ranks)
    with torch.enable_grad():
        noise = fit_map(HeldOut(likelihood, f, spread, y, is_sampled=True)).label_noise
    noise = ranks.gather(noise)[0]
    return likelihood.replace(noise=noise if noise >= NO_NOISE else 0.0)
