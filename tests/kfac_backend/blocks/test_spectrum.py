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


def corrected_by_loops(own, others, M, N):
    """Differences of log det and γ for one factor, one eigenvalue of the other after another.

    Each eigenvalue b of the other factor divides the own eigenvalues by c = (1 − df/M) / (1 − df/N)
    at df = Σ ab / (ab + c), found by bisection of c. The log determinant is the integral of γ.
    """
    log_det = gamma = 0.0
    for b in others:
        x = own * b
        low, high = torch.tensor(0.5, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
        for _ in range(60):
            c = (low + high) / 2
            df = (x / (x + c)).sum()
            is_low = c < (1 - df / M) / (1 - df / N)
            low, high = (c, high) if is_low else (low, c)
        gamma += df - (x / (x + 1)).sum()
        log_det += (x / c).log1p().sum() - x.log1p().sum()
        log_det += M * (-df / M).log1p() - N * (-df / N).log1p()
    return log_det, gamma


@pytest.mark.parametrize("ratio", [1e-4, 1e-2, 1.0])
def test_a_correction_is_the_fixed_point_of_each_eigenvalue(ratio):
    generator = torch.Generator().manual_seed(0)
    B, A = 3 * diagonal(6, 2, generator), 2 * diagonal(40, 4, generator)
    M_B, M_A, share = 180, 90, 0.2
    ratios = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    block = KroneckerBlock("w", B, A, M_A / share)
    plain, corrected = Spectra.of([block]), Spectra.of([block], (share, 2))
    of_A, of_B = (
        corrected_by_loops(own.diagonal(), other.diagonal() * ratio, M, M / share)
        for own, other, M in ((A, B, M_A), (B, A, M_B))
    )
    log_det, gamma = of_A[0] + of_B[0], of_A[1] + of_B[1]
    found = corrected.log_det_ratio(ratios) - plain.log_det_ratio(ratios)
    torch.testing.assert_close(found.squeeze(), log_det, rtol=5e-3, atol=1e-3)
    found = corrected.effective(ratios) - plain.effective(ratios)
    torch.testing.assert_close(found.squeeze(), gamma, rtol=5e-3, atol=1e-3)
    (gradient,) = torch.autograd.grad(corrected.log_det_ratio(ratios).sum(), ratios)
    torch.testing.assert_close(gradient * ratios, corrected.effective(ratios))


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("num_outputs", [1, 5])
def test_corrected_samples_have_the_log_determinant_of_all_data(num_outputs, num_groups):
    """The oracle is dense: mean log determinants and γ of samples, and of all data they are from.

    Negative control: without the correction, samples lack more than a tenth of both.
    """
    torch.manual_seed(0)
    M, N, d, delta = 60, 400, 50, 30.0
    scales = 10 ** -torch.linspace(0, 1, d, dtype=torch.float64)
    sums = torch.zeros(3, 2, dtype=torch.float64)
    for _ in range(20):
        a = torch.randn(num_groups, N, d, dtype=torch.float64) * scales
        b = torch.randn(num_groups, N, num_outputs, dtype=torch.float64)
        found = []
        for number in (N, M):
            B, A = (
                share * rows[:, :number].mT @ rows[:, :number]
                for rows, share in ((b, N / number), (a, 1 / number))
            )
            H = KroneckerBlock("w", B, A).to_dense() / delta
            identity = torch.eye(len(H), dtype=torch.float64)
            log_det = torch.linalg.slogdet(H + identity)[1]
            found.append([log_det, torch.linalg.solve(H + identity, H).trace()])
        spectra = Spectra.of([KroneckerBlock("w", B, A, N)], (M / N, 1))
        ratio = torch.tensor([1 / delta], dtype=torch.float64)
        found.append([spectra.log_det_ratio(ratio), spectra.effective(ratio)])
        sums += torch.tensor(found)
    of_all, plain, corrected = sums
    assert (plain < 0.9 * of_all).all()
    assert ((corrected / of_all - 1).abs() < 0.02).all()


def test_each_block_and_group_counts_its_own_terms():
    """R positions are R terms; a group or a block without known terms has no correction."""
    generator = torch.Generator().manual_seed(0)
    B, A = diagonal(6, 2, generator), diagonal(40, 4, generator)
    share, ratio = 0.2, torch.ones(5)  # also a float32 ratio
    blocks = [
        *(KroneckerBlock("w", B, A, terms) for terms in (100, 400, None, 0)),
        KroneckerBlock("grouped", torch.stack([B, B]), torch.stack([A, A]), (100, 400)),
    ]
    difference = Spectra.of(blocks, (share, 1)).effective(ratio) - Spectra.of(blocks).effective(
        ratio.double()
    )
    for value, terms in zip(difference[:2], (100, 400), strict=True):
        alone = [
            corrected_by_loops(own.diagonal(), other.diagonal(), share * terms, terms)[1]
            for own, other in ((A, B), (B, A))
        ]
        assert float(value) == pytest.approx(float(sum(alone)), rel=1e-2)
    assert difference[0] > 3 * difference[1] > 0
    assert difference[2:4].tolist() == pytest.approx([0, 0], abs=1e-6)
    assert float(difference[4]) == pytest.approx(float(difference[:2].sum()), rel=1e-5)
    unknown = Spectra.of(blocks[2:4], (share, 1))
    assert unknown.correction is None
