"""Each likelihood against its definition: densities, Λ, draws and moments by brute force, float64.

`CASES` says of each: the number of outputs C, and its density by other means than ours, as a
function of outputs and targets; and possible targets with which an expectation over y is taken.
"""

import math
import pickle
import re
from copy import deepcopy
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch.testing import assert_close

from kfac_backend.likelihoods import (
    IGNORED,
    KnownNoise,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Regression,
    StudentT,
    Weighted,
    likelihood_of,
)

CUTS = (-1.0, 0.5, 2.0)
F1 = torch.tensor([[0.3], [-0.7], [1.1]], dtype=torch.float64)
F2 = torch.tensor([[0.3, -0.4], [-0.7, 0.2], [1.1, -1.0]], dtype=torch.float64)
COUNTS = torch.arange(400, dtype=torch.float64)[:, None]
REALS = torch.linspace(-200, 200, 400_001, dtype=torch.float64)[:, None]
"""Steps of 0.001, dense and wide enough for sums over them to be integrals to 1e-6."""


def hessian(f, y, likelihood):
    """∇²ℓ of each term, by autograd of the loss."""
    one = torch.func.hessian(lambda f_t, y_t: likelihood.loss(f_t[None], y_t[None]))
    return torch.stack([one(f_t, y_t) for f_t, y_t in zip(f, y, strict=True)])


def squared(columns):
    """Σ s sᵀ of columns (N, C), (N, C, C)."""
    return sum(s[:, :, None] * s[:, None, :] for s in columns)


# Text -> outputs, all targets that an expectation runs over with their distance, and the density
# p(y|f_n) of those targets by scipy.
FISHERS = {
    "poisson": (F1, COUNTS, 1.0, lambda f: stats.poisson(math.exp(f[0])).pmf),
    "negative_binomial(r=1.7)": (
        *(F1, COUNTS, 1.0),
        lambda f: stats.nbinom(1.7, 1.7 / (1.7 + math.exp(f[0]))).pmf,
    ),
    "student_t(df=5.0, scale=0.7)": (F1, REALS, 1e-3, lambda f: stats.t(5, f[0], 0.7).pdf),
    "heteroscedastic": (F2, REALS, 1e-3, lambda f: stats.norm(f[0], math.exp(f[1] / 2)).pdf),
    "heteroscedastic(noise=0.7, strength=0.5)": (
        *(F2, REALS, 1e-3),
        lambda f: stats.norm(f[0], 0.7 * math.exp(f[1] / 4)).pdf,
    ),
    "ordinal(cuts=[-1.0, 0.5, 2.0])": (
        *(F1, torch.arange(4), 1.0),
        lambda f: lambda y: np.diff(stats.logistic.cdf([-np.inf, *CUTS, np.inf], f[0]))[y],
    ),
    "noisy_classification(noise=0.3)": (F2, torch.arange(2), 1.0, lambda f: _noisy(f, 0.3)),
    "noisy_classification(noise=0.0)": (F2, torch.arange(2), 1.0, lambda f: _noisy(f, 0.0)),
}


def _noisy(f, noise):
    """Probabilities of labels of which a share was drawn from all classes."""
    return lambda y: (1 - noise) * special.softmax(f)[y] + noise / len(f)


@pytest.mark.parametrize("text", FISHERS)
def test_fisher_information_and_loss_are_those_of_the_density(text):
    """Λ = E[∇ℓ ∇ℓᵀ] and ℓ = −log p, over all targets, with the densities of scipy."""
    f, targets, step, density = FISHERS[text]
    likelihood = likelihood_of(text)
    for f_n in f:
        p = torch.from_numpy(np.asarray(density(f_n.tolist())(targets.flatten().numpy())))
        many = f_n.expand(len(targets), -1)
        losses = likelihood.losses(many, targets).flatten()
        some = p > 1e-200
        assert_close(losses[some], -p[some].log(), rtol=1e-6, atol=1e-9)
        g = likelihood.gradient(many, targets)
        fisher = step * torch.einsum("y,yc,yd->cd", p, g, g)
        (found,) = squared(likelihood.root(f_n[None], targets[:1]))
        assert_close(found, fisher, rtol=2e-5, atol=1e-7)
        # Negative control: other outputs have another Λ, except where it is constant.
        if "student" not in text:
            (other,) = squared(likelihood.root(2 * f_n[None] + 2, targets[:1]))
            assert (other - fisher).norm() > 0.02 * fisher.norm()


