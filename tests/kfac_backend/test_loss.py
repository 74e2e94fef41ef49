"""Roots of the loss Hessian, Monte Carlo and label gradients, and what is said of wrong targets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kfac_backend import likelihoods
from kfac_backend.likelihoods import likelihood_of
from kfac_backend.loss import (
    BackwardVectors,
    check_targets,
    loss_sum,
)
from kfac_backend.options import CurvatureOptions
from tests import oracles

LIKELIHOODS = ["classification", "regression", "bernoulli"]


def outer(vectors):
    """Σ_v v_n v_nᵀ of vectors (N, C), as (N, C, C)."""
    return sum(v[:, :, None] * v[:, None, :] for v in vectors)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@settings(max_examples=20, deadline=None)
@given(C=st.integers(2, 7), scale=st.sampled_from([0.0, 1.0, 30.0]), seed=st.integers(0, 99))
def test_root_squares_to_the_hessian(likelihood, C, scale, seed):
    f = scale * torch.randn(
        3, C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    expected = torch.stack([oracles.loss_hessian(f_n, likelihood) for f_n in f])
    assert_close(outer(likelihood_of(likelihood).root(f, f)), expected, rtol=1e-10, atol=1e-14)


def test_categorical_root_has_one_column_less_than_classes():
    assert len(list(likelihood_of("classification").root(torch.randn(2, 5), None))) == 4


def test_categorical_root_is_finite_where_one_class_takes_all():
    f = torch.tensor([[1000.0, 0.0, -1000.0], [0.0, 0.0, 0.0]])
    columns = list(likelihood_of("classification").root(f, None))
    assert all(torch.isfinite(column).all() for column in columns)
    assert_close(outer(columns)[0], torch.zeros(3, 3))


@pytest.mark.parametrize("C", [50, 48])
def test_labels_of_many_classes_have_their_probabilities(C, monkeypatch):
    """Blocks of eight classes, the last of which may be cut; seven rows at a time."""
    monkeypatch.setattr(likelihoods, "MANY_CLASSES", 10)
    monkeypatch.setattr(likelihoods, "CLASSES_OF_BLOCK", 8)
    monkeypatch.setattr(likelihoods, "LARGEST_DRAW", 7 * C)
    f = torch.randn(C, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    f[[0, 3, 17, C - 1]] = -torch.inf  # never drawn
    N = 40_000
    p = torch.softmax(f, -1)
    (drawn,) = BackwardVectors(
        "classification", CurvatureOptions(fisher="mc"), torch.Generator().manual_seed(0)
    )(f.expand(N, C), torch.zeros(N).long())
    counts = (p - drawn).round().sum(0)  # p - e_label = p less one there
    assert_close(drawn.sum(1), torch.zeros(N).double(), rtol=0, atol=1e-12)
    assert counts.sum() == N and not counts[p == 0].any()

    def chi_square(q):
        positive = q > 0
        return float(((counts - N * q).square()[positive] / (N * q[positive])).sum())

    assert chi_square(p) < 2 * C  # its mean is the number of classes less one
    # Negative control: probabilities that are off by a tenth.
    assert chi_square(torch.softmax(0.9 * f, -1)) > 4 * C


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_monte_carlo_converges_to_the_hessian(likelihood):
    f = torch.randn(1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = oracles.loss_hessian(f[0], likelihood)

    def error(examples, seed, samples=4):
        """Of the mean over examples that are all alike."""
        generator = torch.Generator().manual_seed(seed)
        options = CurvatureOptions(fisher="mc", mc_samples=samples)
        many = f.expand(examples, 3)
        y = torch.zeros(examples).long() if likelihood == "classification" else many
        found = outer(BackwardVectors(likelihood, options, generator)(many, y)).mean(0)
        return float((found - expected).norm() / expected.norm())

    assert error(5_000, seed=0) < 0.05
    # Negative control: a handful of samples is not enough.
    assert max(error(1, seed) for seed in range(5)) > 0.1


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_label_gradient_is_the_gradient_of_the_loss(likelihood):
    f = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 2, 1, 1]) if likelihood == "classification" else torch.rand(4, 3)
    (expected,) = torch.autograd.grad(loss_sum(f, y, likelihood), f)
    (vector,) = BackwardVectors(likelihood, CurvatureOptions(fisher="empirical"))(f, y)
    assert_close(vector, expected)


def test_loss_terms_of_one_example_are_never_mixed():
    f = torch.randn(2, 3, 4, dtype=torch.float64)
    vectors = list(BackwardVectors("regression")(f, f))
    assert len(vectors) == 3 * 4
    assert all((v.abs().sum(-1) > 0).sum(1).tolist() == [1, 1] for v in vectors)


@pytest.mark.parametrize(
    ("f", "y", "likelihood", "error", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 3]), "classification", ValueError, "Label 3 is out"),
        (torch.zeros(2, 3), torch.tensor([-100, 0]), "classification", ValueError, "Label -100"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "classification", TypeError, "y.long()"),
        (torch.zeros(2, 3), torch.tensor([[0], [1]]), "classification", ValueError, "(2, 1)"),
        (torch.zeros(2, 1), torch.tensor([0, 0]), "classification", ValueError, "bernoulli"),
        (
            *(torch.zeros(2, 5, 4, 3), torch.zeros(2, 4, 3).long(), "classification", ValueError),
            "classes come last, (2, 4, 3, 5). Return f.movedim(1, -1)",
        ),
        (
            *(torch.zeros(2, 5, 1), torch.zeros(2, 1).long(), "classification", ValueError),
            "classes come last, (2, 1, 5)",
        ),
        (torch.zeros(2, 1), torch.zeros(2, 3), "regression", ValueError, "same shape."),
        (torch.zeros(2, 1), torch.zeros(2), "regression", ValueError, "last axis: y[..., None]."),
        (torch.zeros(1, 1), torch.tensor([[torch.nan]]), "regression", ValueError, "NaN"),
        (torch.zeros(1, 1), torch.tensor([[1j]]), "regression", TypeError, "complex"),
        (torch.zeros(1, 1), torch.tensor([[1j]]), "bernoulli", TypeError, "complex"),
        (torch.zeros(1, 1), torch.tensor([[2.0]]), "bernoulli", ValueError, "[0, 1]"),
        (torch.zeros(3), torch.zeros(3), "regression", ValueError, "leave out squeeze(-1)"),
        ({"logits": 1}, torch.zeros(3), "regression", TypeError, "dict"),
    ],
)
def test_wrong_targets_are_named(f, y, likelihood, error, message):
    with pytest.raises(error) as raised:
        check_targets(f, y, likelihood)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_sums_of_losses_in_half_precision(likelihood):
    f = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.zeros(4000).long() if likelihood == "classification" else torch.zeros(4000, 3)
    assert_close(loss_sum(f, y, likelihood).double(), loss_sum(f.double(), y, likelihood))
