"""Vectors to propagate back, terms that do not count, and what is said of wrong targets."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from kfac_backend import likelihoods
from kfac_backend.curvature import CurvaturePass
from kfac_backend.engine.task import Task
from kfac_backend.fisher import DrawnLabels
from kfac_backend.likelihoods import IGNORED, check_targets, likelihood_of, loss_sum
from kfac_backend.options import CurvatureOptions, TargetOptions
from tests import oracles

LIKELIHOODS = ["classification", "regression", "bernoulli"]
N, R, C = 3, 4, 5


def outer(vectors):
    """Σ_v v_n v_nᵀ of vectors (N, ..., C), over all terms of an example."""
    return sum(v.flatten(1)[:, :, None] * v.flatten(1)[:, None, :] for v in vectors)


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
    (drawn,) = DrawnLabels().vectors(
        likelihood_of("classification"),
        f.expand(N, C),
        torch.zeros(N).long(),
        torch.Generator().manual_seed(0),
    )
    counts = (p - drawn).round().sum(0)  # p - e_label = p less one there
    assert_close(drawn.sum(1), torch.zeros(N).double(), rtol=0, atol=1e-12)
    assert counts.sum() == N and not counts[p == 0].any()

    def chi_square(q):
        positive = q > 0
        return float(((counts - N * q).square()[positive] / (N * q[positive])).sum())

    assert chi_square(p) < 2 * C  # its mean is the number of classes less one
    # Negative control: probabilities that are off by a tenth.
    assert chi_square(torch.softmax(0.9 * f, -1)) > 4 * C


@pytest.mark.parametrize(
    ("f", "y", "likelihood", "error", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 3]), "classification", ValueError, "Label 3 is out"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "classification", TypeError, "y.long()"),
        (torch.zeros(2, 3), torch.tensor([[0], [1]]), "classification", ValueError, "(2, 1)"),
        (torch.zeros(2, 1), torch.tensor([0, 0]), "classification", ValueError, "bernoulli"),
        (
            *(torch.zeros(2, 5, 4, 3), torch.zeros(2, 4, 3).long(), "classification", ValueError),
            "Classes must come last, (2, 4, 3, 5). Return f.movedim(1, -1)",
        ),
        (torch.zeros(2, 1), torch.zeros(2, 3), "regression", ValueError, "same shape."),
        (torch.zeros(2, 1), torch.zeros(2), "regression", ValueError, "last axis: y[..., None]."),
        (torch.zeros(1, 1), torch.tensor([[torch.nan]]), "regression", ValueError, "NaN"),
        (torch.zeros(1, 1), torch.tensor([[1j]]), "regression", TypeError, "complex"),
        (torch.zeros(1, 1), torch.tensor([[2.0]]), "bernoulli", ValueError, "[0, 1]"),
        (torch.zeros(3), torch.zeros(3), "regression", ValueError, "omit squeeze(-1)"),
        ({"logits": 1}, torch.zeros(3), "regression", TypeError, "dict"),
    ],
)
def test_wrong_targets_are_named(f, y, likelihood, error, message):
    with pytest.raises(error) as raised:
        check_targets(f, y, likelihood_of(likelihood))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_sums_of_losses_in_half_precision(likelihood):
    f = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.zeros(4000).long() if likelihood == "classification" else torch.zeros(4000, 3)
    likelihood = likelihood_of(likelihood)
    assert_close(loss_sum(f, y, likelihood).double(), loss_sum(f.double(), y, likelihood))


def sequences(ignored=IGNORED):
    """Outputs (N, R, C) and labels (N, R); the third position counts nowhere."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(N, R, C, dtype=torch.float64, generator=generator)
    y = torch.randint(1, C, (N, R), generator=generator)
    y[:, 2] = y[1, 0] = y[2, 3] = ignored
    return f, y


