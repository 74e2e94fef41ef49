"""How held-out labels correct the weight decays: the gradient, the gate, and what a training does.

The gradient's oracle is retraining: gradient flow in small steps at other decays, from the minimum.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from marglik import OnlineTraining, Posterior, PriorLearner
from marglik.training import algorithm, held_out
from marglik.training.held_out import (
    derivatives_in_log_decays,
    displacements,
    is_negative,
    move_gate,
    rise_of,
    shrunk,
    times_left,
)
from marglik.training.state import Measures

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

    def derivatives(time):
        moved = torch.cat(displacements(posterior, [theta[:1], theta[1:]], [time, time]))
        return -(gradient * moved).sum(1)

    own = derivatives(time)

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
    other = derivatives(1.0 if time < math.inf else 0.02)
    assert (other / own - 1).abs().max() > 0.1


def test_a_padding_row_is_not_displaced():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=2), nn.Flatten(), nn.Linear(6, 3)).double()
    model[0].weight.data[2] = 1.0  # as a loaded network may have it
    posterior = Posterior(model, "classification")
    posterior.fit([(torch.tensor([[0, 1], [2, 3], [3, 2]]), torch.arange(3))])
    moved, *_ = displacements(posterior, [*model.parameters()], [math.inf] * 3)
    assert (moved != 0).any(1).tolist() == [True, True, False, True]


@pytest.mark.parametrize(("epochs", "share"), [(9, 2), (None, 1)])
def test_the_time_left_is_that_of_the_remaining_steps(epochs, share):
    """Of six steps in three epochs; if the end is unknown, of as many. Adam's steps have none."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.2, momentum=0.9)
    data = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 2
    learner = PriorLearner("classification", temperature=0.5)
    learner.start(model, [sgd, torch.optim.Adam(model[1].parameters())], data, epochs)
    learner.state.epoch, learner.state.steps = 3, [6, 6]
    h = 0.2 / (1 - 0.9) * 0.5 * share * 6 / 16
    expected = [h, h, math.inf, math.inf]
    assert times_left(learner.problem, learner.state) == pytest.approx(expected)


@pytest.mark.parametrize("num_batches", [1, 12])
def test_derivatives_by_part_are_those_of_autograd(num_batches):
    """One batch is ten parts; of twelve batches, the parts 0 and 1 have two."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (24,), generator=generator)
    y[5] = -100  # does not count
    batches = [*zip(x.chunk(num_batches), y.chunk(num_batches), strict=True)]
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = PriorLearner("classification", ignore_index=-100, loss_mean_over="terms", **ON)
    learner.start(model, optimizer, batches, 9, held_out=batches)
    moved = [torch.randn(p.shape, generator=generator).double() for p in model.parameters()]
    own = derivatives_in_log_decays(learner.problem, learner.state, moved, 1.7, 0.3)
    if num_batches == 1:
        parts = [torch.arange(i * 24 // 10, (i + 1) * 24 // 10) for i in range(10)]
    else:
        parts = [torch.arange(2 * i, 2 * i + 2) for i in range(10)]
        parts[:2] = [torch.cat([part, part + 20]) for part in parts[:2]]

    def exact(temperature, noise):
        rows = []
        for part in parts:
            part = part[y[part] >= 0]
            p = (model(x[part]) / temperature).softmax(-1).gather(1, y[part, None])
            gradients = torch.autograd.grad(
                -((1 - noise) * p + noise / 3).log().mean(), [*model.parameters()]
            )
            rows.append([-(g * u).sum() for g, u in zip(gradients, moved, strict=True)])
        return torch.tensor(rows, dtype=torch.float64)

    assert_close(own, exact(1.7, 0.3), rtol=1e-10, atol=1e-12)
    assert (own / exact(1.7, 0.0) - 1).abs().max() > 0.1  # negative controls: ε and τ count
    assert (own / exact(1.0, 0.3) - 1).abs().max() > 0.1


def test_confidently_wrong_outputs_have_finite_derivatives():
    """exp(−2000) is 0 in float64; the derivative at ε = 0 is still p − e_y."""
    f, y = torch.tensor([[2000.0, 0.0], [0.0, 1.0]]).double(), torch.tensor([1, 1])
    slopes = held_out._slopes(f, y, 1.0, 0.0)
    assert_close(slopes, f.softmax(-1) - torch.tensor([[0.0, 1.0], [0.0, 1.0]]).double())
    assert held_out._slopes(f, y, 1.0, 0.1)[0].tolist() == [0, 0]  # the label counts as random


def convolutions():
    """Groups of channels, and a head whose 300 inputs exceed twice the number of examples."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(300, 7), nn.Linear(7, 3),
    ).double()  # fmt: skip


