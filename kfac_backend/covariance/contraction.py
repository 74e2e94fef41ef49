"""Sum over the entries of one parameter's gradients in the eigenbasis of its block.

With the eigenvectors Q = Q_B ⊗ Q_A of a block, the gradient Σ_r b_nrc a_nrᵀ of output c (or of
backward vector c) of example n becomes G̃_nc = Σ_r (Q_Bᵀ b_nrc) (Q_Aᵀ a_nr)ᵀ. Two sums need it:

- J Σ Jᵀ for a posterior precision Q diag(s) Qᵀ, Σ_ij G̃_nc,ij G̃_nc',ij / s_ij (`covariance_part`),
  and its diagonal for many precisions Q diag(s + δ) Qᵀ at once (`variances_part`);
- corrected eigenvalues, Σ_n Σ_c G̃_nc,ij² (`add_second_moments`).

Memory never holds the G̃ of all examples at once. With one position G̃ is not needed: the
covariance is Σ_i b̃_ci b̃_c'i Σ_j ã_j² / s_ij, and the second moment is Σ_n (Σ_c b̃_nci²) ã_nj².
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance.gradients import ParameterGradients
from kfac_backend.layers import ExampleGradients

LARGEST_PRODUCT = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
"""Bytes of G̃ to compute at once: few enough for a CPU's cache, and enough to keep a GPU busy."""


