"""The outputs' Gaussian against Jacobians and dense algebra."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from kfac_backend.covariance.output_covariance import OutputCovariance
from marglik import Posterior
from tests.marglik.posteriors import DELTAS, by_jacobians, data, fitted


@pytest.mark.parametrize(
    ("name", "value", "layers"),
    [
        ("prior_precision", DELTAS.flip(0), "all"),
        ("prior_precision", 7.0, "last"),
        ("sigma_noise", 0.2, "all"),
        ("temperature", 3.0, "last"),
    ],
)
def test_changed_hyperparameters_are_seen(name, value, layers):
    la, x = fitted("regression", sigma_noise=0.7)
    before = la.output_distribution(x, layers)[1]
    assert_close(la.output_distribution(x, layers)[1], before)
    setattr(la, name, value)
    fresh, _ = fitted("regression", **{"sigma_noise": 0.7, name: value})
    after = la.output_distribution(x, layers)[1]
    assert_close(after, fresh.output_distribution(x, layers)[1])
    assert (after - before).norm() > 0.01 * before.norm()


def test_a_second_fit_is_seen_and_eigenvectors_are_kept(monkeypatch):
    la, x = fitted()
    before = la.output_distribution(x)[1]
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", lambda *a, **k: pytest.fail("eigenvectors"))
        la.prior_precision = 2.0
        la.output_distribution(x)
    la.prior_precision = DELTAS
    la.fit([data()], override=False)
    twice = la.output_distribution(x)[1]
    assert (twice - before).norm() > 0.01 * before.norm()
    assert_close(twice, by_jacobians(la, x))


class UsesItsHead(nn.Module):
    """Outputs of a last layer whose weight is also used without it, before or after its call."""

    def __init__(self, when):
        super().__init__()
        self.inner, self.head, self.when = nn.Linear(4, 3), nn.Linear(3, 3), when

    def forward(self, x):
        h = self.inner(x).tanh()
        if self.when == "before":
            h = functional.linear(h, self.head.weight).tanh()
        f = self.head(h)
        return f + functional.linear(h, self.head.weight) if self.when == "after" else f


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_all_layers_are_the_last_one_where_the_others_are_frozen(when, monkeypatch):
    """By its formula, without backward passes, where nothing else uses its weight."""
    torch.manual_seed(0)
    model = UsesItsHead(when).double()
    model.inner.requires_grad_(False)
    x = torch.randn(6, 4, dtype=torch.float64)
    delta = torch.tensor([0.5, 2.0])
    la = Posterior(model, "classification", kfac_approx="expand", prior_precision=delta)
    la.fit([(x, torch.arange(6) % 3)])
    general, calls = OutputCovariance.__call__, []
    monkeypatch.setattr(
        OutputCovariance, "__call__", lambda *a, **k: calls.append(a) or general(*a, **k)
    )
    found = la.output_distribution(x)[1]
    assert_close(found, by_jacobians(la, x), rtol=1e-6, atol=0)
    assert bool(calls) == (when != "never")


@pytest.mark.parametrize("layers", ["all", "last"])
def test_without_gradients(layers):
    la, x = fitted()
    expected, _ = fitted()
    with torch.inference_mode():
        inside = la.output_distribution(x * 1.0, layers)
    outside = la.output_distribution(x, layers)
    assert_close(inside, expected.output_distribution(x, layers))
    assert_close(outside, inside)
    delta = torch.tensor(2.0, requires_grad=True)
    la.log_marginal_likelihood(delta).backward()
    assert delta.grad is not None
    assert not la.output_distribution(x, layers)[1].requires_grad  # though δ does


def test_by_jacobians_only_the_last_layer_is_uncertain_where_that_is_asked():
    la, x = fitted()
    expected = la.output_distribution(x, "last")[1]
    all_layers = la.output_distribution(x)[1]
    la, x = fitted(enable_backprop=True)
    x.requires_grad_()
    found = la.output_distribution(x, "last")[1]
    assert found.requires_grad
    assert_close(found.detach(), expected)
    assert_close(la.output_distribution(x)[1].detach(), all_layers)
    assert (all_layers - expected).norm() > 0.01 * expected.norm()
