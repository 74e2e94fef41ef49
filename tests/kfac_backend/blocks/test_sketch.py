"""Sketches of wide factors against the factors themselves, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.blocks.sketch import Frame, Sketch, SketchedFactor, diagonal_of, rows_of
from tests.random_numbers import error, normal

D, RANK = 30, 4


def decaying(M, d=D, seed=0, power=1.0):
    """Rows (M, d) whose directions count less and less, in an order that changes with the rows."""
    scales = torch.arange(1, d + 1, dtype=torch.float64) ** -power
    drift = 1 + torch.linspace(0, 3, M)[:, None].double() * torch.linspace(0, 1, d).double()
    rotation = torch.linalg.qr(normal(d, d, seed=seed + 100)).Q
    return (normal(M, d, seed=seed) * scales * drift) @ rotation


def sketched(rows, rank=RANK, batches=(7, 1, 40)):
    sketch, start = Sketch(rank), 0
    sizes = [*batches, max(0, len(rows) - sum(batches))]
    for size in sizes:
        sketch.add(rows[start : start + size])
        start += size
    found = sketch.factor()
    assert found is not None
    return found


def spectral_norm(matrix):
    return float(torch.linalg.eigvalsh(matrix).abs().max())


@settings(max_examples=40, deadline=None)
@given(
    M=st.integers(1, 200),
    d=st.integers(2, 40),
    rank=st.integers(1, 12),
    power=st.sampled_from([0.0, 0.5, 2.0]),
    seed=st.integers(0, 100),
)
def test_the_stated_error_holds_and_the_trace_is_exact(M, d, rank, power, seed):
    rows = decaying(M, d, seed, power)
    F, found = rows.mT @ rows, sketched(rows, rank)
    dense, rounding = found.to_dense(), 1e-10 * float(F.trace())
    assert spectral_norm(F - dense) <= found.error + rounding
    assert_close(dense.trace(), F.trace())
    assert_close(dense, dense.mT)
    assert float(torch.linalg.eigvalsh(dense).min()) >= -rounding
    assert found.rest <= found.error + rounding
    differences = torch.linalg.eigvalsh(F) - found.eigenvalues()
    assert float(differences.abs().max()) <= found.error + rounding
    assert_close(found.eigenvalues(), torch.linalg.eigvalsh(dense), atol=rounding, rtol=1e-6)
    # Frequent Directions' guarantee beforehand: Δ ≤ ‖F − F_k‖_* / (r + 1 − k) for each k ≤ r.
    tail = torch.linalg.eigvalsh(F).flip(0)
    for k in range(min(rank, d) + 1):
        assert found.error <= float(tail[k:].sum()) / (rank + 1 - k) + rounding


def test_the_error_is_not_stated_for_nothing():
    """Neither a tenth of Δ would be right, nor is a sketch that leaves its rest out as near."""
    rows = decaying(300)
    F, found = rows.mT @ rows, sketched(rows)
    true = spectral_norm(F - found.to_dense())
    assert 0.1 * found.error < true
    leading = (found.U * found.kept) @ found.U.mT  # Frequent Directions as it is
    assert error(leading, F) > 1.1 * error(found.to_dense(), F)
    assert float(leading.trace()) < 0.9 * float(F.trace())


@pytest.mark.parametrize("true_rank", [1, 3, RANK])
def test_a_factor_of_low_rank_is_exact(true_rank):
    rows = normal(200, true_rank) @ normal(true_rank, D, seed=1)
    found = sketched(rows)
    assert_close(found.to_dense(), rows.mT @ rows)
    assert found.error < 1e-12 * found.trace and found.U.shape == (D, true_rank)
    more = normal(200, RANK + 1) @ normal(RANK + 1, D, seed=1)
    assert error(sketched(more).to_dense(), more.mT @ more) > 1e-3


def test_float32_rows():
    rows = decaying(300, 200, power=0.5).float()
    F, found = rows.double().mT @ rows.double(), sketched(rows, 10)
    assert found.dtype == torch.float32
    assert spectral_norm(F - found.to_dense().double()) <= found.error * (1 + 1e-5)
    assert_close(found.U.mT @ found.U, torch.eye(10))


def test_sums_and_multiples():
    one, other = decaying(100), decaying(80, seed=3)
    total = sketched(one) + 0.5 * sketched(other)
    F = one.mT @ one + 0.5 * other.mT @ other
    assert spectral_norm(F - total.to_dense()) <= total.error
    assert_close(total.to_dense().trace(), F.trace())
    assert total.U.shape == (D, RANK)
    zero = SketchedFactor.zero(one, D, RANK)
    assert_close((zero + sketched(one)).to_dense(), sketched(one).to_dense())
    assert not zero.any() and not (zero + zero).to_dense().any()
    with pytest.raises(ValueError, match="Sketches of 30 and of 20 entries"):
        _ = sketched(one) + sketched(decaying(9, 20))


def test_a_frame_serves_as_eigenvectors():
    """Q diag(c) Qᵀ for c that is constant outside of U: as rows, as a power, as its diagonal."""
    found = sketched(decaying(300))
    frame, x = Frame(found.U), normal(5, D, seed=7)
    Q = torch.eye(D).double() @ frame
    assert Q.shape == frame.shape == (D, RANK + D)
    assert_close(Q @ Q.mT, torch.eye(D).double())
    assert_close((x @ frame) @ frame.mT, x)
    assert_close(rows_of(frame, torch.tensor([3, 1])), Q[[3, 1]])
    values, _ = found.decompose()
    assert_close(diagonal_of(values, frame), found.to_dense().diagonal())


def blocks():
    """B ⊗ A with one sketch or two, and B alone, with the same as dense matrices."""
    wide, narrow = sketched(decaying(300)), normal(50, 3, seed=5)
    small = narrow.mT @ narrow
    other = sketched(decaying(60, 12, seed=2), 2)
    return {
        "A": KroneckerBlock("w", small, wide * 0.01, 300),
        "B": KroneckerBlock("w", wide, small * 0.02, 50),
        "both": KroneckerBlock("w", other, wide * 0.01, 300),
        "bias": KroneckerBlock("b", wide),
    }


@pytest.mark.parametrize("case", ["A", "B", "both", "bias"])
@pytest.mark.parametrize("damping", [False, True])
def test_algebra_of_blocks_is_that_of_their_matrices(case, damping):
    block = blocks()[case]
    dense, v = block.to_dense(), normal(2, block.numel, seed=9)
    assert dense.shape == (block.numel, block.numel)
    assert_close(block.matvec(v), v @ dense)
    assert_close(block.eigenvalues().sort().values, torch.linalg.eigvalsh(dense), atol=1e-9, rtol=0)
    delta = 0.3
    precision = dense + delta * torch.eye(block.numel).double()
    if damping and block.A is not None:
        B, A = (F.to_dense() if isinstance(F, SketchedFactor) else F for F in (block.B, block.A))
        B, A = (F + delta**0.5 * torch.eye(len(F)).double() for F in (B, A))
        precision = torch.kron(B, A)
    eigen = block.decompose()
    spectrum = eigen.spectrum(torch.tensor(delta, dtype=torch.float64), damping)
    assert eigen.numel == block.numel
    assert_close(eigen.log_det(spectrum), torch.linalg.slogdet(precision)[1])
    assert_close(eigen.power_matvec(v, spectrum, -1.0), v @ precision.inverse())
    half = eigen.power_matvec(torch.eye(block.numel).double(), spectrum, -0.5)
    assert_close(half @ half.mT, precision.inverse())
    assert_close(eigen.diagonal(spectrum, -1.0), precision.inverse().diagonal())
    # Negative control: the spectrum's own logarithms count the frame's axes too often.
    assert abs(spectrum.log().sum() - eigen.log_det(spectrum)) > 1


def test_blocks_of_sketches_add_up():
    block, both = blocks()["A"], blocks()["A"].add(blocks()["A"].scale(2.0))
    assert_close(both.to_dense(), 3 * block.to_dense())
    assert both.num_terms == 900
    whole = KroneckerBlock("w", block.B, block.sketches["A"].to_dense(), 300)
    with pytest.raises(ValueError, match="sketch_rank"):
        block.add(whole)
    with pytest.raises(NotImplementedError, match=r"one of 'w' \(30×30\) is a sketch of rank 4"):
        block.whole_factors("This test")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_named(value):
    rows = decaying(100)
    rows[3, 2] = value
    block = KroneckerBlock("w", sketched(rows))
    for compute in (block.eigenvalues, block.decompose):
        with pytest.raises(ValueError, match="The curvature factor of 'w, B' is not finite"):
            compute()
