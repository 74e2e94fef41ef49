"""Compute the nearest Kronecker product to a sum of several, for a tensor with several uses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_backend.blocks.block import KroneckerBlock


def nearest_kronecker(blocks: Sequence[KroneckerBlock]) -> KroneckerBlock:
    """Return the block B ⊗ A that is nearest in Frobenius norm to Σ_k B_k ⊗ A_k.

    An embedding whose weight is also the output layer's has two such terms. The entries of the sum,
    rearranged, form the matrix Σ_k vec(B_k) vec(A_k)ᵀ of rank K, whose leading singular vectors are
    the factors. They are combinations of the B_k and of the A_k, so the inner products of these
    suffice. The coefficients are not negative (Perron and Frobenius), so B and A are positive
    semi-definite. Source: Van Loan & Pitsianis 1993, "Approximation with Kronecker products".

    If all B_k are diagonals, each row's trace is kept instead: B = Σ_k tr(A_k) B_k, with the
    nearest A for it. The nearest product of all would change the rows' traces.

    B has trace one, and A has the scale of the product, a sum. The uses differ in which of B_k and
    A_k are sums, and moving averages of factors need a split that does not depend on the number of
    terms.

    The result has no number of terms (None), because it cannot be added to the result of another
    pass: the nearest product of a sum is not the sum of the nearest products. The number is 0 if no
    use ever ran.

    A factor of a block may be a diagonal, (V, 1, 1).
    """
    # Shapes must not depend on values, which only the owner of the block has. Uses that never ran
    # are left out by their number of terms, and other zeros after the shape is decided.
    unused, blocks = blocks[0], [b for b in blocks if b.num_terms]
    if not blocks:
        return unused
    if len(blocks) == 1:
        return _with_trace_in_A(blocks[0].name, blocks[0].B, blocks[0].A)
    # Diagonals of one size stay diagonals: a dense matrix of a vocabulary would not fit into
    # memory.
    diagonal = all(b.B.dim() == 3 and b.B.shape[-1] == 1 for b in blocks)
    Bs = [b.B if diagonal else _dense(b.B) for b in blocks]
    As = [_dense(b.A) for b in blocks]
    if Bs[0].is_meta:
        return KroneckerBlock(blocks[0].name, Bs[0], As[0])
    nonzero = [i for i, (B, A) in enumerate(zip(Bs, As, strict=True)) if B.any() and A.any()]
    if len(nonzero) < 2:
        i = nonzero[0] if nonzero else 0
        return _with_trace_in_A(blocks[0].name, Bs[i], As[i])
    Bs, As = [Bs[i] for i in nonzero], [As[i] for i in nonzero]
    of_B = _inner_products(Bs)  # (K, K) in float64
    if diagonal:
        # Σ_k tr(A_k) B_k: each row of the sum keeps its trace.
        c = torch.stack([A.diagonal().double().sum() for A in As])
    else:
        # Search among the combinations of the factors, so that K × K inner products suffice for any
        # size of the factors.
        c = _leading_coefficients(of_B, _inner_products(As))
    # B = Σ c_k B_k, and the best A for this B: Σ_k ⟨B, B_k⟩ A_k / ⟨B, B⟩.
    A = _combination(of_B @ c / (c @ of_B @ c), As)
    return _with_trace_in_A(blocks[0].name, _combination(c, Bs), A)


def _with_trace_in_A(name: str, B: Tensor, A: Tensor | None) -> KroneckerBlock:
    """Return the block B / tr(B) ⊗ tr(B) A, without a number of terms."""
    if A is None:
        return KroneckerBlock(name, B)
    trace = B.diagonal(dim1=-2, dim2=-1).sum()
    return KroneckerBlock(name, B / torch.where(trace > 0, trace, 1.0), A * trace)


def _leading_coefficients(of_B: Tensor, of_A: Tensor) -> Tensor:
    """Return the coefficients c of the nearest product's B = Σ c_k B_k, from (K, K) products."""
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
    """Return a matrix, or d groups of one entry, as (d, d)."""
    assert factor is not None
    if factor.dim() == 2:
        return factor
    if factor.shape[-1] != 1:
        raise NotImplementedError(
            "A tensor in groups is used in two ways, which have no common block. Use separate "
            "tensors, or freeze it (requires_grad_(False))."
        )
    return torch.diag_embed(factor[:, 0, 0])