HESSIANS = {
    "regression": (F2, torch.randn(3, 2).double()),
    "bernoulli": (F2, torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.3, 0.0]]).double()),
    "classification": (F2, torch.tensor([0, 1, 1])),
    "regression_per_output(noise=[0.5, 2.0])": (F2, torch.randn(3, 2).double()),
    "known_noise": (F1, torch.tensor([[0.1, 0.5], [1.0, 2.0], [-1.0, 1.5]]).double()),
    "poisson": (F1, torch.tensor([[0.0], [2.0], [5.0]]).double()),
    "classification(weights=[0.5, 2.0])": (F2, torch.tensor([0, 1, 1])),
    "classification(smoothing=0.2)": (F2, torch.tensor([0, 1, 1])),
    "classification(weights=[0.5, 2.0], smoothing=0.2)": (F2, torch.tensor([0, 1, 1])),
    "weibull(shape=1.7)": (F1, torch.tensor([[0.4, 1.0], [2.0, 0.0], [1.5, 1.0]]).double()),
    "weighted(of='classification')": (F2, torch.tensor([[0.0, 0.3], [1.0, 2.0], [1.0, 0.0]])),
    "weighted(of='known_noise')": (
        *(F1, torch.tensor([[0.1, 0.5, 0.4], [1.0, 2.0, 3.0], [-1.0, 1.5, 1.0]]).double()),
    ),
}
"""Text -> outputs and targets."""


@pytest.mark.parametrize("text", HESSIANS)
def test_root_is_that_of_the_hessian(text):
    f, y = HESSIANS[text]
    likelihood = likelihood_of(text)
    likelihood.check(f, y)
    expected = hessian(f, y, likelihood)
    assert_close(squared(likelihood.root(f, y)), expected)
    # Negative control: without its weights it is another.
    name = likelihood.name if likelihood.options else "regression"
    plain = likelihood_of("regression" if name == "weighted" else name)
    found = squared(plain.root(f, y))
    same = text == "regression" or likelihood.options.keys() == {"smoothing"}
    assert ((found - expected).norm() < 0.1 * expected.norm()) == same
    # The gradient is the loss's own.
    (g,) = torch.autograd.grad(likelihood.loss(at := f.clone().requires_grad_(), y), at)
    assert_close(likelihood.gradient(f, y), g)


def test_weights_and_smoothing_are_those_of_pytorch():
    y, w = torch.tensor([0, 1, 1]), torch.tensor([0.5, 2.0]).double()
    loss = torch.nn.CrossEntropyLoss(w, reduction="sum", label_smoothing=0.2)
    text = "classification(weights=[0.5, 2.0], smoothing=0.2)"
    assert_close(likelihood_of(text).loss(F2, y), loss(F2, y))


NOISY = "noisy_classification(noise=0.3)"


def test_noisy_labels_weights_masks_and_derivatives():
    """Of tokens (N, R, C): the loss by hand, labels that do not count, weights, d/dε."""
    f = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    y = torch.tensor([[0, 3, -100], [2, -100, 1]])
    likelihood, p = likelihood_of(NOISY), torch.softmax(f, -1)
    label = y.clamp(min=0)[..., None]
    expected = -(0.7 * p.gather(-1, label) + 0.3 / 4).log() * (y != -100)[..., None]
    assert_close(likelihood.losses(f, y), expected)
    assert (likelihood.losses(f, y) - likelihood_of("classification").losses(f, y)).norm() > 0.1
    w = [0.5, 2.0, 1.0, 3.0]
    weighted = likelihood_of(f"noisy_classification(noise=0.3, weights={w})")
    assert_close(weighted.losses(f, y), expected * torch.tensor(w).double()[label])
    w_n = torch.tensor(w).double()[label].squeeze(-1)[0, :2]
    of_weights, plain = (squared(of.root(f[0, :2], y[0, :2])) for of in (weighted, likelihood))
    assert_close(of_weights, w_n[:, None, None] * plain)
    # The loss is bounded by log(C/ε), also where p underflows.
    sure = torch.tensor([[0.0, 400.0]])
    assert likelihood.loss(sure, torch.tensor([0])).item() == pytest.approx(math.log(2 / 0.3))
    # Both terms of the evidence can be differentiated in ε.
    for number in (lambda of: of.loss(f, y), lambda of: squared(of.root(F2, None))[0, 0, 0]):

        def at(noise, number=number):
            return number(likelihood.with_parameters({"noise": noise}))

        noise = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        (derivative,) = torch.autograd.grad(at(noise), noise)
        assert_close(derivative, (at(noise + 1e-6) - at(noise - 1e-6)).detach() / 2e-6)


