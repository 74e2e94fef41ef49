"""A posterior of a network that has other weights by now is an error, wherever it is used."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close

import marglik
from kfac_backend import kronecker_factors
from marglik import Laplace, Posterior, load_posterior, save_posterior
from marglik.prediction.links import Calibration
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive
from tests.random_numbers import normal

OTHER = "no longer has the weights .* fitted: '{}' .*Fit again.*load_state_dict"


def network(seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)
    return nn.Sequential(*layers).double().eval()


def batch(n=12):
    return normal(n, 3), torch.arange(n) % 3


def fitted(kind=Posterior, **options):
    posterior = kind(network(), "classification", prior_precision=0.5, **options)
    posterior.fit([batch()])
    return posterior


def step(posterior, optimizer_class, lr=0.1, **options):
    model, (x, y) = posterior.model, batch()
    optimizer = optimizer_class(model.parameters(), lr, **options)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def assign(posterior):
    parameters = [*posterior.model.parameters()]
    vector_to_parameters(parameters_to_vector(parameters) + 0.1, parameters)


CHANGES = {
    # name: (what happens after the fit, the first weight that is another)
    "another checkpoint": (
        lambda p: p.model.load_state_dict(network(1).state_dict()), "0.weight",
    ),
    "another checkpoint, assigned": (
        lambda p: p.model.load_state_dict(network(1).state_dict(), assign=True), "0.weight",
    ),
    "another model": (lambda p: setattr(p, "model", network(1)), "0.weight"),
    "more training": (lambda p: step(p, torch.optim.SGD), "0.weight"),
    "a vector": (assign, "0.weight"),
    "statistics": (lambda p: p.model.train()(3 * batch()[0]), "1.running_mean"),
}  # fmt: skip
UNCOUNTED = {
    "a fused optimiser": (lambda p: step(p, torch.optim.Adam, fused=True), "0.weight"),
    "data": (lambda p: p.model[3].bias.data.add_(0.1), "3.bias"),
}
"""Changes that torch's version counters do not count: predictions see them, by the values."""
CALLS = {
    "sample": lambda p, x, folder: p.sample(2),
    "output_distribution": lambda p, x, folder: p.output_distribution(x),
    "last layer": lambda p, x, folder: p.output_distribution(x, "last"),
    "joint": lambda p, x, folder: p.joint_output_distribution(x),
    "a new predictive": lambda p, x, folder: laplace_predictive(p),
    "calibrate": lambda p, x, folder: marglik.calibrate(p, [batch()]),
    "save": lambda p, x, folder: save_posterior(p, folder),
    "more data": lambda p, x, folder: p.fit([batch()], override=False),
}
EVIDENCES = {
    "evidence": lambda p, x, folder: p.log_marginal_likelihood(),
    "effective parameters": lambda p, x, folder: p.effective_parameters(),
    "maximize_evidence": lambda p, x, folder: marglik.maximize_evidence(p),
}


@pytest.mark.parametrize("change", [*CHANGES, *UNCOUNTED])
def test_all_calls_raise(change, tmp_path):
    posterior, (x, _) = fitted(), batch()
    samples = posterior.sample(2)
    configs = [
        *(
            PredictiveConfig(method, samples=3, networks=2)
            for method in ("probit", "mc", "linearised")
        ),
        PredictiveConfig(layers="last"),
    ]
    predictives = [laplace_predictive(posterior, config) for config in configs]
    predictives.append(laplace_predictive(posterior, calibration=Calibration(0.0, 1.2)))
    evidence, former = posterior.log_marginal_likelihood(), predictives[0](x)

    act, name = (CHANGES | UNCOUNTED)[change]
    act(posterior)
    calls = CALLS | {str(i): lambda *_, f=f: f(x) for i, f in enumerate(predictives)}
    calls["linearised"] = lambda p, *_: p.linearised_outputs(samples, x)
    calls |= EVIDENCES if change in CHANGES else {}
    for what, call in calls.items():
        with pytest.raises(ValueError, match=OTHER.format(name)):
            call(posterior, x, tmp_path)
            raise AssertionError(what)
    assert not [*tmp_path.iterdir()]

    # The way back.
    posterior.model.load_state_dict(posterior.fitted_weights(), strict=False)
    assert_close(posterior.log_marginal_likelihood(), evidence)
    assert_close(predictives[0](x).mean, former.mean)
    # And the other one: a new fit, whose evidence is another.
    act(posterior)
    posterior.fit([batch()])
    assert (posterior.log_marginal_likelihood() - evidence).abs() > 1e-3
    predictives[0](x)


