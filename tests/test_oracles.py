"""The oracles against cases worked by hand."""

import pytest
import torch
from torch import Tensor, nn

from tests.evidence_oracles import bayesian_linear_regression_log_evidence, laplace_log_evidence
from tests.oracles import (
    Use,
    dense_ggn_blocks,
    dense_ggn_of,
    empirical_fisher_blocks,
    kfac_from_uses,
    nearest_kronecker,
)
from tests.random_numbers import error, normal
from tests.uses import kfac_blocks

close = torch.testing.assert_close


def tensor(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the generalized Gauss-Newton matrix and the empirical Fisher ---


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
        blocks = kfac_blocks(model, x, "regression", approx)
        close(blocks, {"0.weight": A * B * one, "0.bias": B * one})


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
def test_ggn_of_a_linear_model_is_the_hessian_of_its_loss(likelihood):
    x, W, y = normal(4, 2, 3), normal(3, 3, seed=1), torch.arange(8) % 3
    targets = nn.functional.one_hot(y, 3).double()

    def loss(W):
        f = x.reshape(-1, 3) @ W.T
        if likelihood == "classification":
            return nn.functional.cross_entropy(f, y, reduction="sum")
        if likelihood == "bernoulli":
            return nn.functional.binary_cross_entropy_with_logits(f, targets, reduction="sum")
        return 0.5 * (f - targets).square().sum()

    hessian = torch.autograd.functional.hessian(loss, W).reshape(9, 9)
    close(dense_ggn_of(lambda p: x @ p["W"].T, {"W": W}, likelihood), hessian)


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


# --- K-FAC of uses ---


def test_factors_by_hand():
    # N = 2, R = 2, d_in = d_out = C = 1, T = 1
    use = Use(a=[tensor([1], [3]), tensor([2], [0])], b=[tensor(1, 2).reshape(1, 2, 1, 1)] * 2)
    hessians = [[tensor([1])], [tensor([10])]]
    B, A = kfac_from_uses([use], hessians, "expand")
    close((B, A), (tensor([11 * 5]), tensor([(1 + 9 + 4) / 4])))
    B, A = kfac_from_uses([use], hessians, "reduce")
    close((B, A), (tensor([11 * 9]), tensor([(4 + 1) / 2])))
    B, A = kfac_from_uses([use], hessians, "reduce", ragged=True)
    close((B, A), (tensor([11 * 9 / 2]), tensor([(16 + 4) / 2 / 2])))
    twice = [use, Use([2 * a for a in use.a], use.b)]  # four positions
    B, A = kfac_from_uses(twice, hessians, "expand")
    close((B, A), (tensor([11 * 10]), tensor([(14 + 4 * 14) / 8])))
    B, A = kfac_from_uses(twice, hessians, "reduce")
    close((B, A), (tensor([11 * 36]), tensor([(3**2 + 1.5**2) / 2])))


def test_ragged_examples_by_hand():
    # Three positions, one, none; loss Hessians one.
    a = [tensor([1], [2], [3]), tensor([5]), torch.zeros(0, 1).double()]
    b = [torch.ones(1, len(a_n), 1, 1).double() for a_n in a]
    one = [[tensor([1])]] * 3
    B, A = kfac_from_uses([Use(a, b)], one, "expand", ragged=True)
    close((B, A), (tensor([4]), tensor([(1 + 4 + 9 + 25) / 4])))
    B, A = kfac_from_uses([Use(a, b)], one, "reduce", ragged=True)
    close((B, A), (tensor([9 / 3 + 1]), tensor([(36 / 3 + 25) / 3])))
    B, A = kfac_from_uses([Use(a, b)], one, "reduce")  # means 2 and 5; sums 3 and 1
    close((B, A), (tensor([9 + 1]), tensor([(4 + 25) / 3])))
    with pytest.raises(ValueError, match="neither"):
        kfac_from_uses([Use(a, b)], one, "auto")


def test_nearest_product_is_semidefinite_and_no_other_is_nearer():
    pairs = [(normal(3, 2, seed=k), normal(2, 2, seed=10 + k)) for k in range(3)]
    blocks = [(M @ M.T, K @ K.T) for M, K in pairs]
    total = sum(torch.kron(first, second) for first, second in blocks)
    F, S = nearest_kronecker(blocks)
    close((F, S), (F.T, S.T))
    assert torch.linalg.eigvalsh(F).min() > -1e-12 and torch.linalg.eigvalsh(S).min() > 0
    best = error(torch.kron(F, S), total)
    assert 0.05 < best  # the sum is none itself
    for k in range(20):
        step_F, step_S = normal(3, 3, seed=100 + k), normal(2, 2, seed=200 + k)
        assert error(torch.kron(F + 0.01 * step_F, S + 0.01 * step_S), total) > best
    # For a fixed factor the other one is a least-squares problem, which it solves.
    rearranged = total.reshape(3, 2, 3, 2)
    close(torch.einsum("iajb,ab->ij", rearranged, S) / S.pow(2).sum(), F)
    close(torch.einsum("iajb,ij->ab", rearranged, F) / F.pow(2).sum(), S)


# --- evidences ---


def test_evidence_of_bayesian_linear_regression_is_its_laplace_evidence():
    N, D, C, sigma = 6, 3, 2, 0.7
    Phi, y, precision = normal(N, D), normal(N, C, seed=1), normal(C, D, seed=2).exp()
    ggn = dense_ggn_of(lambda p: Phi @ p["W"].T, {"W": normal(C, D)}, "regression") / sigma**2
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
