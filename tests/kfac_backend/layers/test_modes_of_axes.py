"""A mode for each axis over which a weight is shared, against loops over the positions."""

import pytest
import torch
from torch import Tensor, nn

from kfac_backend import examples_of_rows
from tests.kfac_backend.block_checks import (
    MODES,
    OTHER,
    assert_blocks,
    assert_same,
    factors_of,
    randomize,
)
from tests.kfac_backend.layers.attention_models import CAUSAL, PADDING, Attending, batch_of
from tests.kfac_backend.layers.padded_models import Folded
from tests.oracles import layer_jacobians, loss_hessian
from tests.positions import positions_of
from tests.random_numbers import error, normal


class Axes(Folded):
    """A linear layer on (N, S1, S2, d)."""

    def forward(self, x: Tensor) -> Tensor:
        f = self.layer(x).tanh().flatten(1, 2)
        return self.head(torch.linspace(-1, 2, f.shape[1], dtype=f.dtype) @ f)


def blocks_by_loops(model, x, sizes: tuple[int, int], modes: tuple[str, str]) -> dict:
    """Weight's and bias's block, position by position, of two shared axes with a mode each."""
    a, b = layer_jacobians(model, "layer", x)
    A, B, terms = 0, 0, 0
    for n in range(len(x)):
        (_, a_nr, b_nr), _ = positions_of(model.layer, a[n], b[n])
        a_nr = a_nr.unflatten(0, sizes)  # (S1, S2, d_in)
        b_nr = b_nr[0].unflatten(0, sizes)  # (S1, S2, C, d_out)
        for axis, mode in enumerate(modes):
            if mode == "reduce":
                a_nr, b_nr = a_nr.mean(axis, keepdim=True), b_nr.sum(axis, keepdim=True)
        Lambda = loss_hessian(model(x[n : n + 1])[0], "classification")
        for a_r, b_r in zip(a_nr.flatten(0, 1), b_nr.flatten(0, 1), strict=True):
            A, B, terms = A + torch.outer(a_r, a_r), B + b_r.T @ Lambda @ b_r, terms + 1
    return {"layer.weight": torch.kron(B, A / terms), "layer.bias": B}


