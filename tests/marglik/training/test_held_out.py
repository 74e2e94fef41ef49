"""How held-out labels correct the weight decays: the gradient, the gate, and what a training does.

The gradient's oracle is retraining: gradient flow in small steps at other decays, from the minimum.
"""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from marglik import OnlineTraining, Posterior, PriorLearner
from marglik.training.decay_policy import Measures
from marglik.training.held_out import (
    HeldOutLook,
    displacements,
    gradients_in_log_decays,
    move_gate,
    shrunk,
)

D, N = 4, 30
DELTAS = torch.tensor([2.0, 9.0], dtype=torch.float64)


class TwoHeads(nn.Module):
    """Two outputs with weights of their own, whose Gauss-Newton matrix K-FAC has exactly."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(D, 1, bias=False) for _ in range(2))

    def forward(self, x):
        return torch.cat([self.a(x), self.b(x)], -1)


def training_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    x *= torch.tensor([2.0, 1.0, 0.3, 0.1])  # eigenvalues from about 0.3 to 120
    return x, torch.randn(N, 2, generator=generator, dtype=torch.float64) + x[:, :2]


def minimum(x, y, deltas):
    """(2, D), the ridge solutions."""
    return torch.stack(
        [
            torch.linalg.solve(x.T @ x + d * torch.eye(D).double(), x.T @ y[:, c])
            for c, d in enumerate(deltas)
        ]
    )


def flow(theta, x, y, deltas, time, steps=4000):
    """θ after gradient flow on Σ ½(y − θx)² + ½ δ‖θ‖², by the midpoint rule."""
    step = time / steps

    def slope(theta):
        return (y - x @ theta.T).T @ x - deltas[:, None] * theta

    for _ in range(steps):
        theta = theta + step * slope(theta + step / 2 * slope(theta))
    return theta


def held_out_loss(theta):
    """A smooth mean loss that has no minimum at θ."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, D, generator=generator, dtype=torch.float64)
    return (x @ theta.T).logsumexp(-1).mean() + 0.1 * theta[0, 0]


@pytest.mark.parametrize("time", [0.02, 0.2, math.inf])
def test_the_held_out_gradient_is_that_of_retraining(time):
    x, y = training_data()
    theta = minimum(x, y, DELTAS)
    model = TwoHeads().double()
    with torch.no_grad():
        model.a.weight[0], model.b.weight[0] = theta[0], theta[1]
    posterior = Posterior(model, "regression", prior_precision=DELTAS)
    posterior.fit([(x, y)])
    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(held_out_loss(leaf), leaf)
    look = HeldOutLook(torch.zeros(1), [[gradient[:1], gradient[1:]]], [theta[:1], theta[1:]])
    moved = displacements(posterior, look.parameters, [time, time])
    (own,) = gradients_in_log_decays(look, moved)

    def retrained(log_factor):
        deltas = DELTAS * torch.tensor(log_factor).double().exp()
        end = minimum(x, y, deltas) if time == math.inf else flow(theta, x, y, deltas, time)
        return held_out_loss(end).item()

    eps = 1e-4
    exact = [
        (
            retrained([eps * (g == 0), eps * (g == 1)])
            - retrained([-eps * (g == 0), -eps * (g == 1)])
        )
        / (2 * eps)
        for g in range(2)
    ]
    assert_close(own, torch.tensor(exact).double(), rtol=1e-4, atol=1e-9)
    # Negative control: the time counts.
    another = [1.0 if time < math.inf else 0.02] * 2
    (other,) = gradients_in_log_decays(look, displacements(posterior, look.parameters, another))
    assert (other / own - 1).abs().max() > 0.1


