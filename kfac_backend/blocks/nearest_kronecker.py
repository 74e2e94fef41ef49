"""One Kronecker product in place of a sum of several: a tensor used in two ways."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_backend.blocks.block import KroneckerBlock

__all__ = ["nearest_kronecker"]


def nearest_kronecker(blocks: Sequence[KroneckerBlock]) -> KroneckerBlock:
    """The block B ⊗ A that is nearest in Frobenius norm to Σ_k B_k ⊗ A_k.

    An embedding whose weight is also the output layer's has two such terms. The entries of the sum,
    rearranged, form the matrix Σ_k vec(B_k) vec(A_k)ᵀ of rank K, whose leading singular vectors are
    the factors. They are combinations of the B_k and of the A_k, and the inner products of these
    suffice to find them. The coefficients are not negative (Perron and Frobenius), so that B and A
    are positive semi-definite. Source: Van Loan & Pitsianis 1993, "Approximation with Kronecker
    products".

    If all B_k are diagonals, each row's trace is kept instead: B = Σ_k tr(A_k) B_k, and the nearest
    A for that, whose trace is one. The nearest product of all would give rows other traces.

    The result has no number of terms, since it cannot be added to that of another pass: the nearest
    product of a sum is not the sum of the nearest products.

    Args:
        blocks: blocks of the same tensor; a factor may be a diagonal, (V, 1, 1).
    """
    blocks = [b for b in blocks if b.A is not None and b.B.any() and b.A.any()] or list(blocks[:1])
    if len(blocks) == 1:
        return KroneckerBlock(blocks[0].name, blocks[0].B, blocks[0].A)
    whole = [block.whole_factors("A tensor used in two ways") for block in blocks]
    # Diagonals of one size stay diagonals: a vocabulary's dense matrix would not fit into memory.
    diagonal = all(B.dim() == 3 and B.shape[-1] == 1 for B, _ in whole)
    Bs = [B if diagonal else _dense(B) for B, _ in whole]
    As = [_dense(A) for _, A in whole if A is not None]
    of_B = _inner_products(Bs)  # (K, K) in float64
    if diagonal:
        c = torch.stack([A.diagonal().double().sum() for A in As])
    else:
        c = _leading_coefficients(of_B, _inner_products(As))
    # B = Σ c_k B_k, and the best A for this B: Σ_k ⟨B, B_k⟩ A_k / ⟨B, B⟩.
    A = _combination(of_B @ c / (c @ of_B @ c), As)
    return KroneckerBlock(blocks[0].name, _combination(c, Bs), A)


def _leading_coefficients(of_B: Tensor, of_A: Tensor) -> Tensor:
    """The coefficients c of the nearest product's B = Σ c_k B_k, from inner products (K, K)."""
    # Scale all B_k to norm one, and their A_k inversely: the products B_k ⊗ A_k stay the same.
    roots = of_B.diagonal().sqrt()
    of_B, of_A = of_B / torch.outer(roots, roots), of_A * torch.outer(roots, roots)
    # The leading eigenvector of the product of both matrices is the limit of alternating between
    # the best A for a B and the best B for an A.
    values, vectors = torch.linalg.eig(of_A @ of_B)
    return vectors.real[:, values.real.argmax()].abs() / roots


def _combination(coefficients: Tensor, factors: list[Tensor]) -> Tensor:
    terms = [float(c) * F for c, F in zip(coefficients, factors, strict=True)]
    return torch.stack(terms).sum(0)


def _inner_products(factors: list[Tensor]) -> Tensor:
    flat = torch.stack([F.flatten().double() for F in factors])
    return flat @ flat.mT


def _dense(factor: Tensor | None) -> Tensor:
    """(d, d), of a matrix or of d groups of one entry."""
    assert factor is not None
    if factor.dim() == 2:
        return factor
    if factor.shape[-1] != 1:
        raise NotImplementedError(
            "A tensor in groups is used in two ways, which have no common block. Use separate "
            "tensors, or freeze it (requires_grad_(False))."
        )
    return torch.diag_embed(factor[:, 0, 0])
