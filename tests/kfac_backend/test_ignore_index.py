"""Loss terms that do not count: no loss, no gradient, no curvature."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from kfac_backend.curvature import CurvaturePass
from kfac_backend.loss import IGNORED, BackwardVectors, check_targets
from kfac_backend.model.batches import Targets
from kfac_backend.options import CurvatureOptions, TargetOptions
from tests import oracles

N, R, C = 3, 4, 5


def sequences(ignored=IGNORED):
    """Outputs (N, R, C) and labels (N, R); the third position counts nowhere."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(N, R, C, dtype=torch.float64, generator=generator)
    y = torch.randint(1, C, (N, R), generator=generator)
    y[:, 2] = y[1, 0] = y[2, 3] = ignored
    return f, y


def outer(vectors, f):
    """Σ_v v_n v_nᵀ over all terms of an example, (N, R C, R C)."""
    total = torch.zeros(len(f), f[0].numel(), f[0].numel(), dtype=f.dtype)
    for v in vectors:
        total += v.flatten(1)[:, :, None] * v.flatten(1)[:, None, :]
    return total


def brute_force(f, y, block):
    """A block (C, C) for each term that counts, on the diagonal of (N, R C, R C)."""
    total = torch.zeros(N, R * C, R * C, dtype=f.dtype)
    for n in range(N):
        for r in range(R):
            if y[n, r] != IGNORED:
                part = slice(r * C, (r + 1) * C)
                total[n, part, part] = block(f[n, r], y[n, r])
    return total


def vectors_of(f, y, **options):
    return list(BackwardVectors("classification", CurvatureOptions(**options))(f, y))


@pytest.mark.parametrize("mark", [IGNORED, 0, 7])
def test_whatever_label_marks_them_is_turned_into_one(mark):
    _, y = sequences(mark)
    targets = Targets("classification", TargetOptions(ignore_index=mark))
    assert targets.may_ignore
    assert_close(targets(None, torch.zeros(N), y), sequences()[1])
    if mark != IGNORED:
        with pytest.raises(ValueError, match=f"labels -100 beside ignore_index={mark}"):
            targets(None, torch.zeros(N), sequences()[1])
    # Negative control: all count unless it is said.
    untold = Targets("classification")
    assert untold(None, torch.zeros(N), y) is y and not untold.may_ignore


def block_of(f_nr, label, fisher):
    """Λ of a loss term, or the square of its label's gradient."""
    if fisher != "empirical":
        return oracles.loss_hessian(f_nr, "classification")
    g = torch.softmax(f_nr, -1) - F.one_hot(label, C)
    return torch.outer(g, g)


@pytest.mark.parametrize("fisher", ["exact", "empirical", "mc"])
def test_vectors_square_to_the_blocks_of_the_terms_that_count(fisher):
    samples, tolerance = (6000, 0.08) if fisher == "mc" else (1, 1e-12)
    number = {"exact": (R - 1) * (C - 1), "empirical": R - 1}  # none where nothing counts
    f, y = sequences()
    expected = brute_force(f, y, partial(block_of, fisher=fisher))

    def error(y, samples):
        generator = torch.Generator().manual_seed(1)
        options = CurvatureOptions(fisher=fisher, mc_samples=samples)
        vectors = list(BackwardVectors("classification", options, generator)(f, y))
        assert (y != IGNORED).all() or len(vectors) == number.get(fisher, len(vectors))
        found = outer(vectors, f)
        return float((found - expected).norm() / expected.norm())

    assert error(y, samples) < tolerance
    # Negative controls: a handful of samples is not enough; all terms.
    assert error(y, 3) > 0.2 if fisher == "mc" else error(y.clamp(min=0), samples) > 0.1


@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
def test_examples_without_a_label(fisher):
    """One term an example; the whole batch may have none that counts."""
    f, y = torch.randn(3, 4), torch.tensor([1, IGNORED, 2])
    vectors = vectors_of(f, y, fisher=fisher)
    assert all(not v[1].any() for v in vectors) and all(v[0].any() for v in vectors)
    none = vectors_of(f, torch.full((3,), IGNORED), fisher=fisher)
    assert none and not any(v.any() for v in none)


def test_targets_that_do_not_count_are_in_order():
    f, y = sequences()
    check_targets(f, y, "classification", may_ignore=True)
    with pytest.raises(ValueError, match="Label -100 .*, pass ignore_index=-100"):
        check_targets(f, y, "classification")
    with pytest.raises(ValueError, match="Label -1 is out of range.*, pass ignore_index=-1"):
        check_targets(f, y.where(y != y[0, 0], -1), "classification", may_ignore=True)
    with pytest.raises(ValueError, match="Label 5 is out of range.*Relabel the data"):
        check_targets(f, y.where(y != y[0, 0], 5), "classification", may_ignore=True)


@pytest.mark.parametrize("likelihood", ["regression", "bernoulli"])
def test_only_labels_can_be_ignored(likelihood):
    options = CurvatureOptions(ignore_index=IGNORED)
    for make in (Targets, lambda *given: CurvaturePass(torch.nn.Linear(2, 2), *given)):
        with pytest.raises(ValueError, match="ignore_index=-100 is for the labels of .*'classif"):
            make(likelihood, options)
