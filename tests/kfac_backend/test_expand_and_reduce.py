"""The formulas against explicit loops over n, r and Λ, and against the paper's listing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kfac_backend import expand_and_reduce
from tests.kfac_backend.block_checks import MODES
from tests.oracles import Use, kfac_from_uses
from tests.random_numbers import error, normal

sizes = st.integers(1, 4)


def setting(N, R, d_in, d_out, C, seed=0):
    """Inputs, Jacobians (N, R, d_out, C), Λ (N, C, C), and the roots' vectors propagated back."""
    a = normal(N, R, d_in, seed=seed)
    jacobians, roots = normal(N, R, d_out, C, seed=seed + 1), normal(N, C, C, seed=seed + 2)
    vectors = torch.stack(
        [torch.stack([jacobians[n] @ roots[n, :, v] for n in range(N)]) for v in range(C)]
    )  # (V, N, R, d_out)
    return a, jacobians, roots @ roots.mT, vectors


def by_loops(a, jacobians, hessians, mode, ragged=False):
    """The paper's equations 7 and 10; a and Jacobians (R_n, d_out, C) of each example."""
    of_terms = [jacobians_n.mT[None] for jacobians_n in jacobians]  # (1, R_n, C, d_out)
    hessians = [[Lambda] for Lambda in hessians]
    return kfac_from_uses([Use(list(a), of_terms)], hessians, mode, ragged)


