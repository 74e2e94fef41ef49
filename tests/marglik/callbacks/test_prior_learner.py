"""The prior in a plain training loop: `PriorLearner` beside `OnlineTraining`."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from marglik import PriorLearner
from tests.marglik.callbacks.online import (
    EPOCHS,
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


def test_a_step_before_the_start_is_told():
    with pytest.raises(RuntimeError, match="call start\\(model, optimizer, loader\\) before"):
        PriorLearner("classification").add_to_gradients()