def brute_force(f, y, fisher):
    """A block (C, C) for each term that counts, on the diagonal of (N, R C, R C)."""
    total = torch.zeros(N, R, C, R, C, dtype=f.dtype)
    for n, r in (y != IGNORED).nonzero().tolist():
        total[n, r, :, r] = oracles.loss_hessian(f[n, r], "classification")
        if fisher == "empirical":
            g = torch.softmax(f[n, r], -1) - F.one_hot(y[n, r], C)
            total[n, r, :, r] = torch.outer(g, g)
    return total.view(N, R * C, R * C)


@pytest.mark.parametrize("fisher", ["exact", "empirical", "mc", "random_signs"])
def test_vectors_square_to_the_blocks_of_the_terms_that_count(fisher):
    """And products of an example's different terms are zero."""
    draws = fisher in ("mc", "random_signs")
    samples, tolerance = (6000, 0.08) if draws else (1, 1e-12)
    number = {"exact": (R - 1) * (C - 1), "empirical": R - 1}  # none where nothing counts
    f, y = sequences()
    expected = brute_force(f, y, fisher)

    def error(y, samples):
        generator = torch.Generator().manual_seed(1)
        made = CurvatureOptions(fisher=fisher, mc_samples=samples).make_fisher()
        vectors = list(made.vectors(likelihood_of("classification"), f, y, generator))
        assert (y != IGNORED).all() or len(vectors) == number.get(fisher, len(vectors))
        return float((outer(vectors) - expected).norm() / expected.norm())

    assert error(y, samples) < tolerance
    # Negative controls: a handful of samples is not enough; all terms.
    assert error(y, 3) > 0.2 if draws else error(y.clamp(min=0), samples) > 0.1


@pytest.mark.parametrize("mark", [IGNORED, 0, 7])
def test_whatever_label_marks_them_is_turned_into_one(mark):
    _, y = sequences(mark)
    task = Task("classification", TargetOptions(ignore_index=mark))
    assert task.may_ignore
    assert_close(task.targets(None, torch.zeros(N), y), sequences()[1])
    if mark != IGNORED:
        with pytest.raises(ValueError, match=f"labels are -100 although ignore_index={mark}"):
            task.targets(None, torch.zeros(N), sequences()[1])
    # Negative control: all count unless it is said.
    plain = Task("classification")
    assert plain.targets(None, torch.zeros(N), y) is y and not plain.may_ignore


@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
def test_examples_without_a_label(fisher):
    """One term an example; the whole batch may have none that counts."""
    f, y = torch.randn(3, 4), torch.tensor([1, IGNORED, 2])
    made = CurvatureOptions(fisher=fisher).make_fisher()
    likelihood = likelihood_of("classification")
    vectors = list(made.vectors(likelihood, f, y))
    assert all(not v[1].any() for v in vectors) and all(v[0].any() for v in vectors)
    none = list(made.vectors(likelihood, f, torch.full((3,), IGNORED)))
    assert none and not any(v.any() for v in none)


def test_targets_that_do_not_count_are_in_order():
    (f, y), likelihood = sequences(), likelihood_of("classification")
    check_targets(f, y, likelihood, may_ignore=True)
    with pytest.raises(ValueError, match="Label -100 .*, pass ignore_index=-100"):
        check_targets(f, y, likelihood)
    with pytest.raises(ValueError, match="Label -1 is out of range.*, pass ignore_index=-1"):
        check_targets(f, y.where(y != y[0, 0], -1), likelihood, may_ignore=True)
    with pytest.raises(ValueError, match="Label 5 is out of range.*Relabel the data"):
        check_targets(f, y.where(y != y[0, 0], 5), likelihood, may_ignore=True)


@pytest.mark.parametrize("likelihood", ["regression", "bernoulli"])
def test_only_labels_can_be_ignored(likelihood):
    options = CurvatureOptions(ignore_index=IGNORED)
    for make in (Task, lambda *given: CurvaturePass(torch.nn.Linear(2, 2), *given)):
        with pytest.raises(ValueError, match="ignore_index=-100 needs the labels of .*'classif"):
            make(likelihood, options)