@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("time", [2.0, math.inf])
def test_displacements_are_those_of_dense_blocks(time, correction):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, 12, 8, generator=generator, dtype=torch.float64)[..., :7]
    x = torch.nn.functional.pad(x, (0, 0, 0, 5))  # (12, 2, 17, 7): 4 × 15 × 5 features
    y = torch.randint(3, (12,), generator=generator)
    model = convolutions()
    posterior = Posterior(model, "classification", prior_precision=0.7, temperature=0.5)
    posterior.fit([(x, y)], corrected=correction)
    blocks = posterior.fitted_factors().blocks
    assert any(F.rows is not None for block in blocks.values() for F, _ in block.named_factors())
    parameters = [*model.parameters()]
    moved = displacements(posterior, parameters, [time] * len(parameters))
    for block, p, u in zip(blocks.values(), parameters, moved, strict=True):
        s, Q = torch.linalg.eigh(block.to_dense().double() / 0.5 + 0.7 * torch.eye(p.numel()))
        f = 1 / s if time == math.inf else (1 - torch.exp(-time * s)) / s
        dense = Q @ (f * (Q.T @ (0.7 * p.detach().flatten())))
        assert_close(u.flatten(), dense, rtol=1e-6, atol=1e-9)
        # Negative control: the curvature counts.
        without = 0.7 * p.detach() * (1 / 0.7 if time == math.inf else (1 - math.exp(-1.4)) / 0.7)
        assert (u - without).norm() > 0.01 * u.norm()