@pytest.mark.parametrize("text", ["classification", NOISY, "ordinal(cuts=[0.0])"])
def test_a_label_that_does_not_count_costs_nothing(text):
    f, y = F1 if "ordinal" in text else F2, torch.tensor([0, IGNORED, 1])
    losses = likelihood_of(text).losses(f, y).flatten()
    assert losses[1] == 0 < losses[[0, 2]].min()


def test_weights_count_examples_several_times():
    """Integer weights are copies, for the loss, its gradient and Λ; and 0 leaves an example out."""
    y, w = torch.tensor([[0.4], [2.0], [3.0]]).double(), torch.tensor([2, 0, 3])
    found = likelihood_of("weighted(of='negative_binomial(r=2.0)')")
    plain = likelihood_of("negative_binomial(r=2.0)")
    weighted = torch.cat([y, w[:, None]], 1)
    copies = F1.repeat_interleave(w, 0), y.repeat_interleave(w, 0)
    assert_close(found.loss(F1, weighted), plain.loss(*copies))
    assert (found.loss(F1, weighted) - plain.loss(F1, y)).abs() > 0.1
    assert_close(squared(found.root(F1, weighted)).sum(0), squared(plain.root(*copies)).sum(0))
    assert_close(found.gradient(F1, weighted).sum(0), plain.gradient(*copies).sum(0))


def test_censored_times_have_the_probability_of_what_is_beyond():
    """ℓ, log score and ranks of Weibull's times by scipy, as Gumbel's distribution of log t."""
    t, d = torch.tensor([[[0.4], [2.0], [1.5]], [[1.0], [0.0], [1.0]]]).double()
    y, likelihood = torch.cat([t, d], 1), likelihood_of("weibull(shape=1.7)")
    of = stats.gumbel_l(F1.numpy(), 1 / 1.7)
    log_t = t.log().numpy()
    expected = torch.from_numpy(np.where(d == 1, of.logpdf(log_t), of.logsf(log_t)))
    assert_close(likelihood.losses(F1, y), -expected)
    mean, noise, _ = likelihood.moments(F1, torch.zeros_like(F1), torch.ones(()))
    assert_close(mean, torch.from_numpy(of.mean()))
    assert_close(noise, torch.from_numpy(of.var()))
    assert_close(likelihood.log_score(y, mean, noise), expected)
    low, high = likelihood.ranks(y, mean, noise)
    assert_close(low, torch.from_numpy(of.cdf(log_t)))
    assert_close(high, torch.where(d == 1, low, 1.0))
    # Negative control: as if the second time were an event's.
    events = torch.cat([t, torch.ones_like(t)], 1)
    assert (likelihood.losses(F1, events) - likelihood.losses(F1, y))[1].abs() > 0.1


@pytest.mark.parametrize("text", [*FISHERS, *HESSIANS])
def test_drawn_gradients_square_to_lambda(text):
    f, y = (FISHERS[text][0], None) if text in FISHERS else HESSIANS[text]
    likelihood, S = likelihood_of(text), 40_000
    n = 1
    many = f[n].expand(S, -1)
    labels = torch.zeros(S).long() if y is None else y[n].expand(S, *y[n].shape)
    generator = torch.Generator().manual_seed(0)
    lam = squared(likelihood.root(many[:1], labels[:1]))[0]
    for draw in (likelihood.drawn_gradient, likelihood.drawn_root):
        g = draw(many, labels, generator)
        assert (g.T @ g / S - lam).norm() < 0.05 * lam.norm()
        worst = max((torch.outer(v, v) - lam).norm() / lam.norm() for v in g[:20])
        # One is not enough, but for random signs of one output, each of which is exact.
        assert worst < 1e-6 if lam.numel() == 1 else worst > 0.2


