"""The rules by which decays depart from plain evidence: without them, and the limit of gradients.

What the other rules do is in `test_learner.py`.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from marglik import DecayPolicy, Posterior, PriorLearner
from marglik.training.decay_policy import NEW_NORM, clip_gradients
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


def written_out(weight_decay=WEIGHT_DECAY):
    """Algorithm 1 of Immer et al. 2021: steps on log δ after some epochs, and nothing else."""
    model = network()
    optimizer, parameters = sgd(model), list(model.parameters())
    log_delta = torch.full((len(parameters),), weight_decay * N, dtype=torch.float64).log()
    adam = torch.optim.Adam([log_delta.requires_grad_()], lr=0.1)
    for epoch in range(1, EPOCHS + 1):
        decays = (log_delta.detach().exp() / N).tolist()
        for x, y in data():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            for p, decay in zip(parameters, decays, strict=True):
                p.grad += decay * p.detach()
            optimizer.step()
        if epoch % EVERY:
            continue
        posterior = Posterior(model, "classification")
        posterior.fit(data())
        for _ in range(STEPS):
            adam.zero_grad()
            (-posterior.log_marginal_likelihood(log_delta.exp())).backward()
            adam.step()
    return [*parameters, log_delta.detach().exp() / N]


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
    # Negative control: each rule that acts on decays, or on steps, changes the result.
    for name, value in rules.items():
        policy = DecayPolicy(**{**vars(DecayPolicy.off()), name: value})
        changed = by_the_rules(policy, weight_decay)
        assert not all(map(torch.equal, changed, expected)), name


@pytest.mark.parametrize("rule", [{"settled": None}, {}])
def test_a_rule_that_is_off_does_not_warn(rule, recwarn):
    model = network()
    prior = PriorLearner("classification", **rule)
    learn(model, sgd(model), prior, data(), EPOCHS)
    assert any("settled" in str(w.message) for w in recwarn) == (not rule)


# --- the limit of a step's gradients ---


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_limits_the_norm_to_a_multiple_of_its_running_mean(scale):
    mean, running, clipped = None, None, []
    for g in [torch.randn(5) * size for size in (1.0, 1.2, 30.0, 0.1, 9.0)]:
        norm = g.norm().item()
        factor = 1.0 if mean is None else min(1.0, 2 * mean / norm)
        mean = norm if mean is None else mean + NEW_NORM * (factor * norm - mean)
        p = nn.Parameter(torch.zeros(5))
        p.grad = scale * g
        running, is_clipped = clip_gradients([p], running, 2.0, torch.tensor(scale))
        clipped.append(int(is_clipped))
        assert_close(p.grad / scale, factor * g)
        assert_close(float(running), mean, rtol=1e-5, atol=0)
    assert clipped == [0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("gradient", "clip", "mean"),
    [([50.0, 0.0], None, 1 + NEW_NORM * 49), ([1.0, float("inf")], 2.0, 1.0)],
)
def test_gradients_that_are_not_limited_are_left(gradient, clip, mean):
    """Without a limit, the norm is followed alone; infinite ones are left to a scaler."""
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor(gradient)
    running, is_clipped = clip_gradients([p], torch.tensor(1.0), clip, torch.tensor(1.0))
    assert p.grad.tolist() == gradient and not is_clipped
    assert float(running) == pytest.approx(mean)


def test_the_running_mean_starts_at_the_first_norm_that_is_finite():
    """A gradient scaler's first steps are often skipped, as its factor is too large."""
    p, mean, clipped = nn.Parameter(torch.zeros(2)), None, []
    for norm in (float("inf"), 3.0, 3.0, 60.0):
        p.grad = torch.tensor([norm, 0.0])
        mean, is_clipped = clip_gradients([p], mean, 2.0, torch.tensor(1.0))
        clipped.append(int(is_clipped))
    assert clipped == [0, 0, 0, 1] and p.grad[0] == pytest.approx(6.0)
