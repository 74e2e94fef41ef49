"""The rules by which decays depart from plain evidence: without them, and the limit of gradients.

What the other rules do is in `test_learner.py`.
"""

import math
import warnings
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import KroneckerBlock
from kfac_backend.ranks import Ranks
from marglik import DecayPolicy, Posterior, PriorLearner
from marglik.posterior.prior import Hyperparameters, PriorGroups
from marglik.training.decay_policy import (
    NEW_NORM,
    clip_gradients,
    largest_precisions,
    look_at_update,
    skips_update,
    warn_at_the_end,
    warn_of_late_fit,
)
from marglik.training.options import Schedule
from marglik.training.state import Measures
from tests.marglik.plain_loop import learn

pytestmark = pytest.mark.usefixtures("one_thread")

N, EPOCHS, EVERY, STEPS, WEIGHT_DECAY = 30, 6, 3, 4, 5e-4


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)
    ).double()  # fmt: skip


def data():
    x = torch.randn(N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    y[-3:] = (y[-3:] + 1) % 3  # a last batch of wrong labels, whose gradients are large
    return DataLoader(TensorDataset(x, y), 9)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)


def by_the_rules(policy, weight_decay=WEIGHT_DECAY):
    model = network()
    prior = PriorLearner(
        "classification", policy=policy, weight_decay=weight_decay, every=EVERY, steps=STEPS,
        average=None, curvature_from="pass",
    )  # fmt: skip
    learn(model, sgd(model), prior, data(), EPOCHS)
    return [*model.parameters(), prior.weight_decays()]


def written_out(weight_decay=WEIGHT_DECAY, by_autograd=False):
    """Algorithm 1 of Immer et al. 2021: steps on log δ after some epochs, and nothing else."""
    model = network()
    optimizer, parameters = sgd(model), list(model.parameters())
    log_delta = torch.full((len(parameters),), weight_decay * N, dtype=torch.float64).log()
    adam = torch.optim.Adam([log_delta], lr=0.1)
    for epoch in range(1, EPOCHS + 1):
        decays = (log_delta.exp() / N).tolist()
        for x, y in data():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            for p, decay in zip(parameters, decays, strict=True):
                p.grad.add_(p.detach(), alpha=decay)
            optimizer.step()
        if epoch % EVERY:
            continue
        posterior = Posterior(model, "classification")
        posterior.fit(data())
        for _ in range(STEPS):
            if by_autograd:
                leaf = log_delta.clone().requires_grad_()
                posterior.log_marginal_likelihood(leaf.exp()).backward()
                of_log_delta = leaf.grad
            else:  # by the product's formula, whose roundings are other ones
                of_log_delta, _ = posterior.evidence_terms.gradient(log_delta.exp(), torch.ones(()))
            log_delta.grad = -of_log_delta
            adam.step()
    return [*parameters, log_delta.exp() / N]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("weight_decay", "rules"),
    [
        (WEIGHT_DECAY, {"clip": 1.01, "raised_start": 1e-2}),
        (0.3, {"invariant_limit": 0.1}),
        (6.0, {"stability_limit": True}),
    ],
)
def test_without_its_rules_training_is_algorithm_1_to_the_bit(weight_decay, rules):
    expected = written_out(weight_decay)
    off = by_the_rules(DecayPolicy.off(), weight_decay)
    assert all(map(torch.equal, off, expected))
    assert_close(off, written_out(weight_decay, by_autograd=True), rtol=1e-9, atol=1e-12)
    # Negative control: each rule that acts on decays, or on steps, changes the result.
    for name, value in rules.items():
        policy = DecayPolicy(**{**vars(DecayPolicy.off()), name: value})
        changed = by_the_rules(policy, weight_decay)
        assert not all(map(torch.equal, changed, expected)), name


LATE = [(2, 2.25), (6, 2.13), (10, 2.02), (14, 1.81), (18, 1.56)]
"""Convolutions with GroupNorm in batches of 128, which lose 0.1 nats without the rule."""
EARLY = [(1, 2.03), (2, 1.74), (5, 1.78), (9, 1.79), (18, 1.78)]
"""An MLP with wrong labels."""


