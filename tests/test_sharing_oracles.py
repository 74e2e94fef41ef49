"""Oracle for shared weights against cases worked by hand, tests/oracles.py and the dense GGN."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from tests import oracles
from tests.random_numbers import error, normal
from tests.sharing_oracles import (
    Use,
    dense_ggn_of,
    ggn_blocks,
    kfac_from_uses,
    loss_hessians,
    nearest_kronecker,
)
from tests.taps import reference_blocks, uses_of

close = torch.testing.assert_close
OTHER = {"expand": "reduce", "reduce": "expand"}
MODES = list(OTHER)


def tensor(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Mean(nn.Module):
    """Average over all axes between the batch and the features."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, ..., d) to (N, d)."""
        return x.flatten(1, -2).mean(1)


# --- the dense GGN ---


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
@pytest.mark.parametrize("layers", [[nn.Linear(4, 3)], [nn.Linear(4, 3), Mean()]])
def test_dense_ggn_is_that_of_the_other_oracle(likelihood, layers):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *layers).double(), normal(3, 2, 3)
    blocks = ggn_blocks(model, lambda run: run(x), likelihood)
    expected = oracles.dense_ggn_blocks(model, x, likelihood)
    assert list(blocks) == list(expected)
    for name, block in expected.items():
        close(blocks[name], block)


def test_ignored_loss_terms_are_as_if_they_were_not_there():
    W, x = {"W": normal(2, 3)}, normal(2, 3, 3, seed=1)
    ignored = torch.tensor([[False, True, False], [True, True, False]])
    found = dense_ggn_of(lambda p: x @ p["W"].T, W, "classification", ignored)
    kept = x[~ignored]  # (3, d)
    close(found, dense_ggn_of(lambda p: kept @ p["W"].T, W, "classification"))
    assert error(found, dense_ggn_of(lambda p: x @ p["W"].T, W, "classification")) > 0.1


def test_tied_parameters_appear_once_and_have_the_sum_of_all_four_blocks():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    with torch.no_grad():
        model[2].weight.copy_(model[0].weight)
    x = normal(4, 3)
    ggn = oracles.dense_ggn(model, x, "regression")
    model[2].weight = model[0].weight
    blocks = ggn_blocks(model, lambda run: run(x), "regression")
    assert list(blocks) == ["0.weight"]
    close(blocks["0.weight"], ggn.reshape(2, 9, 2, 9).sum((0, 2)))
    assert error(blocks["0.weight"], ggn[9:, 9:]) > 0.1  # the last use only


def test_tokens_keywords_and_frozen_parameters():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(4, 2), nn.Linear(2, 2)

        def forward(self, *, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens))

    model, tokens = Lookup().double(), torch.tensor([[0, 3], [3, 3]])
    model.head.bias.requires_grad_(False)
    blocks = ggn_blocks(model, lambda run: run(tokens=tokens), "regression")
    assert list(blocks) == ["table.weight", "head.weight"]
    W = model.head.weight.detach()
    close(blocks["table.weight"], torch.kron(torch.diag(tensor(1, 0, 0, 3)), W.T @ W))


# --- factors from uses ---


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


def test_ragged_and_constant_reduce_are_one_product_for_equal_numbers_of_positions():
    use = Use(list(normal(3, 4, 2)), list(normal(3, 2, 4, 3, 2, seed=1)))
    hessians = loss_hessians(list(normal(3, 2, 3, seed=2)), "classification")
    constant = kfac_from_uses([use], hessians, "reduce")
    ragged = kfac_from_uses([use], hessians, "reduce", ragged=True)
    close(torch.kron(*ragged), torch.kron(*constant))
    close(ragged[0] * 4, constant[0])


def two_layers(taps, x, first: nn.Linear, second: nn.Linear, pool: bool) -> Tensor:
    x = taps.linear(x, first.weight, first.bias, ("0.weight", "0.bias")).tanh()
    x = taps.linear(x, second.weight, second.bias, ("2.weight", "2.bias"))
    return x.mean(0) if pool else x


@pytest.mark.parametrize("approx", MODES)
@pytest.mark.parametrize("pool", [False, True])
def test_taps_find_the_factors_of_linear_layers(approx, pool):
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)]
    model, x = nn.Sequential(*layers, *[Mean()] * pool).double(), normal(3, 4, 3)
    examples = [(x_n, model[0], model[2], pool) for x_n in x]
    found = reference_blocks(two_layers, examples, "classification", approx)
    expected = oracles.kfac_blocks(model, x, "classification", approx)
    assert set(found) == set(expected)
    for name, block in expected.items():
        close(found[name], block)
    assert (
        error(
            found["0.weight"],
            oracles.kfac_blocks(model, x, "classification", OTHER[approx])["0.weight"],
        )
        > 0.1
    )


def test_examples_that_make_other_operations_are_an_error():
    layer = nn.Linear(2, 2).double()

    def sometimes(taps, x, k):
        names = ("a", "b") if k else ("b", "a")
        return taps.linear(x, layer.weight, layer.bias, names)

    with pytest.raises(ValueError, match="Example 1 makes other"):
        uses_of(sometimes, [(normal(2), 0), (normal(2), 1)])


# --- tied weights ---


def siamese(taps, x, z, W: Tensor, pool: bool) -> Tensor:
    """The same weight on two sets of positions; mean of all (pool), or one loss term for each."""
    f = [taps.linear(part, W, None, ("W", "")) for part in (x, z)]
    return torch.cat(f).mean(0) if pool else torch.cat(f)


