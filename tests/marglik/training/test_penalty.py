"""The limit of a step's gradients, beside its definition."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from marglik.training.penalty import NEW_NORM, clip_gradients


def parameters(gradients):
    made = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(made, gradients, strict=True):
        p.grad = g.clone()
    return made


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_limits_the_norm_to_a_multiple_of_its_running_mean(scale):
    steps = [torch.randn(5) * size for size in (1.0, 1.2, 30.0, 0.1, 9.0)]
    mean, clipped = None, []
    running, expected = None, []
    for g in steps:
        norm = g.norm().item()
        limit = float("inf") if mean is None else 2 * mean
        factor = min(1.0, limit / norm)
        mean = factor * norm if mean is None else mean + NEW_NORM * (factor * norm - mean)
        expected.append(factor * g)
        of = parameters([scale * g[:2], scale * g[2:]])
        running, is_clipped = clip_gradients(of, running, 2.0, torch.tensor(scale))
        clipped.append(int(is_clipped))
        assert_close(torch.cat([p.grad for p in of]) / scale, expected[-1])
        assert_close(running.item(), mean, rtol=1e-5, atol=0)
    assert clipped == [0, 0, 1, 0, 1]


def test_none_follows_the_norm_alone():
    (p,) = parameters([torch.full((4,), 50.0)])
    running, is_clipped = clip_gradients([p], torch.tensor(1.0), None, torch.tensor(1.0))
    assert p.grad.tolist() == [50.0] * 4
    assert (int(is_clipped), running.item()) == (0, pytest.approx(1 + NEW_NORM * 99))


def test_gradients_that_are_not_finite_are_left_to_the_scaler():
    (p,) = parameters([torch.tensor([1.0, float("inf")])])
    running, _ = clip_gradients([p], torch.tensor(1.0), 2.0, torch.tensor(1.0))
    assert p.grad.tolist() == [1.0, float("inf")]
    assert running.item() == 1.0
