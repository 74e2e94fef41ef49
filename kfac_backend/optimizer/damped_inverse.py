"""Compute (F + damping)⁻¹ g, the preconditioned gradient of a block F = B ⊗ A, and the KL clip.

F is the block of the mean loss: A is a mean over its terms, and B a mean over the batch's loss
terms. A gradient G has the shape of its parameter, here (d_out, d_in); vec flattens it row by row.

- Damping on the product: (B ⊗ A + λI)⁻¹ vec(G) = vec(Q_B [(Q_Bᵀ G Q_A) / (β_i α_j + λ)] Q_Aᵀ).
- Damping on the factors: (B + λ_B I)⁻¹ G (A + λ_A I)⁻¹ with λ_A = π√λ, λ_B = √λ/π. Compared with
  the first, it also adds λ_B I ⊗ A + λ_A B ⊗ I to the block, which damps large eigenvalues, too.

Source: Martens & Grosse 2015 (arXiv:1503.05671), sections 6.2 and 6.3; Eschenhagen et al. 2023
(arXiv:2311.00636), appendix on the practical choices.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock, KroneckerBlock, decompose
from kfac_backend.blocks.eigen import eigendecompositions, map_on_cores
from kfac_backend.layers.gram import Factor

DampingOn = Literal["factors", "product"]

Inverse: TypeAlias = dict[str, Tensor]
"""(F + damping)⁻¹ as tensors by name, without tensors of A for a block without A.

- ``B``, ``A``: the inverses of the damped factors.
- ``L_B``, ``L_A``: lower triangular roots of the damped factors, L Lᵀ = B + λ_B I, for an inverse
  that is used only once. Solving for the d_out rows of a gradient takes d_out d_in²
  multiplications, as many as the product with the inverse, at a lower speed. But computing the
  inverse takes d_in³/3 more. At 256×2304 the solve takes 22 ms, the product 19 ms, and the inverse
  78 ms (a core of x86-64).
- ``Q_B``, ``Q_A``, ``spectrum``: eigenvectors and the damped eigenvalues β_i α_j + λ.