MOMENTS = {
    "regression_per_output(noise=[0.5, 2.0])": (F2, 0.8),
    "heteroscedastic": (F2, 1.0),
    "heteroscedastic(noise=0.7, strength=0.5)": (F2, 1.0),
    "poisson": (F1, 1.0),
    "negative_binomial(r=1.7)": (F1, 1.0),
    "student_t(df=5.0, scale=0.7)": (F1, 1.0),
    "weibull(shape=1.7)": (F1, 1.0),
}


@pytest.mark.parametrize("text", MOMENTS)
def test_moments_are_those_of_the_mixture(text):
    """Over a Gauss-Hermite rule for each output; those at fixed outputs are `moments` at 0."""
    f, sigma = MOMENTS[text]
    likelihood, variance = likelihood_of(text), torch.full_like(f, 0.3)
    z, w = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(40))
    w = (w / w.sum())[:, None, None]
    outputs = f + variance.sqrt() * z[:, None, None]
    one = torch.tensor(sigma).double()
    mean, noise, _ = likelihood.moments(outputs, torch.zeros_like(outputs), one)
    expected = (w * mean).sum(0), (w * noise).sum(0)
    spread = (w * (mean - expected[0]).square()).sum(0)
    found = likelihood.moments(f, variance, one)
    for a, b in zip(found, (*expected, spread), strict=True):
        assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert found[2].min() > 0.1  # the outputs' variance counts