SHARING = {
    # name: (model, inputs, sizes of the two shared axes, what the two are called)
    "linear, two axes": (lambda: Axes(nn.Linear(3, 4)), (3, 2, 3, 3), (2, 3), ("time", "space")),
    "linear, rows": (lambda: Folded(nn.Linear(3, 4)), (3, 2, 3, 3), (2, 3), ("rows", "space")),
    "convolution, rows": (
        lambda: Folded(nn.Conv2d(2, 4, 2, padding=1, stride=2)),
        (3, 2, 2, 3, 4), (2, 6), ("augmentation", "space"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("name", SHARING)
def test_a_mode_for_each_axis(name, first, second):
    build, shape, sizes, axes = SHARING[name]
    model, x, y = randomize(build()), normal(*shape, seed=2), torch.tensor([0, 1, 2])
    mapping = {"*": dict(zip(axes, (first, second), strict=True))}
    expected = blocks_by_loops(model, x, sizes, (first, second))
    for batches in ([(x, y)], [(x[:1], y[:1]), (x[1:], y[1:])]):
        factors = factors_of(model, batches, mapping)
        assert_blocks(factors, expected)
    for others in ((OTHER[first], second), (first, OTHER[second])):  # negative controls
        other = blocks_by_loops(model, x, sizes, others)
        assert all(error(other[name], block) > 0.05 for name, block in expected.items())
    if first == second:  # one mode for all says the same
        assert_same(factors, factors_of(model, [(x, y)], first))
    half = nn.Parameter(model.layer.bias.detach(), requires_grad=False)
    model.layer.bias = half  # a frozen bias leaves the weight's block as it is
    alone = factors_of(model, [(x, y)], mapping)
    assert "layer.bias" not in alone.blocks
    assert_blocks(alone, {"layer.weight": expected["layer.weight"]})


class Ragged(nn.Module):
    """A layer on rows (V, S, d) of examples with different numbers of them, or with none."""

    def __init__(self, by_roots: bool):
        super().__init__()
        self.layer, self.head, self.by_roots = nn.Linear(3, 4), nn.Linear(4, 3), by_roots
        self.index = torch.tensor([0, 0, 0, 2, -1, 2])

    def forward(self, x: Tensor) -> Tensor:  # (N, K, S, d)
        with examples_of_rows(self.index, len(x), by_roots=self.by_roots):
            f = self.layer(x.flatten(0, 1)).tanh()
        f = torch.linspace(-1, 2, f.shape[1], dtype=f.dtype) @ f  # (V, d)
        f = f * (self.index >= 0)[:, None]
        return self.head(torch.zeros_like(f[:3]).index_add(0, self.index.clamp(min=0), f))


@pytest.mark.parametrize("by_roots", [False, True])
@pytest.mark.parametrize("space", MODES)
@pytest.mark.parametrize("rows", MODES)
def test_examples_with_different_numbers_of_rows(rows, space, by_roots):
    model, x, y = randomize(Ragged(by_roots)), normal(3, 2, 3, 3, seed=2), torch.tensor([0, 1, 2])
    a = x.flatten(0, 1)

    def outputs(shift: Tensor) -> Tensor:
        handle = model.layer.register_forward_hook(lambda layer, args, output: output + shift)
        f = model(x)
        handle.remove()
        return f

    J = torch.autograd.functional.jacobian(
        outputs, torch.zeros(6, 3, 4).double()
    )  # (N, C, V, S, d)
    A, B, B_bias, terms = 0, 0, 0, 0
    for n in range(3):
        mine = model.index == n
        a_n, b_n = a[mine], J[n].movedim(0, 2)[mine]  # (K, S, d_in), (K, S, C, d_out)
        scale = max(len(a_n), 1) ** 0.5
        if rows == "reduce":
            a_n, b_n = a_n.sum(0, keepdim=True) / scale, b_n.sum(0, keepdim=True) / scale
            a_n, b_n = (a_n, b_n) if by_roots else (a_n / scale, b_n * scale)
        if space == "reduce":
            a_n, b_n = a_n.mean(1, keepdim=True), b_n.sum(1, keepdim=True)
        Lambda = loss_hessian(model(x)[n], "classification")
        gram = torch.einsum("ksci,cd,ksdj->ij", b_n, Lambda, b_n)
        A, terms = A + torch.einsum("ksi,ksj->ij", a_n, a_n), terms + a_n[..., 0].numel()
        # Whatever an input is scaled by, a bias has none.
        B, B_bias = B + gram, B_bias + gram * (scale**2 if by_roots and rows == "reduce" else 1)
    expected = {"layer.weight": torch.kron(B.contiguous(), A / terms), "layer.bias": B_bias}
    mapping = {"*": {"rows": rows, "space": space}}
    assert_blocks(factors_of(model, [(x, y)], mapping), expected)
    if rows == space:
        assert_blocks(factors_of(model, [(x, y)], rows), expected)


OTHER_LAYERS = {
    # name: (model, inputs)
    "Conv2d with groups": (lambda: Folded(nn.Conv2d(2, 4, 2, groups=2)), (3, 2, 2, 3, 3)),
    "ConvTranspose1d": (lambda: Folded(nn.ConvTranspose1d(2, 4, 3, 2)), (3, 2, 2, 3)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_the_same_mode_for_all_axes(name, mode):
    build, shape = OTHER_LAYERS[name]
    model, x, y = randomize(build()), normal(*shape), torch.tensor([0, 1, 2])
    mapping = {"layer": {"rows": mode, "space": mode}, "head": "expand"}
    factors = factors_of(model, [(x, y)], mapping)
    assert_same(factors, factors_of(model, [(x, y)], mode))
    for mixed in ({"rows": mode, "space": OTHER[mode]}, {"rows": OTHER[mode], "space": mode}):
        other = factors_of(model, [(x, y)], {"layer": mixed, "head": "expand"})
        for parameter in ("layer.weight", "layer.bias"):
            assert error(other.to_dense(parameter), factors.to_dense(parameter)) > 0.05


@pytest.mark.parametrize("name", [*SHARING, *OTHER_LAYERS])
def test_another_number_of_axes_is_an_error_that_names_them(name):
    build, shape = (SHARING | OTHER_LAYERS)[name][:2]
    model, x, y = randomize(build()), normal(*shape), torch.tensor([0, 1, 2])
    for modes in ({"pixels": "reduce"}, {"a": "reduce", "b": "expand", "pixels": "expand"}):
        message = rf"names the axes .*pixels, but .*{type(model.layer).__name__}.* weight over 2"
        with pytest.raises(ValueError, match=message):
            factors_of(model, [(x, y)], {"layer": modes, "*": "reduce"})


class UsedTwice(nn.Module):
    """A layer whose positions are told in one of its two uses, in both or in none: all count."""

    def __init__(self, told: tuple[bool, bool]):
        super().__init__()
        self.layer, self.head, self.told = nn.Conv1d(3, 3, 3, padding=1), nn.Linear(3, 3), told

    def forward(self, x: Tensor) -> Tensor:
        for told in self.told:
            rows = torch.arange(len(x))
            with examples_of_rows(rows if told else None, len(x), by_roots=False):
                x = self.layer(x).tanh()
        return self.head(x.mean(2))


@pytest.mark.parametrize("frozen", [None, "layer.bias", "layer.weight"])
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_whose_rows_are_told_in_some_uses(mode, frozen):
    x, y, found = normal(3, 3, 2), torch.tensor([0, 1, 2]), []
    for told in [(False, False), (True, True), (True, False), (False, True)]:
        model = randomize(UsedTwice(told))
        if frozen:
            model.get_parameter(frozen).requires_grad_(False)
        found.append(factors_of(model, [(x, y)], mode))
    for factors in found[1:]:
        assert_same(factors, found[0])


class Sentences(nn.Module):
    """Embedded tokens, one of them padding, and a linear layer on each."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).tanh().mean(1))


ONE_AXIS = {
    "attention": lambda: (Attending(True, CAUSAL), [batch_of(True)]),
    "attention, keys that do not count": lambda: (
        Attending(True), [batch_of(True, padding_mask=PADDING)],
    ),
    "embedding": lambda: (
        Sentences(), [(torch.tensor([[1, 0, 2], [4, 4, 1]]), torch.tensor([0, 2]))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ONE_AXIS)
def test_one_axis_by_its_name_is_the_mode_itself(name, mode):
    model, data = ONE_AXIS[name]()
    model = randomize(model)
    factors = factors_of(model, data, {"*": {"tokens": mode}})
    assert_same(factors, factors_of(model, data, mode))
    other = factors_of(model, data, OTHER[mode])
    assert all(error(factors.to_dense(n), other.to_dense(n)) > 0.02
               for n in factors.blocks if n.endswith("weight") and n != "head.weight")  # fmt: skip
    with pytest.raises(ValueError, match="names the axes tokens, heads, but .* together|over 1"):
        factors_of(model, data, {"*": {"tokens": mode, "heads": mode}})
