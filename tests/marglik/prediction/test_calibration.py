"""Calibration by held-out data, against grids and integrals."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch.testing import assert_close

from kfac_backend.likelihoods import Classification, Regression, likelihood_of
from marglik.posterior_file import load_posterior, save_posterior
from marglik.prediction import calibration
from marglik.prediction.calibration import (
    FEWEST_TERMS,
    PRIOR_OF_SCALE,
    PRIOR_OF_SHARPNESS,
    HeldOut,
    calibrate,
    calibrations_of,
    fit_calibration,
)
from marglik.prediction.links import Calibration, CalibrationFit, predict_from_gaussian
from marglik.prediction.metrics import compute_metrics
from marglik.prediction.predictive import (
    PredictiveConfig,
    laplace_predictive,
    map_predictive,
    predict_all,
    remembered_calibration,
)
from tests.marglik.posteriors import data, fitted, network
from tests.marglik.prediction.gaussians import gaussians

LIKELIHOODS = ("classification", "bernoulli", "regression")
EVERY = [
    (of, link) for of in LIKELIHOODS for link in ("probit", "mc")[: 1 if of == "regression" else 2]
]
SAMPLES = 40


def held_out(likelihood, n=60, C=3, seed=0, sigma_noise=1.0):
    """Outputs that are sure of themselves, and targets that often differ."""
    f, covariance = gaussians(C, n, scale=2.0, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    noise = torch.randn(n, C, generator=generator, dtype=torch.float64)
    if likelihood == "classification":
        y = (f + 2 * noise).argmax(1)
    elif likelihood == "bernoulli":
        y = ((f + 2 * noise) > 0).double()
    else:
        y = f + covariance.diagonal(dim1=1, dim2=2).sqrt() * noise + 0.7 * noise.flip(0)
    return HeldOut(likelihood_of(likelihood), f, covariance, y, sigma_noise)


def nll(data, link, calibration):
    """By the predictive itself, and the metrics that users see."""
    generator = torch.Generator().manual_seed(0)  # as the search draws them
    noise = torch.randn(SAMPLES, data.f.shape[1], generator=generator, dtype=torch.float64)
    prediction = predict_from_gaussian(
        data.f, data.spread, data.likelihood, link, noise, data.sigma_noise, calibration
    )
    if data.likelihood.name != "regression":
        return compute_metrics(prediction, data.targets, data.likelihood).nll
    normal = stats.norm(prediction.mean, prediction.total_uncertainty.sqrt())
    return -normal.logpdf(data.targets).sum(1).mean()


def cost(calibration):
    """Of the prior, in nats."""
    sharp = calibration.sigma_noise or calibration.output_temperature
    of_sharpness = PRIOR_OF_SHARPNESS * math.log(sharp) ** 2
    root = math.sqrt(calibration.covariance_scale)
    return (of_sharpness + PRIOR_OF_SCALE * (root - 1) ** 2) / 2


@pytest.mark.parametrize(("likelihood", "link"), EVERY)
def test_no_grid_point_is_better(likelihood, link):
    """Of the NLL that the predictive itself has, with the prior of s and τ."""
    data = held_out(likelihood)
    fit = fit_calibration(data, link, SAMPLES)
    assert_close(fit.nll, float(nll(data, link, fit.calibration)), rtol=1e-6, atol=1e-6)
    assert (fit.map_calibration.covariance_scale, fit.num_terms) == (0, 60)
    best = fit.nll + cost(fit.calibration) / 60
    s, sharpness = fit.calibration.covariance_scale, fit.calibration.output_temperature
    sharpness = fit.calibration.sigma_noise or sharpness
    near = (0.95, 0.99, 1.01, 1.05)
    for scale in [0.0, *torch.logspace(-3, 2, 7).tolist(), *(s * by for by in near)]:
        for value in [*torch.logspace(-1, 1, 7).tolist(), *(sharpness * by for by in near)]:
            sharp = (1.0, value) if likelihood == "regression" else (value,)
            tried = Calibration(scale, *sharp)
            assert nll(data, link, tried) + cost(tried) / 60 >= best - 1e-9  # nats


@pytest.mark.parametrize(("likelihood", "link"), EVERY)
def test_rounding_of_outputs_decides_nothing(likelihood, link):
    """The NLL is flat at its bottom: in float32 its own rounding would decide where s lies."""
    data = held_out(likelihood, n=200)
    found = []
    for change in (0, 1e-7):
        f, V = (t * (1 + change * torch.randn_like(t)) for t in (data.f, data.spread))
        rounded = replace(data, f=f.float(), spread=V.float())
        found.append(fit_calibration(rounded, link, SAMPLES).calibration)
    first, second = ((c.covariance_scale, c.sigma_noise or c.output_temperature) for c in found)
    assert second == pytest.approx(first, rel=1e-5)


def of_few(n, draws=20):
    """Mean coverage of 90 % intervals, and NLL, after calibration with n examples; s = 1 is true.

    Both are expectations over new targets y ~ N(f, V + σ²).
    """
    f, covariance = gaussians(1, draws * n)
    variance = covariance[:, :, 0]  # (N, 1)
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(f.shape, dtype=torch.float64, generator=generator)
    true = variance + 0.49
    y, coverages, nlls = f + true.sqrt() * noise, [], []
    for some in torch.arange(draws * n).split(n):
        data = HeldOut(Regression(), f[some], covariance[some], y[some], 0.7)
        found = fit_calibration(data).calibration
        total = found.covariance_scale * variance + found.sigma_noise**2
        z = torch.special.ndtri(torch.tensor(0.95, dtype=torch.float64)) * (total / true).sqrt()
        coverages.append((2 * torch.special.ndtr(z) - 1).mean().item())
        nlls.append(0.5 * (true / total + (2 * math.pi * total).log()).mean().item())
    return sum(coverages) / draws, sum(nlls) / draws


def test_few_examples_leave_a_right_posterior_nearly_as_it_is(monkeypatch):
    coverage, found = of_few(30)
    assert 0.875 < coverage < 0.915
    monkeypatch.setattr(calibration, "PRIOR_OF_SCALE", 0.0)
    monkeypatch.setattr(calibration, "PRIOR_OF_SHARPNESS", 1.0)
    worse, without = of_few(30)  # the control: the NLL nearly alone
    assert worse < coverage - 0.003 and without > found + 0.005
    # Twenty examples, all of them right: the likelihood alone would make τ zero.
    monkeypatch.undo()
    f, covariance = gaussians(3, 20)
    fit = fit_calibration(HeldOut(Classification(), f, covariance, f.argmax(1)), "mc", 50)
    assert 0.05 < fit.calibration.output_temperature < 1
    assert fit.nll < fit.nll_uncalibrated


@pytest.mark.parametrize(
    ("likelihood", "method"),
    [("classification", "linearised"), ("regression", "probit"), ("bernoulli", "probit")],
)
def test_the_calibrated_predictive_is_what_the_fit_speaks_of(likelihood, method):
    la, _ = fitted(likelihood)
    x, y = data(likelihood)
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    found = calibrate(la, batches, PredictiveConfig(method))
    scaled, fit = found.calibration_fit.map_calibration, found.calibration_fit
    sigma = scaled.sigma_noise or la.sigma_noise
    predictives = {
        fit.nll: found,
        fit.nll_uncalibrated: found.uncalibrated,
        fit.nll_map: map_predictive(la.model, likelihood, la.sigma_noise),
        fit.nll_temperature_scaled: map_predictive(
            la.model, likelihood, sigma, scaled.output_temperature
        ),
    }
    for expected, predict in predictives.items():
        metrics = compute_metrics(*predict_all(predict, batches), likelihood)
        assert metrics.nll == pytest.approx(expected, rel=1e-5)


def test_where_the_covariance_does_not_help_scores_keep_their_width(caplog):
    """One sentence says so; the uncalibrated predictive still tells inputs apart."""
    la, x = fitted("regression", sigma_noise=0.3)
    f = la.model.eval()(x).detach()
    for residual, zero in ((1e-3, True), (3.0, False)):
        caplog.clear()
        sign = torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0)[:, None]
        found = calibrate(la, [(x, f + residual * sign)] * 20)
        assert (found.calibration.covariance_scale == 0) is zero
        assert ("All intervals have the same width" in caplog.text) is zero
        assert (found(x).epistemic == 0).all() == zero
        plain = laplace_predictive(la, PredictiveConfig(calibration="none"))(x)
        assert_close(found.uncalibrated(x).epistemic, plain.epistemic)
        assert plain.epistemic.std() > 1e-3


def test_few_examples_are_said_once(caplog):
    """With as many as the prior was checked with, there is no warning."""
    la, x = fitted()
    _, y = data("classification")
    for number, said in ((5, 1), (FEWEST_TERMS, 0)):
        caplog.clear()
        some = torch.arange(number) % len(x)
        calibrations_of(la, [(x[some], y[some])])
        assert caplog.text.count(f"calibration uses only {number} held-out") == said, caplog.text


def test_a_posterior_remembers_its_calibration_and_forgets_it_with_what_it_was_of(tmp_path):
    la, _ = fitted()
    x, y = data("classification")
    config = PredictiveConfig("mc")
    found = calibrate(la, [(x, y)], config, generator=torch.Generator().manual_seed(0))
    save_posterior(la, tmp_path)
    loaded = load_posterior(tmp_path, network())
    assert remembered_calibration(loaded, config) == found.calibration_fit
    again = laplace_predictive(loaded, config, torch.Generator().manual_seed(0))
    assert_close(again(x).mean, found(x).mean)
    plain = PredictiveConfig("mc", calibration="none")
    plain = laplace_predictive(loaded, plain, torch.Generator().manual_seed(0))
    assert (plain(x).mean - found(x).mean).abs().max() > 1e-3
    for change in (
        lambda: loaded.fit([(x, y)]),
        lambda: setattr(loaded, "prior_precision", 2.0),
        lambda: setattr(loaded, "temperature", 0.5),
    ):
        loaded.calibrations = {"Laplace, mc": {}}
        change()
        assert loaded.calibrations == {}
    by_default = calibrate(la, [(x, y)], config)  # and so is what uses it later
    assert torch.equal(laplace_predictive(la, config)(x).mean, by_default(x).mean)
    la.prior_precision = 2.0  # what calibrate returned is of the old one
    with pytest.raises(ValueError, match="noise or temperature has changed"):
        found(x)
    with torch.no_grad():  # a fit and a calibration need gradients, whatever the caller needs
        la.fit([(x, y)])
        assert calibrate(la, [(x, y)], config)(x).mean.isfinite().all()


def test_linearised_networks_and_variances_alone_are_calibrated_as_covariances():
    la, _ = fitted()
    held_out = [data(n=24)]
    by_mc, by_networks = (
        calibrate(la, held_out, PredictiveConfig(method, samples=400, networks=400)).calibration_fit
        for method in ("mc", "linearised")
    )
    assert by_networks.nll_uncalibrated == pytest.approx(by_mc.nll_uncalibrated, rel=0.02)
    assert by_networks.nll_temperature_scaled == pytest.approx(by_mc.nll_temperature_scaled)
    alone = HeldOut.of(la, held_out, links=["probit"])
    both = HeldOut.of(la, held_out)
    assert (alone.spread.dim(), both.spread.dim()) == (2, 3)
    fits = [fit_calibration(one, "probit") for one in (alone, both)]
    assert fits[0].nll_uncalibrated == pytest.approx(fits[1].nll_uncalibrated, rel=1e-10)
    wrong = replace(both, spread=2 * both.spread)  # the control
    assert abs(fit_calibration(wrong).nll_uncalibrated - fits[0].nll_uncalibrated) > 1e-6


def test_targets_are_checked_before_they_broadcast():
    la, _ = fitted("regression")
    x, y = data("regression")
    with pytest.raises(ValueError, match=r"Targets have shape \(8,\), the model's output \(8, 3\)"):
        calibrate(la, [(x, y[:, 0])])
    la, _ = fitted()
    x, y = data()
    with pytest.raises(ValueError, match="Label 4 is out of range: the model has 3 outputs"):
        calibrate(la, [(x, y + 3)])
    with pytest.raises(ValueError, match="no held-out targets to calibrate with"):
        calibrate(la, [])
    broken = held_out("classification")
    broken.f[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="held-out NLL is not finite"):
        fit_calibration(broken)


def test_many_terms_are_thinned_alike_for_all_links(monkeypatch):
    """Every second one, of each batch: two numbers need no more, and memory has a bound."""
    la, _ = fitted()
    x, y = data(n=64)
    monkeypatch.setattr(calibration, "MOST_NUMBERS", 20 * 9)
    monkeypatch.setattr(calibration, "ROUGH_TERMS", 10)
    batches = [(x[:30], y[:30]), (x[30:], y[30:])]
    some = HeldOut.of(la, batches)
    f = la.model.eval()(x).detach()
    assert torch.equal(some.f, f[::4]) and torch.equal(some.targets, y[::4])
    assert_close(some.spread, la.output_distribution(x)[1][::4])
    fits = calibration.calibrations_of(la, batches)
    assert len({fit.num_terms for fit in fits.values()}) == 1
    assert len({fit.nll_map for fit in fits.values()}) == 1


def sure_outputs(wrong, n=200, C=4, seed=0):
    """Outputs whose softmax made the true classes, observed labels, and these classes."""
    generator = torch.Generator().manual_seed(seed)
    f = 4 * torch.randn(n, C, generator=generator, dtype=torch.float64)
    true = torch.multinomial(torch.softmax(f, -1), 1, generator=generator).squeeze(1)
    change = torch.rand(n, generator=generator) < wrong
    shift = torch.randint(1, C, (n,), generator=generator)
    return HeldOut(
        likelihood_of("classification"), f, torch.zeros_like(f)[:, None],
        torch.where(change, (true + shift) % C, true), is_sampled=True,
    ), true  # fmt: skip


def assert_best_of_a_grid(data, found):
    """By hand: Σ log((1 − ε) p_τ(y) + ε/C), with both priors."""
    y, C = data.targets[:, None], data.f.shape[1]

    def objective(tau, noise):
        q = (1 - noise) * torch.softmax(data.f / tau, -1).gather(1, y) + noise / C
        prior = PRIOR_OF_SHARPNESS * math.log(tau) ** 2 / 2
        prior += calibration.PRIOR_OF_NOISE * math.log1p(noise / calibration.SMALL_NOISE)
        prior += calibration.PRIOR_OF_MOST_NOISE * math.log(min(2 * (1 - noise), 1)) ** 2 / 2
        return -q.log().sum().item() + prior

    best = objective(found.output_temperature, found.label_noise)
    for noise in (0.0, 1e-3, 0.1, 0.3, 0.5, 0.8, *(found.label_noise * k for k in (0.97, 1.03))):
        for tau in (0.1, 0.5, 1.0, 2.0, 5.0, *(found.output_temperature * k for k in (0.97, 1.03))):
            assert objective(tau, noise) >= best - 1e-6


def test_wrong_labels_are_found_and_no_grid_point_is_better():
    """The temperature is the true one; of few examples, between this and the prior's 1."""
    data, true = sure_outputs(0.3, n=2000)
    found = calibration.fit_sharpness(data, scale=0.0)
    assert found.label_noise == pytest.approx(0.3 * 4 / 3, abs=0.08)
    assert found.output_temperature == pytest.approx(1, abs=0.2)
    assert_best_of_a_grid(data, found)
    few, _ = sure_outputs(0.0, n=30)
    few = replace(few, f=4 * few.f)
    found_of_few = calibration.fit_sharpness(few, scale=0.0)
    assert 2 < found_of_few.output_temperature < 4
    assert_best_of_a_grid(few, found_of_few)
    # Negative control: a temperature alone blurs all predictions to forgive the wrong labels.
    alone = fit_without_noise(data).output_temperature
    nlls = [
        torch.nn.functional.cross_entropy(data.f / tau, true).item()
        for tau in (found.output_temperature, alone)
    ]
    assert alone > 2 and nlls[0] < nlls[1] - 0.2