@pytest.mark.parametrize(
    "text", ["poisson", "negative_binomial(r=1.7)", "student_t(df=5.0, scale=0.7)"]
)
def test_moments_at_fixed_outputs_and_densities_are_those_of_scipy(text):
    f, targets, step, density = FISHERS[text]
    likelihood = likelihood_of(text)
    for f_n in f:
        y = targets.flatten()
        p = step * torch.from_numpy(density(f_n.tolist())(y.numpy()))
        mean, noise, none = likelihood.moments(f_n, torch.zeros_like(f_n), torch.ones(()).double())
        assert_close(mean[0], (p * y).sum(), rtol=1e-6, atol=1e-9)
        assert_close(noise[0], (p * (y - mean).square()).sum(), rtol=1e-4, atol=1e-9)
        assert none.item() == 0
        # The density of a prediction has its moments, also with a wider variance.
        wide = 1.5 * noise
        q = step * likelihood.log_density(y, mean, wide).exp()
        assert_close(q.sum(), torch.ones(()).double(), rtol=1e-5, atol=1e-9)
        assert_close((q * (y - mean).square()).sum(), wide[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("r", [1.7, 1e5])
def test_counts_in_float32_are_as_exact_as_that(r):
    """For large r the constants nearly cancel; in float32 the loss was wrong by a per cent."""
    likelihood = likelihood_of(f"negative_binomial(r={r})")
    y = torch.arange(0.0, 30)[:, None]
    f = torch.full_like(y, 2.0)
    expected = -stats.nbinom(r, r / (r + math.exp(2.0))).logpmf(y.numpy()).sum()
    assert likelihood.loss(f, y).item() == pytest.approx(expected, rel=2e-6)


class Cosine(Likelihood):
    """A likelihood of one's own, whose loss is not convex: 1 − cos(f₁ − y) + (f₁ − f₀)²/2."""

    name = "cosine"

    def target_shape(self, f):
        return *f.shape[:-1], 1

    def losses(self, f, y):
        return 1 - (f[..., 1:] - y).cos() + 0.5 * (f[..., 1:] - f[..., :1]).square()


def test_own_likelihood_has_the_hessian_without_its_negative_part():
    likelihood = likelihood_of("cosine")
    y = torch.tensor([[0.5], [-3.3], [1.0]]).double()
    expected = hessian(F2, y, likelihood)
    values, vectors = torch.linalg.eigh(expected)
    assert values.min() < -0.1  # else there is nothing to leave out
    clipped = vectors @ torch.diag_embed(values.clamp(min=0)) @ vectors.mT
    found = squared(likelihood.root(F2, y))
    assert_close(found, clipped)
    assert (found - expected).norm() > 0.1
    assert torch.linalg.eigvalsh(found).min() > -1e-12
    many, labels = F2[1].repeat(40_000, 1), y[1].repeat(40_000, 1)
    g = likelihood.drawn_gradient(many, labels, torch.Generator().manual_seed(0))
    assert (g.T @ g / len(g) - found[1]).norm() < 0.05 * found[1].norm()


@pytest.mark.parametrize("text", [*FISHERS, *HESSIANS])
def test_likelihoods_are_their_text(text):
    likelihood = likelihood_of(text)
    assert str(likelihood) == text
    again = pickle.loads(pickle.dumps(deepcopy(likelihood)))
    assert again == likelihood and hash(again) == hash(likelihood)


def test_likelihoods_are_equal_if_their_options_are():
    """Not if their texts are, and a number that was not given is not its default."""
    likelihood = StudentT(df=4)
    assert likelihood == likelihood_of("student_t( df = 4.0 )") != StudentT(df=4.5)
    assert StudentT() != StudentT(df=4.0, scale=1.0)
    assert Regression() != KnownNoise() and Ordinal([0, 1]) == Ordinal(np.arange(2.0))
    assert Weighted(StudentT(df=4)) == likelihood_of("weighted(of='student_t(df=4)')")
    with pytest.raises(FrozenInstanceError):
        likelihood.df = 5.0


def test_computing_with_other_parameters_changes_nothing_else():
    """The derivative in r of a loss, also of one with weights, beside a difference quotient."""
    counts, r = torch.tensor([[0.0], [2.0], [5.0]]).double(), torch.tensor(1.7).double()
    weighted = torch.cat([counts, torch.ones_like(counts)], 1)
    for likelihood, y in (NegativeBinomial(), counts), (Weighted(NegativeBinomial()), weighted):
        at = likelihood.with_parameters({"r": r.requires_grad_()})
        (slope,) = torch.autograd.grad(at.loss(F1, y), r)
        near = [likelihood.replace(r=1.7 + h).loss(F1, y) for h in (1e-5, -1e-5)]
        assert_close(slope, (near[0] - near[1]) / 2e-5, rtol=1e-6, atol=0)
        assert likelihood.parameters["r"] == 1 and at == likelihood


def above(least):
    return st.floats(least, 1e300, exclude_min=True)


POSITIVE = st.lists(above(0), min_size=1, max_size=4)
OPTIONS = {
    "classification": {"weights": POSITIVE, "smoothing": st.floats(0, 0.99)},
    "noisy_classification": {"noise": st.floats(0, 0.99), "weights": POSITIVE},
    "ordinal": {"cuts": st.lists(st.floats(-9, 9), min_size=1, unique=True).map(sorted)},
    "regression": {},
    "regression_per_output": {"noise": POSITIVE},
    "known_noise": {},
    "heteroscedastic": {"noise": above(0), "strength": above(0)},
    "poisson": {},
    "negative_binomial": {"r": above(0)},
    "student_t": {"df": above(2), "scale": above(0)},
    "weibull": {"shape": above(0)},
    "bernoulli": {},
    "weighted": {"of": st.sampled_from(["poisson", "student_t(df=3)"])},
}
"""Name -> its options, and values that they may have."""
AS_GIVEN = [lambda v: v, np.asarray, lambda v: torch.tensor(v, dtype=torch.float64)]


def test_the_table_of_options_has_all_likelihoods():
    found = {
        name: {option.name for option in fields(of)}
        for name, of in Likelihood._by_name.items()
        if of.__module__ == Likelihood.__module__
    }
    assert found == {name: options.keys() for name, options in OPTIONS.items()}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
@pytest.mark.parametrize("name", OPTIONS)
def test_the_text_of_a_likelihood_gives_an_equal_one(name, data):
    """Some options, in any order, whether they are numbers of Python, NumPy or torch."""
    needed = {"ordinal", "weighted"}  # these need their option
    values = {
        option: data.draw(of)
        for option, of in data.draw(st.permutations([*OPTIONS[name].items()]))
        if name in needed or data.draw(st.booleans())
    }
    as_given = data.draw(st.sampled_from(AS_GIVEN[: 1 if name == "weighted" else 3]))
    likelihood = Likelihood._by_name[name](**{key: as_given(v) for key, v in values.items()})
    again = likelihood_of(str(likelihood))
    assert again == likelihood and again.options.items() <= values.items()
    assert again.parameters.keys() == likelihood.parameters.keys()
    for key, number in again.parameters.items():
        assert torch.equal(number, likelihood.parameters[key])
        if key in values and name != "regression_per_output":  # which divides by their mean
            assert number.item() == values[key]


@pytest.mark.parametrize(
    "more",
    ["(4)", "(**{'a': 4})", "(*[4])", "() x", "() # a=4", "()[0]", "() + 1", "(", "() if 1 else 2",
     "(\n# a=4\n)", "(unknown=4)", "(a=4, a=5)"],
)  # fmt: skip
def test_nothing_of_a_text_is_ignored(more):
    """What is more than a likelihood is refused, with the options that there are."""
    for name, options in OPTIONS.items():
        with pytest.raises(ValueError) as raised:
            likelihood_of(name + more)
        words = f"with options {', '.join(options)}." if options else f"'{name}' has no options."
        assert repr(name + more) in str(raised.value) and str(raised.value).endswith(words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gauss", "choose one of 'classification'"),
        ("poisson(rate=3)", "poisson"),
        ("heteroscedastic(strength=inf)", "not understood"),
        ("student_t(df=__import__('os'))", "not understood"),
        ("classification(smoothing=1.0)", "smoothing must be in"),
        ("ordinal(cuts=[1, 0])", "ascend"),
        ("student_t(df=1)", "df must exceed 2: a finite number, not 1)"),
        ("student_t(scale=True)", "a finite number, not True)"),
        ("student_t(df='4')", "a finite number, not '4')"),
        (f"student_t(df={'1' * 400})", "a finite number, not 111"),
        (f"student_t(df={'(' * 10_000}1)", "nested"),
        ("negative_binomial(r=1e999)", "r must exceed 0: a finite number, not inf"),
        ("regression_per_output(noise=3.0)", "a list of finite numbers, not 3.0"),
        ("regression_per_output(noise=[1, -2])", "a list of finite numbers, not [1, -2]"),
        ("ordinal(cuts=[0, 1e999])", "a list of finite, ascending numbers, not [0, inf]"),
        ("ordinal", "cuts"),
        ("classification(weights=[0, 1])", "a positive number for each class, not [0, 1]"),
        ("noisy_classification(noise=1.0)", "noise must be in [0, 1), not 1.0"),
        ("weighted(of=3)", "a int is not supported"),
        ("student_t(df=None)", "df is None; omit it"),
    ],
)
def test_wrong_texts_are_named(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        likelihood_of(text)


@pytest.mark.parametrize(
    ("text", "C", "y", "message"),
    [
        ("heteroscedastic", 3, torch.zeros(2, 3), "two outputs"),
        ("heteroscedastic", 4, torch.zeros(2, 4), "of shape (2, 2)"),
        ("poisson", 1, torch.tensor([[0.5], [1.0]]), "counts"),
        ("known_noise", 1, torch.zeros(2, 2), "positive"),
        ("weibull", 1, torch.tensor([[1.0, 0.5], [1.0, 1.0]]), "1 (event) or 0"),
        ("weighted(of='poisson')", 1, torch.tensor([[1.0, 1.0], [1.0, -1.0]]), "at least 0"),
        ("weighted(of='classification')", 2, torch.tensor([[0.5, 1.0], [1.0, 1.0]]), "whole"),
        ("ordinal(cuts=[0.0])", 2, torch.zeros(2).long(), "one output"),
        ("ordinal(cuts=[0.0])", 1, torch.tensor([0, 2]), "out of range"),
        ("regression_per_output(noise=[1.0, 2.0])", 3, torch.zeros(2, 3), "noises for 2 outputs"),
        ("classification(weights=[1, 2])", 3, torch.zeros(2).long(), "but the model has 3"),
    ],
)
def test_wrong_targets_are_named(text, C, y, message):
    with pytest.raises(ValueError) as raised:
        likelihood_of(text).check(torch.zeros(2, C), y)
    assert message in str(raised.value)
