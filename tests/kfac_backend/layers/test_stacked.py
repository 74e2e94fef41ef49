"""Weights stacked in one parameter have a block for each matrix, as layers of their own have."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_backend import examples_of_rows, kronecker_factors
from kfac_backend.expand_and_reduce import reduce_factors_of_graphs
from tests.kfac_backend.block_checks import MODES, OTHER
from tests.kfac_backend.networks import Model, random_model
from tests.random_numbers import error, normal

E, N = 3, 6
GROUPED_MM = getattr(F, "grouped_mm", torch._grouped_mm)  # torch 2.9 has only that one


def stacked(way, is_declared=True) -> Model:
    """A mean over positions of experts' outputs; ``way`` is how the experts run."""
    return random_model(
        lambda m, x: m.head(way(m, x).tanh().mean(1)),
        stack=torch.zeros(E, 4, 4),
        gate=nn.Linear(4, E),
        head=nn.Linear(4, 3),
        is_declared=is_declared,
    )


def with_layers(model: Model, way, transposed: bool) -> Model:
    """The same model, with a layer for each matrix of the stack."""
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(E))
    for layer, weight in zip(layers, model.stack, strict=True):
        layer.weight = nn.Parameter((weight.T if transposed else weight).detach().clone())
    return Model(
        lambda m, x: m.head(way(m, x).tanh().mean(1)),
        stack=layers,
        gate=model.gate,
        head=model.head,
        is_declared=True,
    )


def mixed(m, x, outputs):  # (N, R, E, d)
    return torch.einsum("nre,nred->nrd", m.gate(x).softmax(-1), outputs)


def batched(m, x):
    rows = x.flatten(0, 1).expand(E, -1, -1)
    return mixed(m, x, torch.bmm(rows, m.stack).movedim(0, 1).unflatten(0, x.shape[:2]))


def in_front(m, x):
    return mixed(m, x, (m.stack @ x[:, None].mT).mT.movedim(1, 2))


DENSE = {
    # Each expert sees all positions: the function, and whether the stack is (E, d_in, d_out).
    "bmm": (batched, True),
    "matmul": (lambda m, x: mixed(m, x, (x[:, None] @ m.stack).movedim(1, 2)), True),
    "matmul, in front": (in_front, False),
    "einsum": (lambda m, x: mixed(m, x, torch.einsum("nri,eio->nreo", x, m.stack)), True),
    "einsum, in front": (
        lambda m, x: mixed(m, x, torch.einsum("e o i, n r i -> n r e o", m.stack, x)), False,
    ),
    "one by one": (
        lambda m, x: mixed(m, x, torch.stack([F.linear(x, w) for w in m.stack], 2)), False,
    ),
}  # fmt: skip


def told(m, x, index):
    return examples_of_rows(index, len(x)) if m.is_declared else nullcontext()


def chosen(m, x):
    """Rows (N·R, d), the one expert of each, and its weight."""
    weight, expert = m.gate(x).flatten(0, 1).softmax(-1).max(-1)
    return x.flatten(0, 1), expert, weight[:, None]


def routed(m, x):
    rows, expert, weight = chosen(m, x)
    out = torch.zeros_like(rows)
    for e, one in enumerate(m.stack):
        (which,) = torch.where(expert == e)
        with told(m, x, which // x.shape[1]):
            a = rows[which]
            out = out.index_copy(0, which, one(a) if isinstance(one, nn.Module) else a @ one.T)
    return (weight * out).view_as(x)


def grouped(m, x):
    rows, expert, weight = chosen(m, x)
    order = expert.argsort(stable=True)
    with told(m, x, order // x.shape[1]):
        ends = expert.bincount(minlength=E).cumsum(0).int()
        y = GROUPED_MM(rows[order], m.stack.mT, offs=ends)
    return (weight[order] * y)[order.argsort()].view_as(x)


def places(m, x):
    """As many places for each expert as there are rows, of which most stay empty."""
    rows, expert, weight = chosen(m, x)
    number = torch.arange(len(rows))
    a = rows.new_zeros(E, len(rows), 4).index_put((expert, number), rows)
    index = torch.where(expert == torch.arange(E)[:, None], number // x.shape[1], -1)
    with told(m, x, index):
        y = torch.einsum("emi,eoi->emo", a, m.stack)
    return (weight * y[expert, number]).view_as(x)


def factors(model, x, mode):
    data = [(x, torch.arange(len(x)) % 3)]
    return kronecker_factors(model, data, "classification", kfac_approx=mode)


def difference(found, expected, transposed=False) -> float:
    """Between the stack's groups and the layers' blocks."""
    B, A = found.blocks["stack"].B, found.blocks["stack"].A
    pairs = zip(A, B, strict=True) if transposed else zip(B, A, strict=True)
    blocks = [expected.to_dense(f"stack.{e}.weight") for e in range(E)]
    return error(
        torch.block_diag(*(torch.kron(*pair) for pair in pairs)), torch.block_diag(*blocks)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DENSE)
def test_each_matrix_has_the_block_of_a_layer(name, mode):
    way, transposed = DENSE[name]
    model, x = stacked(way), normal(N, 5, 4)
    outputs = lambda m, x: mixed(m, x, torch.stack([layer(x) for layer in m.stack], 2))  # noqa: E731
    plain = with_layers(model, outputs, transposed)
    found = factors(model, x, mode)
    assert difference(found, factors(plain, x, mode), transposed) < 1e-12
    assert difference(found, factors(plain, x, OTHER[mode]), transposed) > 0.1  # a control


@pytest.mark.parametrize("way", [routed, grouped, places])
def test_routed_positions(way):
    torch.manual_seed(0)
    model, x = stacked(way), normal(N, 5, 4)
    x[:4, :, 0] += 9  # so that some expert gets nothing of some examples
    if way is grouped:  # whose kernel is for float32
        model, x = model.float(), x.float()
    plain = with_layers(model, routed, transposed=False)
    tolerance = 1e-5 if way is grouped else 1e-12
    seen = {}
    for mode in MODES:
        found, expected = factors(model, x, mode), factors(plain, x, mode)
        assert difference(found, expected) < tolerance
        seen[mode] = found.blocks["stack"].num_terms
    assert sum(seen["expand"]) == N * 5 and seen["reduce"] == (N,) * E  # A is a mean over these
    # The convention of graphs, for one expert.
    rows, expert, _ = chosen(model, x)
    a, graph = rows[expert == 0], torch.arange(N).repeat_interleave(5)[expert == 0]
    _, A = reduce_factors_of_graphs(a, a[None], graph, N)
    assert 0 < len(graph.unique()) and error(found.blocks["stack"].A[0], A) < tolerance
    # Nothing says whose the rows are: expand need not know.
    model.is_declared = False
    if way is places:  # an example's places lie one behind the other, which the proof sees
        return
    assert difference(factors(model, x, "expand"), factors(plain, x, "expand")) < tolerance
    with pytest.raises(NotImplementedError, match="examples_of_rows"):
        factors(model, x, "reduce")