def test_the_gate_opens_only_where_the_loss_rose_and_higher_decays_would_lower_it():
    generator = torch.Generator().manual_seed(0)
    best = torch.rand(200, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
    worse = best + 0.1 + noise
    late = {"rising_helps": True, "is_early": False, "limit": 1.2}

    def after(losses, **conditions):
        measures = Measures([], [])
        assert move_gate(measures, best, **late) == 0 and measures.log_factor == 0
        z = move_gate(measures, losses, **late | conditions)
        return measures, z

    measures, z = after(worse)
    error = (0.1 + noise).std() / math.sqrt(200)
    assert z == pytest.approx(((0.1 + noise).mean() / error).item()) and z > 10
    assert measures.log_factor == 0.5 and measures.best_losses is best
    for _ in range(3):
        move_gate(measures, worse, **late)
    assert measures.log_factor == 1.2
    move_gate(measures, best - 0.01, **late)  # it has fallen below the best
    assert measures.log_factor == pytest.approx(1.08)
    assert measures.best_losses is not best
    for closed in ({"rising_helps": False}, {"is_early": True}, {"limit": None}):
        assert after(worse, **closed)[0].log_factor == 0
    assert after(best + noise - noise.mean())[0].log_factor == 0  # no rise on average


def test_parts_that_disagree_say_nothing():
    agreeing = torch.full((10, 1), 0.3, dtype=torch.float64)
    assert_close(shrunk(agreeing), agreeing[0])
    noise = torch.tensor([[1.0], [-1.0]] * 5).double()
    assert shrunk(noise + 0.1).item() == 0
    t = 0.5 / ((noise.std() / math.sqrt(10)).item())
    assert_close(shrunk(noise + 0.5).item(), 0.5 * (1 - 1 / t**2))


def images(number, share, seed):
    """Four classes of noisy 6 × 6 images, a share of whose labels is drawn; and the true labels."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (number,), generator=generator)
    means = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(9))
    x = 0.5 * means[y] + torch.randn(number, 1, 6, 6, generator=generator)
    is_drawn = torch.rand(number, generator=generator) < share
    return x, torch.where(is_drawn, torch.randint(4, (number,), generator=generator), y), y


def train(share, **options):
    """Convolutions that memorise 400 images; the learner, the model and its accuracy."""
    (x, y, _), (x_held, y_held, _) = images(400, share, 0), images(200, share, 1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(576, 4),
    )  # fmt: skip
    learner = PriorLearner("classification", epochs=45, **options)
    OnlineTraining(
        model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        [*zip(x.split(50), y.split(50), strict=True)], learner, held_out=[(x_held, y_held)],
    ).run()  # fmt: skip
    x_test, _, y_test = images(1000, share, 2)
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    return learner, model, accuracy


@pytest.mark.filterwarnings("ignore")
def test_the_gate_opens_where_a_network_memorises_and_not_on_clean_labels():
    off, _, accuracy_off = train(0.4)
    on, _, accuracy = train(0.4, raise_limit=1.2)
    assert off.state.measures.log_factor == 0 < on.state.measures.log_factor <= 1.2
    assert accuracy > accuracy_off + 0.04  # 0.81 and 0.73
    clean, model, _ = train(0.0)
    gated, same, _ = train(0.0, raise_limit=1.2)
    assert gated.state.measures.log_factor == 0
    # To the bit: a look at held-out data draws no random numbers of the training.
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(clean.weight_decays(), gated.weight_decays())


def no_held_out(learner, model, optimizer, loader):
    learner.start(model, optimizer, loader, 2)


def regression(learner, model, optimizer, loader):
    other = PriorLearner("regression", raise_limit=1.2)
    loader = [(x, torch.randn(len(x), 3)) for x, _ in loader]
    other.start(model, optimizer, loader, 2, held_out=loader)


@pytest.mark.parametrize(
    ("start", "message"), [(no_held_out, "pass held_out to start"), (regression, "a classifier")]
)
def test_corrections_without_labels_that_can_make_them_are_errors(start, message):
    torch.manual_seed(0)
    model, loader = nn.Linear(4, 3), [(torch.randn(8, 4), torch.randint(3, (8,)))] * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = PriorLearner("classification", raise_limit=1.2)
    with pytest.raises(ValueError, match=message):
        start(learner, model, optimizer, loader)
    learner.start(model, optimizer, loader, 2, held_out=loader)  # negative control
