"""Variances alone, without a C×C product: against the diagonal of J Σ Jᵀ by dense Jacobians."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.timing import peak_memory
from kfac_backend import kronecker_factors
from kfac_backend.covariance.last_layer import LastLayerCovariance
from kfac_backend.covariance.output_covariance import OutputCovariance
from tests.kfac_backend.covariance import test_output_covariance as flat
from tests.kfac_backend.covariance import test_positions as sequences
from tests.kfac_backend.test_large_vocabularies import Language, batch, posterior


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", flat.CASES)
def test_are_the_diagonals_of_the_dense_covariances(name, batched):
    model, x = flat.case(name)
    blocks, dense = flat.posterior(model, x)
    f, variance = OutputCovariance(model, blocks, batched=batched)(x, variance_only=True)
    expected = flat.brute_force(model, x, dense).diagonal(dim1=1, dim2=2)
    assert variance.shape == f.shape and not variance.requires_grad
    assert_close(variance, expected, rtol=1e-10, atol=1e-12)
    # Negative control: eigenvalues that belong to other eigenvectors.
    wrong = {n: (eigen, spectrum.flip(-2, -1)) for n, (eigen, spectrum) in blocks.items()}
    if name not in ("scalars", "depthwise"):
        other = OutputCovariance(model, wrong, batched=batched)(x, variance_only=True)[1]
        assert (other - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("sketch_rank", [None, 1])
@pytest.mark.parametrize("name", ["mlp", "one layer", "no bias", "one output", "tokens"])
def test_of_the_last_layer(name, sketch_rank):
    """Its own formula, with factors, diagonals or sketches in the place of eigenvectors."""
    model, x = flat.case(name)
    blocks, _ = flat.posterior(model, x, sketch_rank=sketch_rank)
    last = [layer for layer, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    if last == "":
        model = nn.Sequential(model)
        blocks, last = {f"0.{name}": of_name for name, of_name in blocks.items()}, "0"
    of_last = {n: of_name for n, of_name in blocks.items() if n.startswith(f"{last}.")}
    covariances = LastLayerCovariance(model, last, of_last)
    f, expected = covariances(x)
    same, variance = covariances(x, variance_only=True)
    assert torch.equal(f, same)
    assert_close(variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-12)
    # Of the class with the largest output of each example.
    top = f.argmax(1, keepdim=True)
    assert_close(covariances(x, classes=top, variance_only=True)[1], variance.gather(1, top))


@pytest.mark.parametrize("name", sequences.CASES)
def test_of_sequences(name):
    """Some positions and classes, a few at a time, of each network with several positions."""
    model, x, blocks, dense = sequences.case(name)
    full = sequences.brute_force(model, x, dense).diagonal(dim1=-2, dim2=-1)
    covariance = OutputCovariance(model, blocks)
    f, variance = covariance(x, variance_only=True)
    assert_close(variance, full, rtol=1e-9, atol=1e-11)
    mask = torch.zeros(f.shape[:-1], dtype=torch.bool)
    mask.view(-1)[::3] = True
    classes = torch.arange(f.shape[-1]).flip(0)[:2]
    _, some = covariance(x, mask, classes, variance_only=True)
    assert_close(some, full[mask][:, classes], rtol=1e-9, atol=1e-11)
    assert (full.roll(1, 1) - full).norm() > 1e-2 * full.norm()  # positions differ
    # The last layer alone, by its own formula or, where something follows it, the general one.
    layer = sequences.LAST[name]
    if not layer:
        return
    own = {id(p) for p in model.get_submodule(layer).parameters()}
    last = {n: blocks[n] for n, p in model.named_parameters() if id(p) in own}
    of_last = LastLayerCovariance(model, layer, last)
    expected = of_last(x, mask)[1].diagonal(dim1=1, dim2=2)
    assert_close(of_last(x, mask, variance_only=True)[1], expected)


@pytest.mark.parametrize("tied", [False, True])
def test_of_rows_that_are_kept_by_their_diagonal(tied):
    model, x = Language(tied), batch()[0][:2]
    _, precision, _ = posterior(model)
    _, covariance = OutputCovariance(model, precision)(x)
    _, variance = OutputCovariance(model, precision)(x, variance_only=True)
    assert_close(variance, covariance.diagonal(dim1=-2, dim2=-1))
    weight = "tokens.weight" if tied else "head.weight"
    last = {name: precision[name] for name in (weight, "head.bias")}
    of_last = LastLayerCovariance(model, "head", last)
    expected = of_last(x)[1].diagonal(dim1=-2, dim2=-1)
    assert_close(of_last(x, variance_only=True)[1], expected)
    assert (expected - variance).norm() > 1e-3 * variance.norm()  # all layers have more


def test_takes_no_memory_for_pairs_of_outputs():
    torch.manual_seed(0)
    C, N = 500, 16
    model, x = nn.Sequential(nn.Tanh(), nn.Linear(16, C)), torch.randn(N, 16)
    data = [(x, torch.randint(C, (N,)))]
    factors = kronecker_factors(model, data, "classification", fisher="mc")
    blocks = {name: block.decompose() for name, block in factors.blocks.items()}
    precision = {name: (block, block.spectrum(1.0)) for name, block in blocks.items()}
    of_last = LastLayerCovariance(model, "1", precision)
    cpu, pairs = torch.device("cpu"), 4 * N * C * C
    of_last(x)
    assert peak_memory(lambda: of_last(x), cpu) > pairs
    # One C×C array, the squares of the eigenvectors, and not one for each example.
    assert peak_memory(lambda: of_last(x, variance_only=True), cpu) < 1.5 * pairs / N
