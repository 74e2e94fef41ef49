"""The formulas against explicit loops over n, r and Λ, as the paper writes them."""

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


def test_the_modes_differ_where_positions_are_shared_and_only_there():
    for R in (1, 3):
        a, _, _, vectors = setting(4, R, 3, 2, 3)
        expand, reduce = (
            expand_and_reduce.expand_factors(a, vectors),
            expand_and_reduce.reduce_factors(a, vectors),
        )
        errors = [error(e, r) for e, r in zip(expand, reduce, strict=True)]
        assert max(errors) < 1e-12 if R == 1 else min(errors) > 0.1


def test_graphs_scale_both_sums_by_the_root_of_their_positions():
    graph = torch.tensor([0, 3, 0, -1, 1, 0, 3])  # of three positions, one, none and two
    a, jacobians, root = normal(7, 4), normal(7, 3, 2, seed=1), normal(2, 2, seed=2)
    vectors = torch.stack([jacobians @ column for column in root.mT])  # of one Λ for all
    found = expand_and_reduce.reduce_factors_of_graphs(a, vectors, graph, 4)
    of_graphs = [(a[graph == n], jacobians[graph == n]) for n in range(4)]
    expected = by_loops(*zip(*of_graphs, strict=True), 4 * [root @ root.mT], "reduce", True)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