def test_the_factor_rises_to_its_limit_and_falls_by_a_tenth():
    generator = torch.Generator().manual_seed(0)
    best = torch.rand(200, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
    worse, measures = best + 0.1 + noise, Measures([], [])

    def move(losses, limit):
        move_gate(measures, losses, rise_of(measures.best_losses, losses), limit)

    move(best, None)
    assert measures.rise == 0 and measures.log_factor == 0
    move(worse, 1.2)
    error = (0.1 + noise).std() / math.sqrt(200)
    assert measures.rise == pytest.approx(((0.1 + noise).mean() / error).item())
    assert measures.rise > 10
    assert measures.log_factor == 0.5 and measures.best_losses is best
    for _ in range(3):
        move(worse, 1.2)
    assert measures.log_factor == 1.2
    move(best - 0.01, None)
    assert measures.log_factor == pytest.approx(1.08)
    assert measures.best_losses is not best


@pytest.mark.parametrize(
    ("z", "epoch", "a", "options", "factor", "lowers"),
    [
        (2.0, 20, -0.3, {}, 0.5, False),
        (2.0, 20, -0.3, {"lowering": False}, 0.5, False),
        (2.0, 20, -0.11, {}, 0.5, False),
        (2.0, 20, -0.09, {}, 0.0, True),  # parts disagree: not below 0 by a standard error
        (2.0, 20, 0.3, {}, 0.0, True),  # lower decays help, also above the best loss
        (2.0, 20, 0.3, {"lowering": False}, 0.0, False),
        (0.5, 20, -0.3, {}, 0.0, True),
        (2.0, 9, -0.3, {}, 0.0, True),  # too early: a third of the epochs
        (2.0, 20, -0.3, {"raise_limit": None}, 0.0, True),
    ],
)
def test_the_factor_rises_only_where_parts_agree_that_the_loss_rose_and_would_fall(
    z, epoch, a, options, factor, lowers, monkeypatch
):
    data, model = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 2, nn.Linear(4, 3)
    learner = PriorLearner("classification", **ON | options)
    learner.start(model, torch.optim.SGD(model.parameters(), lr=0.1), data, 30, held_out=data)
    problem, state = learner.problem, learner.state
    state.epoch = epoch
    # The weight's gradient, with an error of 0.1 of the mean of ten parts; the bias wants less.
    of_weight = a + 0.1 * math.sqrt(9) * torch.tensor([1.0, -1.0] * 5).double()
    by_part = torch.stack([of_weight, torch.full((10,), 0.2).double()], 1)
    monkeypatch.setattr(held_out, "displacements", lambda *args: [])
    monkeypatch.setattr(held_out, "derivatives_in_log_decays", lambda *args: by_part)
    monkeypatch.setattr(held_out, "rise_of", lambda *args: z)
    pull = held_out.correct(problem, state, Posterior(model, "classification"))
    assert state.measures.log_factor == factor
    if not lowers:
        assert pull is None
        return
    expected = torch.tensor([max(a, 0.0) * (1 - (0.1 / a) ** 2), 0.2]).double()
    assert_close(pull, 3 * 16 * expected)


def test_parts_that_disagree_say_nothing():
    agreeing = torch.full((10, 1), 0.3, dtype=torch.float64)
    assert_close(shrunk(agreeing), agreeing[0])
    noise = torch.tensor([[1.0], [-1.0]] * 5).double()
    assert shrunk(noise + 0.1).item() == 0
    t = 0.5 / ((noise.std() / math.sqrt(10)).item())
    assert_close(shrunk(noise + 0.5).item(), 0.5 * (1 - 1 / t**2))


def test_a_single_held_out_example_corrects_nothing():
    """It has no standard error, and NaN would become a weight decay."""
    one = torch.tensor([0.3])
    assert rise_of(one, one + 1) == 0
    assert shrunk(torch.tensor([[0.5, -2.0]])).tolist() == [0, 0]
    assert not is_negative(torch.tensor([-2.0]))
    assert is_negative(torch.tensor([-2.0, -2.1]))  # the control
    assert rise_of(torch.zeros(2), torch.tensor([0.9, 1.1])) > 1  # the control


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


ON = {"lowering": True}


@pytest.mark.filterwarnings("ignore")
def test_the_gate_opens_where_a_network_memorises_and_not_on_clean_labels():
    off, _, accuracy_off = train(0.4, raise_limit=None)
    on, _, accuracy = train(0.4)
    c = on.state.measures.log_factor
    assert off.state.measures.log_factor == 0 < c <= 1.2
    assert accuracy > accuracy_off + 0.04  # 0.79 and 0.74
    # e^c is in the decays that act, are returned, recorded and replayed: of weights, not of biases.
    own = on.state.hyperparameters.prior_precision / on.problem.num_data
    factors = torch.tensor([math.exp(c), 1.0] * 3, dtype=torch.float64)
    assert_close(on.weight_decays(), own * factors, rtol=1e-12, atol=0)
    assert [*on.state.record["weight_decay"].values()] == on.weight_decays().tolist()
    assert on.state.decays == on.weight_decays().tolist()
    delta, *_ = on.state.decay_history[45]
    assert_close(delta / 400, on.weight_decays())
    clean, model, _ = train(0.0, raise_limit=None)
    gated, same, _ = train(0.0)
    assert gated.state.measures.log_factor == 0
    # To the bit: a look at held-out data draws no random numbers of the training.
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(clean.weight_decays(), gated.weight_decays())


def test_one_decay_of_all_parameters_is_raised_as_a_whole():
    model = nn.Sequential(nn.Linear(4, 3))
    data = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 2
    learner = PriorLearner("classification", structure="scalar", **ON)
    learner.start(model, torch.optim.SGD(model.parameters(), lr=0.1), data, 2, held_out=data)
    before = learner.weight_decays()
    learner.state.measures.log_factor = 1.0
    assert_close(learner.weight_decays(), before * math.e)


@pytest.mark.parametrize(
    ("likelihood", "is_held_out", "options", "message"),
    [
        ("classification", True, {}, None),
        ("noisy_classification", True, {}, None),
        ("classification", False, {"updates": 0}, None),  # nothing is learned
        ("classification", False, {}, "held-out batches"),
        ("classification", True, {"hessian_structure": "diag"}, "hessian_structure='kron'"),
        ("regression", True, {}, "a classifier"),
    ],
)
def test_lowering_without_labels_that_can_do_it_is_an_error_and_the_default_does_nothing(
    likelihood, is_held_out, options, message
):
    y = torch.randn(8, 3) if likelihood == "regression" else torch.randint(3, (8,))
    data, model = [(torch.randn(8, 4), y)] * 2, nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = PriorLearner(likelihood, **ON | options)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        learner.start(model, optimizer, data, 9, held_out=data if is_held_out else None)
    learner = PriorLearner(likelihood, **options)
    learner.start(model, optimizer, data, 9, held_out=data if is_held_out else None)
    assert learner.problem.corrects_decays == (message is None and is_held_out)


def test_the_best_update_has_the_factor_of_its_weight_decays(monkeypatch):
    """Here the first one."""

    def correct(problem, state, posterior):
        state.measures.log_factor += 0.3

    monkeypatch.setattr(algorithm.held_out, "correct", correct)
    (x, y, _), model = images(40, 0.0, 0), nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    optimizer, data = torch.optim.SGD(model.parameters(), 0.1), [(x, y)]
    prior = PriorLearner("classification", keep="best", every=1)
    prior.start(model, optimizer, data, 5, held_out=data)
    first = None
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        first = first or prior.state.best
    prior.state.best = first | {"evidence": 0.0}  # others are negative
    assert prior.state.measures.log_factor == pytest.approx(4 * 0.3)
    prior.finish()
    assert prior.state.kept_epoch == 1
    factors = torch.tensor([math.exp(0.3), 1.0], dtype=torch.float64)
    delta = prior.state.hyperparameters.prior_precision
    assert_close(prior.weight_decays(), delta / len(y) * factors)


def test_held_out_batches_that_are_read_once_are_an_error():
    data = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 2
    model = nn.Linear(4, 3)
    learner = PriorLearner("classification", **ON)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError):
        learner.start(model, optimizer, data, 9, held_out=iter(data))
