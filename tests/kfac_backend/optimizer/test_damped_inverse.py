"""(F + damping)⁻¹ g against dense algebra, and the norms."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend import KroneckerBlock
from kfac_backend.optimizer.damped_inverse import damped_inverses, kl_clip_factor, precondition
from tests.random_numbers import normal

LAMBDA = 0.03


def gram(*shape, seed):
    x = normal(*shape, seed=seed)
    return x @ x.mT / shape[-1]


BLOCKS = {
    "weight": (20 * gram(3, 5, seed=0), gram(4, 6, seed=1)),
    "bias": (gram(3, 5, seed=2), None),
    "rank one": (gram(3, 1, seed=3), gram(4, 1, seed=4)),
    "groups": (gram(2, 3, 5, seed=5), gram(2, 4, 6, seed=6)),
    "groups of one A": (gram(2, 3, 5, seed=7), gram(4, 6, seed=8)),
    "tokens": (gram(5, 1, 3, seed=9), gram(4, 6, seed=10)),
    "diagonal": (gram(5, 1, 3, seed=11), None),
    "zero": (torch.zeros(3, 3).double(), torch.zeros(4, 4).double()),
}


def block_of(name):
    return KroneckerBlock(name, *BLOCKS[name])


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_each_damping_is_a_dense_solve(name, once):
    """λ I; or (B + √λ/π I) ⊗ (A + π√λ I), group by group, with the traces' ratio by hand."""
    block = block_of(name)
    g = normal(block.numel, seed=20)
    dense = block.to_dense() + LAMBDA * torch.eye(block.numel).double()
    found = preconditioned(block, g, "product")
    assert_close(found, torch.linalg.solve(dense, g), rtol=1e-10, atol=1e-10)
    if block.A is not None:
        B = block.B.reshape(-1, *block.B.shape[-2:])
        A = block.A.expand(len(B), *block.A.shape[-2:])
        together = block.B.dim() > block.A.dim()  # one A for all groups: one π
        parts = []
        for B_g, A_g in zip(B, A, strict=True):
            of_B = torch.stack([b.diagonal().mean() for b in B]).mean() if together else None
            of_B = B_g.diagonal().mean() if of_B is None else of_B
            of_A = A_g.diagonal().mean()
            pi = float((of_A / of_B).sqrt()) if of_B * of_A > 0 else 1.0
            identities = [torch.eye(len(m)).double() for m in (B_g, A_g)]
            damped_B = B_g + LAMBDA**0.5 / pi * identities[0]
            parts.append(torch.kron(damped_B, A_g + LAMBDA**0.5 * pi * identities[1]))
        dense = torch.block_diag(*parts)
    (inverse,) = damped_inverses([block], [LAMBDA], "factors", once)
    assert ("L_B" in inverse) == once
    found = precondition([inverse], [g])[0]
    assert_close(found, torch.linalg.solve(dense, g), rtol=1e-10, atol=1e-10)


def preconditioned(block, g, damping_on="factors"):
    return precondition(damped_inverses([block], [LAMBDA], damping_on), [g])[0]


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("damping_on", ["product", "factors"])
def test_rounding_below_zero_is_clipped(damping_on, once):
    """A factor with a negative eigenvalue, larger than the damping: as if it were zero."""
    Q = torch.linalg.qr(normal(3, 3, seed=1)).Q
    F = (Q * torch.tensor([2.0, 1.0, -0.1]).double()) @ Q.T
    right = (Q / torch.tensor([2.01, 1.01, 0.01]).double()) @ Q.T
    g = normal(3, seed=2)
    inverses = damped_inverses([KroneckerBlock("b", F)], [0.01], damping_on, once=once)
    assert_close(precondition(inverses, [g])[0], right @ g, rtol=1e-6, atol=1e-6)


def test_what_is_not_finite_is_named():
    B, A = BLOCKS["weight"]
    with pytest.raises(FloatingPointError, match=r"'conv1.weight, A' is not finite.*learning rate"):
        damped_inverses([KroneckerBlock("conv1.weight", B, A * torch.nan)], [LAMBDA], "factors")


def test_a_factor_beside_which_the_damping_is_lost_is_named():
    """As where a training diverges: a raw error of torch's Cholesky inverse before."""
    F = torch.ones(3, 3)
    damped_inverses([KroneckerBlock("b", 1e10 * F)], [1e-2], "factors")  # negative control
    with pytest.raises(FloatingPointError, match=r"b, B is not finite.*learning rate"):
        damped_inverses([KroneckerBlock("b", 1e30 * F)], [1e-2], "factors")


def test_half_precision_gradients_keep_their_dtype_and_shape():
    block = KroneckerBlock("w", *(F.float() for F in BLOCKS["weight"]))
    (inverse,) = damped_inverses([block], [1], "factors")
    g = normal(3, 4, 1, 1).bfloat16()
    found = precondition([inverse], [g])[0]
    assert found.dtype == torch.bfloat16 and found.shape == g.shape


def test_kl_clip():
    """min(1, √(κ / (η² Σ⟨p̂, g⟩))): afterwards η² ν² Σ⟨p̂, g⟩ = κ."""
    products = torch.tensor([3.0, 5.0]).double()
    nu = kl_clip_factor(products, 0.1, 1e-3)
    assert_close(0.1**2 * nu**2 * products.sum(), torch.tensor(1e-3).double())
    assert kl_clip_factor(products, 1e-3, 1e-3) == 1
    assert kl_clip_factor(0 * products, 0.1, 1e-3) == 1
