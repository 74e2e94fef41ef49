"""The rate falls in the last third, if the noise of the steps exceeds a share of the targets'."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader, TensorDataset

from marglik import OnlineTraining, PriorLearner
from marglik.data import Batches
from marglik.models import MLP
from marglik.training import loop
from marglik.training.algorithm import end_of_epoch
from marglik.training.average import noise_of_steps

EPOCHS, RATE = 9, 0.03
OF_STUDENT = {"likelihood": "student_t", "epochs": 60, "rate": 0.1}
"""Options with which the scale is learned, and steps have much noise."""


def training(
    noise=1e-3, likelihood="regression", scheduler=None, epochs=EPOCHS, rate=RATE, **options
):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator).double()
    y = x[:, :1].sin() + noise * torch.randn(64, 1, generator=generator).double()
    if likelihood == "classification":
        y = (y[:, 0] > 0).long()
    if likelihood.startswith("weighted"):
        y = torch.cat([y, torch.ones_like(y)], 1)
    torch.manual_seed(0)
    outputs = 2 if likelihood in ("classification", "heteroscedastic") else 1
    model = MLP(3, (20,), outputs, "tanh").double()
    optimizer = torch.optim.Adam(model.parameters(), rate)
    learner = PriorLearner(likelihood, epochs=epochs, **options)
    loader = Batches(x, y, 16, shuffle=True, seed=0)
    return OnlineTraining(
        model, optimizer, loader, learner, scheduler=scheduler and scheduler(optimizer)
    )


class Counting(torch.nn.Module):
    """Counts its calls, in a buffer and in a number."""

    buffer: torch.Tensor

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("buffer", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.buffer += 1
        return x


def rates(run):
    return [record["lr"] for record in run.run().records if record["kind"] == "epoch"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        OF_STUDENT,
        {**OF_STUDENT, "likelihood": "student_t(df=4)"},
        {**OF_STUDENT, "likelihood": "weighted(of='student_t')"},
    ],
    ids=str,
)
def test_the_rate_falls_to_zero_in_the_last_third(options):
    found, late = rates(training(**options)), options.get("epochs", EPOCHS) // 3
    rate = options.get("rate", RATE)
    assert found[:-late] == [rate] * 2 * late
    # The record has the rate after the epoch's steps.
    expected = [rate * (1 - epoch / late) for epoch in range(1, late + 1)]
    assert found[-late:] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"noise": 3.0},
        {"likelihood": "classification"},
        {"average": None},
        {"sigma_noise": 0.1, "learn_sigma_noise": False},
        {"scheduler": partial(ConstantLR, factor=1.0)},
        {"epochs": 1},
        {**OF_STUDENT, "noise": 3.0},
        {**OF_STUDENT, "likelihood": "student_t(scale=0.01)"},
        {**OF_STUDENT, "updates": 0},
        {**OF_STUDENT, "likelihood": "heteroscedastic"},
    ],
    ids=str,
)
def test_the_rate_stays_constant(options):
    """With noisy targets, labels, no average, a known σ, or a schedule by the user."""
    assert set(rates(training(**options))) == {options.get("rate", RATE)}


@pytest.mark.parametrize(
    ("options", "fixed_noise"),
    [
        ({}, {"sigma_noise": 0.1, "learn_sigma_noise": False}),
        (OF_STUDENT, {"likelihood": "student_t(scale=0.01)"}),
    ],
    ids=str,
)
def test_members_that_replay_the_noise_measure_it_too(options, fixed_noise):
    rate = options.get("rate", RATE)
    first = training(**options)
    first.run()
    replayed = training(**options)
    loader = replayed.train_loader
    optimizer = torch.optim.Adam(replayed.model.parameters(), rate)
    member = OnlineTraining(replayed.model, optimizer, loader, first.learner.replay())
    assert rates(member)[-1] == pytest.approx(0.0, abs=1e-12)
    fixed = training(**{**options, **fixed_noise})
    fixed.run()
    again = training(**options)
    optimizer = torch.optim.Adam(again.model.parameters(), rate)
    member = OnlineTraining(again.model, optimizer, again.train_loader, fixed.learner.replay())
    assert set(rates(member)) == {rate}


def test_a_measurement_changes_nothing_by_itself():
    """A training whose targets are noisy ends at the same bits as with a constant schedule."""
    measured = training(noise=3.0)
    constant = training(noise=3.0, scheduler=partial(ConstantLR, factor=1.0))
    for run in (measured, constant):
        run.run()
    for a, b in zip(measured.model.parameters(), constant.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_measurement_restores_buffers():
    run = training(noise=3.0)
    run.train_epoch()
    layers: Any = run.model.layers
    layers.append(Counting())
    noise_of_steps(run.learner.problem, run.learner.state, [1.0])
    assert layers[-1].calls == 4  # batches
    assert layers[-1].buffer == 0


def test_a_run_whose_rate_falls_is_not_resumed_with_a_schedule():
    run = training()
    for _ in range(7):
        run.train_epoch()
    again = training(scheduler=partial(ConstantLR, factor=1.0))
    with pytest.raises(ValueError, match="pass scheduler=None"):
        again.load_state_dict(run.state_dict())


@pytest.mark.parametrize("epochs", [8, 9, 11])
def test_a_falling_rate_reaches_zero_after_the_new_number_of_epochs(epochs):
    run = training()
    for _ in range(7):
        run.train_epoch()
    again = training(epochs=epochs)
    again.load_state_dict(run.state_dict())
    found, left = rates(again)[7:], epochs - 7
    expected = [RATE * 8 / 12 * (1 - epoch / left) for epoch in range(1, left + 1)]
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("noise", [1e-3, 3.0])
def test_a_resume_within_the_new_last_third_measures_the_noise(noise, monkeypatch):
    """A run for 30 epochs has not measured it after 7 epochs; with 9, the last third has begun."""
    monkeypatch.setattr(loop, "LARGEST_NOISE", 0.02)
    run = training(noise, epochs=30)
    for _ in range(7):
        run.train_epoch()
    again = training(noise)
    again.load_state_dict(run.state_dict())
    falls = [RATE / 2, 0.0] if noise < 1 else [RATE, RATE]
    assert rates(again)[7:] == pytest.approx(falls, abs=1e-12)


def test_a_resume_with_as_many_epochs_keeps_the_schedule():
    """Also if the remaining steps are not those of the earlier epochs."""
    run = training()
    for _ in range(7):
        run.train_epoch()
    for total in (4, 17):  # the rate is zero already, or the later epochs have more steps
        state = run.state_dict()
        state["scheduler"] = state["scheduler"] | {"total_iters": total}
        again = training()
        again.load_state_dict(state)
        schedule: Any = again.scheduler
        assert schedule.total_iters == total


def test_a_stop_with_fewer_epochs_can_continue_with_more():
    run = training()
    for _ in range(7):
        run.train_epoch()
    stopped = training(epochs=7)
    stopped.load_state_dict(run.state_dict())
    stopped.run()
    again = training()
    again.load_state_dict(stopped.state_dict())
    assert rates(again)[7:] == pytest.approx([RATE / 3, 0], abs=1e-12)


def test_a_refused_state_changes_nothing():
    run = training()
    for _ in range(7):
        run.train_epoch()
    schedule, other = run.scheduler, training(noise=3.0, scheduler=partial(ConstantLR, factor=1.0))
    other.train_epoch()
    with pytest.raises(ValueError, match="a learning-rate schedule"):
        run.load_state_dict(other.state_dict())
    assert run.scheduler is schedule


def test_a_rate_that_has_fallen_to_zero_cannot_train_for_more_epochs():
    run = training()
    run.run()
    training().load_state_dict(run.state_dict())  # the control: no more epochs
    with pytest.raises(ValueError, match="fallen to zero after 9 epochs"):
        training(epochs=11).load_state_dict(run.state_dict())


@pytest.mark.parametrize("saved", [None, partial(ConstantLR, factor=1.0)])
def test_a_schedule_is_not_dropped_or_added_by_a_resume(saved):
    other = partial(ConstantLR, factor=1.0) if saved is None else None
    run = training(noise=3.0, scheduler=saved)
    run.train_epoch()
    training(noise=3.0, scheduler=saved).load_state_dict(run.state_dict())  # the control
    with pytest.raises(ValueError, match="learning-rate schedule. To resume it, pass"):
        training(noise=3.0, scheduler=other).load_state_dict(run.state_dict())


def test_the_noise_of_steps_is_what_the_average_removes():
    """½ log(L/L̄) with L̄ at the average by hand; the latest parameters have another loss."""
    run = training()
    for _ in range(4):
        run.train_epoch()
    problem, state, model = run.learner.problem, run.learner.state, run.model
    loss = 2.5e-2
    noise = noise_of_steps(problem, state, [9.0, loss])
    x, y = (torch.cat(parts) for parts in zip(*run.train_loader, strict=True))
    latest = [p.detach().clone() for p in model.parameters()]

    def expected():
        with torch.no_grad():
            return 0.5 * math.log(loss / (0.5 * (model(x) - y).square().mean().item()))

    assert abs(expected() - noise) > 0.05  # at the latest parameters, which are restored
    state.averages[0].include_latest()
    state.averages[0].write()
    assert noise == pytest.approx(expected(), rel=1e-12)
    for p, q in zip(model.parameters(), latest, strict=True):
        assert not torch.equal(p, q)


def test_the_noise_of_student_t_compares_losses_of_the_same_likelihood():
    """Mean of L − L̄ over the epochs, by hand, with an update between two of them."""
    run = training(likelihood="student_t", epochs=40, updates=10)
    problem, state, model = run.learner.problem, run.learner.state, run.model
    losses, likelihoods = list[float](), []
    for epoch in range(1, 10):
        likelihoods.append(run.learner.likelihood)
        losses.append(run.train_epoch()["loss"])
        end_of_epoch(problem, state, epoch)
    noise = noise_of_steps(problem, state, losses)
    x, y = (torch.cat(parts) for parts in zip(*run.train_loader, strict=True))
    state.averages[0].include_latest()
    state.averages[0].write()
    with torch.no_grad():
        of_average = [of.loss(model(x), y).item() / len(y) for of in likelihoods]
    # Two epochs, the twentieth of 40, with an update between them.
    assert likelihoods[7] != likelihoods[8] == state.likelihood
    expected = sum(losses[7:]) / 2 - sum(of_average[7:]) / 2
    assert noise == pytest.approx(expected, rel=1e-9)
    # Negative control: with the present likelihood alone the change of the scale counts, too.
    assert abs(sum(losses[7:]) / 2 - of_average[8] - expected) > 0.005


def test_dropout_is_no_noise_of_steps():
    """The average is evaluated in train mode: in eval mode its loss would be far lower."""
    run = training()
    for _ in range(6):
        run.train_epoch()
    ask = partial(noise_of_steps, run.learner.problem, run.learner.state, [1.0])
    without = ask()
    layers: Any = run.model.layers
    layers.append(torch.nn.Dropout(0.5))
    run.model.eval()
    assert without - ask() > 1.0
    assert not run.model.training


def test_batches_of_a_loader_are_restored():
    """The measurement draws from the loader, but later epochs have the same order."""
    run = training(noise=3.0)
    dataset = TensorDataset(torch.randn(32, 3).double(), torch.randn(32, 1).double())
    loader = DataLoader(dataset, 8, shuffle=True)
    run.train_epoch()
    torch.manual_seed(3)
    before = [x for x, _ in loader]
    torch.manual_seed(3)
    noise_of_steps(run.learner.problem, run.learner.state, [1.0], loader)
    for a, (b, _) in zip(before, loader, strict=True):
        assert torch.equal(a, b)


def test_rounding_of_lower_precision_is_no_noise_of_steps():
    """Steps with a rate of zero have no noise, although bfloat16 rounds more than the targets'."""
    torch.manual_seed(0)
    x, model = torch.randn(64, 3), MLP(3, (20,), 1, "tanh")
    y = model(x).detach() + 1e-4 * torch.randn(64, 1)
    optimizer, learner = (
        torch.optim.Adam(model.parameters(), 0.0),
        PriorLearner("regression", epochs=EPOCHS),
    )
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    run = OnlineTraining(model, optimizer, Batches(x, y, 16), learner, fabric=fabric)
    losses = [run.train_epoch()["loss"] for _ in range(7)]
    assert not run.state_dict()["falls"]
    # Control: the loss of the average in float32.
    assert noise_of_steps(run.learner.problem, run.learner.state, losses) > 1.0