@pytest.mark.parametrize(
    ("subset", "structure"),
    [("all", "kron"), ("last_layer", "kron"), ("all", "full"), ("all", "diag"), ("all", "lowrank")],
)
@pytest.mark.parametrize("change", ["more training", "a fused optimiser"])
def test_the_calls_of_laplace_torch(subset, structure, change):
    la = Laplace(model := network(), "classification", subset, structure)
    la.fit([batch()])
    x, _ = batch()
    copy = deepcopy(la.state_dict())
    la(x)
    J = la.jacobians(x)[0]
    act, _ = (CHANGES | UNCOUNTED)[change]
    act(SimpleNamespace(model=model))  # the user's, of which the last layer's posterior has a copy
    for call in (
        lambda: la(x),
        lambda: la(x, joint=True),
        lambda: la.sample(2),
        lambda: la.predictive_samples(x),
        lambda: la.functional_variance(J),
        lambda: la.functional_covariance(J),
        lambda: la.output_variances(x, torch.ones(2)),
    ):
        with pytest.raises(ValueError, match="no longer has the weights"):
            call()
    again = Laplace(network(), "classification", subset, structure)
    again.load_state_dict(copy)
    again(x)


def test_equal_weights_are_no_change(tmp_path):
    posterior, (x, y) = fitted(), batch()
    expected = posterior.output_distribution(x)[1]

    def check(p=posterior):
        assert_close(p.output_distribution(x)[1].double(), expected, rtol=1e-4, atol=1e-6)
        p.log_marginal_likelihood()

    # A step without a gradient, and the same checkpoint, in place and assigned.
    for p in posterior.model.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.SGD(posterior.model.parameters(), 0.1).step()
    check()
    posterior.model.load_state_dict(deepcopy(posterior.model.state_dict()))
    check()
    posterior.model.load_state_dict(deepcopy(posterior.model.state_dict()), assign=True)
    check()
    # Networks at samples, and calibration.
    posterior.linearised_outputs(posterior.sample(2), x)
    marglik.calibrate(posterior, [(x, y)])
    check()
    # Copies, files, and other dtypes.
    check(deepcopy(posterior))
    save_posterior(posterior, tmp_path)
    check(load_posterior(tmp_path, network(2)))
    x = x.float()
    check(posterior.to(dtype=torch.float32))
    x = x.double()
    check(posterior.to(dtype=torch.float64))


def test_a_fit_after_an_assigned_checkpoint_is_at_its_weights():
    posterior = fitted()
    posterior.model.load_state_dict(network(1).state_dict(), assign=True)
    posterior.fit([batch()])
    assert torch.equal(posterior.mean, parameters_to_vector(network(1).parameters()))


def test_parameters_that_are_frozen_or_parametrised_since():
    for change, name in (
        (lambda model: model[0].bias.requires_grad_(False), "0.bias"),
        (lambda model: nn.utils.parametrizations.weight_norm(model[3]), "3.parametrizations"),
    ):
        posterior = fitted()
        change(posterior.model)
        message = f"'{name}.* has other values, or was frozen or unfrozen"
        for call in (posterior.sample, lambda p=posterior: p.output_distribution(batch()[0])):
            with pytest.raises(ValueError, match=message):
                call()


def test_before_a_fit():
    posterior = Posterior(network(), "classification")
    for call in (
        posterior.check_weights,
        lambda: posterior.linearised_outputs(torch.ones(1, 35), 0),
    ):
        with pytest.raises(AttributeError, match="not fitted. Call fit"):
            call()
    assert posterior.factors is None


def test_factors_are_restored():
    """At the weights that the network has now."""
    posterior = fitted()
    posterior.log_marginal_likelihood()
    step(posterior, torch.optim.SGD)
    factors = kronecker_factors(posterior.model, [batch()], "classification", kfac_approx="expand")
    posterior.restore(factors)
    new = fitted()
    new.model.load_state_dict(posterior.model.state_dict())
    new.fit([batch()])
    assert_close(posterior.log_marginal_likelihood(), new.log_marginal_likelihood())
    with pytest.raises(TypeError, match="is dict. Pass the KroneckerFactors that kron"):
        posterior.restore(factors.blocks)
    with pytest.raises(ValueError, match="A posterior needs a block for every trainable parameter"):
        posterior.restore(replace(factors, blocks={}))


