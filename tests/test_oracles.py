"""The oracles against cases worked by hand and against each other."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.evidence_oracles import (
    bayesian_linear_regression_log_evidence,
    laplace_log_evidence,
)
from tests.oracles import (
    dense_ggn,
    dense_ggn_blocks,
    empirical_fisher_blocks,
    kfac_blocks,
    kfac_factors,
    layer_jacobians,
    loss_hessian,
    positions,
)
from tests.random_numbers import normal

close = torch.testing.assert_close


class Mean(nn.Module):
    """Average over the given axes, the aggregation of the reduce setting."""

    def __init__(self, *axes: int):
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        """Average of x over the axes."""
        return x.mean(self.axes)


def tensor(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def differ(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() > 0.1 * b.norm())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_loss_hessians_by_hand():
    f = tensor(math.log(3.0), 0.0)  # softmax (3/4, 1/4); sigmoid (3/4, 1/2)
    close(loss_hessian(f, "classification"), tensor([1, -1], [-1, 1]) * 3 / 16)
    close(loss_hessian(f, "regression"), tensor([1, 0], [0, 1]))
    close(loss_hessian(f, "bernoulli"), tensor([3 / 16, 0], [0, 1 / 4]))
    three = loss_hessian(tensor(math.log(2.0), 0.0, 0.0), "classification")  # (1/2, 1/4, 1/4)
    close(three, tensor([4, -2, -2], [-2, 3, -1], [-2, -1, 3]) / 16)
    with pytest.raises(ValueError, match="poisson"):
        loss_hessian(f, "poisson")


def test_single_linear_layer_without_sharing_by_hand():
    model, x = nn.Linear(2, 2), tensor([1, 2], [3, -1])
    exact = dense_ggn_blocks(model, x, "regression")
    gram = tensor([10, -1], [-1, 5])  # Σ_n x xᵀ
    close(exact["weight"], torch.block_diag(gram, gram))
    close(exact["bias"], 2 * torch.eye(2).double())
    cross = dense_ggn(model, x, "regression")[:4, 4:]
    close(cross, tensor([4, 0], [1, 0], [0, 4], [0, 1]))  # Σ_n x between a row of W and its bias
    for approx in ("expand", "reduce"):
        close(kfac_blocks(model, x, "regression", approx), exact)
        B, A = kfac_factors(model, x, "regression", approx)["weight"]
        close(B, 2 * torch.eye(2).double()[None])
        close(A, gram[None] / 2)


def test_shared_positions_by_hand():
    layer, x = nn.Linear(1, 1), tensor([[1], [3]])  # N = 1, R = 2, d_in = 1
    pooled = nn.Sequential(layer, Mean(1))
    # (exact, expand, reduce): 1 + 9, (1 + 9)/2 · 2, 2² · 2; with pooling 2², 5 · 2/4, 2² · 1.
    for model, name, values in ((layer, "weight", (10, 10, 8)), (pooled, "0.weight", (4, 2.5, 4))):
        close(dense_ggn_blocks(model, x, "regression")[name], tensor([values[0]]))
        close(kfac_blocks(model, x, "regression", "expand")[name], tensor([values[1]]))
        close(kfac_blocks(model, x, "regression", "reduce")[name], tensor([values[2]]))


class Mix(nn.Module):
    """Position r' of the output is Σ_r M_r'r x_r, as attention with fixed weights M."""

    def __init__(self, M: Tensor):
        super().__init__()
        self.register_buffer("M", M)

    def forward(self, x: Tensor) -> Tensor:
        """Mixed x (N, R, d)."""
        return self.M @ x


def test_loss_terms_that_see_every_position_by_hand():
    model = nn.Sequential(nn.Linear(1, 2), Mix(tensor([1, 2], [3, -1])))
    x = tensor([[1], [3]])  # mixed inputs: 1 + 6 and 3 − 3
    one = torch.eye(2).double()
    close(dense_ggn_blocks(model, x, "regression")["0.weight"], 49 * one)
    for approx, A, B in (("expand", 5, 1 + 4 + 9 + 1), ("reduce", 4, 3**2 + 2**2)):
        factors = kfac_factors(model, x, "regression", approx)
        close(factors["0.weight"], (B * one[None], tensor([[A]])))
        close(factors["0.bias"], (B * one[None], tensor([[1]])))


def deep_linear_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def pooled_convolution(**kwargs) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 2, **kwargs), Mean(-1, -2), nn.Linear(4, 3))


def depthwise_head() -> nn.Sequential:  # no mixing after the groups: their blocks are exact too
    return nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), Mean(-1, -2))


@pytest.mark.parametrize(
    ("model", "shape", "exact_mode"),
    [
        (deep_linear_network, (3, 5, 3), "expand"),
        (lambda: nn.Sequential(deep_linear_network(), Mean(1)), (3, 5, 3), "reduce"),
        (lambda: pooled_convolution(stride=2), (3, 2, 5, 4), "reduce"),
        (depthwise_head, (3, 2, 4, 4), "reduce"),
    ],
)
def test_one_mode_is_exact_for_deep_linear_networks_and_the_other_is_not(model, shape, exact_mode):
    model, x = model().double(), normal(*shape)
    exact = dense_ggn_blocks(model, x, "regression")
    close(kfac_blocks(model, x, "regression", exact_mode), exact)
    other = {"expand": "reduce", "reduce": "expand"}[exact_mode]
    assert differ(first(kfac_blocks(model, x, "regression", other)), first(exact))


def first(blocks: dict[str, Tensor]) -> Tensor:
    return next(iter(blocks.values()))


CONVOLUTIONS = [
    {"kernel_size": k, "groups": g, "padding": p, "padding_mode": mode, "dilation": d, "stride": s}
    for k, g, p, mode, d, s in itertools.product(
        [(3, 3), (2, 4)],
        [1, 2],
        [0, (2, 1), "same", "valid"],
        ["zeros", "reflect", "replicate", "circular"],
        [1, (1, 2)],
        [1, (2, 3)],
    )
    if p != "same" or s == 1
]


def test_convolution_patches_reproduce_the_layer():
    for kwargs in CONVOLUTIONS:
        layer = nn.Conv2d(4, 2, **kwargs)  # float32: positions compares in float64, and raises
        x = normal(4, 7, 8)
        out = layer(x.float())
        G, R = kwargs["groups"], out[0].numel()
        b = normal(2, 3, *out.shape)  # T = 2, C = 3
        a_nr, b_nr = positions(layer, x, b)
        k1, k2 = kwargs["kernel_size"]
        assert a_nr.shape == (G, R, 4 // G * k1 * k2)
        assert b_nr.shape == (G, 2, R, 3, 2 // G)
        joined = torch.cat(list(b_nr), dim=-1)  # (T, R, C, all channels)
        close(joined, b.flatten(-2).permute(0, 3, 1, 2))


def test_convolution_patch_by_hand():
    layer = nn.Conv2d(2, 2, (1, 2), groups=2, padding="same")
    x = tensor([[1, 2], [3, 4]], [[5, 6], [7, 8]])
    a_nr, _ = positions(layer, x, torch.zeros(1, 1, 2, 2, 2).double())
    close(a_nr, tensor([[1, 2], [2, 0], [3, 4], [4, 0]], [[5, 6], [6, 0], [7, 8], [8, 0]]))


def test_layer_jacobians_through_an_in_place_activation():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    x = normal(4, 2)
    before = copy.deepcopy(model.state_dict())
    a, b = layer_jacobians(model, "0", x)
    close(a, x)
    mask = (x @ model[0].weight.T + model[0].bias > 0).double()
    close(b, (model[2].weight[None] * mask[:, None]).detach()[:, None])  # (N, 1, C, d_out)
    close(dict(model.state_dict()), dict(before))
    # b and the dense GGN agree on the bias, whose Jacobian is b itself.
    exact = dense_ggn_blocks(model, x, "regression")["0.bias"]
    close(kfac_blocks(model, x, "regression", "expand")["0.bias"], exact)


def test_layer_called_twice_is_an_error():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="called 2 times"):
        layer_jacobians(nn.Sequential(layer, nn.ReLU(), layer), "0", normal(1, 2))


def test_tied_parameters_are_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="share one parameter"):
        kfac_factors(model, normal(1, 2), "regression", "expand")


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
def test_ggn_of_a_linear_model_is_the_hessian_of_its_loss(likelihood):
    model, x = nn.Linear(3, 3, bias=False).double(), normal(4, 2, 3)
    ggn = dense_ggn(model, x, likelihood)
    direct = torch.zeros(9, 9).double()
    for row in x.reshape(-1, 3):
        direct += torch.kron(loss_hessian(model(row), likelihood), torch.outer(row, row))
    close(ggn, direct)
    if likelihood == "classification":
        labels = torch.arange(8) % 3
        hessian = torch.autograd.functional.hessian(
            lambda W: cross_entropy(x.reshape(-1, 3) @ W.T, labels, reduction="sum"),
            model.weight.detach(),
        )
        close(ggn, hessian.reshape(9, 9))


def test_blocks_follow_trainable_parameters_and_names():
    model, x = deep_linear_network(), normal(3, 3)
    full = dense_ggn(model, x, "classification")
    model[0].bias.requires_grad_(False)
    blocks = dense_ggn_blocks(model, x, "classification")
    assert list(blocks) == ["0.weight", "1.weight", "1.bias"]
    assert list(kfac_factors(model, x, "classification", "expand")) == list(blocks)
    close(blocks["1.weight"], full[16:24, 16:24])
    swapped = dense_ggn(model, x, "classification", names=["1.bias", "0.weight"])
    close(swapped[:2, 2:], full[24:, :12])


def test_empirical_fisher_by_hand():
    model, x, y = nn.Linear(2, 2), normal(3, 4, 2), torch.arange(12).reshape(3, 4) % 2
    fisher = empirical_fisher_blocks(model, x, y, "classification")
    weight, bias = torch.zeros(4, 4).double(), torch.zeros(2, 2).double()
    for row, label in zip(x.reshape(-1, 2), y.flatten(), strict=True):
        residual = model.double()(row).softmax(-1).detach() - torch.eye(2)[label]
        weight += torch.kron(torch.outer(residual, residual), torch.outer(row, row))
        bias += torch.outer(residual, residual)
    close(fisher, {"weight": weight, "bias": bias})
    targets = model(x).detach() + 2  # f − y = −2
    fisher = empirical_fisher_blocks(model, x, targets, "regression")
    close(fisher["bias"], 12 * torch.full((2, 2), 4.0).double())


def test_evidence_of_bayesian_linear_regression_is_its_laplace_evidence():
    N, D, C, sigma = 6, 3, 2, 0.7
    Phi, y, precision = normal(N, D), normal(N, C, seed=1), normal(C, D, seed=2).exp()
    model = nn.Linear(D, C, bias=False).double()
    ggn = dense_ggn(model, Phi, "regression") / sigma**2
    mode = torch.linalg.solve(
        ggn + torch.diag(precision.flatten()), (y.T @ Phi).flatten() / sigma**2
    )
    fit = Phi @ mode.reshape(C, D).T
    log_likelihood = torch.distributions.Normal(fit, sigma).log_prob(y).sum()
    laplace = laplace_log_evidence(log_likelihood, mode, ggn, precision.flatten())
    exact = bayesian_linear_regression_log_evidence(Phi, y, precision, sigma)
    assert laplace == pytest.approx(exact, rel=1e-10)
    away = laplace_log_evidence(log_likelihood, mode * 1.5, ggn, precision.flatten())
    assert away != pytest.approx(exact, rel=1e-3)


def test_evidences_by_hand():
    one = tensor(1)
    # θ = 2, H = 6, P₀ = 3, T = 2: −10/2 − ½·3·4 − ½ (log 6 − log 3).
    value = laplace_log_evidence(-10.0, 2 * one, tensor([6]), 3 * one, temperature=2.0)
    assert value == pytest.approx(-11 - 0.5 * math.log(2))
    # y = 2, φ = 1, P₀ = 1/3, σ = 1: variance 1 + 3 = 4.
    value = bayesian_linear_regression_log_evidence(tensor([1]), 2 * one, one / 3, 1.0)
    assert value == pytest.approx(-0.5 * (math.log(2 * math.pi * 4) + 1))
