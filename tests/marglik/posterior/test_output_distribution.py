"""The outputs' Gaussian against Jacobians and dense algebra."""

import pytest
import torch
from torch import nn
from torch.func import jacrev
from torch.nn import functional
from torch.testing import assert_close

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


def test_a_second_fit_is_seen():
    la, x = fitted()
    before = la.output_distribution(x)[1]
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
def test_all_layers_are_the_last_one_where_the_others_are_frozen(when):
    """By its formula where nothing else uses its weight."""
    torch.manual_seed(0)
    model = UsesItsHead(when).double()
    model.inner.requires_grad_(False)
    x = torch.randn(6, 4, dtype=torch.float64)
    delta = torch.tensor([0.5, 2.0])
    la = Posterior(model, "classification", kfac_approx="expand", prior_precision=delta)
    la.fit([(x, torch.arange(6) % 3)])
    assert_close(la.output_distribution(x)[1], by_jacobians(la, x), rtol=1e-6, atol=0)


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


class TiedDecoder(nn.Module):
    """Tokens whose embedding is the weight of the last layer, too."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.read = nn.Linear(3, 5, bias=False)
        self.read.weight = self.table.weight

    def features(self, x):
        return self.inner(self.table(x).sum(1)).tanh()

    def forward(self, x):
        return self.read(self.features(x))


def tied(structure, **options):
    torch.manual_seed(0)
    model, x = TiedDecoder().double(), torch.randint(5, (6, 4))
    la = Posterior(model, "classification", structure=structure, **options)
    la.fit([(x, torch.arange(6) % 5)])
    return la, x


@pytest.mark.parametrize("structure", ["kron", "full", "diag", "lowrank"])
def test_earlier_uses_of_the_last_layers_weight_are_constants(structure):
    la, x = tied(structure, enable_backprop=True)
    weight, h = la.model.read.weight.detach(), la.model.features(x).detach()
    J = jacrev(lambda w: h @ w.mT)(weight).flatten(2)  # (N, C, 15)
    if structure == "kron":
        precision = la.factors.to_dense("table.weight") + torch.eye(15).double()
        assert_close(
            la.output_distribution(x, "last")[1], tied("kron")[0].output_distribution(x, "last")[1]
        )
    else:
        precision = la.precision().to_dense()[:15, :15]
    expected = J @ torch.linalg.inv(precision) @ J.mT
    assert_close(la.output_distribution(x, "last")[1], expected)
    # Negative control: with the embedding's use.
    both = jacrev(lambda w: torch.func.functional_call(la.model, {"table.weight": w}, (x,)))(weight)
    both = both.flatten(2) @ torch.linalg.inv(precision) @ both.flatten(2).mT
    assert (both - expected).norm() > 0.1 * expected.norm()
    assert la.model.read.weight is la.model.table.weight


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_enable_backprop_can_be_set_at_any_time(structure):
    la, x = fitted(structure=structure, prior_precision=0.7)
    x.requires_grad_()
    for enabled in (False, True, False):
        la.enable_backprop = enabled
        assert la.output_distribution(x)[1].requires_grad == enabled
        assert la.output_distribution(x, "last")[1].requires_grad == enabled


class Normed(nn.Module):
    """A norm of features, or of two channels of these."""

    def __init__(self, norm, channels):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 6), norm, nn.Linear(6, 2)
        self.shape = (2, 3) if channels else (6,)
        for p in norm.parameters():
            nn.init.normal_(p)

    def forward(self, x):
        h = self.norm(self.first(x).tanh().unflatten(-1, self.shape))
        return self.last(h.flatten(1).tanh())


NORMS = {
    "layer": lambda: (nn.LayerNorm(6), False),
    "layer of matrices": lambda: (nn.LayerNorm((2, 3)), True),
    "layer without bias": lambda: (nn.LayerNorm(6, bias=False), False),
    "instance": lambda: (nn.InstanceNorm1d(2, affine=True), True),
    "group": lambda: (nn.GroupNorm(2, 6), False),
    "root mean square": lambda: (nn.RMSNorm(6), False),
    "batch": lambda: (nn.BatchNorm1d(6), False),
}


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_in_inputs_through_norms_are_those_of_differences(norm):
    """By torch alone a mapped Jacobian's derivative lacks a part with layer and instance norms."""
    model = Normed(*NORMS[norm]()).double()
    x, direction = torch.randn(2, 4, 3).double()
    posterior = Posterior(model, "regression", structure="diag", enable_backprop=True)
    posterior.fit([(x, x[:, :2])])

    def loss(x):
        f, covariance = posterior.output_distribution(x)
        return f.sin().sum() + covariance.square().sum().log()

    (gradient,) = torch.autograd.grad(loss(at := x.clone().requires_grad_()), at)
    ahead, behind = (loss(x + s * direction) for s in (1e-6, -1e-6))
    assert_close((gradient * direction).sum(), (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
def test_wrong_positions_classes_and_batches(structure, layers):
    la, x = fitted(structure=structure, prior_precision=0.7)
    index = torch.tensor
    for error, message, options in (
        (TypeError, "positions has dtype", {"positions": torch.ones(8)}),
        (ValueError, r"positions has shape \(7,\)", {"positions": torch.ones(7).bool()}),
        (ValueError, "selects 0 positions", {"positions": torch.zeros(8).bool()}),
        (TypeError, "classes has dtype", {"classes": index([0.0])}),
        (ValueError, "index 3, but the outputs are 0 to 2", {"classes": index([3])}),
        (ValueError, "index -1, but the outputs are 0 to 2", {"classes": index([-1])}),
        (ValueError, "classes has shape", {"classes": index([[0]])}),
    ):
        with pytest.raises(error, match=message):
            la.output_distribution(x, layers, **options)
    with pytest.raises(ValueError, match="The batch has no examples"):
        la.output_distribution(x[:0], layers)
    whole = la.output_distribution(x, layers)[1]
    mask, classes = torch.arange(8) % 3 == 0, torch.tensor([2, 0])
    some = la.output_distribution(x, layers, positions=mask, classes=classes)[1]
    assert_close(some, whole[mask][:, classes][:, :, classes])


@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
def test_joint_covariances_of_sequences_are_refused(structure):
    torch.manual_seed(0)
    x = torch.randn(6, 2, 4).double()
    la = Posterior(nn.Linear(4, 3).double(), "regression", structure=structure)
    la.fit([(x, x[..., :3])])
    model = la.model
    model.forward = lambda x: nn.functional.linear(x, model.weight, model.bias)[:, None]
    with pytest.raises(NotImplementedError, match=r"shape \(6, 1, 3\) for 6 inputs"):
        la.joint_output_distribution(x[:, 0])
