"""The prior in a plain training loop: `PriorLearner` beside `OnlineTraining`."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from marglik import PriorLearner
from tests.marglik.callbacks.online import (
    EPOCHS,
    LR,
    OPTIONS,
    loader,
    network,
    online_training,
    sgd,
)


def test_the_decays_of_a_plain_loop_are_those_of_online_training():
    model = network()
    optimizer, prior = sgd(model), PriorLearner("classification", **OPTIONS)
    prior.start(model, optimizer, loader())
    for epoch in range(1, EPOCHS + 1):
        for x, y in loader():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            prior.add_to_gradients()
            optimizer.step()
        prior.end_of_epoch(epoch)
    prior.end_of_training()
    other = network()
    decays, evidence = online_training(other, sgd(other))
    assert torch.equal(prior.weight_decays(), decays)
    assert prior.evidences[-1] == evidence
    assert len(set(decays.tolist())) == len(decays)  # they were learned


R = 3
"""Loss terms of each example."""


def decays_of_a_tagger(lr, loss_of_terms, loss_scale=1.0):
    """Weight decays that are learned where each example has R labels."""
    x = torch.randn(24, R, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, x[..., :3].argmax(-1)), 8)
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    options = {**OPTIONS, "weight_decay": 1.0, "mean_over": "terms", "loss_scale": loss_scale}
    prior = PriorLearner("classification", **options)
    prior.start(model, optimizer, data)
    for epoch in range(1, EPOCHS + 1):
        for x, y in data:
            optimizer.zero_grad()
            terms = cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
            loss_of_terms(terms).backward()
            prior.add_to_gradients()
            optimizer.step()
        prior.end_of_epoch(epoch)
    return prior.weight_decays()


def test_a_sum_over_terms_has_the_decays_of_their_mean():
    """Its gradients are R times those of the mean, the prior's too, if loss_scale says so."""
    expected = decays_of_a_tagger(LR, torch.mean)
    assert_close(decays_of_a_tagger(LR / R, lambda terms: terms.sum() / 8, R), expected)
    # Negative control: the scale left out.
    wrong = decays_of_a_tagger(LR / R, lambda terms: terms.sum() / 8)
    assert ((wrong - expected).abs() > 0.1 * expected).any()


def test_a_step_before_the_start_is_told():
    with pytest.raises(RuntimeError, match="call start\\(model, optimizer, loader\\) before"):
        PriorLearner("classification").add_to_gradients()
