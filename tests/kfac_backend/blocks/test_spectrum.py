"""Spectra on grids against sums over all eigenvalues."""

import pytest
import torch

from kfac_backend.blocks import spectrum
from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.blocks.spectrum import Spectra

SHAPES = {"weight": (64, 150), "wide": (10, 2000), "bias": (30, None), "scalar": (1, None)}


def diagonal(n, decades, generator):
    values = 10 ** (-decades * torch.rand(n, dtype=torch.float64, generator=generator))
    return torch.diag(values)


def blocks(decades=12):
    generator = torch.Generator().manual_seed(0)
    return [
        KroneckerBlock(
            name,
            3e4 * diagonal(d_out, decades, generator),
            None if d_in is None else diagonal(d_in, decades, generator),
        )
        for name, (d_out, d_in) in SHAPES.items()
    ]


@pytest.mark.parametrize("decades", [0, 3, 12, 25])
def test_sums_over_all_eigenvalues(decades):
    found = Spectra.of(blocks(decades))
    eigenvalues = [block.eigenvalues() for block in blocks(decades)]
    for ratio in 10.0 ** torch.arange(-12, 13, 0.7, dtype=torch.float64):
        products = [values * ratio for values in eigenvalues]
        log_det = torch.stack([p.log1p().sum() for p in products])
        effective = torch.stack([(p / (1 + p)).sum() for p in products])
        ratios = ratio.expand(len(products))
        torch.testing.assert_close(found.log_det_ratio(ratios), log_det, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.effective(ratios), effective, rtol=1e-12, atol=0)


def test_the_grid_must_be_this_fine(monkeypatch):
    """Negative control: twice the step is a hundred times worse than the tolerance."""
    monkeypatch.setattr(spectrum, "STEP", 1 / 2)
    (block, *_) = blocks()
    found = Spectra.of([block]).log_det_ratio(torch.tensor([1e-2], dtype=torch.float64))
    expected = (block.eigenvalues() * 1e-2).log1p().sum()
    assert abs(found / expected - 1) > 1e-10


def test_derivative_is_that_of_the_log_determinant():
    found = Spectra.of(blocks())
    ratios = torch.tensor([0.1, 3.0, 1e-4, 50.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(found.log_det_ratio, ratios)
    (gradient,) = torch.autograd.grad(found.log_det_ratio(ratios).sum(), ratios)
    torch.testing.assert_close(gradient * ratios, found.effective(ratios), rtol=1e-12, atol=0)


def test_zero_eigenvalues_have_no_weight():
    B = torch.diag(torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64))
    zero = torch.zeros(2, 2, dtype=torch.float64)
    found = Spectra.of([KroneckerBlock("w", B), KroneckerBlock("v", zero, zero)])
    ratios = torch.tensor([5.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(
        found.log_det_ratio(ratios), torch.tensor([11.0, 1.0], dtype=torch.float64).log()
    )
    assert found.largest.tolist() == [2.0, 0.0]


def test_groups_and_diagonals():
    generator = torch.Generator().manual_seed(0)
    B = torch.stack([diagonal(3, 2, generator) for _ in range(4)])
    A = torch.stack([diagonal(5, 2, generator) for _ in range(4)])
    for block in (KroneckerBlock("grouped", B, A), KroneckerBlock("diagonal", B[..., :1, :1])):
        found = Spectra.of([block]).log_det_ratio(torch.ones(1, dtype=torch.float64))
        torch.testing.assert_close(found.squeeze(), block.eigenvalues().log1p().sum())