def covariance_part(
    gradients: ParameterGradients, product_bytes: int, *, q: int = 1
) -> Float[Tensor, "T q_C q_C"]:
    """Return one parameter's part of J Σ Jᵀ, exact, for T sets of q examples.

    The spectrum of the N = T·q gradients is the posterior precision's, > 0. At least one row, and
    at most ``product_bytes`` of G̃ are computed at once. q = 1 gives each example's covariance
    (N, C, C).
    """
    concatenated, s = gradients.concatenated_uses(), gradients.spectrum

    def paired(left: Tensor, right: Tensor) -> Tensor:  # both (N, C, P)
        left, right = (t.unflatten(0, (-1, q)).flatten(1, 2) for t in (left, right))
        return left @ right.mT

    if concatenated is None:  # no common factors
        parts = gradients.dense_in_basis(product_bytes, q)
        scaled = ((part * s.rsqrt()).flatten(2) for part in parts)
        return torch.cat([paired(part, part) for part in scaled])
    (b, a), transposed, block = *concatenated, gradients.block
    if a is None or block.Q_A is None:
        # A bias: its gradient is Σ_r b, so one rotation and one product suffice.
        b = _without_input(b, block)
        return paired(b / s.flatten(), b)
    Q_B, Q_A, s = bases(block, s, transposed)
    a, b = _reached(a.to(block.Q_A.dtype), b.to(block.Q_B.dtype))
    (N, R, C, d_out), d_in = b.shape[1:], a.shape[-1]
    # One position: G̃ is the outer product b̃ ãᵀ, so its entries need not be formed. The sum over j
    # of ã_j² / s_ij is a weight for each i, and a sum over i remains. Sets of examples have weights
    # for pairs. If the sets are so large and the layer so small that gradients take less memory
    # than these, use the general method.
    if R == 1 and (q == 1 or q * (d_in + C * d_out) <= C * d_in * d_out):
        b, a = rotated(b[:, :, 0], Q_B), rotated(a[:, :, 0], Q_A)
        if q == 1:
            # w_ni = Σ_j ã_nj² / s_ij, and then Σ_i b̃_nci b̃_nc'i w_ni over rows and groups.
            weights = a.square() @ s.reciprocal().mT  # (G, N, d_out)
            b, scaled = (t.movedim(0, 2).flatten(2) for t in (b, b * weights[:, :, None]))
            return paired(scaled, b)
        # The same for each pair p, r of a set: w_pri = Σ_j ã_pj ã_rj / s_ij.
        b, a = b.unflatten(1, (-1, q)), a.unflatten(1, (-1, q))
        weights = (a[:, :, :, None] * a[:, :, None]) @ s.reciprocal().mT[:, None, None]
        scaled = weights[..., None, :] * b[:, :, :, None]  # (G, T, q, q, C, d_out)
        return torch.einsum("gtprco,gtrdo->tpcrd", scaled, b).flatten(3).flatten(1, 2)
    # Several positions: the entries of G̃, a few rows at a time, each divided by √s. Their inner
    # products are summed over the parts.
    total = b.new_zeros(N // q, q * C, q * C)
    root = s.rsqrt()
    for n, g, rows, part in _in_basis(b, a, Q_B, Q_A, q, product_bytes):
        scaled = (part * root[g, rows]).flatten(2)
        sets = slice(n.start // q, n.stop // q)
        total[sets] = total[sets] + paired(scaled, scaled)
    return total


class LayerBasis(NamedTuple):
    """Eigenvectors and inverse spectra of a layer's weight and bias, for `layer_part`."""

    Q_B: Tensor
    """(d_out, d_out), of both."""
    Q_A: Tensor
    """(d_in, d_in)."""
    inverse: Tensor
    """1 / s of the weight, (d_out, d_in)."""
    bias_inverse: Tensor | None
    """1 / s of the bias, (d_out,); None without an uncertain bias."""


def layer_part(
    a: Float[Tensor, "N R d_in"],
    b: Float[Tensor, "N R K d_out"],
    basis: LayerBasis,
    *,
    variance_only: bool,
) -> Float[Tensor, "N K _"]:
    """Return the part of weight and bias together, (N, K, K), or of the variances, (N, K, 1).

    The formulas are those of `covariance_part`, with the gradients rotated once for both parameters
    and all examples at once.
    """
    Q_B, Q_A, inverse, bias_inverse = basis
    a, b = a.to(Q_A.dtype), b.to(Q_B.dtype) @ Q_B
    if a.shape[1] == 1:
        w = (a[:, 0] @ Q_A).square() @ inverse.mT  # (N, d_out)
        w = w if bias_inverse is None else w + bias_inverse
        b = b[:, 0]
        return b.square() @ w[:, :, None] if variance_only else (b * w[:, None]) @ b.mT
    K, d_out = b.shape[2:]
    # Rotate the inputs or their products with b, whichever has fewer rows.
    inputs_first = a.shape[1] <= K * d_out
    entries = b.flatten(2).mT @ (a @ Q_A if inputs_first else a)  # (N, K·d_out, d_in)
    entries = (entries if inputs_first else entries @ Q_A).unflatten(1, (K, d_out))
    entries, inverse = entries.flatten(2), inverse.flatten()
    if bias_inverse is not None:
        entries, inverse = torch.cat([entries, b.sum(1)], -1), torch.cat([inverse, bias_inverse])
    if variance_only:
        return entries.square() @ inverse[:, None]
    return (entries * inverse) @ entries.mT


def variances_part(
    gradients: ParameterGradients, added: Float[Tensor, "D"], product_bytes: int
) -> Float[Tensor, "N C D"]:
    """Return one parameter's part of the diagonal of J Σ Jᵀ at each of D precisions, exact.

    The precisions are Q diag(s + δ) Qᵀ with the spectrum s ≥ 0 and a value δ ≥ 0 of ``added``. The
    squares of G̃ are computed once for all of them.
    """
    concatenated, s = gradients.concatenated_uses(), gradients.spectrum

    def inverses(spectrum: Tensor) -> Iterator[Tensor]:
        """Yield 1 / (s + δ) for some δ at a time, (some, *spectrum)."""
        most = max(1, product_bytes // (spectrum.numel() * spectrum.element_size()))
        for some in added.to(spectrum).split(most):
            yield (spectrum + some.view(-1, *[1] * spectrum.dim())).reciprocal()

    def summed(entries: Tensor, spectrum: Tensor) -> Tensor:  # (N, C, *spectrum) -> (N, C, D)
        squares = entries.square().flatten(2)
        return torch.cat([squares @ inverse.flatten(1).mT for inverse in inverses(spectrum)], -1)

    if concatenated is None:  # no common factors
        return torch.cat([summed(part, s) for part in gradients.dense_in_basis(product_bytes)])
    (b, a), transposed, block = *concatenated, gradients.block
    if a is None or block.Q_A is None:
        return summed(_without_input(b, block), s)
    Q_B, Q_A, s = bases(block, s, transposed)
    a, b = _reached(a.to(block.Q_A.dtype), b.to(block.Q_B.dtype))
    if b.shape[2] == 1:
        # (b̃_i ã_j)² is a product of squares: w_ni = Σ_j ã_nj² / (s_ij + δ), then Σ_i b̃_nci² w_ni.
        b = rotated(b[:, :, 0], Q_B).square().movedim(0, 2).flatten(2)  # (N, C, G·d_out)
        a = rotated(a[:, :, 0], Q_A).square()  # (G, N, d_in)
        weights = torch.cat([a @ inverse.mT for inverse in inverses(s)])  # (D, G, N, d_out)
        return b @ weights.movedim((2, 0), (0, 3)).flatten(1, 2)
    total = b.new_zeros(*b.shape[1:4:2], len(added))
    for n, g, rows, part in _in_basis(b, a, Q_B, Q_A, 1, product_bytes):
        total[n] += summed(part, s[g, rows])
    return total


def add_second_moments(gradients: ParameterGradients, product_bytes: int) -> None:
    """Add Σ_n Σ_v (Qᵀ g_nv)² to the spectrum, in place; arguments as in `covariance_part`."""
    moments, block = gradients.spectrum, gradients.block
    concatenated = gradients.concatenated_uses()
    if concatenated is None:
        for part in gradients.dense_in_basis(product_bytes):
            moments += part.square().sum((0, 1))
        return
    (b, a), transposed = concatenated
    if a is None or block.Q_A is None:
        moments += _without_input(b, block).square().sum((0, 1)).view_as(moments)
        return
    Q_B, Q_A, moments = bases(block, moments, transposed)  # a view
    a, b = a.to(block.Q_A.dtype), b.to(block.Q_B.dtype)
    if b.shape[2] == 1:
        # (b̃_i ã_j)² is a product of squares: sum the squares of b̃ over the vectors first. One
        # product over the examples then gives all d_out × d_in entries.
        squares = rotated(b[:, :, 0], Q_B).square().sum(2)  # (G, N, d_out)
        moments += squares.mT @ rotated(a[:, :, 0], Q_A).square()
        return
    for _, g, rows, part in _in_basis(b, a, Q_B, Q_A, 1, product_bytes):
        moments[g, rows] += part.square_().sum((0, 1))


def in_basis(gradients: ParameterGradients) -> ParameterGradients:
    """Return the gradients Qᵀ g, with the inputs and output gradients of each use in the basis."""
    uses, block = list[tuple[ExampleGradients, bool]](), gradients.block
    for (b, a), transposed in gradients.uses:
        if a is None or block.Q_A is None:
            b, a = _without_input(b, block)[None, :, None], None
        else:
            Q_B, Q_A, _ = bases(block, gradients.spectrum, transposed)
            b, a = rotated(b, Q_B), rotated(a, Q_A)
        uses.append((ExampleGradients(b, a), transposed))
    return gradients._replace(uses=uses)


def bases(
    block: EigenBlock, spectrum: Tensor, transposed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return eigenvectors (G, d_out, d_out) and (G, d_in, d_in), and the spectrum (G, d_out, d_in).

    They are views. The eigenvectors are None for a diagonal factor, such as an embedding's over
    tokens.

    A ``transposed`` parameter is stored as (d_in, d_out).
    """
    Q_B, Q_A = _grouped(block.Q_B), _grouped(block.Q_A)
    if Q_B.shape[-1] == 1 and Q_B.shape[0] > Q_A.shape[0]:
        # A diagonal over the rows is stored as groups of one entry, (rows, 1, 1), with one Q_A for
        # all; the spectrum is (rows, 1, ...). Here it is one group with the identity as its basis.
        apart = spectrum[:, 0]
        return (Q_A, None, apart.mT[None]) if transposed else (None, Q_A, apart[None])
    if not transposed:
        return Q_B, Q_A, _grouped(spectrum)
    return Q_A, Q_B, _grouped(spectrum).mT


def rotated(x: Float[Tensor, "G *rows d"], Q: Tensor | None) -> Float[Tensor, "G *rows k"]:
    """Return X Q per group, the coordinates of rows x; x itself if Q is None."""
    if Q is None:
        return x
    x = x.to(Q.dtype)  # another dtype if a layer is narrower than the widest parameter
    if len(x) == 1:  # a plain product is faster than a batch of one
        return (x[0].flatten(0, -2) @ Q[0]).view(*x.shape[:-1], Q.shape[-1])
    return (x.flatten(1, -2) @ Q).view(*x.shape[:-1], Q.shape[-1])


def _reached(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and gradients without positions that no output depends on.

    Such positions are the later ones in a causal network.
    """
    if b.shape[2] == 1 or b.requires_grad:
        return a, b
    reached = b.flatten(3).any(-1).any(0).any(0)
    return (a, b) if reached.all() else (a[:, :, reached], b[:, :, reached])


def _without_input(b: Float[Tensor, "G N R C d"], block: EigenBlock) -> Float[Tensor, "N C P"]:
    """Return Qᵀ g of a parameter without an input factor, whose gradient is Σ_r b."""
    b = b.to(block.Q_B.dtype).sum(2)
    if block.Q_B.shape[-1] > 1:  # otherwise a diagonal, for P groups of one entry or one of P
        b = rotated(b, _grouped(block.Q_B))
    return b.movedim(0, 2).flatten(2)


def _in_basis(
    b: Float[Tensor, "G N R C d_out"],
    a: Float[Tensor, "G N R d_in"],
    Q_B: Tensor | None,
    Q_A: Tensor | None,
    q: int,
    product_bytes: int,
) -> Iterator[tuple[slice, int, slice, Float[Tensor, "n C rows d_in"]]]:
    """Yield G̃ in parts: examples n, whole sets of q; the group; its rows; and the entries."""
    # Rotate the gradients of the output once, before splitting their rows.
    b = rotated(b, Q_B)
    (G, N, R, C, d_out), d_in = b.shape, a.shape[-1]
    # Rotate the inputs or their products with b, whichever has fewer rows.
    inputs_first = R <= C * d_out
    if inputs_first:
        a = rotated(a, Q_A)
    # Set by set on a CPU, because single products are faster than batches there.
    at_once = q if b.device.type == "cpu" else N
    rows = max(1, product_bytes // (at_once * C * d_in * b.element_size()))
    for start, row, g in product(range(0, N, at_once), range(0, d_out, rows), range(G)):
        n, some = slice(start, start + at_once), slice(row, row + rows)
        # Σ_r b̃_r a_rᵀ: outputs and rows form one axis, so it is a product over R.
        of_rows = b[g, n, ..., some].flatten(-2).mT  # (n, C·rows, R)
        # A batch of one is slower than a plain product.
        part = (of_rows[0] @ a[g, start])[None] if at_once == 1 else of_rows @ a[g, n]
        part = part.unflatten(-2, (C, -1))
        if not inputs_first and Q_A is not None:
            part = rotated(part[None], Q_A[g : g + 1])[0]
        yield n, g, some, part


def _grouped(Q: Any) -> Any:
    """Return a matrix with an axis of groups, (G, ..., ...), also for a single group."""
    return Q if Q.dim() == 3 else Q[None]
