"""One parameter's part of J Σ Jᵀ, from the factors of its gradients.

In the eigenbasis of the posterior precision Q diag(s) Qᵀ, with Q = Q_B ⊗ Q_A, the gradient of
output c is G̃_nc = Σ_r (Q_Bᵀ b_nrc) (Q_Aᵀ a_nr)ᵀ, and the covariance of outputs c and c' is
Σ_ij G̃_nc,ij G̃_nc',ij / s_ij. The gradients of all examples are never held at once. With one
position G̃ is not needed at all: the covariance is Σ_i b̃_ci b̃_c'i Σ_j ã_j² / s_ij. The variances
alone, c = c', take no products between different outputs.

Most eigenvalues of a trained network's posterior precision equal the smallest one, s₀, which mostly
is the prior's: s_ij = s₀ for all output directions i of most input directions j. The part of these
directions needs no eigenvectors: Σ_rr' ⟨b_rc, b_r'c'⟩ ⟨a⊥_r, a⊥_r'⟩ / s₀, with a⊥ the part of an
input in their span. They are treated in this way where s_ij equals s₀ up to rounding, or is at most
(1 + tolerance) s₀, which makes a variance too large by at most the share ``tolerance``.

`joint_covariance` is that of the outputs of several inputs. With one position two examples n and m
have Σ_i b̃_nci b̃_mdi Σ_j ã_nj ã_mj / s_ij, which needs no gradient (d_out, d_in) of any example.
With several positions the gradients are computed some rows at a time, and again in a backward pass
instead of being kept.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance.eigenbasis import (
    LARGEST_PRODUCT,
    bases,
    examples_at_once,
    grouped,
    products,
    rotated,
)
from kfac_backend.covariance.gradients import ParameterGradients
from kfac_backend.layers import ExampleGradients

__all__ = ["gradient_covariance", "joint_covariance", "joint_part", "parameter_covariance"]

DOUBLE_TAKES = {"cpu": 2, "cuda": 32}
"""How many times as long a product takes in float64 as in float32. On a few GPUs the ratio is 2, on
many it is even more than 32. Other devices may have no float64."""


def parameter_covariance(
    gradients: ParameterGradients,
    product_bytes: int,
    *,
    tolerance: float = 0.0,
    variance_only: bool = False,
) -> Float[Tensor, "N C *other"]:
    """J Σ Jᵀ (N, C, C), or its diagonals (N, C); arguments as of `gradient_covariance`."""
    joined, spectrum = gradients.joined(), gradients.spectrum
    if joined is not None:
        return gradient_covariance(
            joined[0], gradients.block, spectrum, product_bytes,
            tolerance=tolerance, transposed=joined[1], variance_only=variance_only,
        )  # fmt: skip
    found = []
    for part in gradients.dense_in_basis(product_bytes):
        scaled = (part * spectrum.rsqrt()).flatten(2)
        found.append(_paired(scaled, scaled, variance_only))
    return torch.cat(found)


def gradient_covariance(
    gradients: ExampleGradients,
    block: EigenBlock,
    spectrum: Float[Tensor, "*G rows columns"],
    product_bytes: int = LARGEST_PRODUCT["cpu"],
    *,
    tolerance: float = 0.0,
    transposed: bool = False,
    variance_only: bool = False,
) -> Float[Tensor, "N C *other"]:
    """J Σ Jᵀ (N, C, C), or its diagonals (N, C), for the uncertainty of one parameter.

    Exact up to rounding if the tolerance is 0. Biases and diagonals are exact for any tolerance.

    Args:
        gradients: the outputs' gradients in the parameter.
        block: eigenvectors of the parameter's posterior precision.
        spectrum: its eigenvalues > 0, see `EigenBlock.spectrum`.
        product_bytes: bytes of a gradient that are computed at once, but at least one row.
        tolerance: t in V ≤ result ≤ (1 + t) V, in the order of semi-definite matrices, with V the
            exact covariance.
        transposed: whether the parameter is stored inputs first, (d_in, d_out).
        variance_only: return the diagonals (N, C).
    """
    b = gradients.b.to(block.Q_B.dtype)
    # Without an input factor the gradient is Σ_r b, and the eigenbasis is Q_B alone.
    if gradients.a is None or block.Q_A is None:
        b = b.sum(2)  # (G, N, C, d_out)
        if block.Q_B.shape[-1] == 1:  # a diagonal, for P groups of one entry or one of P
            b = b.movedim(0, 2).flatten(2)  # (N, C, P)
            return _paired(b / spectrum.flatten(), b, variance_only)
        b = rotated(b, grouped(block.Q_B))
        return _paired(b / grouped(spectrum)[:, None, None, :, 0], b, variance_only).sum(0)
    a = gradients.a.to(block.Q_A.dtype)
    Q_B, Q_A, spectrum = bases(block, spectrum, transposed)
    floor, start = _prior_like(Q_A, spectrum, tolerance)
    double = DOUBLE_TAKES.get(b.device.type, math.inf) if b.dtype == torch.float32 else 1
    # The choice counts all positions, also those that no output of this batch reaches: whether the
    # tolerance is made use of must not depend on the other examples of the batch.
    way, inputs_first = _cheapest(b.shape[2], b.shape[3:].numel(), a.shape[-1], start, double)
    if b.shape[2] > 1:
        reached = _reached(b)
        if not reached.all():
            a, b = a[:, :, reached], b[:, :, reached]
    _, N, R, C, _ = b.shape
    covariance = b.new_zeros((N, C) if variance_only else (N, C, C))
    if R == 0:
        return covariance
    # One position: Σ_j ã_j² / s_ij weighs each output direction i, and no gradient is formed.
    if R == 1:
        known, rest = _parts(a[:, :, 0], Q_A, start)
        weights = known.square() @ spectrum[..., start:].reciprocal().mT  # (G, N, d_out)
        if rest is not None:
            weights += rest.square().sum(-1, keepdim=True) / floor[:, None, None]
        b = rotated(b[:, :, 0], Q_B)
        return _paired(b * weights[:, :, None], b, variance_only).sum(0)
    # Several: the gradients in the basis, some rows at a time; inputs are rotated before the
    # product with b, or the product after it, whichever takes fewer multiplications.
    start, inverse_root = way, spectrum[..., way:].rsqrt()
    b = rotated(b, Q_B)
    if inputs_first:
        known, rest = _parts(a, Q_A, start)
        if rest is not None:
            _add_prior_like(covariance, b, rest, floor, product_bytes)
        if known.shape[-1]:
            for n, g, some, gradient in products(b, known, product_bytes):
                gradient.mul_(inverse_root[g, some])
                covariance[n] += _squared(gradient, variance_only)
        return covariance
    for n, g, some, gradient in products(b, a, product_bytes):
        known, rest = _parts(gradient[None], None if Q_A is None else Q_A[g : g + 1], start)
        covariance[n] += _squared(known[0].mul_(inverse_root[g, some]), variance_only)
        if rest is not None:
            covariance[n] += _squared(rest[0], variance_only) / floor[g]
    return covariance


def _reached(b: Float[Tensor, "G N R C d_out"]) -> Bool[Tensor, "R"]:
    """The positions that any output depends on; in a causal network later ones are not reached."""
    # Usually the first output reaches all positions, and testing it alone is cheaper.
    reached = b[..., 0, :].any(-1).any(0).any(0)
    return reached if reached.all() else b.flatten(3).any(-1).any(0).any(0)


def _prior_like(
    Q_A: Tensor | None, spectrum: Float[Tensor, "G d_out d_in"], tolerance: float
) -> tuple[Float[Tensor, "G"], int]:
    """The smallest eigenvalue s₀ of each group, and the number of leading input directions with it.

    The factors' eigenvectors are sorted by their eigenvalues, so that all such directions come
    first. Corrected eigenvalues need not be sorted; then some such directions may not be counted.
    """
    floor = spectrum.amin((1, 2))
    if Q_A is None:
        return floor, 0
    rounding = 4 * torch.finfo(spectrum.dtype).eps
    known = (spectrum > (1 + tolerance + rounding) * floor[:, None, None]).flatten(0, 1).any(0)
    return floor, int(known.int().argmax()) if known.any() else len(known)


def _parts(
    x: Float[Tensor, "G *n d"], Q_A: Tensor | None, start: int
) -> tuple[Float[Tensor, "G *n d_known"], Float[Tensor, "G *n d_rest"] | None]:
    """The coordinates along the eigenvectors from ``start`` on, and the rest; None if start is 0.

    The rest is the part of x in the span of the first eigenvectors, in whichever basis is cheaper:
    only its inner products are used.
    """
    if start == 0 or Q_A is None:
        return rotated(x, Q_A), None
    if start == Q_A.shape[-1]:
        return x[..., :0], x
    if start < Q_A.shape[-1] / 2:
        x = rotated(x, Q_A)
        return x[..., start:], x[..., :start]
    Q = Q_A[..., start:]
    known = rotated(x, Q)
    rest = x.flatten(1, -2).baddbmm(known.flatten(1, -2), Q.mT, alpha=-1)
    return known, rest.view_as(x)


def _cheapest(R: int, d_b: int, d_in: int, start: int, double: float) -> tuple[int, bool]:
    """The way with the fewest multiplications.

    Args:
        R: positions.
        d_b: entries of all outputs' gradients at one position, C·d_out.
        d_in: entries of the input at one position.
        start: see `_prior_like`.
        double: how many times as long a multiplication takes in float64.

    Returns:
        ``start``, or 0 where treating the first directions separately costs more than it saves; and
        whether to rotate the inputs into the basis, or else the products of inputs and gradients.
    """

    def multiplications(start: int, inputs_first: bool) -> float:
        known = max(0, d_in - start)
        rotation = d_in * min(d_in, 2 * known)
        if not inputs_first:
            return R * d_in * d_b + d_b * rotation
        inner = double * R * R * (d_in + d_b) if start else 0
        return R * rotation + R * known * d_b + inner

    ways = [(start, True), (start, False), (0, True), (0, False)]
    return min(ways, key=lambda way: multiplications(*way))


def _add_prior_like(
    covariance: Float[Tensor, "N C *other"],
    b: Float[Tensor, "G N R C d_out"],
    rest: Float[Tensor, "G N R d"],
    floor: Float[Tensor, "G"],
    product_bytes: int,
) -> None:
    """Add Σ_rr' ⟨b_rc, b_r'c'⟩ ⟨a⊥_r, a⊥_r'⟩ / s₀, in place, without a gradient (d_out, d).

    It is computed in float64. Where gradients cancel over positions, as below a norm or a softmax,
    this sum of products loses twice as many digits as the square of the summed gradient would.
    """
    G, N, R, C, d_out = b.shape
    of_example = 8 * R * (R + 3 * C * d_out)
    for g in range(G):
        for n in examples_at_once(b.device, N, max(1, product_bytes // of_example)):
            a, gradient = rest[g, n].double(), b[g, n].double()
            inner = a @ a.mT / floor[g]  # (*n, R, R)
            weighted = (inner @ gradient.flatten(-2)).unflatten(-1, (C, d_out))
            left, right = (t.movedim(-2, -3).flatten(-2) for t in (weighted, gradient))
            covariance[n] += _paired(left, right, covariance.dim() == 2).to(covariance.dtype)


def _paired(
    left: Float[Tensor, "*n C d"], right: Float[Tensor, "*n C d"], variance_only: bool
) -> Tensor:
    """The inner products of all pairs of rows (..., C, C), or of rows with equal index (..., C)."""
    return (left * right).sum(-1) if variance_only else left @ right.mT


def _squared(gradient: Float[Tensor, "*n C rows d"], variance_only: bool) -> Tensor:
    """The inner products of all pairs of outputs' gradients (*n, C, C), or the squares (*n, C).

    The gradients are flattened over rows and columns.
    """
    gradient = gradient.flatten(-2)
    return _paired(gradient, gradient, variance_only)


def joint_part(
    gradients: ParameterGradients, q: int, product_bytes: int
) -> Float[Tensor, "T q_C q_C"]:
    """J(X) Σ J(X)ᵀ of T sets of q examples; arguments as of `joint_covariance`."""
    joined, spectrum = gradients.joined(), gradients.spectrum
    if joined is None:
        everything = 8 * spectrum.numel() * gradients.uses[0][0].b.shape[1:4].numel()
        (dense,) = gradients.dense_in_basis(everything)
        return _gram((dense * spectrum.rsqrt()).flatten(2), q)
    return joint_covariance(
        joined[0], gradients.block, spectrum, q, product_bytes, transposed=joined[1]
    )


def joint_covariance(
    gradients: ExampleGradients,
    block: EigenBlock,
    spectrum: Float[Tensor, "*G rows columns"],
    q: int,
    product_bytes: int = 8 * 2**20,
    *,
    transposed: bool = False,
) -> Float[Tensor, "T q_C q_C"]:
    """J(X) Σ J(X)ᵀ of T sets X of q examples, for the uncertainty of one parameter; exact.

    Args:
        gradients: the outputs' gradients in the parameter, of N = T·q examples.
        block: eigenvectors of the parameter's posterior precision.
        spectrum: its eigenvalues > 0, see `EigenBlock.spectrum`.
        q: the number of consecutive examples in a set.
        product_bytes: bytes of the gradients that are computed at once, but at least one row.
        transposed: whether the parameter is stored inputs first, (d_in, d_out).
    """
    b = gradients.b.to(block.Q_B.dtype)
    if gradients.a is None or block.Q_A is None:
        b = b.sum(2)  # (G, N, C, d_out)
        if block.Q_B.shape[-1] == 1:  # a diagonal, for P groups of one entry or one of P
            return _gram(b.movedim(0, 2).flatten(2) * spectrum.flatten().rsqrt(), q)
        b = rotated(b, grouped(block.Q_B)) * grouped(spectrum)[:, None, None, :, 0].rsqrt()
        return _gram(b.movedim(0, 2).flatten(2), q)
    Q_B, Q_A, spectrum = bases(block, spectrum, transposed)
    a = rotated(gradients.a.to(block.Q_A.dtype), Q_A)
    b = rotated(b, Q_B)
    G, N, R, C, d_out = b.shape
    d_in = a.shape[-1]
    # For large sets of small layers the gradients take less memory than the products of pairs.
    if R == 1 and q * (d_in + C * d_out) <= C * d_in * d_out:
        b, a = b[:, :, 0].unflatten(1, (-1, q)), a[:, :, 0].unflatten(1, (-1, q))
        pairs = a[:, :, :, None] * a[:, :, None]  # (G, T, q, q, d_in)
        weights = pairs @ spectrum.reciprocal().mT[:, None, None]  # (G, T, q, q, d_out)
        scaled = weights[..., None, :] * b[:, :, :, None]  # (G, T, q, q, C, d_out)
        return torch.einsum("gtprco,gtrdo->tpcrd", scaled, b).flatten(3).flatten(1, 2)

    def of_rows(b: Tensor, a: Tensor, spectrum: Tensor) -> Tensor:
        in_basis = torch.einsum("nrco,nri->ncoi", b, a) * spectrum.rsqrt()
        return _gram(in_basis.flatten(2), q)

    rows = max(1, product_bytes // (N * C * d_in * b.element_size()))
    total = b.new_zeros(())
    for g in range(G):
        for start in range(0, d_out, rows):
            some = slice(start, start + rows)
            part = b[g, ..., some], a[g], spectrum[g, some]
            again = b.requires_grad or a.requires_grad
            total = total + (
                checkpoint(of_rows, *part, use_reentrant=False, preserve_rng_state=False)
                if again
                else of_rows(*part)
            )
    return total


def _gram(features: Float[Tensor, "N C P"], q: int) -> Float[Tensor, "T q_C q_C"]:
    """The inner products between all outputs of a set's examples."""
    rows = features.unflatten(0, (-1, q)).flatten(1, 2)
    return rows @ rows.mT
