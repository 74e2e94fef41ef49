"""Comparing the product's blocks with an oracle's, in both modes."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kfac_backend import KroneckerFactors, kronecker_factors
from kfac_backend.blocks.block import CorrectedBlock
from tests.random_numbers import normal

OTHER = {"expand": "reduce", "reduce": "expand"}
MODES = list(OTHER)


def randomize(module: nn.Module, std: float = 0.7) -> nn.Module:
    """The module in float64 and evaluation mode, all of its parameters normal."""
    generator = torch.Generator().manual_seed(0)
    module = module.double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(std * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return module


def with_statistics(model: nn.Module) -> None:
    """Running statistics that are not those of a new layer."""
    for seed, (name, buffer) in enumerate(model.named_buffers()):
        if name.endswith("running_mean"):
            buffer.copy_(normal(*buffer.shape, seed=seed))
        elif name.endswith("running_var"):
            buffer.copy_(1 + normal(*buffer.shape, seed=seed).square())


def assert_blocks(factors: KroneckerFactors, expected: dict[str, Tensor]) -> None:
    """Blocks of all names in ``expected`` are those, up to rounding in float64.

    Their factors are symmetric to the bit, which not every BLAS gives.
    """
    for name, block in expected.items():
        for factor in (factors.blocks[name].A, factors.blocks[name].B):
            assert not isinstance(factor, Tensor) or torch.equal(factor, factor.mT), name
        scale = float(block.abs().max())
        found = factors.to_dense(name)
        assert_close(found, block, rtol=1e-9, atol=1e-11 * max(scale, 1), msg=_named(name))


def _named(name: str):
    return lambda message: f"Block of {name}: {message}"


def factors_of(model, data, kfac_approx, **options) -> KroneckerFactors:
    return kronecker_factors(model, data, "classification", kfac_approx=kfac_approx, **options)


def assert_same(first: KroneckerFactors, second: KroneckerFactors, **tolerances) -> None:
    """Factors and the numbers of their terms, parameter by parameter."""
    assert list(first.blocks) == list(second.blocks)
    for name, block in first.blocks.items():
        other = second.blocks[name]
        assert_close(block.B, other.B, msg=_named(name), **tolerances)
        if block.A is not None:
            assert_close(block.A, other.A, msg=_named(name), **tolerances)
        assert block.num_terms == other.num_terms, name


def targets_of(f: Tensor, likelihood: str = "classification") -> Tensor:
    """Possible targets of outputs (N, ..., C)."""
    if "classification" not in likelihood:
        return f.cos().square()  # in [0, 1], and not where the gradient is zero
    return torch.arange(f[..., 0].numel()).view(f.shape[:-1]) % f.shape[-1]


def batch_of(x, y: Tensor):
    """Inputs, which may be a mapping, and targets as one batch."""
    return {**x, "labels": y} if isinstance(x, Mapping) else (x, y)


def basis(block: CorrectedBlock) -> Tensor:
    """The eigenvectors as columns of a dense (P, P) matrix, group by group."""
    Q_B, Q_A = block.eigen.Q_B, block.eigen.Q_A
    groups = []
    for g, of_B in enumerate(Q_B if Q_B.dim() == 3 else [Q_B]):
        of_A = torch.ones(1, 1).double() if Q_A is None else Q_A[g] if Q_A.dim() == 3 else Q_A
        groups.append(torch.kron(of_B.contiguous(), of_A.contiguous()))
    return torch.block_diag(*groups)


def parts(batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    """A batch that is a mapping as several of these numbers of examples."""
    pieces = [tensor.split(sizes) for tensor in batch.values()]
    return [dict(zip(batch, piece, strict=True)) for piece in zip(*pieces, strict=True)]
