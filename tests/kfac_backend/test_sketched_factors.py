"""Passes with ``sketch_rank``: adapters on wide frozen layers, against dense matrices."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import KroneckerFactors, corrected_factors, kronecker_factors
from kfac_backend.blocks.sketch import SketchedFactor
from kfac_backend.optimizer import KFAC
from tests.kfac_backend.block_checks import MODES
from tests.random_numbers import normal

WIDTH, RANK = 24, 3


class Adapted(nn.Module):
    """Two frozen wide layers with low-rank adapters, over a sequence, and a small head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH) for _ in range(2))  # with a bias
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x):
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return self.head(x.mean(1))


def batches(sizes=(9, 1, 30)):
    x, y = normal(sum(sizes), 4, WIDTH), torch.arange(sum(sizes)) % 3
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def factors(data=None, **options):
    return kronecker_factors(Adapted(), data or batches(), "classification", **options)


WIDE = {
    "down.0.weight": "A",
    "down.1.weight": "A",
    "up.0.weight": "B",
    "up.0.bias": "B",
    "up.1.weight": "B",
    "up.1.bias": "B",
    "head.weight": "A",
}


@pytest.mark.parametrize("kfac_approx", MODES)
def test_wide_factors_are_sketches_within_their_error(kfac_approx):
    found = factors(sketch_rank=RANK, kfac_approx=kfac_approx)
    exact = factors(kfac_approx=kfac_approx)
    assert {name: "".join(b.sketches) for name, b in found.blocks.items() if b.sketches} == WIDE
    assert found.is_sketched and not exact.is_sketched and not exact.sketch_errors()
    assert set(found.sketch_errors()) == {f"{name}, {F}" for name, F in WIDE.items()}
    for name, block in found.blocks.items():
        for which in ("B", "A"):
            F, whole = getattr(block, which), getattr(exact.blocks[name], which)
            if isinstance(F, SketchedFactor):
                difference = torch.linalg.eigvalsh(whole - F.to_dense()).abs().max()
                assert 0.01 * F.error < difference <= F.error
                assert_close(F.to_dense().trace(), whole.trace())
                largest = torch.linalg.eigvalsh(F.to_dense()).max()
                assert_close(found.sketch_errors()[f"{name}, {which}"], F.error / float(largest))
                with pytest.raises(AssertionError):  # they are not the same
                    assert_close(F.to_dense(), whole)
            elif F is not None:
                assert_close(F, whole)


@pytest.mark.parametrize("kfac_approx", MODES)
def test_few_rows_make_exact_sketches(kfac_approx):
    """One example: A has the rank of its positions, 4, or 1 where they are averaged."""
    data, rank = batches((1,)), 4 if kfac_approx == "expand" else 1
    exact = factors(data, kfac_approx=kfac_approx)
    found = factors(data, sketch_rank=rank, kfac_approx=kfac_approx)
    for name in ("down.0.weight", "down.1.weight", "head.weight"):
        assert found.blocks[name].sketches
        assert_close(found.to_dense(name), exact.to_dense(name))
    if rank > 1:
        lower = factors(data, sketch_rank=rank - 1, kfac_approx=kfac_approx)
        assert max(lower.sketch_errors().values()) > 1e-3


def test_narrow_factors_stay_whole():
    """Up to 4r a sketch, with the rows that wait, would take as much."""
    assert not factors(sketch_rank=WIDTH // 4).is_sketched
    assert factors(sketch_rank=WIDTH // 4 - 1).is_sketched


def test_log_determinants_are_those_of_the_sketch():
    found, delta = factors(sketch_rank=RANK), 0.7
    expected = sum(
        torch.linalg.slogdet(found.to_dense(name) + delta * torch.eye(block.numel).double())[1]
        for name, block in found.blocks.items()
    )
    assert_close(found.log_det(delta), expected)
    assert (factors().log_det(delta) - expected).abs() > 1e-3 * expected.abs()


def test_saved_and_loaded(tmp_path):
    found = factors(sketch_rank=RANK)
    found.save(tmp_path / "factors.safetensors")
    loaded = KroneckerFactors.load(tmp_path / "factors.safetensors")
    assert loaded.options == found.options and loaded.options.sketch_rank == RANK
    assert loaded.sketch_errors() == found.sketch_errors()
    for name, block in loaded.blocks.items():
        assert torch.equal(block.to_dense(), found.to_dense(name))
    # The sketch's file has no matrix of the wide factors' size.
    largest = max(t.numel() for t in found.state_dict()["tensors"].values())
    assert largest == RANK * WIDTH


def test_sums_over_data():
    first, second = batches((20, 20))
    total = factors([first], sketch_rank=RANK) + factors([second], sketch_rank=RANK)
    exact = factors([first, second])
    for name, block in total.blocks.items():
        for which, F in block.sketches.items():
            whole = getattr(exact.blocks[name], which)
            assert torch.linalg.eigvalsh(whole - F.to_dense()).abs().max() <= F.error
            assert_close(F.to_dense().trace(), whole.trace())
    with pytest.raises(ValueError, match="Cannot add factors with sketch_rank 3 and None"):
        _ = total + exact
    cast = total.to(dtype=torch.float32).blocks["down.0.weight"].sketches["A"]
    assert cast.dtype == torch.float32 and cast.kept.dtype == torch.float64


class Tied(nn.Module):
    """A weight that two layers share, and packed projections, beside a layer of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(self.attention(x, x, x)[0].mean(1))


def test_tied_and_packed_tensors_keep_whole_factors():
    model = Tied()
    found = kronecker_factors(model, batches(), "classification", sketch_rank=RANK)
    exact = kronecker_factors(model, batches(), "classification")
    sketched = {name for name, block in found.blocks.items() if block.sketches}
    assert sketched == {"attention.out_proj.weight", "attention.out_proj.bias", "head.weight"}
    for name in set(found.blocks) - sketched:
        assert_close(found.to_dense(name), exact.to_dense(name))


def test_a_layer_that_no_row_reaches():
    class Idle(Adapted):
        def forward(self, x):
            return self.head(torch.tanh(self.base[0](x) + self.up[0](self.down[0](x))).mean(1))

    with pytest.warns(UserWarning, match="No part of the forward pass"):
        found = kronecker_factors(Idle(), batches(), "classification", sketch_rank=RANK)
    block = found.blocks["down.1.weight"]
    assert block.sketches["A"].U.shape == (WIDTH, 0) and not block.eigenvalues().any()


def test_what_needs_whole_factors_says_so():
    model, found = Adapted(), factors(sketch_rank=RANK)
    with pytest.raises(NotImplementedError, match="correction of eigenvalues needs whole factors"):
        corrected_factors(found, model, batches())
    with pytest.raises(ValueError, match="sketch_rank=3 is not for preconditioning"):
        KFAC(model, "classification", lr=0.1, curvature=replace(found.options, sketch_rank=3))
    with pytest.raises(ValueError, match="sketch_rank must be at least 1, or None, not 0"):
        factors(sketch_rank=0)
