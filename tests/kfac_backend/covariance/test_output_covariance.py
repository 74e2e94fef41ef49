"""Covariances of outputs against J Σ Jᵀ with a dense Jacobian J and a dense covariance Σ."""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close

from kfac_backend.covariance.output_covariance import OutputCovariance
from tests.kfac_backend import layer_cases
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.covariance.posteriors import brute_force, covariance_parts, posterior
from tests.kfac_backend.networks import OwnNorm, random_model
from tests.random_numbers import error, normal


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


@pytest.mark.parametrize("has_diagonal", [False, True])
def test_a_graph_without_edges_alone(has_diagonal):
    model, batch = layer_cases.case("graphs")
    if has_diagonal:
        model.head = nn.Sequential(OwnNorm(4).double(), model.head)
    blocks, dense = posterior(model, batch)
    expected = brute_force(model, batch, dense)
    alone = {key: value[2:] for key, value in batch.items()}
    assert not alone["edges"].any()
    covariance = OutputCovariance(model, blocks)
    for batch_or_one, wanted in ((alone, expected[2:]), (batch, expected)) * 2:
        assert_close(covariance(batch_or_one)[1], wanted, rtol=1e-9, atol=1e-11)


def test_mappings_and_inference_mode():
    model = random_model(lambda m, x: m.fc(torch.tanh(x["a"] * x["b"])), fc=nn.Linear(6, 3))
    x = {"a": normal(5, 6), "b": normal(5, 6, seed=1)}
    blocks, dense = posterior(model, x)
    expected = brute_force(model, x, dense)
    with torch.inference_mode():
        inside = {key: value * 1.0 for key, value in x.items()}
        assert inside["a"].is_inference()
        f, covariance = OutputCovariance(model, blocks, memory=1)(inside)
    assert_close(covariance, expected)
    assert not covariance.is_inference()
    assert_close(f, model(x).detach())


def test_wrong_input_is_named():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = normal(5, 6)
    blocks, _ = posterior(model, x)
    with pytest.raises(ValueError, match="'2.weight' .*30 entries.* 15"):
        OutputCovariance(model, {"2.weight": blocks["0.weight"]})
    with pytest.raises(ValueError, match="The batch has no examples"):
        OutputCovariance(model, blocks)(x[:0])
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="'0.weight' .*requires_grad"):
        OutputCovariance(model, blocks)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda f: (f, f), TypeError, "returned tuple, but must return a tensor"),
        (lambda f: f[:, 0], NotImplementedError, r"returned shape \(2,\) for 2 examples"),
        (lambda f: f - f.mean(0), NotImplementedError, "rows of different examples mix"),
    ],
)
def test_outputs_without_a_covariance(change, error, message):
    x = torch.randn(5, 6).double()
    blocks, _ = posterior(random_model(lambda m, x: m.fc(x), fc=nn.Linear(6, 3)), x)
    model = random_model(lambda m, x: change(m.fc(x)), fc=nn.Linear(6, 3))
    with pytest.raises(error, match=message):
        OutputCovariance(model, blocks)(x)


class Copies(nn.Module):
    """Two copies of each sequence, and an embedding of positions that all of them share."""

    def __init__(self):
        super().__init__()
        self.position, self.head = nn.Embedding(3, 2), nn.Linear(2, 2)

    def forward(self, x):
        rows = torch.stack([x, 2 * x], 1).flatten(0, 1)
        rows = torch.tanh(rows + self.position(torch.arange(3)))
        return self.head(rows).unflatten(0, (len(x), 2)).mean(1)


def test_all_positions_of_a_single_example():
    """The example is repeated for its positions, so that the proof needs it twice as well."""
    model, x = Copies().double(), normal(1, 3, 2)
    blocks, dense = posterior(model, x)
    expected = brute_force(model, x, dense)
    for memory in (None, 1):
        found = OutputCovariance(model, blocks, memory=memory)(x)[1]
        assert_close(found, expected, rtol=1e-9, atol=1e-11)


def halved_gradient(module, args, output):
    """A hook's output with the same value, and half of the gradient."""
    return output.detach() + 0.5 * (output - output.detach())


def test_a_single_example_that_cannot_be_repeated():
    """Outputs that depend on the number of examples, so that the batch must stay as it is."""
    model = random_model(lambda m, x: len(x) * m.fc(x).sin(), fc=nn.Linear(3, 2))
    for x in (normal(1, 5, 3), normal(3, 5, 3)):
        blocks, dense = posterior(model, x)
        f, found = OutputCovariance(model, blocks)(x)
        assert_close(f, model(x).detach())
        assert_close(found, brute_force(model, x, dense), rtol=1e-9, atol=1e-11)


CHANGES = {
    # name: the change of a network, which returns a function that undoes it
    "forward hook": lambda m: m[2].register_forward_hook(halved_gradient).remove,
    "backward hook": lambda m: (
        m[1].register_full_backward_hook(lambda m, inside, outside: (3 * inside[0],)).remove
    ),
    "hook of all modules": lambda m: register_module_forward_hook(halved_gradient).remove,
    "own forward": lambda m: own_forward(m[2]),
}


def own_forward(layer):
    layer.forward = lambda x: halved_gradient(layer, (x,), type(layer).forward(layer, x))
    return lambda: delattr(layer, "forward")


def by_autograd(model, x, dense):
    """J Σ Jᵀ with a backward pass for each output, as hooks on gradients need."""
    rows = [
        torch.autograd.grad(f_c, [model.get_parameter(n) for n in dense], retain_graph=True)
        for f_c in model(x).flatten()
    ]
    total = 0
    for g, P in zip(zip(*rows, strict=True), dense.values(), strict=True):
        J = torch.stack(g).flatten(1).unflatten(0, (len(x), -1))
        total = total + J @ torch.linalg.solve(P, J.mT)
    return total


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_network_after_the_first_call(name):
    """Hooks and forwards that come and go, which the proof of the first batch has not seen."""
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    model, x = nn.Sequential(*layers).double(), normal(5, 3)
    blocks, dense = posterior(model, x)
    covariance = OutputCovariance(model, blocks)
    plain = covariance(x)[1]
    assert_close(plain, by_autograd(model, x, dense), rtol=1e-9, atol=1e-11)
    undo = CHANGES[name](model)
    changed = by_autograd(model, x, dense)
    assert error(changed, plain) > 0.1
    try:
        assert_close(covariance(x)[1], changed, rtol=1e-9, atol=1e-11)
    finally:
        undo()
    assert_close(covariance(x)[1], plain)


def test_changes_that_have_no_covariance():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), normal(5, 3)
    blocks, _ = posterior(model.double().eval(), x)
    covariance = OutputCovariance(model, blocks)
    covariance(x)
    model.train()
    with pytest.raises(ValueError, match="BatchNorm1d.* is in train mode"):
        covariance(x)
    model.eval()
    hook = model[2].register_forward_hook(lambda m, args, f: f - f.mean(0))
    with pytest.raises(NotImplementedError, match="rows of different examples mix"):
        covariance(x)
    hook.remove()
    covariance(x)