B-like tensors are (d_out, d_out) or (G, d_out, d_out) for G groups.
"""


def damped_inverses(
    blocks: Sequence[KroneckerBlock],
    dampings: Sequence[float],
    damping_on: DampingOn,
    once: bool = False,
) -> list[Inverse]:
    """Compute (F + damping)⁻¹ of blocks F of the mean loss, for `precondition`.

    Each block has its own λ > 0, and a block without A gets λ itself. With damping on the factors
    the function waits for a GPU twice, for any number of blocks. It then returns roots instead of
    inverses if they are used only ``once``.
    """
    if not blocks:
        return []
    factors = {name: F.matrix for block in blocks for F, name in block.named_factors()}
    # The sum suffices, in a tenth of the time of testing each entry.
    sums = torch.stack([F.sum().float() for F in factors.values()])
    if not sums.isfinite().all():
        wrong = next(
            name for name, total in zip(factors, sums, strict=True) if not total.isfinite()
        )
        raise diverging(f"The curvature factor of '{wrong}'")

    # The largest first, because as the last one it would leave the other cores of a CPU idle.
    order = sorted(range(len(blocks)), key=lambda i: -blocks[i].cost)
    on_each: Any = map_on_cores if blocks[0].B.device.type == "cpu" else map

    # On the product: exact, at the cost of eigenvectors.
    if damping_on == "product":
        return [_of_product(*of_one) for of_one in zip(decompose(blocks), dampings, strict=True)]

    # Step 1: Cholesky roots of the damped factors.
    pairs = ((blocks[i], dampings[i]) for i in order)
    roots = dict(zip(order, on_each(lambda pair: _decomposed(*pair), pairs), strict=True))
    # Step 2: compute failed roots in another way. Read all failures at once.
    flags = [flag.reshape(-1) for _, failed in roots.values() for flag in failed]
    if flags and torch.cat(flags).any():
        for i, (_, failed) in roots.items():
            if any(flag.any() for flag in failed):
                roots[i] = _decomposed(blocks[i], dampings[i], clip=True)
    inverses = {i: inverse for i, (inverse, _) in roots.items()}
    # Step 3: invert roots that are used several times.
    if not once:

        def invert(i: int) -> Inverse:
            return {kind.removeprefix("L_"): _inverse(L) for kind, L in inverses[i].items()}

        inverses = dict(zip(order, on_each(invert, order), strict=True))
    return [inverses[i] for i in range(len(blocks))]


def _of_product(eigen: EigenBlock, damping: float) -> Inverse:
    """Return eigenvectors, and the damped eigenvalues."""
    spectrum = eigen.spectrum(damping)
    if eigen.Q_A is None:
        spectrum = spectrum.expand(*eigen.beta.shape, 1)
    return _named("Q_B", "Q_A", eigen.Q_B, eigen.Q_A) | {"spectrum": spectrum}


def _decomposed(
    block: KroneckerBlock, damping: float, clip: bool = False
) -> tuple[Inverse, list[Tensor]]:
    """Return roots of the damped factors, and where Cholesky failed; ``clip`` handles failures."""
    B, A = block.B, block.A
    # Both factors get the same relative damping: π balances their scales (Martens & Grosse 2015,
    # section 6.3).
    pi = 1.0 if A is None else _balance(B, A)
    if any(block.constants):  # d_out without constants
        pi = pi * (block.num_parameters / block.numel) ** 0.5
    of_A, of_B = (f"{block.name}, A", f"{block.name}, B") if clip else (None, None)
    failed: list[Tensor] = []
    L_A = None if A is None else _root(A, damping**0.5 * pi, of_A, failed)
    L_B = _root(B, damping if A is None else damping**0.5 / pi, of_B, failed)
    return _named("L_B", "L_A", L_B, L_A), failed


def empty_inverse(block: KroneckerBlock, damping_on: DampingOn, once: bool = False) -> Inverse:
    """Return the shapes of a result of `damped_inverses` on another rank, without memory."""
    B, A = (None if F is None else torch.empty_like(F, device="meta") for F in (block.B, block.A))
    assert B is not None
    if damping_on == "product":
        spectrum = B.new_empty(*B.shape[:-1], 1 if A is None else A.shape[-1])
        return _named("Q_B", "Q_A", B, A) | {"spectrum": spectrum}
    return _named("L_B", "L_A", B, A) if once else _named("B", "A", B, A)


def precondition(inverses: Sequence[Inverse], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return (F + damping)⁻¹ G for each block's gradient G, in the shape and dtype of G.

    Blocks with a single entry, such as Fixup's scalars, are computed together, because on a GPU the
    work on each takes less time than its start.
    """
    numbers = [i for i, inverse in enumerate(inverses) if _is_number(inverse)]
    by_index: dict[int, Tensor] = {}
    if len(numbers) > 1:
        some = [inverses[i] for i in numbers]
        one = {kind: torch.cat([inverse[kind] for inverse in some])[:, None] for kind in some[0]}
        of_all = _precondition(one, torch.cat([gradients[i].reshape(1) for i in numbers]))
        by_index = dict(zip(numbers, of_all, strict=True))
    return [
        by_index[i].reshape(G.shape) if i in by_index else _precondition(inverse, G)
        for i, (inverse, G) in enumerate(zip(inverses, gradients, strict=True))
    ]


def _is_number(inverse: Inverse) -> bool:
    """Return whether the inverse belongs to a block of a single entry, without A."""
    return not inverse.keys() & {"A", "L_A", "Q_A"} and all(
        t.numel() == 1 for t in inverse.values()
    )


def _precondition(inverse: Inverse, G: Tensor) -> Tensor:
    """Return (F + damping)⁻¹ G of one block."""
    B, A = (next((inverse[n] for n in names if n in inverse), None) for names in _NAMES)
    assert B is not None
    columns = 1 if A is None else A.shape[-1]
    V = G.reshape(*B.shape[:-1], columns).to(B.dtype)  # (d_out, d_in) or (G, d_out, d_in)
    # Transform to the eigenbasis, divide by the damped eigenvalues, and transform back.
    if "spectrum" in inverse:
        V = _times(B.mT, V, A) / inverse["spectrum"]
        V = _times(B, V, None if A is None else A.mT)
    elif "L_B" in inverse:
        V = _solve(B, V, left=True)
        V = V if A is None else _solve(A, V, left=False)
    else:
        V = _times(B, V, A)
    return V.reshape(G.shape).to(G.dtype)