@pytest.mark.parametrize(
    ("losses", "loss", "gamma", "rule", "is_late"),
    [
        (LATE, 1.0, 700, {"late_fit": "hold"}, True),
        (LATE, 1.0, 700, {}, True),
        (LATE, 1.0, 700, {"late_fit": None}, False),
        (EARLY, 1.7, 300, {"late_fit": "hold"}, False),  # most of the fall came early
        (LATE, 1.0, 1400, {"late_fit": "hold"}, False),  # γ parameters fit as much of noise
        (LATE, 2.4, 300, {"late_fit": "hold"}, False),  # no fall
        ([], 1.0, 1, {"late_fit": "hold"}, False),  # the first update has nothing to compare
    ],
)
def test_while_a_network_fits_late_no_decay_may_rise(losses, loss, gamma, rule, is_late):
    model, measures = network(), Measures([], [None], first_loss=2.3, raised=["0.weight"])
    groups = PriorGroups.from_model(model)
    hyper = Hyperparameters(groups, torch.linspace(7.0, 0.1, len(groups.names)))
    state = SimpleNamespace(hyperparameters=hyper, measures=measures, losses=losses, epoch=20)
    terms = SimpleNamespace(
        loss=500 * loss,
        tensors=torch.arange(len(groups.names)),
        effective_parameters=lambda *_: torch.tensor([gamma / 2, gamma / 2]),
    )
    posterior = SimpleNamespace(evidence_terms=terms)
    options = SimpleNamespace(temperature=1.0, policy=DecayPolicy(**rule))
    problem = SimpleNamespace(options=options, num_data=500, ranks=Ranks(None))
    largest = largest_precisions(problem, state, posterior)
    assert measures.fits_late == is_late
    if not (is_late and rule):  # the default warns alone
        assert largest is None
        return
    # Negative control: a decay that started high goes back to the default.
    delta = hyper.prior_precision
    assert delta[0] > 6.9 and abs(largest[0] - WEIGHT_DECAY * 500) < 1e-9
    assert torch.equal(largest[1:], delta[1:])