@pytest.mark.parametrize("mode", MODES)
@given(N=sizes, R=sizes, d_in=sizes, d_out=sizes, C=sizes, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_factors_are_the_papers(mode, N, R, d_in, d_out, C, seed):
    a, jacobians, hessians, vectors = setting(N, R, d_in, d_out, C, seed)
    found = expand_and_reduce.layer_factors(a, vectors, mode)
    expected = by_loops(a, jacobians, hessians, mode)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_expand_has_the_papers_other_scaling():
    a, jacobians, hessians, vectors = setting(4, 3, 5, 2, 2)
    found = expand_and_reduce.expand_factors(a, vectors, "examples")
    of_terms = [jacobians_n.mT[None] for jacobians_n in jacobians]
    hessians = [[Lambda] for Lambda in hessians]
    expected = kfac_from_uses([Use(list(a), of_terms)], hessians, "expand", scaling="examples")
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    default = expand_and_reduce.expand_factors(a, vectors)
    assert_close(found[1], 3 * default[1], rtol=1e-12, atol=0)


def test_the_modes_differ_where_positions_are_shared_and_only_there():
    for R in (1, 3):
        a, _, _, vectors = setting(4, R, 3, 2, 3)
        both = (expand_and_reduce.layer_factors(a, vectors, mode) for mode in MODES)
        errors = [error(e, r) for e, r in zip(*both, strict=True)]
        assert max(errors) < 1e-12 if R == 1 else min(errors) > 0.1


def test_graphs_scale_both_sums_by_the_root_of_their_positions():
    graph = torch.tensor([0, 3, 0, -1, 1, 0, 3])  # of three positions, one, none and two
    a, jacobians, root = normal(7, 4), normal(7, 3, 2, seed=1), normal(2, 2, seed=2)
    vectors = torch.stack([jacobians @ column for column in root.mT])  # of one Λ for all
    found = expand_and_reduce.reduce_factors_of_graphs(a, vectors, graph, 4)
    of_graphs = [(a[graph == n], jacobians[graph == n]) for n in range(4)]
    expected = by_loops(*zip(*of_graphs, strict=True), 4 * [root @ root.mT], "reduce", True)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


def by_the_listing(in_data, out_grads, approximation):
    """The paper's listing 1 for one mini-batch and one layer, one vector for each example."""
    M, R, P_in = in_data.shape
    if approximation == "expand":
        in_data = in_data.reshape(M * R, P_in) / math.sqrt(R)
        out_grads = out_grads.reshape(M * R, -1)
    else:
        in_data, out_grads = in_data.mean(dim=1), out_grads.sum(dim=1)
    return out_grads.T @ out_grads, in_data.T @ in_data / M


@pytest.mark.parametrize("mode", MODES)
def test_factors_are_the_papers_listing(mode):
    a, _, _, vectors = setting(4, 3, 5, 2, 2)
    for vector in vectors:
        found = expand_and_reduce.layer_factors(a, vector[None], mode)
        assert_close(found, by_the_listing(a, vector, mode), rtol=1e-10, atol=1e-12)


# Where the modes are exact: the paper's lemmas 3 and 5. Λ is the identity; its columns are the
# vectors, so that b of each example, term and vector is the Jacobian b itself.


def exact_block(a, jacobians):
    """Σ_n Σ_t J_nt J_ntᵀ with J_nt = Σ_r b_ntr ⊗ a_nr, by loops.

    a is (N, R, d_in), and the Jacobians are (N, T, R, d_out, C) for T loss terms.
    """
    N, T, R, d_out, _ = jacobians.shape
    block = a.new_zeros(d_out * a.shape[-1], d_out * a.shape[-1])
    for n in range(N):
        for t in range(T):
            J = sum(torch.kron(jacobians[n, t, r], a[n, r, :, None]) for r in range(R))
            block += J @ J.mT
    return block


def error_of(mode, a, jacobians):
    """The relative error of a mode's block B ⊗ A."""
    vectors = jacobians.permute(1, 4, 0, 2, 3).flatten(0, 1)  # (T·C, N, R, d_out)
    return error(
        torch.kron(*expand_and_reduce.layer_factors(a, vectors, mode)), exact_block(a, jacobians)
    )


def turned(root, *sizes):
    """The root times a rotation of its own for each index: all products with themselves agree."""
    return root @ torch.linalg.qr(normal(*sizes, root.shape[-1], root.shape[-1], seed=7)).Q


def test_expand_is_exact_where_terms_are_apart_and_have_one_curvature():
    """Lemma 3: b_nrm = 0 for r ≠ m, and b_nmm Λ b_nmmᵀ is one matrix."""
    N, R, d_out, C = 3, 4, 2, 3
    a, jacobians = normal(N, R, 5), torch.zeros(N, R, R, d_out, C, dtype=torch.float64)
    each = turned(normal(d_out, C, seed=1), N, R)
    for r in range(R):
        jacobians[:, r, r] = each[:, r]
    assert error_of("expand", a, jacobians) < 1e-12 and error_of("reduce", a, jacobians) > 0.1
    # Each condition is needed: another curvature for one example; a term that reaches another row.
    other = jacobians.clone()
    other[0] *= 3
    assert error_of("expand", a, other) > 0.1
    other = jacobians.clone()
    other[:, 0, 1] = jacobians[:, 0, 0]
    assert error_of("expand", a, other) > 0.01


def test_reduce_is_exact_where_positions_have_one_jacobian_and_examples_one_curvature():
    """Lemma 5: b_nr = D_n for all r, and b̂_n Λ b̂_nᵀ is one matrix."""
    N, R, d_out, C = 3, 4, 2, 3
    a = normal(N, R, 5)
    each = turned(normal(d_out, C, seed=1), N)
    jacobians = each[:, None, None].expand(N, 1, R, d_out, C).clone()
    assert error_of("reduce", a, jacobians) < 1e-12 and error_of("expand", a, jacobians) > 0.1
    # A weighted sum over positions is linear, and not enough, as the paper says.
    weighted = jacobians * torch.arange(1.0, R + 1)[:, None, None]
    assert error_of("reduce", a, weighted) > 0.01
    other = jacobians.clone()
    other[0] *= 3
    assert error_of("reduce", a, other) > 0.1


@pytest.mark.parametrize("mode", MODES)
def test_trivial_cases_are_exact(mode):
    """One position of one example; one position and the same input for all examples."""
    jacobians = normal(4, 1, 1, 2, 3, seed=1)
    assert error_of(mode, normal(1, 1, 5), jacobians[:1]) < 1e-12
    assert error_of(mode, normal(1, 1, 5).expand(4, 1, 5), jacobians) < 1e-12
    assert error_of(mode, normal(4, 1, 5), jacobians) > 0.1  # control
