"""Covariances of outputs against J Σ Jᵀ with a dense Jacobian J and a dense covariance Σ."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.covariance import output_covariance
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.layers import Bias, Scale
from tests.kfac_backend.networks import OwnNorm, data, network


class OverTokens(nn.Module):
    """A linear layer over tokens, then their mean."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)).mean(1))


class TakesMapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, batch):
        return self.fc(torch.tanh(batch["a"] * batch["b"]))


def convolution(**options):
    size = nn.Sequential(nn.Conv2d(4, 6, **options))(torch.zeros(1, 4, 7, 6)).flatten().numel()
    return nn.Sequential(nn.Conv2d(4, 6, **options), nn.Tanh(), nn.Flatten(), nn.Linear(size, 3))


IMAGES = torch.randn(5, 4, 7, 6, generator=torch.Generator().manual_seed(0))
CASES = {
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(5, 6)),
    "one layer": lambda: (nn.Linear(6, 3), torch.randn(5, 6)),
    "one output": lambda: (nn.Linear(6, 1), torch.randn(5, 6)),
    "no bias": lambda: (nn.Linear(6, 3, bias=False), torch.randn(5, 6)),
    "tokens": lambda: (OverTokens(), torch.randn(5, 7, 4)),
    "all layers": lambda: (network(), data(5)[0]),
    "scalars": lambda: (nn.Sequential(Scale(), nn.Linear(6, 3), Bias()), torch.randn(5, 6)),
    "wide kernel": lambda: (convolution(kernel_size=5, padding=2), IMAGES),
    "stride": lambda: (convolution(kernel_size=3, stride=(2, 1)), IMAGES),
    "dilation": lambda: (convolution(kernel_size=2, dilation=2, padding="same"), IMAGES),
    "reflected": lambda: (convolution(kernel_size=3, padding=1, padding_mode="reflect"), IMAGES),
    "groups": lambda: (convolution(kernel_size=3, groups=2), IMAGES),
    "depthwise": lambda: (
        nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.Flatten(), nn.Linear(80, 3)),
        IMAGES,
    ),
    "no rule": lambda: (
        nn.Sequential(nn.Linear(6, 5), OwnNorm(5), nn.Tanh(), nn.Linear(5, 3)),
        torch.randn(5, 6),
    ),
}


def case(name):
    torch.manual_seed(1)
    model, x = CASES[name]()
    return model.double(), x.double()


def posterior(model, x, kfac_approx="expand", damping=False, sketch_rank=None):
    """Blocks of the posterior precision, and the same densely, by parameter."""
    y = torch.arange(len(x)) % 2
    likelihood = "classification"
    if model(x).shape[1] == 1:
        likelihood, y = "regression", torch.zeros(len(x), 1)
    factors = kronecker_factors(
        model, [(x, y)], likelihood, kfac_approx=kfac_approx, unsupported="diagonal",
        sketch_rank=sketch_rank,
    )  # fmt: skip
    blocks, dense = {}, {}
    for i, (name, block) in enumerate(factors.blocks.items()):
        eigen, delta = block.decompose(), 0.5 + i
        blocks[name] = eigen, eigen.spectrum(delta, damping)
        if damping and block.A is not None:
            root = delta**0.5
            dense[name] = torch.kron(
                block.B + root * torch.eye(len(block.B)), block.A + root * torch.eye(len(block.A))
            )
        else:
            dense[name] = block.to_dense() + delta * torch.eye(block.numel)
    return blocks, dense


def brute_force(model, x, dense):
    """Σ over parameters of J (precision)⁻¹ Jᵀ, (N, C, C)."""
    parameters = {n: p.detach() for n, p in model.named_parameters() if n in dense}
    jacobians = jacrev(lambda p: functional_call(model, p, (x,)))(parameters)
    total = 0
    for name, J in jacobians.items():
        J = J.flatten(2).detach()  # (N, C, P)
        total = total + J @ torch.linalg.solve(dense[name], J.mT)
    return total


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_jacobian(name, kfac_approx, batched):
    model, x = case(name)
    blocks, dense = posterior(model, x, kfac_approx)
    f, covariance = OutputCovariance(model, blocks, batched=batched)(x)
    expected = brute_force(model, x, dense)
    assert_close(covariance, expected, rtol=1e-10, atol=1e-12)
    assert_close(f, model(x).detach())
    assert not covariance.requires_grad
    # Negative control: eigenvalues that belong to other eigenvectors.
    wrong = {n: (eigen, spectrum.flip(-2, -1)) for n, (eigen, spectrum) in blocks.items()}
    if name not in ("scalars", "depthwise"):
        difference = OutputCovariance(model, wrong, batched=batched)(x)[1] - expected
        assert difference.norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("memory", [1, 20_000, 10**9])
@pytest.mark.parametrize("name", ["all layers", "wide kernel", "groups", "tokens"])
def test_does_not_depend_on_memory_or_batches(name, memory):
    model, x = case(name)
    blocks, dense = posterior(model, x)
    covariance = OutputCovariance(model, blocks, memory=memory)
    expected = brute_force(model, x, dense)
    assert_close(covariance(x)[1], expected, rtol=1e-10, atol=1e-12)
    assert_close(covariance(x[:1])[1], expected[:1], rtol=1e-10, atol=1e-12)
    first = OutputCovariance(model, blocks, memory=memory)
    assert_close(first(x[:1])[1], expected[:1], rtol=1e-10, atol=1e-12)  # one example at first
    assert_close(first(x)[1], expected, rtol=1e-10, atol=1e-12)