def slow_network():
    """Deep and without a norm: for some epochs its loss hardly falls, then faster and faster."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(12, 3)).double()
    for p in model.parameters():
        p.data *= 0.7
    return model


def slow_data():
    x = torch.randn(300, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 50)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_decays_rise_later_where_a_network_fits_late_and_a_resumed_run_knows():
    def trained(epochs, begun=(), **rule):
        """The learner, each update's largest factor, and whether the network fitted late then.

        ``begun`` are the states of a model, its optimiser and learner, from which it goes on.
        """
        model, prior = slow_network(), PriorLearner("classification", average=None, **rule)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        for part, state in zip((model, optimizer, prior), deepcopy(begun), strict=False):
            part.load_state_dict(state)
        prior.start(model, optimizer, slow_data(), 40)
        rises, late = [], []
        for _ in range(prior.state.epoch, epochs):
            before = prior.state.hyperparameters.prior_precision
            updates = len(prior.state.losses)
            for x, y in slow_data():
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
            if len(prior.state.losses) > updates:
                after = prior.state.hyperparameters.prior_precision
                rises.append((after / before).max().item())
                late.append(prior.state.measures.fits_late)
        return [part.state_dict() for part in (model, optimizer, prior)], rises, late

    _, rises, late = trained(30, late_fit="hold")
    assert any(late) and not all(late)
    assert all(rise <= 1 + 1e-9 for rise, held in zip(rises, late, strict=True) if held)
    _, free, _ = trained(30)
    held = [rise for rise, is_late in zip(free, late, strict=False) if is_late]
    assert max(held) > 1.1  # negative control: without the rule the evidence raises them
    # What the rule has measured is a part of the state.
    stop = 1 + late.index(True)
    begun, first, _ = trained(stop, late_fit="hold")
    _, then, of_then = trained(30, begun, late_fit="hold")
    assert first + then == rises and of_then == late[len(first) :]
    begun[2]["measures"]["first_loss"] = 0.0  # negative control
    assert trained(30, begun, late_fit="hold")[1] != then


@pytest.mark.parametrize(
    ("fits_late", "epoch", "warns"),
    [(True, 20, True), (False, 20, False), (True, 19, False), (True, 40, False)],
)
def test_a_late_fit_is_named_at_half_of_the_epochs(fits_late, epoch, warns, recwarn):
    measures = Measures([], [None], fits_late=fits_late)
    state = SimpleNamespace(losses=[*LATE, (epoch, 1.0)], measures=measures)
    problem = SimpleNamespace(options=SimpleNamespace(schedule=Schedule(epochs=40)))
    warn_of_late_fit(problem, state)
    assert any("does not fit yet" in str(w.message) for w in recwarn) == warns


def test_an_evidence_of_samples_has_fallen_only_beyond_its_error():
    """Normal estimates of one evidence are silent; one that falls by four errors is not.

    Evidences of all data have no error.
    """
    generator = torch.Generator().manual_seed(0)
    problem = SimpleNamespace(num_data=1)
    shares = []
    for fall, has_estimates in ((0.0, True), (0.2, True), (0.0, False)):
        count = 0
        for _ in range(200):
            evidences = 0.05 * torch.randn(20, generator=generator)
            evidences[-1] = -fall  # the last one is exact
            measures = SimpleNamespace(all_left_out=0, has_estimates=has_estimates)
            state = SimpleNamespace(
                evidences=evidences.tolist(), measures=measures,
                hyperparameters=SimpleNamespace(learn_sigma_noise=False), posterior=None,
            )  # fmt: skip
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                warn_at_the_end(problem, state)
            count += len(warned)
        shares.append(count / 200)
    assert shares[0] < 0.2 and shares[1] > 0.9 and shares[2] > 0.9


@pytest.mark.parametrize("epochs", [2, 60])
def test_the_last_update_sets_the_noise_to_its_fixed_point(epochs):
    """From σ = 30 it takes Adam some updates to the residuals' 0.1."""
    torch.manual_seed(0)
    x = torch.randn(100, 2, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(100, 1, dtype=torch.float64)

    def trained(**rule):
        model = nn.Linear(2, 1).double()
        options = {"sigma_noise": 30.0, "learn_sigma_noise": True, "average": None, **rule}
        prior, optimizer = (
            PriorLearner("regression", **options),
            torch.optim.SGD(model.parameters(), 0.3),
        )
        learn(model, optimizer, prior, DataLoader(TensorDataset(x, y), 20), epochs)
        posterior, residuals = prior.posterior, model(x) - y
        gamma = posterior.effective_parameters().sum()
        fixed_point = (residuals.square().sum() / (100 - gamma)).sqrt()
        assert float(posterior.log_marginal_likelihood()) == pytest.approx(prior.evidences[-1])
        return prior, posterior.sigma_noise.item() / fixed_point.item()

    prior, ratio = trained()
    assert ratio == pytest.approx(1, rel=1e-5)
    posterior = prior.posterior
    best, sigma = float(posterior.log_marginal_likelihood()), posterior.sigma_noise
    for factor in (0.98, 1.02):  # it is the maximum of the evidence
        assert float(posterior.log_marginal_likelihood(sigma_noise=factor * sigma)) < best
    _, ratio = trained(settles_noise=False)  # negative control
    assert (ratio > 1.5) == (epochs == 2)


# --- rests ---


def test_updates_rest_once_decays_have_settled_and_go_on_when_they_move():
    epochs = []
    for rule in ({}, {"rest": None}):
        model = network()
        prior = PriorLearner("classification", updates=40, average=None, **rule)
        learn(model, sgd(model), prior, data(), 40)
        epochs.append([epoch for epoch, _ in prior.state.losses])
    rested, budget = epochs
    assert budget == list(range(1, 41))
    gaps = [after - before for before, after in pairwise(rested)]
    assert gaps[0] == 1 and max(gaps) > 2 and rested[-1] == 40
    for gap, after in pairwise(gaps[:-1]):  # rests of 1, 2, 4, ... updates
        assert after in (1, 2 if gap == 1 else 2 * gap - 1)
    measures = prior.state.measures
    measures.rest, measures.left_out = 2, 0
    skips = [skips_update(prior.problem, prior.state) for _ in range(4)]
    assert skips == [True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "rest"),
    [((0.3, -0.28), 1), ((0.3, 0.28), 0), ((0.3, 0.05), 1), ((0.3, -0.28, 0.27), 2)],
)
def test_updates_that_undo_each_other_are_followed_by_a_rest(changes, rest):
    model, measures = network(), Measures([], [None])
    groups = PriorGroups.from_model(model)
    hyper = Hyperparameters(groups, 1.0)
    gamma = {name: 0.5 if name == "3.bias" else 2.0 for name in groups.names}
    record = {"effective_parameters": gamma, "num_examples": 500}
    block = KroneckerBlock("0.weight", torch.eye(4), torch.eye(2))  # two directions per example
    posterior = SimpleNamespace(
        factors=SimpleNamespace(blocks={"0.weight": block}, num_loss_terms=500, num_data=500)
    )
    state = SimpleNamespace(
        hyperparameters=hyper, measures=measures, losses=[], record=record, posterior=posterior,
        ranges=None,
    )  # fmt: skip
    options = SimpleNamespace(schedule=Schedule(epochs=20), policy=DecayPolicy(late_fit=None))
    problem = SimpleNamespace(
        options=options, learned_by_evidence={}, ranks=Ranks(None), num_data=500
    )
    for change in changes:
        before = hyper.prior_precision
        factors = torch.full_like(before, math.exp(change))
        factors[groups.names.index("3.bias")] = math.e  # the data does not determine it
        hyper.set(before * factors, hyper.sigma_noise)
        look_at_update(problem, state, before)
    assert measures.rest == rest
    # Two examples cannot show that these decays have settled.
    record["num_examples"] = 2
    look_at_update(problem, state, hyper.prior_precision)
    assert measures.rest == 0


