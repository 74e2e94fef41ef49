"""Outputs of several positions, (N, R, C): covariances, linearised outputs; by dense Jacobians."""

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, jacrev
from torch.testing import assert_close

from experiments.timing import peak_memory
from kfac_backend import kronecker_factors
from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance.last_layer import LastLayerCovariance
from kfac_backend.covariance.linearised import linearised_outputs
from kfac_backend.covariance.output_covariance import OutputCovariance
from marglik.models import GPT
from tests.kfac_backend.networks import OwnNorm
from tests.marglik.networks import randomised

VOCABULARY = 5


class Pixels(nn.Sequential):
    """A convolutional network with three outputs at each pixel, features last."""

    def __init__(self, kernel_size=1, groups=1):
        last = nn.Conv2d(6, 3, kernel_size, padding="same", groups=groups)
        super().__init__(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), last)

    def forward(self, x):
        return super().forward(x).movedim(1, -1)


class Mixing(nn.Module):
    """A transformer's layer over patches, a layer without a rule, and outputs that are scaled."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.embed, self.norm = nn.Linear(3, 4), OwnNorm(4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head, self.scale = nn.Linear(4, 3), scale

    def forward(self, x):
        return self.scale * self.head(self.encoder(self.norm(self.embed(x))))


def tokens(N=4, R=4):
    return torch.randint(VOCABULARY, (N, R), generator=torch.Generator().manual_seed(0))


def images(N=3):
    return torch.randn(N, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def patches(N=3):
    return torch.randn(N, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


CASES = {
    "gpt": lambda: (GPT(VOCABULARY, 4, 4, 2, 2), tokens()),
    "gpt, not tied": lambda: (GPT(VOCABULARY, 4, 4, 1, 2, tied=False), tokens()),
    "pixels": lambda: (Pixels(), images()),
    "pixels, wide": lambda: (Pixels(3), images()),
    "pixels, groups": lambda: (Pixels(3, groups=3), images()),
    "mixing": lambda: (Mixing().eval(), patches()),
    "scaled": lambda: (Mixing(2.0).eval(), patches()),
    "linear": lambda: (nn.Linear(3, 4), patches()),
    "one output": lambda: (nn.Linear(3, 1), patches()),
}
LAST = {
    "gpt": "head", "gpt, not tied": "head", "pixels": "2", "pixels, wide": "2", "mixing": "head",
    "pixels, groups": "2", "scaled": "head", "linear": "", "one output": "",
}  # fmt: skip


def case(name, mode="expand"):
    """A network, inputs, the blocks of its posterior precision, and these densely."""
    torch.manual_seed(1)
    model, x = CASES[name]()
    model = randomised(model)
    f = model(x)
    y = torch.randint(max(f.shape[-1], 2), f.shape[:-1])
    likelihood = "classification"
    if f.shape[-1] == 1:
        likelihood, y = "regression", torch.zeros_like(f)
    factors = kronecker_factors(
        model, [(x, y)], likelihood, kfac_approx=mode, unsupported="diagonal"
    )
    blocks, dense = {}, {}
    for i, (key, block) in enumerate(factors.blocks.items()):
        eigen, delta = block.decompose(), 0.5 + i
        blocks[key] = eigen, eigen.spectrum(delta)
        dense[key] = block.to_dense() + delta * torch.eye(block.numel)
    return model, x, blocks, dense


def jacobians(model, x, names):
    """Name -> (N, ..., C, P)."""
    parameters = {n: p.detach() for n, p in model.named_parameters() if n in names}
    found = jacrev(lambda p: functional_call(model, p, (x,)))(parameters)
    axes = model(x).dim()
    return {name: J.flatten(axes).detach() for name, J in found.items()}


def brute_force(model, x, dense):
    """J Σ Jᵀ of each position, (N, ..., C, C)."""
    J = jacobians(model, x, dense)
    return sum(J[name] @ torch.linalg.solve(dense[name], J[name].mT) for name in dense)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("mode", ["expand", "reduce"])
@pytest.mark.parametrize("name", CASES)
def test_each_positions_covariance_equals_the_dense_jacobians(name, mode, batched):
    model, x, blocks, dense = case(name, mode)
    f, covariance = OutputCovariance(model, blocks, batched=batched)(x)
    expected = brute_force(model, x, dense)
    assert covariance.shape == (*f.shape, f.shape[-1]) and f.dim() > 2
    assert_close(f, model(x).detach())
    assert_close(covariance, expected, rtol=1e-9, atol=1e-11)
    # Negative control: another position's.
    assert (covariance.roll(1, 1) - expected).norm() > 1e-2 * expected.norm()


@pytest.mark.parametrize("memory", [1, 10_000, 10**9])
@pytest.mark.parametrize("name", ["gpt", "pixels, wide", "mixing"])
def test_chosen_positions_and_classes(name, memory):
    model, x, blocks, dense = case(name)
    covariance = OutputCovariance(model, blocks, memory=memory)
    f, expected = model(x).detach(), brute_force(model, x, dense)
    mask = torch.rand(f.shape[:-1], generator=torch.Generator().manual_seed(2)) < 0.4
    found = covariance(x, mask)
    assert_close(found, (f[mask], expected[mask]), rtol=1e-9, atol=1e-11)
    order = torch.tensor([2, 0])
    found = covariance(x, mask, order)
    wanted = f[mask][:, order], expected[mask][:, order][:, :, order]
    assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    top = f.topk(2).indices
    rows = expected.gather(-2, top[..., None].expand(*top.shape, f.shape[-1]))
    wanted = f.gather(-1, top), rows.gather(-1, top[..., None, :].expand(*top.shape, 2))
    assert_close(covariance(x, classes=top), wanted, rtol=1e-9, atol=1e-11)
    assert_close(covariance(x, mask, top[mask]), tuple(t[mask] for t in wanted))
    # Each example alone, and all in another order.
    for n in range(len(x)):
        assert_close(covariance(x[n : n + 1])[1][0], expected[n], rtol=1e-9, atol=1e-11)
    assert_close(covariance(x.flip(0))[1], expected.flip(0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tied", [False, True])
def test_memory_is_kept_besides_the_result(tied):
    """Gradients of all layers, of several pairs, would be far beyond it."""
    model = randomised(GPT(20, 4, 20, 2, 2, tied=tied))
    x = torch.randint(20, (3, 4), generator=torch.Generator().manual_seed(0))
    blocks = {}
    for name, p in model.named_parameters():
        rows, columns = len(p), p[0].numel() if p.dim() > 1 else None
        block = EigenBlock(torch.ones(rows).double(), torch.eye(rows).double())
        if columns is not None:
            alpha, Q_A = torch.ones(columns).double(), torch.eye(columns).double()
            block = EigenBlock(block.beta, block.Q_B, alpha, Q_A)
        blocks[name] = block, block.spectrum(1.0)
    peaks, found = {}, {}
    for memory in (2**21, 2**30):
        covariance = OutputCovariance(model, blocks, memory=memory)
        found[memory] = covariance(x)[1]
        peak = peak_memory(lambda of=covariance: of(x), torch.device("cpu"))
        peaks[memory] = peak - found[memory].nbytes
    assert_close(found[2**21], found[2**30])
    assert peaks[2**21] < 1.1 * 2**21 + 2**19  # with the activations
    assert peaks[2**30] > 2 * peaks[2**21]  # negative control


def test_batches_that_cannot_be_taken_apart():
    """Their examples' positions are worked on in turn, each example's own."""

    class Whole:
        """A batch that only its network can read."""

        def __init__(self, rows):
            self.rows = rows

        def to(self, device):
            return self

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x):
            return self.fc(torch.tanh(x.rows if isinstance(x, Whole) else x))

    _, x, blocks, dense = case("linear")
    model = randomised(Reads())
    blocks = {f"fc.{name}": of_name for name, of_name in blocks.items()}
    dense = {f"fc.{name}": of_name for name, of_name in dense.items()}
    expected = brute_force(model, x, dense)
    covariance = OutputCovariance(model, blocks)
    assert_close(covariance(Whole(x))[1], expected)
    mask = torch.tensor([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    assert_close(covariance(Whole(x), mask)[1], expected[mask])
    classes = torch.tensor([[0, 1], [2, 3], [3, 1], [0, 3], [1, 2]])
    found, rows = covariance(Whole(x), mask, classes)[1], torch.arange(5)[:, None]
    wanted = expected[mask][rows[..., None], classes[:, :, None], classes[:, None]]
    assert_close(found, wanted)


@pytest.mark.parametrize("mode", ["expand", "reduce"])
@pytest.mark.parametrize("memory", [1, None])
@pytest.mark.parametrize("name", CASES)
def test_last_layer(name, memory, mode):
    model, x, blocks, dense = case(name, mode)
    layer = LAST[name]
    names = {n for n, p in model.named_parameters()
             if any(p is own for own in model.get_submodule(layer).parameters())}  # fmt: skip
    if name == "gpt":  # the token embedding, whose weight is the same, is known
        untied = randomised(GPT(VOCABULARY, 4, 4, 2, 2, tied=False))
        state = model.state_dict()
        untied.load_state_dict(state)
        expected = brute_force(untied, x, {"head.weight": dense["token_embedding.weight"]})
    else:
        expected = brute_force(model, x, {n: dense[n] for n in names})
    some = {n: blocks[n] for n in names}
    covariance = LastLayerCovariance(model, layer, some, memory=memory)
    f, found = covariance(x)
    assert_close(f, model(x).detach())
    assert_close(found, expected, rtol=1e-9, atol=1e-11)
    mask = torch.rand(f.shape[:-1], generator=torch.Generator().manual_seed(2)) < 0.5
    top = f.topk(min(2, f.shape[-1])).indices
    found = covariance(x, mask, top[mask])[1]
    rows = torch.arange(len(found))[:, None, None]
    wanted = expected[mask][rows, top[mask][:, :, None], top[mask][:, None]]
    assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_which_last_layers_need_a_backward_pass():
    needed = set()
    for name in CASES:
        model, x, blocks, _ = case(name)
        layer = LAST[name]
        own = {id(p) for p in model.get_submodule(layer).parameters()}
        some = {n: blocks[n] for n, p in model.named_parameters() if id(p) in own}
        covariance = LastLayerCovariance(model, layer, some)
        covariance(x)
        if covariance._general is not None:
            needed.add(name)
    assert needed == {"pixels, groups", "scaled"}


def test_a_last_layer_that_is_tied_and_not_the_output():
    class Scaled(GPT):
        def forward(self, tokens):
            return 2 * super().forward(tokens)

    model = randomised(Scaled(VOCABULARY, 4, 4, 2, 2))
    blocks = case("gpt")[2]
    name = "token_embedding.weight"
    with pytest.raises(NotImplementedError, match="last layer 'head'.* Use all layers"):
        LastLayerCovariance(model, "head", {name: blocks[name]})(tokens())


@pytest.mark.parametrize("name", CASES)
def test_linearised_outputs_equal_the_dense_jacobians(name):
    model, x, _, dense = case(name)
    changes = {
        n: torch.randn(3, *p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(3))
        for n, p in model.named_parameters()
    }
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    found = linearised_outputs(model, changes, x)
    assert before == (
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    )  # fmt: skip
    J = jacobians(model, x, dense)
    expected = model(x).detach() + sum(
        torch.einsum("...p,sp->s...", J[n], change.flatten(1)) for n, change in changes.items()
    )
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not found.requires_grad
    if name not in ("linear", "one output"):  # negative control: the network itself
        parameters = {n: p.detach() + changes[n][0] for n, p in model.named_parameters()}
        f = functional_call(model, parameters, (x,)).detach()
        assert (found[0] - f).norm() > 1e-2 * f.norm()
    one = {n: change for n, change in changes.items() if n == next(iter(changes))}
    ((n, change),) = one.items()
    some = torch.einsum("...p,sp->s...", J[n], change.flatten(1)) + model(x).detach()
    assert_close(linearised_outputs(model, one, x), some)


@pytest.mark.parametrize("beside", [False, True])
def test_what_cannot_be_differentiated_twice_is_named(beside):
    """Autograd itself passes over it if there is another way."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return grad

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return Own.apply(self.fc(x)) + (self.fc(x) if beside else 0)

    model = Model()
    changes = {n: torch.zeros(1, *p.shape) for n, p in model.named_parameters()}
    with pytest.raises(NotImplementedError, match="Model cannot be linearised.*'probit' and 'mc'"):
        linearised_outputs(model, changes, torch.randn(2, 3))


