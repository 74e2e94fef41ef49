"""Comparing one rule's sums and gradients with explicit loops over positions, and with autograd."""

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kfac_backend.layers import Rule, Use
from kfac_backend.layers.gram import FactorSum
from kfac_backend.layers.rows import Rows
from tests.positions import positions_of


def sums_of(
    rule_type: type[Rule],
    layer: nn.Module,
    mode: str,
    a: Tensor,
    vectors: Tensor,
    rows: Rows | None = None,
) -> dict:
    """A rule's sums after one batch of inputs (N, ...) with V output gradients (V, N, ...)."""
    rule = rule_type(layer, mode, {name for name, _ in layer.named_parameters()})
    use = Use(a, rows)
    rule.add_input(use)
    FactorSum.end(rule.A.values())
    for b in vectors:
        rule.add_gradient(use, b)
        FactorSum.end(rule.B.values())
    return rule.block_sums()


def sums_by_loops(
    layer: nn.Module, mode: str, a: Tensor, vectors: Tensor, rows: Rows | None = None
) -> dict:
    """(parameter, group) -> Σ b bᵀ, Σ a aᵀ and the number of its terms."""
    index = torch.arange(len(a)) if rows is None else rows.index
    sums: dict = {}
    for n in range(len(a) if rows is None else rows.num_examples):
        found: dict = {}
        for m in (index == n).nonzero().flatten().tolist():
            b_m = vectors[:, m][None]  # one loss term with V outputs
            for key, a_mr, b_mr in positions_of(layer, a[m], b_m):
                found.setdefault(key, []).append((a_mr, b_mr[0]))
        for key, of_rows in found.items():
            a_nr, b_nr = (torch.cat(parts) for parts in zip(*of_rows, strict=True))
            if mode == "reduce":  # (R, d_in) and (R, V, d_out)
                R = len(a_nr)
                a_nr, b_nr = a_nr.sum(0, keepdim=True), b_nr.sum(0, keepdim=True)
                by_roots = rows is not None and rows.by_roots and key[0] == "weight"
                a_nr, b_nr = (a_nr / R**0.5, b_nr / R**0.5) if by_roots else (a_nr / R, b_nr)
            B, A, terms = sums.get(key, (0, 0, 0))
            of_b, of_a = torch.einsum("rvi,rvj->ij", b_nr, b_nr), a_nr.T @ a_nr
            sums[key] = B + of_b, A + of_a, terms + len(a_nr)
    return sums


def assert_sums(
    rule_type: type[Rule],
    layer: nn.Module,
    mode: str,
    a: Tensor,
    vectors: Tensor,
    rows: Rows | None = None,
) -> None:
    """A rule's sums are those of loops over positions."""
    found = sums_of(rule_type, layer, mode, a, vectors, rows)
    expected = sums_by_loops(layer, mode, a, vectors, rows)
    assert {name for name, _ in expected} == set(found)
    for (name, group), (B, A, terms) in expected.items():
        first, second = found[name].B, found[name].A
        if name == "bias":
            assert second is None
            assert_close(first[group], B, rtol=1e-10, atol=1e-11)
            continue
        if rule_type.transposed:
            first, second = second, first
        assert_close(first[group], B, rtol=1e-10, atol=1e-11)
        assert_close(second[group], A, rtol=1e-10, atol=1e-11)
        assert found[name].num_terms == terms


def assert_gradients(
    rule_type: type[Rule], layer: nn.Module, a: Tensor, vectors: Tensor, f
) -> None:
    """Each example's gradients are autograd's, where f(a) is the layer's output."""
    parameters = dict(layer.named_parameters())
    rule = rule_type(layer, "expand", set(parameters))
    use = Use(a)
    rows = torch.stack([rule.position_gradients(use, b) for b in vectors], 2)
    gradients = rule.example_gradients(a, rows)
    assert set(gradients) == set(parameters)
    equation = "gnrco,gnri->ncgio" if rule_type.transposed else "gnrco,gnri->ncgoi"
    for name, (b, inputs) in gradients.items():
        found = b.sum(2).movedim(0, 2) if inputs is None else torch.einsum(equation, b, inputs)
        for n in range(len(a)):
            for v, vector in enumerate(vectors):
                (expected,) = torch.autograd.grad(
                    f(a[n : n + 1]), parameters[name], vector[n, None]
                )
                assert_close(found[n, v].reshape(expected.shape), expected, rtol=1e-9, atol=1e-11)


def some_vectors(layer: nn.Module, size: tuple[int, ...], N: int = 2) -> tuple[Tensor, Tensor]:
    """Inputs (N, C_in, *size), and two gradients (2, N, C_out, ...) with respect to the output."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(N, layer.in_channels, *size, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        shape = layer.double()(a).shape
    return a, torch.randn(2, *shape, generator=generator, dtype=torch.float64)