def diverging(quantity: str) -> FloatingPointError:
    """Return the error for a quantity of a training step that is not finite."""
    return FloatingPointError(
        f"{quantity} is not finite: the training diverges. Lower the learning rate, raise the "
        "damping, warm the learning rate up, or set kl_clip."
    )


def kl_clip_factor(inner_products: Tensor, learning_rate: float, kl_limit: float) -> Tensor:
    """Return min(1, √(κ / (η² Σ⟨p̂, g⟩))), which bounds the change of predictions at about κ nats.

    η is the learning rate and κ the limit. Source: Ba, Grosse & Martens 2017, section 5.
    """
    moved = learning_rate**2 * inner_products.sum()
    return (kl_limit / moved.clamp(min=torch.finfo(moved.dtype).tiny)).sqrt().clamp(max=1.0)


def _balance(B: Tensor, A: Tensor) -> Tensor:
    """Return π = √((tr A/d_in) / (tr B/d_out)), (G, 1, 1) for groups; 1 if a factor is zero.

    Groups that share one A also share its damping, so π uses the mean of tr B over groups.
    """
    of_A, of_B = (F.diagonal(dim1=-2, dim2=-1).mean(-1) for F in (A, B))
    if of_B.dim() > of_A.dim():
        of_B = of_B.mean()
    ratio = (of_A / of_B).nan_to_num(1.0, 1.0)
    return torch.where(ratio > 0, ratio, 1.0).sqrt()[..., None, None]


_NAMES = (("B", "L_B", "Q_B"), ("A", "L_A", "Q_A"))


def _named(of_B: str, of_A: str, B: Any, A: Any | None) -> Inverse:
    return {of_B: B} if A is None else {of_B: B, of_A: A}


def _times(B: Tensor, V: Tensor, A: Tensor | None) -> Tensor:
    """Return B V A, group by group."""
    # 1×1 matrices form a diagonal; a batched product would start a kernel for each entry.
    V = B * V if B.shape[-1] == 1 else B @ V
    return V if A is None else V @ A


def _root(F: Tensor, damping: Tensor | float, clipped: str | None, failed: list[Tensor]) -> Tensor:
    """Return lower triangular L with L Lᵀ = F + damping I, batched over leading axes.

    Args:
        F: the factor.
        damping: one for all groups, or (G, 1, 1).
        clipped: the factor's name. With a name, eigenvalues of F that rounding made negative count
            as zero. Without it Cholesky's decomposition fails if one of them is more negative than
            the damping.
        failed: receives whether it failed. The function does not read this, because reading waits
            for a GPU.
    """
    if F.shape[-1] == 1:
        return (F.clamp(min=0.0) + damping).sqrt()
    of_diagonal = damping[..., 0] if isinstance(damping, Tensor) and damping.dim() else damping
    if clipped is None:
        damped = F.clone()
        damped.diagonal(dim1=-2, dim2=-1).add_(of_diagonal)
        L, info = torch.linalg.cholesky_ex(damped)
        failed.append(info)
        return L
    # With the eigenvalues Λ of F, take R of the QR decomposition of √(Λ + damping) Qᵀ: Rᵀ R = Q (Λ
    # + damping) Qᵀ. A QR decomposition cannot fail by rounding.
    values, Q, _ = eigendecompositions([(Factor(F), clipped)], vectors=True)[0]
    root = (values + of_diagonal).sqrt()[..., None] * Q.mT
    L = torch.linalg.qr(root, mode="r").R.mT.contiguous()
    if not L.diagonal(dim1=-2, dim2=-1).all():  # F is so large that rounding removes the damping
        raise diverging(f"The inverse of {clipped}")
    return L


def _inverse(L: Tensor) -> Tensor:
    """Return (L Lᵀ)⁻¹ of a lower triangular L, or entry by entry of diagonals."""
    return L.square().reciprocal() if L.shape[-1] == 1 else torch.cholesky_inverse(L)


def _solve(L: Tensor, V: Tensor, left: bool) -> Tensor:
    """Return (L Lᵀ)⁻¹ V, or V (L Lᵀ)⁻¹ if not ``left``."""
    if L.shape[-1] == 1:
        return V / L.square()
    first, second = (L, L.mT) if left else (L.mT, L)
    half = torch.linalg.solve_triangular(first, V, upper=not left, left=left)
    return torch.linalg.solve_triangular(second, half, upper=left, left=left)