@pytest.mark.parametrize(("pool", "exact_mode"), [(False, "expand"), (True, "reduce")])
def test_parallel_uses_of_one_weight_are_exact_in_their_setting(pool, exact_mode):
    W, x, z = normal(2, 3), normal(4, 3, 3, seed=1), normal(4, 2, 3, seed=2)
    examples = [(x_n, z_n, W, pool) for x_n, z_n in zip(x, z, strict=True)]
    both = torch.cat([x, z], 1)  # as if it were one layer
    f = both.mean(1) if pool else both
    exact = dense_ggn_of(lambda p: f @ p["W"].T, {"W": W}, "regression")
    close(reference_blocks(siamese, examples, "regression", exact_mode)["W"], exact)
    assert (
        error(reference_blocks(siamese, examples, "regression", OTHER[exact_mode])["W"], exact)
        > 0.1
    )


def deep(taps, x, W: Tensor) -> Tensor:
    return taps.linear(taps.linear(x, W, None, ("W", "")), W, None, ("W", ""))


@pytest.mark.parametrize("approx", MODES)
def test_uses_in_depth_are_not_exact_even_for_one_example(approx):
    W, x = normal(2, 2), normal(1, 2, seed=1)
    exact = dense_ggn_of(lambda p: x @ p["W"].T @ p["W"].T, {"W": W}, "regression")
    found = reference_blocks(deep, [(x_n, W) for x_n in x], "regression", approx)["W"]
    inputs, jacobians = [x[0], W @ x[0]], [W, torch.eye(2).double()]
    J = sum(torch.kron(b, a[None]) for a, b in zip(inputs, jacobians, strict=True))
    close(exact, J.T @ J)
    if approx == "expand":
        A = sum(torch.outer(a, a) for a in inputs) / 2
        B = sum(b.T @ b for b in jacobians)
    else:
        A, B = torch.outer(sum(inputs), sum(inputs)) / 4, sum(jacobians).T @ sum(jacobians)
    close(found, torch.kron(B, A))
    assert error(found, exact) > 0.1


def language_model(taps, tokens, W: Tensor) -> Tensor:
    """Embedding weight (V, d) that is the weight of the output layer, too."""
    return taps.linear(taps.embedding(tokens, W, "W").tanh(), W, None, ("W", ""))


@pytest.mark.parametrize("approx", MODES)
def test_opposite_orientations_are_the_nearest_product_to_the_sum(approx):
    W, tokens = normal(4, 2), torch.tensor([[0, 1, 3], [2, 1, 1]])
    uses, outputs = uses_of(language_model, [(t, W) for t in tokens])
    embedding, linear = uses[("W", 0)]
    assert embedding.input_first and not linear.input_first
    hessians = loss_hessians(outputs, "classification")
    B1, A1 = kfac_from_uses([embedding], hessians, approx)
    B2, A2 = kfac_from_uses([linear], hessians, approx)
    total = torch.kron(A1, B1) + torch.kron(B2, A2)
    found = reference_blocks(language_model, [(t, W) for t in tokens], "classification", approx)[
        "W"
    ]
    close(found, torch.kron(*nearest_kronecker([(A1, B1), (B2, A2)])))
    assert error(found, total) < min(
        error(torch.kron(A1, B1), total), error(torch.kron(B2, A2), total)
    )


def test_nearest_product_of_one_product_and_of_two_that_share_a_factor():
    F, S, S2 = (M @ M.T for M in (normal(3, 3), normal(2, 2, seed=1), normal(2, 2, seed=2)))
    close(torch.kron(*nearest_kronecker([(F, S)])), torch.kron(F, S))
    close(torch.kron(*nearest_kronecker([(F, S), (2 * F, S2)])), torch.kron(F, S + 2 * S2))


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


# --- ragged positions ---


def graph(taps, x, W: Tensor, aggregation: str, ragged: bool) -> Tensor:
    f = taps.linear(x, W, None, ("W", ""), ragged=ragged)
    scales = {"sum": 1.0, "mean": 1 / len(x), "root": 1 / math.sqrt(len(x))}
    return scales[aggregation] * f.sum(0) if aggregation != "none" else f


def graph_blocks(aggregation: str, ragged: bool) -> tuple[Tensor, dict[str, Tensor]]:
    W, sizes = normal(2, 3), [1, 4, 2]
    graphs = [normal(size, 3, seed=size) for size in sizes]
    examples = [(x, W, aggregation, ragged) for x in graphs]
    exact = sum(
        dense_ggn_of(
            lambda p, x=x: x @ p["W"].T if aggregation == "none" else graph_of(x, p, aggregation),
            {"W": W},
            "regression",
        )
        for x in graphs
    )
    found = {mode: reference_blocks(graph, examples, "regression", mode)["W"] for mode in MODES}
    return exact, found


def graph_of(x: Tensor, p: dict[str, Tensor], aggregation: str) -> Tensor:
    scale = {"sum": 1.0, "mean": 1 / len(x), "root": 1 / math.sqrt(len(x))}[aggregation]
    return scale * (x.sum(0) @ p["W"].T)[None]


def test_ragged_modes_are_exact_in_their_settings_only():
    exact, found = graph_blocks("none", ragged=True)  # one loss term per node
    close(found["expand"], exact)
    assert error(found["reduce"], exact) > 0.1
    for aggregation, ragged in itertools.product(("sum", "mean", "root"), (False, True)):
        exact, found = graph_blocks(aggregation, ragged)
        assert error(found["expand"], exact) > 0.1
        if (aggregation, ragged) in {("mean", False), ("root", True)}:
            close(found["reduce"], exact)
        else:
            assert error(found["reduce"], exact) > 0.1