@pytest.mark.parametrize("corrected", [False, True])
def test_blocks_that_are_changed_in_place(corrected):
    """Evidence, samples and covariances are those of the changed blocks."""
    (x, _), posteriors = batch(), [fitted(), fitted()]
    for posterior in posteriors:
        posterior.fit([batch()], corrected=corrected)
    changed, expected = posteriors
    before = changed.log_marginal_likelihood(), changed.output_distribution(x)[1]
    changed.sample(1)
    for posterior in posteriors:
        for block in posterior.factors.blocks.values():
            eigen = getattr(block, "eigen", None)
            (block.B if eigen is None else eigen.corrected).mul_(3)
    expected.restore(expected.factors * 1.0)  # of which nothing was computed before
    evidence, covariance = changed.log_marginal_likelihood(), changed.output_distribution(x)[1]
    assert_close(evidence, expected.log_marginal_likelihood())
    assert_close(covariance, expected.output_distribution(x)[1])
    assert (evidence - before[0]).abs() > 0.1
    assert (covariance - before[1]).norm() > 0.1 * before[1].norm()
    draws = [p.sample(2, torch.Generator().manual_seed(0)) for p in posteriors]
    assert_close(*draws)


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_a_network_in_another_dtype_is_named(structure):
    x, y = batch()
    la = Laplace(network(), "classification", "all", structure)
    la.fit([(x, y)])
    J, expected = la.jacobians(x)[0].float(), la(x)
    la.model.float()
    x = x.float()
    message = "Sequential is in torch.float32 .'.*'., .* in torch.float64. Convert both with"
    for call in (
        lambda: la(x),
        lambda: la(x, pred_type="nn"),
        lambda: la.functional_variance(J),
        lambda: la.joint_output_distribution(x),
        lambda: la.sample(2),
        lambda: la.log_marginal_likelihood(),
        lambda: laplace_predictive(la),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    la.to(dtype=torch.float32)  # the way out
    assert_close(la(x), expected.float(), rtol=1e-4, atol=1e-5)


def test_the_pass_of_a_former_posterior_serves_its_own_model_alone():
    first = fitted()
    again = Posterior(first.model, "classification", prior_precision=0.5, former=first)
    other = Posterior(network(1), "classification", prior_precision=0.5, former=first)
    for posterior in (again, other):
        posterior.fit([batch()])
    alone = Posterior(network(1), "classification", prior_precision=0.5)
    alone.fit([batch()])
    for name in alone.factors.blocks:
        assert_close(other.factors.to_dense(name), alone.factors.to_dense(name))
    assert again._curvature_pass is first._curvature_pass  # the same model needs no other proof
    assert other.log_marginal_likelihood() != first.log_marginal_likelihood()
    ignoring = Posterior(first.model, "classification", ignore_index=2, former=first)
    ignoring.fit([batch()])
    assert ignoring.factors.num_loss_terms == 8  # of 12 examples: other targets, another pass


def examples_of_former_and_alone():
    """N of a posterior of all ranks, and of a posterior of this rank alone that follows it."""
    x, y = batch()
    own = slice(dist.get_rank(), None, 2)
    first = Posterior(network(), "classification")
    first.fit([(x[own], y[own])])
    alone = Posterior(first.model, "classification", process_group=None, former=first)
    alone.fit([(x[own], y[own])])
    return first.n_data, alone.n_data


def test_the_pass_of_a_former_posterior_serves_its_own_ranks_alone(worlds):
    found = worlds.all(2, f"{__name__}:examples_of_former_and_alone")
    assert found == [(12, 6)] * 2


def test_the_pass_of_a_former_posterior_serves_its_own_likelihood_alone():
    """A first pass for continuous targets has not checked where the outputs have their classes."""
    x, y = torch.randn(6, 4).double(), torch.randn(6, 3, 3).double()
    model = nn.Sequential(nn.Linear(4, 9), nn.Unflatten(1, (3, 3))).double()
    first = Posterior(model, "regression")
    first.fit([(x, y)])
    for former in (None, first):
        posterior = Posterior(model, "classification", former=former)
        with pytest.raises(ValueError, match="classes may be second or last"):
            posterior.fit([(x, y.argmax(1))])
