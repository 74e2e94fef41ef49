"""Covariances of outputs against J Σ Jᵀ with a dense Jacobian J and a dense covariance Σ."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.layers import gram
from tests.kfac_backend import layer_cases
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.covariance.posteriors import (
    brute_force,
    case,
    covariance_parts,
    posterior,
)
from tests.random_numbers import error


@pytest.mark.parametrize("name", layer_cases.CASES)
def test_equals_the_dense_jacobian(name):
    """In parts of little memory or at once, variances alone, and of some parameters alone.

    Of blocks in one of the modes: the covariance asks not how they were made.
    """
    model, x = layer_cases.case(name)
    kfac_approx = MODES[len(name) % 2]
    blocks, dense = posterior(model, x, kfac_approx)
    parts = covariance_parts(model, x, dense)
    expected = sum(parts.values())
    for start, memory in enumerate({"expand": (None, 3_000), "reduce": (1, None)}[kfac_approx]):
        covariance = OutputCovariance(model, blocks, memory=memory)
        f, found = covariance(x)
        assert_close(f, model(x).detach())
        assert_close(found, expected, rtol=1e-10, atol=1e-12)
        variance = covariance(x, variance_only=True)[1]
        assert_close(variance, found.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-12)
        assert not found.requires_grad and not variance.requires_grad
        some = dict(list(blocks.items())[start::2])  # the others' parameters are constants
        if some:
            found = OutputCovariance(model, some, memory=memory)(x)[1]
            assert_close(found, sum(parts[name] for name in some), rtol=1e-10, atol=1e-12)
    # Negative control: eigenvalues that belong to other eigenvectors.
    wrong = {n: (eigen, spectrum.flip(-2, -1)) for n, (eigen, spectrum) in blocks.items()}
    if name != "scalars":
        covariance = OutputCovariance(model, wrong)
        assert error(covariance(x)[1], expected) > 1e-3
        assert error(covariance(x, variance_only=True)[1], variance) > 1e-3


@pytest.mark.parametrize("name", ["LayerNorm twice", "BatchNorm2d", "own parameters"])
def test_large_elementwise_parameters(monkeypatch, name):
    monkeypatch.setattr(gram, "LARGEST_DENSE", 1)
    model, x = layer_cases.case(name)
    blocks, dense = posterior(model, x)
    assert any(len(eigen.Q_B) > 1 == eigen.Q_B.shape[-1] for eigen, _ in blocks.values())
    expected = brute_force(model, x, dense)
    assert_close(OutputCovariance(model, blocks)(x)[1], expected, rtol=1e-9, atol=1e-11)


def test_a_graph_without_edges_alone():
    model, batch = layer_cases.case("graphs")
    blocks, dense = posterior(model, batch)
    expected = brute_force(model, batch, dense)
    alone = {key: value[2:] for key, value in batch.items()}
    assert not alone["edges"].any()
    covariance = OutputCovariance(model, blocks)
    for batch_or_one, wanted in ((alone, expected[2:]), (batch, expected)) * 2:
        assert_close(covariance(batch_or_one)[1], wanted, rtol=1e-9, atol=1e-11)


def test_memory_decides_how_many_examples_run_at_once():
    model, x = case("tokens")
    blocks, _ = posterior(model, x)
    short, long = torch.randn(64, 4, 4).double(), torch.randn(64, 400, 4).double()
    covariance, seen = OutputCovariance(model, blocks, memory=400_000), []
    covariance(short[:1])  # one example at first
    covariance(short)
    covariance(long)
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    for inputs in (short, long):  # each shape has a number of its own
        covariance(inputs)
    assert seen[0] > 20 and max(seen[-5:]) < 5


class TakesMapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, batch):
        return self.fc(torch.tanh(batch["a"] * batch["b"]))


def test_mappings_and_inference_mode():
    model = TakesMapping().double()
    x = {"a": torch.randn(5, 6).double(), "b": torch.randn(5, 6).double()}
    blocks, _ = posterior(model, x)
    expected = OutputCovariance(model, blocks)(x)[1]
    with torch.inference_mode():
        inside = {key: value * 1.0 for key, value in x.items()}
        assert inside["a"].is_inference()
        f, covariance = OutputCovariance(model, blocks, memory=1)(inside)
    assert_close(covariance, expected)
    assert not covariance.is_inference()
    plain = TakesMapping().double()
    plain.load_state_dict(model.state_dict())
    assert_close(f, plain(x).detach())


def test_wrong_input_is_named():
    model, x = case("mlp")
    blocks, _ = posterior(model, x)
    with pytest.raises(ValueError, match="no block; it belongs to another model"):
        OutputCovariance(model, {})
    with pytest.raises(ValueError, match="'9.weight' with 30 entries, where the model has none"):
        OutputCovariance(model, {"9.weight": blocks["0.weight"]})
    with pytest.raises(ValueError, match="'2.weight' with 30 entries, where the model has 15"):
        OutputCovariance(model, {"2.weight": blocks["0.weight"]})
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        OutputCovariance(model, blocks, memory=0)
    with pytest.raises(ValueError, match="The batch has no examples"):
        OutputCovariance(model, blocks)(x[:0])
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="'0.weight' .* none that are trained.*requires_grad_"):
        OutputCovariance(model, blocks)


class Outputs(nn.Module):
    """A linear layer whose output is changed."""

    def __init__(self, change):
        super().__init__()
        self.fc, self.change = nn.Linear(6, 3), change

    def forward(self, x):
        return self.change(self.fc(x))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda f: (f, f), TypeError, "returned tuple; a tensor of outputs"),
        (lambda f: f[:, 0], NotImplementedError, r"returned shape \(2,\) for 2 examples"),
        (lambda f: f - f.mean(0), NotImplementedError, "rows of different examples mix"),
    ],
)
def test_outputs_without_a_covariance(change, error, message):
    plain = Outputs(lambda f: f).double()
    x = torch.randn(5, 6).double()
    blocks, _ = posterior(plain, x)
    model = Outputs(change).double()
    with pytest.raises(error, match=message):
        OutputCovariance(model, blocks)(x)