def held_at_once(model, blocks, x, memory):
    """The largest number of examples that the model sees after the first, which are tried out."""
    seen = []
    covariance = OutputCovariance(model, blocks, memory=memory)
    covariance(x)
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    covariance(x)
    return max(seen)


def test_memory_decides_how_many_examples_run_at_once():
    model, x = case("tokens")
    blocks, _ = posterior(model, x)
    short, long = torch.randn(64, 4, 4).double(), torch.randn(64, 400, 4).double()
    few, many = (held_at_once(model, blocks, short, memory) for memory in (4_000, 10**8))
    assert 1 <= few < many == 64
    # Each shape has a number of its own.
    covariance, seen = OutputCovariance(model, blocks, memory=200_000), []
    covariance(short)
    covariance(long)
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    for inputs in (short, long):
        covariance(inputs)
    assert seen[0] > 20 and max(seen[-5:]) < 5


def test_a_gpus_constants_do_not_outgrow_the_memory(monkeypatch):
    monkeypatch.setitem(output_covariance.LARGEST_PRODUCT, "cpu", 256 * 2**20)
    model, x = case("wide kernel")
    blocks, _ = posterior(model, x)
    assert held_at_once(model, blocks, x, 96 * 2**20) == len(x)


def test_a_gpu_lends_a_share_of_its_memory(monkeypatch):
    monkeypatch.setattr(output_covariance, "total_memory", lambda device: 80 * 2**30)
    assert output_covariance.default_memory(torch.device("cuda")) == 10 * 2**30
    assert output_covariance.default_memory(torch.device("cpu")) == 144 * 2**20


def test_damping():
    model, x = case("mlp")
    blocks, dense = posterior(model, x, damping=True)
    assert_close(OutputCovariance(model, blocks)(x)[1], brute_force(model, x, dense))


def test_parameters_without_a_block_are_constants():
    model, x = case("mlp")
    blocks, dense = posterior(model, x)
    for kept in (["2.weight", "2.bias"], ["0.weight"], ["2.bias"]):
        some = {name: blocks[name] for name in kept}
        expected = brute_force(model, x, {name: dense[name] for name in kept})
        assert_close(OutputCovariance(model, some)(x)[1], expected)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias"])
def test_half_frozen_layer(frozen):
    model, x = case("wide kernel")
    model.get_parameter(frozen).requires_grad_(False)
    blocks, dense = posterior(model, x)
    assert frozen not in blocks
    assert_close(OutputCovariance(model, blocks)(x)[1], brute_force(model, x, dense))


def test_mappings_and_inference_mode():
    torch.manual_seed(0)
    model = TakesMapping().double()
    x = {"a": torch.randn(5, 6).double(), "b": torch.randn(5, 6).double()}
    factors = kronecker_factors(
        model, [x | {"labels": torch.arange(5) % 3}], "classification", dict_key_y="labels"
    )
    blocks = {n: (b.decompose(), b.decompose().spectrum(1.0)) for n, b in factors.blocks.items()}
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


def test_float32_stays_close_and_gradients_of_the_user_stay():
    model, x = case("all layers")
    blocks, dense = posterior(model, x)
    expected = brute_force(model, x, dense)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    single = {n: (_float(eigen), s.float()) for n, (eigen, s) in blocks.items()}
    covariance = OutputCovariance(model.float(), single)(x.float())[1]
    assert covariance.dtype == torch.float32
    assert (covariance - expected).norm() < 1e-5 * expected.norm()
    assert all((p.grad == 1).all() for p in model.parameters())


def _float(eigen):
    values = {f.name: getattr(eigen, f.name) for f in fields(eigen)}
    return replace(eigen, **{n: v if v is None else v.float() for n, v in values.items()})


def test_wrong_input_is_named():
    model, x = case("mlp")
    blocks, _ = posterior(model, x)
    with pytest.raises(ValueError, match="no block; it belongs to another model"):
        OutputCovariance(model, {})
    with pytest.raises(ValueError, match="'9.weight', which the model lacks"):
        OutputCovariance(model, {"9.weight": blocks["0.weight"]})
    with pytest.raises(ValueError, match="'2.weight' has 30 entries, the parameter 15"):
        OutputCovariance(model, {"2.weight": blocks["0.weight"]})
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        OutputCovariance(model, blocks, memory=0)
    with pytest.raises(ValueError, match="The batch has no examples"):
        OutputCovariance(model, blocks)(x[:0])
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="'0.weight' has a posterior, but requires_grad=False"):
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


def test_an_input_that_is_modified_later_is_named():
    class Modifies(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            x = x * 1
            f = self.fc(x)
            x.add_(1)
            return f

    torch.manual_seed(0)
    model, x = Modifies().double(), torch.randn(5, 6).double()
    plain = Outputs(lambda f: f).double()
    blocks, _ = posterior(plain, x)
    with pytest.raises(NotImplementedError, match="modified in place"):
        OutputCovariance(model, blocks)(x)