def test_linearised_outputs_that_depend_on_no_parameter():
    class Constant(nn.Linear):
        def forward(self, x):
            return 2 * x

    model, x = Constant(3, 3), torch.randn(4, 3)
    changes = {n: torch.ones(2, *p.shape) for n, p in model.named_parameters()}
    assert_close(linearised_outputs(model, changes, x), torch.stack([2 * x, 2 * x]))


@pytest.mark.parametrize("name", ["gpt", "pixels, wide"])
def test_memory_of_linearised_outputs(name):
    """What is held besides the result; and no less than needed for one example."""
    model, x, _, _ = case(name)
    x = x.repeat(16, *[1] * (x.dim() - 1))
    changes = {n: torch.randn_like(p)[None] for n, p in model.named_parameters()}
    expected = linearised_outputs(model, changes, x, 2**40)
    result, peaks = 3 * expected.nbytes, {}
    for memory in (2**17, 2**20, 2**40):
        found = linearised_outputs(model, changes, x, memory)
        assert_close(found, expected)
        peaks[memory] = peak_memory(
            lambda m=memory: linearised_outputs(model, changes, x, m), torch.device("cpu")
        )
    # Beyond the graph: the tensors of one pass back through it, and the parameters' gradients.
    assert peaks[2**17] < 2 * 2**17 + result and peaks[2**20] < 2 * 2**20 + result
    assert peaks[2**40] > 2 * peaks[2**17]  # negative control


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ({"positions": torch.ones(3, 5)}, TypeError, "dtype torch.float32; a boolean mask"),
        ({"positions": torch.ones(3, 4).bool()}, ValueError, r"mask of shape \(3, 5\)"),
        ({"positions": torch.zeros(3, 5).bool()}, ValueError, "No position is chosen"),
        (
            {"classes": torch.tensor([0.0])},
            TypeError,
            "dtype torch.float32; indices must be integers",
        ),
        ({"classes": torch.tensor([0, 4])}, ValueError, "index 4; the outputs are 0 to 3"),
        ({"classes": torch.tensor([-1])}, ValueError, "index -1; the outputs are 0 to 3"),
        ({"classes": torch.zeros(3, 2).long()}, ValueError, r"\(K,\) is needed, or \(3, 5, 'K'\)"),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_wrong_choices_are_named(last, chosen, error, message):
    model, x, blocks, _ = case("linear")
    covariance = LastLayerCovariance(model, "", blocks) if last else OutputCovariance(model, blocks)
    with pytest.raises(error, match=message):
        covariance(x, **chosen)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("width", [3, 512])
def test_a_backward_without_a_graph_is_named(beside, width):
    """As those of hand-written kernels: autograd takes its gradients for constants."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad.detach()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(width, width), nn.Linear(width, 2)

        def forward(self, x):
            h = self.first(x)
            return self.last(Cut.apply(h) + (h if beside else 0))

    torch.manual_seed(0)
    model = Model()
    changes = {name: torch.randn(1, *p.shape) for name, p in model.named_parameters()}
    with pytest.raises(NotImplementedError, match="cannot be linearised"):
        linearised_outputs(model, changes, torch.randn(4, width))
