"""Many classes: ``diagonal_above`` against brute force, what does not fit, and the peak memory."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.models import GPT
from experiments.timing import peak_memory
from kfac_backend import kronecker_factors
from kfac_backend.covariance.last_layer import LastLayerCovariance
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.curvature import CurvaturePass
from kfac_backend.engine import factor_sums
from tests import oracles
from tests.kfac_backend.block_checks import MODES, OTHER
from tests.kfac_backend.covariance.posteriors import (
    brute_force,
    dense_precision,
    of_layer,
    precision_of,
)
from tests.uses import uses_of

V, D, R, N = 24, 4, 3, 5
"""Classes, features, positions, examples."""


class Language(nn.Module):
    """Tokens, a nonlinear layer, and an output layer with a bias; a loss term per position."""

    def __init__(self, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.hidden, self.head = nn.Linear(D, D), nn.Linear(D, V)
        if tied:
            self.head.weight = self.tokens.weight
        self.double()

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.tokens(x))))


def batch():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(V, (N, R), generator=generator) for _ in range(2))


def factors(model, data=None, **options):
    data = [batch()] if data is None else data
    return kronecker_factors(model, data, "classification", **options)


def blocks_by_loops(model, x, kfac_approx):
    """Of the output layer, the hidden layer and the tokens: B, A (dense), by loops."""
    names = {p: name for name, p in model.named_parameters()}
    runs = [partial(model, x_n[None]) for x_n in x]
    uses, outputs = uses_of(runs, dict(model.named_parameters()))
    hessians = oracles.loss_hessians(outputs, "classification")
    found = {}
    for name in ("tokens", "hidden", "head"):
        of_weight = uses[names[model.get_submodule(name).weight], 0]
        (use,) = (use for use in of_weight if use.input_first == (name == "tokens"))
        found[name] = oracles.kfac_from_uses([use], hessians, kfac_approx)
    return found


@pytest.mark.parametrize("kfac_approx", MODES)
def test_rows_of_large_weights_by_their_diagonal(kfac_approx):
    model = Language()
    found = factors(model, kfac_approx=kfac_approx, diagonal_above=10).blocks
    expected = blocks_by_loops(model, batch()[0], kfac_approx)
    B, A = expected["head"]
    assert found["head.weight"].B.shape == found["head.bias"].B.shape == (V, 1, 1)
    assert_close(found["head.weight"].B[:, 0, 0], B.diagonal())
    assert_close(found["head.bias"].B[:, 0, 0], B.diagonal())
    assert_close(found["head.weight"].A, A)
    assert (B - B.diagonal().diag()).norm() > 0.01 * B.norm()  # and not the matrix
    B, A = expected["hidden"]
    assert_close(found["hidden.weight"].B, B)  # narrow layers stay as they are
    assert_close(found["hidden.weight"].A, A)
    B, A = expected["tokens"]  # stored inputs first
    tokens = found["tokens.weight"]
    assert tokens.B.shape == (V, 1, 1)
    assert_close(tokens.B[:, 0, 0] / tokens.num_terms, A.diagonal())
    assert_close(tokens.A * tokens.num_terms, B)
    other = blocks_by_loops(model, batch()[0], OTHER[kfac_approx])
    for name in ("hidden", "head"):  # positions do not mix, so that only the modes' A differ
        assert (other[name][1] - expected[name][1]).norm() > 0.1 * expected[name][1].norm()
    whole = factors(model, kfac_approx=kfac_approx).blocks["head.weight"]
    assert_close(whole.B, expected["head"][0])


@pytest.mark.parametrize("kfac_approx", MODES)
def test_a_tied_weight_keeps_the_trace_of_each_row(kfac_approx):
    """And is the nearest of all products that do, by brute force on dense blocks."""
    model = Language(tied=True)
    block = factors(model, kfac_approx=kfac_approx, diagonal_above=10).blocks["tokens.weight"]
    terms = N * R if kfac_approx == "expand" else N
    of_uses = blocks_by_loops(model, batch()[0], kfac_approx)
    B, A = of_uses["head"]
    uses = [(B.diagonal().diag(), A)]
    B, A = of_uses["tokens"]
    uses.append((A.diagonal().diag() * terms, B / terms))
    total = sum(torch.kron(*use) for use in uses)
    rows = torch.stack([total[i * D :, i * D :][:D, :D] for i in range(V)])  # (V, D, D)
    traces = rows.diagonal(dim1=1, dim2=2).sum(1)
    # Σ_i ‖rows_i − traces_i A‖² is smallest for this A.
    A = torch.einsum("v,vij->ij", traces, rows) / traces.square().sum()
    assert block.B.shape == (V, 1, 1)
    found = block.to_dense().view(V, D, V, D).diagonal(dim1=0, dim2=2).movedim(2, 0)
    assert_close(found.diagonal(dim1=1, dim2=2).sum(1), traces, rtol=1e-9, atol=0)
    assert_close(block.to_dense(), torch.kron(traces.diag(), A), rtol=1e-8, atol=1e-10)
    # Negative control: the nearest of all products gives some rows another trace.
    nearest = torch.kron(*oracles.nearest_kronecker(uses))
    of_nearest = nearest.diagonal().view(V, D).sum(1)
    assert ((of_nearest - traces).abs() > 0.05 * traces).any()
    assert (nearest - total).norm() < (block.to_dense() - total).norm()


@pytest.mark.parametrize("tied", [False, True])
def test_covariances_and_determinants_are_those_of_the_dense_blocks(tied):
    model, x = Language(tied), batch()[0][:2]
    found = factors(model, diagonal_above=10)
    precision, dense = precision_of(found, 0.5), dense_precision(found, 0.5)
    expected = brute_force(model, x, dense)
    covariance = OutputCovariance(model, precision)
    assert_close(covariance(x)[1], expected, rtol=1e-9, atol=1e-11)
    variance = covariance(x, variance_only=True)[1]
    assert_close(variance, expected.diagonal(dim1=-2, dim2=-1))
    log_det = sum(torch.linalg.slogdet(matrix)[1] for matrix in dense.values())
    assert_close(found.log_det(0.5), log_det)
    assert (factors(model).log_det(0.5) - log_det).abs() > 0.1
    last = LastLayerCovariance(model, "head", of_layer(precision, model, "head"))
    expected = last(x)[1].diagonal(dim1=-2, dim2=-1)
    assert_close(last(x, variance_only=True)[1], expected)
    assert (expected - variance).norm() > 1e-3 * variance.norm()  # all layers have more


@pytest.mark.parametrize("kfac_approx", ["expand", "auto"])
def test_factors_that_cannot_fit_are_refused_before_any_work(kfac_approx, monkeypatch):
    """A vocabulary of 50,257: 9.4 GiB, and two copies in float64 for the eigenvalues."""
    monkeypatch.setattr(factor_sums, "total_memory", lambda device: 16 * 2**30)
    options = {"kfac_approx": kfac_approx, "fisher": "mc"}
    for tied, name in ((True, "token_embedding"), (False, "head")):
        model = GPT(50257, 8, 4, 1, 1, tied=tied)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            CurvaturePass(model, "classification", **options)
        message = str(caught.value)
        assert f"factor is B of '{name}.weight' (50257×50257, 9.4 GiB)" in message
        assert "another 37.6 GiB" in message and "cpu has 16.0 GiB" in message
        assert "diagonal_above=8192" in message and "requires_grad_(False)" in message
        CurvaturePass(model, "classification", diagonal_above=8192, **options)
    # With enough memory it is tried.
    monkeypatch.setattr(factor_sums, "total_memory", lambda device: 48 * 2**30)
    CurvaturePass(model, "classification", **options)


def test_a_large_embedding_under_reduce(monkeypatch):
    monkeypatch.setattr("kfac_backend.layers.embedding.LARGEST_VOCABULARY", 20)
    with pytest.raises(NotImplementedError, match="diagonal_above=20.*choose expand"):
        CurvaturePass(Language(), "classification", kfac_approx="reduce")
    CurvaturePass(Language(), "classification", kfac_approx="reduce", diagonal_above=20)


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_peak_memory_is_the_outputs_and_one_gradient(fisher):
    """The outputs, one gradient and parts of them; a step of training holds three such arrays.

    The empirical Fisher takes two more, of which one has a single term's gradient at a time.
    """
    model, C, terms = GPT(30_000, 16, 8, 1, 1), 30_000, 16 * 8
    x, y = torch.randint(C, (8, 16)), torch.randint(C, (8, 16))
    options = {"fisher": fisher, "diagonal_above": 8192, "kfac_approx": "reduce"}
    curvature = CurvaturePass(model, "classification", **options)
    curvature.add(x[:2], y[:2])  # with the proof

    def add():
        curvature.add(x, y)

    def step():
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

    outputs, cpu = 4 * C * terms, torch.device("cpu")
    of_pass, of_step = peak_memory(add, cpu) / outputs, peak_memory(step, cpu) / outputs
    assert of_pass <= (2.8 if fisher == "mc" else 4.2)
    assert of_step > 2.95