def fit_without_noise(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "PRIOR_OF_NOISE", 1e9)
        return calibration.fit_sharpness(data, scale=0.0)


def test_a_network_that_knows_nothing_is_unsure_and_not_surrounded_by_noise():
    """Of two classes ε = .95 and a large τ explain its labels alike; only τ blurs the true class.

    A likelihood that says how many are wrong may say more than a half.
    """
    data, y = sure_outputs(0.0, C=2)
    data = replace(data, targets=y[torch.randperm(len(y), generator=torch.Generator())])

    def nll(fit):
        return torch.nn.functional.cross_entropy(data.f / fit.output_temperature, data.targets)

    assert nll(calibration.fit_sharpness(data, scale=0.0)) < math.log(2) + 0.2
    expecting = replace(data, likelihood=likelihood_of("noisy_classification(noise=0.9)"))
    assert calibration.fit_sharpness(expecting, scale=0.0).label_noise > 0.85
    with pytest.MonkeyPatch.context() as patch:  # negative control
        patch.setattr(calibration, "PRIOR_OF_MOST_NOISE", 0.0)
        assert nll(calibration.fit_sharpness(data, scale=0.0)) > math.log(2) + 0.5


@pytest.mark.parametrize("labels", ["true", "observed"])
@pytest.mark.parametrize(("noise", "hints"), [(0.06, True), (0.03, False)])
def test_a_hint_names_the_likelihood_where_labels_are_wrong(
    noise, hints, labels, caplog, monkeypatch
):
    """Where two thirds of the noise exceed 3 %, as a third of drawn labels of three is right."""
    at_map = Calibration(0.0, label_noise=noise)
    fit = CalibrationFit(Calibration(), 1.0, 1.0, at_map, 1.0, 1.0, 60)
    monkeypatch.setattr(calibration, "fit_calibration", lambda *_: fit)
    calibrations_of(fitted("classification")[0], [data()], PredictiveConfig(labels=labels))
    assert ("noisy_classification" in caplog.text) == hints
    assert ("predictive.labels observed" in caplog.text) == (hints and labels == "true")
