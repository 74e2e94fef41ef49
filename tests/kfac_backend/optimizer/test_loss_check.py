"""A loss that is not the likelihood's is named once, and no other is."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_backend.optimizer import KFAC, KfacPreconditioner, loss_check
from tests.kfac_backend.block_checks import randomize
from tests.random_numbers import normal

N, R, C = 24, 3, 4
LABELS = torch.arange(N) % C
SOFT, ONE_HOT = normal(N, C, seed=5).softmax(-1), F.one_hot(LABELS, C).double()
OF_POSITIONS = (torch.arange(N * R) % C).where(torch.arange(N * R) % C != 1, -100)  # two do count
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0]).double()


def softmax(f, **options):
    return F.cross_entropy(f, LABELS, **options)


def softmax_of_positions(f, **options):
    return F.cross_entropy(f.flatten(0, 1), OF_POSITIONS, **options)


def sigmoid(f, y=ONE_HOT, **options):
    return F.binary_cross_entropy_with_logits(f, y.to(f), **options)


def noisy(f):
    return -(0.8 * f.softmax(-1)[range(N), LABELS] + 0.2 / f.shape[-1]).log().mean()


def squared(y):
    return lambda f: F.mse_loss(f, y.to(f))


CASES = {
    # what K-FAC is given, the loss, and what the warning says
    "mean": ("classification", softmax, None),
    "a scaled mean": ("classification", lambda f: 1024 * softmax(f), None),
    "a sum": ("classification", lambda f: softmax(f, reduction="sum"), "a sum over 24 terms"),
    "positions": ("classification", softmax_of_positions, None),
    "a sum over positions": (
        "classification", lambda f: softmax_of_positions(f, reduction="sum"), "a sum over 54 terms",
    ),
    "smoothing": ("classification", lambda f: softmax(f, label_smoothing=0.1), None),
    "soft labels": ("classification", lambda f: F.cross_entropy(f, SOFT.to(f)), None),
    "weighted classes": (
        "classification", lambda f: softmax(f, weight=WEIGHTS.to(f)), "has class weights",
    ),
    "binary terms": ("classification", sigmoid, "Pass 'bernoulli'"),
    "squared errors": ("classification", squared(ONE_HOT), "not the gradient of a cross-entropy"),
    "probabilities": (
        "classification", lambda f: -f[range(N), LABELS].abs().log().mean(),
        "instead of probabilities",
    ),
    "noisy labels": ("noisy_classification(noise=0.2)", noisy, None),
    "noisy labels, right loss": (
        "noisy_classification(noise=0.2)", softmax, "Pass 'classification'",
    ),
    "regression": ("regression", squared(normal(N, C)), None),
    "regression on signs": ("regression", squared(2 * ONE_HOT - 1), None),
    "a cross-entropy": ("regression", softmax, "Pass 'classification'"),
    "a binary cross-entropy": ("regression", sigmoid, "Pass 'bernoulli'"),
    "bernoulli": ("bernoulli", sigmoid, None),
    "a sum of bernoulli": (
        "bernoulli", lambda f: sigmoid(f, reduction="sum"), "a sum over 24 terms",
    ),
    "not bernoulli": ("bernoulli", softmax, "likelihood 'classification', but K-FAC has"),
    "counts": ("poisson", lambda f: F.poisson_nll_loss(f, ONE_HOT.to(f)), None),
}  # fmt: skip


def messages(model, shape, likelihood, loss, steps=2, enlarge_at=None):
    """The warnings of some steps with new factors."""
    optimizer = KFAC(model, likelihood, lr=1e-4, factor_every=1, update_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            if step == enlarge_at:
                randomize(model)
            optimizer.zero_grad()
            loss(model(normal(*shape, seed=step).to(model.weight))).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_that_is_not_the_likelihoods_is_named_once(name, dtype):
    likelihood, loss, words = CASES[name]
    shape = (N, R, 3) if "positions" in name else (N, 3)
    model = randomize(nn.Linear(3, C)).to(dtype)
    found = messages(model, shape, likelihood, loss)
    assert len(found) == (words is not None), found
    assert not found or words in found[0]


@pytest.mark.parametrize("name", ["a cross-entropy", "regression on signs"])
def test_outputs_of_zero_tell_nothing_and_one_batch_that_does_is_enough(name, monkeypatch):
    """At outputs of 0 these two have gradients of one form. A comparison waits for a GPU."""
    likelihood, loss, words = CASES[name]
    compared, why_not = [], loss_check.why_not

    def recorded(*arguments):
        compared.append(why_not(*arguments))
        return compared[-1]

    monkeypatch.setattr(loss_check, "why_not", recorded)
    found = messages(randomize(nn.Linear(3, C), 0.0), (N, 3), likelihood, loss, 9, enlarge_at=4)
    assert compared[:-1] == [None] * 4 and len(compared) == 5
    assert found == ([] if words is None else compared[-1:])


@pytest.mark.parametrize("width", [4, 5], ids=["as many classes as columns", "more columns"])
@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
def test_classes_on_the_second_axis_are_refused(fisher, width):
    """The loss's gradient shows them, also where both axes have equal sizes."""
    model, y = randomize(nn.Conv2d(2, C, 1)), torch.arange(6 * 4 * width).view(6, 4, width) % C
    x = normal(6, 2, 4, width)
    for is_last in (True, False):
        layer = nn.Sequential(model, Last()) if is_last else model
        preconditioner = KfacPreconditioner(layer, "classification", fisher=fisher)
        f = layer(x)
        loss = F.cross_entropy(f.movedim(-1, 1) if is_last else f, y, label_smoothing=0.1)
        if is_last:  # the negative control
            loss.backward()
        else:
            with pytest.raises(ValueError, match=rf"\(4, 4, {width}\).*classes are second; they"):
                loss.backward()
        preconditioner.detach()


def test_one_output_of_an_ordinal_likelihood_has_no_axis_of_classes():
    """Its gradient may sum to zero over positions."""
    model, x = randomize(nn.Linear(3, 1)), normal(2, 2, 3)
    preconditioner = KfacPreconditioner(model, "ordinal(cuts=[0.0])")
    f = model(x)
    (f * torch.tensor([1.0, -1.0])[:, None]).mean().backward()
    with pytest.raises(ValueError, match="classes are second"):  # the negative control
        loss_check.check_axis(f, torch.tensor([1.0, -1.0])[:, None].expand_as(f))
    preconditioner.detach()


class Last(nn.Module):
    def forward(self, f):
        return f.movedim(1, -1)