def test_updates_do_not_rest_where_the_data_determines_no_group():
    """Of decays that the data does not determine yet none has settled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)).double()
    x = torch.randn(30, 1, dtype=torch.float64)
    prior = PriorLearner("regression", updates=20, average=None, sigma_noise=10.0)
    learn(model, sgd(model), prior, DataLoader(TensorDataset(x, x), 10), 20)
    assert prior.posterior.effective_parameters().max() < 1
    assert len(prior.state.losses) == 20 and prior.state.measures.all_left_out == 0


# --- the limit of a step's gradients ---


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_limits_the_norm_to_a_multiple_of_its_running_mean(scale):
    mean, running = None, None
    for g in [torch.randn(5) * size for size in (1.0, 1.2, 30.0, 0.1, 9.0)]:
        norm = g.norm().item()
        factor = 1.0 if mean is None else min(1.0, 2 * mean / norm)
        mean = norm if mean is None else mean + NEW_NORM * (factor * norm - mean)
        p = nn.Parameter(torch.zeros(5))
        p.grad = scale * g
        running = clip_gradients([p], running, 2.0, torch.tensor(scale))
        assert_close(p.grad / scale, factor * g)
        assert_close(float(running), mean, rtol=1e-5, atol=0)
    assert factor < 1  # of the last


@pytest.mark.parametrize(
    ("gradient", "clip", "mean"),
    [([50.0, 0.0], None, 1 + NEW_NORM * 49), ([1.0, float("inf")], 2.0, 1.0)],
)
def test_gradients_that_are_not_limited_are_left(gradient, clip, mean):
    """Without a limit, the norm is followed alone; infinite ones are left to a scaler."""
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor(gradient)
    running = clip_gradients([p], torch.tensor(1.0), clip, torch.tensor(1.0))
    assert p.grad.tolist() == gradient
    assert float(running) == pytest.approx(mean)


def test_the_running_mean_starts_at_the_first_norm_that_is_finite():
    """A gradient scaler's first steps are often skipped, as its factor is too large."""
    p, mean = nn.Parameter(torch.zeros(2)), None
    for norm, limited in ((float("inf"), float("inf")), (3.0, 3.0), (3.0, 3.0), (60.0, 6.0)):
        p.grad = torch.tensor([norm, 0.0])
        mean = clip_gradients([p], mean, 2.0, torch.tensor(1.0))
        assert p.grad[0] == pytest.approx(limited)


@pytest.mark.parametrize("wrong", [False, "holds"])
def test_another_late_fit_is_refused(wrong):
    with pytest.raises(ValueError, match=f"late_fit.*{wrong}"):
        DecayPolicy(late_fit=wrong)
