"""The online loop: its steps, its records, what it ends with, what it refuses."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from kfac_backend import CurvatureOptions, kronecker_factors
from kfac_backend.likelihoods import likelihood_of
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from marglik import (
    Hyperparameters,
    OnlineTraining,
    PriorGroups,
    PriorLearner,
    Schedule,
)
from marglik.application.runs.optimizers import OptimizerConfig, build_optimizer
from marglik.loaders import count_examples
from marglik.posterior.prior import add_penalty
from tests.kfac_backend.test_steady_batch import WAITS, Dispatched
from tests.marglik.states import same
from tests.marglik.training.runs import scaled_fabric

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 0.05
DELTA = torch.tensor([3.0, 0.5, 2.0, 7.0, 1.0]).double()
"""Prior precisions of the network's five trainable tensors."""


class Network(nn.Module):
    """With a parameter that the outputs do not need, and one that is frozen."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Parameter(torch.randn(5))
        self.first = nn.Linear(4, 6)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.last = nn.Linear(6, 3)
        self.to(dtype)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) * self.frozen))


class Halving(Network):
    """Changes its input in place."""

    def forward(self, x):
        return super().forward(x.mul_(0.5))


def batch(likelihood="classification", dtype=torch.float64, n=7):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    y = {
        "classification": x[:, :3].argmax(-1),
        "regression": x[:, :3].sin(),
        "bernoulli": (x[:, :3] > 0).double(),
    }[likelihood]
    return x.to(dtype), y.to(dtype) if y.is_floating_point() else y


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, nesterov=True)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=LR)


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def training(
    likelihood="classification", model=None, optimizer=None, loader=None, delta=DELTA, sigma=1.0,
    temperature=1.0, schedule=None, learns=False, dtype=torch.float64, **options,
):  # fmt: skip
    """A run on one batch, which learns nothing if not asked to."""
    model = model or Network(dtype)
    loader = [batch(likelihood, dtype)] if loader is None else loader
    learner = PriorLearner(
        likelihood,
        CurvatureOptions(unsupported="diagonal"),
        temperature=temperature,
        schedule=schedule or Schedule(updates=0 if not learns else 20, average=None),
        hyperparameters=Hyperparameters(PriorGroups.from_model(model), delta, sigma_noise=sigma),
    )
    optimizer = optimizer or momentum(trainable(model))
    return OnlineTraining(model, optimizer, loader, learner, **options)


@pytest.mark.parametrize(
    ("likelihood", "sigma", "temperature", "make_optimizer"),
    [
        ("classification", 1.0, 1.0, momentum),
        ("classification", 1.0, 0.3, adam),
        ("bernoulli", 1.0, 0.3, momentum),
        ("regression", 0.5, 1.0, adam),
        ("regression", 0.5, 0.3, momentum),
    ],
)
def test_steps_follow_the_tempered_log_joint(likelihood, sigma, temperature, make_optimizer):
    """Their loss is −σ²·T/N·(log p(D|θ)/T + log p(θ)); records have it without σ²."""

    def steps_of_autograd(delta):
        model, (x, y) = Network(), batch(likelihood)
        parameters, values = trainable(model), []
        optimizer = make_optimizer(parameters)
        for _ in range(4):
            f = model(x)
            distribution = {
                "classification": lambda f=f: torch.distributions.Categorical(logits=f),
                "bernoulli": lambda f=f: torch.distributions.Bernoulli(logits=f),
                "regression": lambda f=f: torch.distributions.Normal(f, sigma),
            }[likelihood]()
            log_prior = sum(
                torch.distributions.Normal(0.0, d**-0.5).log_prob(p).sum()
                for p, d in zip(parameters, delta, strict=True)
            )
            log_joint = distribution.log_prob(y).sum() / temperature + log_prior
            objective = -temperature / len(x) * log_joint
            optimizer.zero_grad()
            (sigma**2 * objective).backward()
            optimizer.step()
            values.append(objective.item())
        # Of the densities' constants, the objective has none.
        constant = sum(
            0.5 * p.numel() * math.log(float(d) / (2 * math.pi))
            for p, d in zip(parameters, delta, strict=True)
        )
        constant *= temperature / len(x)
        if likelihood == "regression":
            constant -= 0.5 * y.shape[1] * math.log(2 * math.pi * sigma**2)
        return parameters, [value + constant for value in values]

    model = Network()
    run = training(
        likelihood, model, make_optimizer(trainable(model)), sigma=sigma, temperature=temperature
    )
    records = [run.train_epoch() for _ in range(4)]
    expected, values = steps_of_autograd(DELTA)
    for p, after, first in zip(trainable(model), expected, trainable(Network()), strict=True):
        assert_close(p, after, rtol=1e-12, atol=1e-14)
        assert (p - first).abs().min() > 0  # the unused ones, too
    assert [r["objective"] for r in records] == pytest.approx(values, rel=1e-12)
    assert torch.equal(model.frozen, Network().frozen) and model.frozen.grad is None
    # Negative control: another precision of any one tensor is seen.
    unlike, _ = steps_of_autograd([*DELTA[:-1], 2 * DELTA[-1]])
    assert (trainable(model)[-1] - unlike[-1]).abs().max() > 1e-4


@pytest.mark.parametrize("shares", [False, True])
def test_the_penalty_is_added_once_to_each_gradient(shares):
    """Also to one that two parameters share, as after a compiled backward pass, or to none."""
    parameters = [nn.Parameter(torch.full((3,), v, dtype=torch.float64)) for v in (1.0, 2.0, 4.0)]
    gradient = torch.ones(3, dtype=torch.float64)
    for p in parameters[:2]:
        p.grad = gradient if shares else gradient.clone()
    for scale in (0.5, torch.tensor(0.5)):
        value = add_penalty(parameters, [0.1, 0.2, 0.3], scale, {}, with_value=True)
    # Twice: with a number for the scale, and with a scaler's tensor.
    gradients = torch.stack([p.grad[0] for p in parameters])
    assert_close(gradients, torch.tensor([1.1, 1.4, 1.2], dtype=torch.float64))
    assert value == pytest.approx(0.5 * 3 * (0.1 + 0.2 * 4 + 0.3 * 16))
    weight = nn.Parameter(torch.ones(2, 3))  # an embedding's sparse gradient
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 3), (2, 3))
    add_penalty([weight], [0.5], 1.0, {})
    assert_close(weight.grad, torch.tensor([[0.5] * 3, [1.5] * 3]))


def test_float16_with_a_scaler_follows_float32():
    """The loss's scale starts at 64 and doubles every second step."""
    plain = training(dtype=torch.float32)
    half = training(dtype=torch.float32, fabric=scaled_fabric())
    curves = [[run.train_epoch()["objective"] for _ in range(12)] for run in (plain, half)]
    assert curves[1] == pytest.approx(curves[0], rel=5e-3)
    assert curves[1] != curves[0]  # negative control: it was float16
    for p, q in zip(trainable(half.model), trainable(plain.model), strict=True):
        assert_close(p, q, rtol=0, atol=5e-3)
    start = trainable(Network(torch.float32))
    moved = [(p - q).abs().max() for p, q in zip(trainable(plain.model), start, strict=True)]
    assert max(moved) > 0.1


@pytest.mark.slow
def test_compilation_changes_rounding_alone():
    plain, compiled = training(), training(compile_mode="default")
    for _ in range(4):
        assert plain.train_epoch()["loss"] == pytest.approx(compiled.train_epoch()["loss"])
    for p, q in zip(trainable(compiled.model), trainable(plain.model), strict=True):
        assert_close(p, q)


@pytest.mark.parametrize(("likelihood", "sigma"), [("classification", 1.0), ("regression", 0.5)])
def test_kfac_takes_natural_gradient_steps_on_the_posterior(likelihood, sigma):
    """Δ = −lr (F + (λ + σ² T δ/N) I)⁻¹ (g + σ² T δ/N θ), F of the mean loss with unit noise."""
    model, (x, y) = Network(), batch(likelihood)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    factors = kronecker_factors(model, [(x, y)], likelihood, unsupported="diagonal")
    (likelihood_of(likelihood).loss(model(x), y) / len(x)).backward()
    gradients = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()
    }
    model.zero_grad()
    with pytest.warns(UserWarning, match="No K-FAC rule for unused"):
        optimizer = KFAC(
            model, likelihood, LR, momentum=0.0, fisher="exact",
            options=PreconditionerOptions(damping=0.02, damping_on="product", kl_clip=None),
        )  # fmt: skip
    training(likelihood, model, optimizer, sigma=sigma).train_epoch()
    for delta, (name, p) in zip(DELTA.tolist(), parameters.items(), strict=True):
        decay = sigma**2 * delta / len(x)
        g = (gradients[name] + decay * before[name]).flatten()
        if name != "unused":
            block = factors.to_dense(name) / len(x)
            damped = block + 0.02 * torch.eye(len(block)).double()
            of_kfac = torch.linalg.solve(damped, g)  # the control: without the prior's curvature
            g = torch.linalg.solve(damped + decay * torch.eye(len(block)).double(), g)
            assert (of_kfac - g).norm() > 0.01 * g.norm()
        assert_close(p.detach(), before[name] - LR * g.view(p.shape))


def test_batches_that_stay_in_memory_are_left_as_they_are():
    run = training(model=Halving(), learns=True, schedule=Schedule(4, every=2))
    run.run()
    assert same(run.train_loader[0], batch())


# --- what it learns, records and ends with ---


def test_learns_and_records():
    records = []
    model = Network().eval()
    schedule = Schedule(6, every=2, steps=20, average=None)
    run = training(model=model, learns=True, schedule=schedule, on_record=records.append)
    result = run.run()
    assert not model.training and not model.last.training  # the mode that it was in
    assert records == result.records
    assert [(r["kind"], r["epoch"]) for r in records] == [
        ("epoch", 1), ("epoch", 2), ("update", 2), ("epoch", 3), ("epoch", 4), ("update", 4),
        ("epoch", 5), ("epoch", 6), ("update", 6),
    ]  # fmt: skip
    updates = [r for r in records if r["kind"] == "update"]
    assert all(u["evidence"] > u["evidence_before"] for u in updates)
    assert result.evidence == updates[-1]["evidence"] and len(result.evidences) == 3 * 20
    last = updates[-1]
    assert len(set(last["weight_decay"].values())) == 5  # none of the frozen tensor
    assert last["weight_decay"]["first.weight"] == last["prior_precision"]["first.weight"] / 7
    assert set(last["seconds"]) == {"pass", "eigenvalues", "steps"}
    assert records[-2]["loss"] < records[0]["loss"] < records[0]["objective"]
    assert 0 <= records[-2]["accuracy"] <= 1


@pytest.mark.parametrize("keep", ["best", "last"])
def test_best_evidence_comes_back(keep):
    """A last epoch that wrecks the network loses against the update before it, unless asked for."""
    schedule = Schedule(2, every=1, steps=5, keep=keep, average=None)
    run, seen = training(learns=True, schedule=schedule), []

    def wreck(record):
        if record["kind"] == "epoch":
            seen.append([p.detach().clone() for p in trainable(run.model)])
        if record["kind"] == "update" and record["epoch"] == 1:
            with torch.no_grad():
                for p in trainable(run.model):
                    p.add_(30 * torch.randn_like(p))

    run.on_record = wreck
    result = run.run()
    evidences = [r["evidence"] for r in result.records if r["kind"] == "update"]
    assert evidences[0] > evidences[1] + 10
    kept = {"best": 0, "last": 1}[keep]
    assert result.epoch == kept + 1
    assert same([p.detach() for p in trainable(run.model)], seen[kept])
    assert_close(result.laplace.mean, torch.cat([p.flatten() for p in seen[kept]]))
    delta = result.records[2 * kept + 1]["prior_precision"].values()
    assert_close(result.laplace.prior_precision, torch.tensor(list(delta)).double())
    assert float(result.laplace.log_marginal_likelihood()) == pytest.approx(result.evidence)


def test_without_any_update_the_posterior_is_fitted_at_the_end():
    schedule = Schedule(epochs=2, every=5, burn_in=10, average=None)
    result = training(learns=True, schedule=schedule).run()
    assert result.epoch == 2
    assert_close(result.laplace.prior_precision, DELTA)
    assert float(result.laplace.log_marginal_likelihood()) == pytest.approx(result.evidence)


def test_a_decay_that_sgd_cannot_follow_is_limited_and_named():
    """Without the limit lr · T·δ/N = 71 would multiply the parameter by −70 in each step."""
    run = training(delta=[1.0, 1.0, 1e4, 1.0, 1.0], schedule=Schedule(3, updates=0, average=None))
    with pytest.warns(RuntimeWarning, match="weight decay of first.bias has grown beyond") as told:
        run.run()
    assert len(told) == 1
    assert run.model.first.bias.abs().max() < 0.1


# --- what it refuses ---


def test_refusals():
    x, y = batch()
    model = Network()
    with pytest.raises(ValueError, match="Label 3 is out of range: the model has 3 outputs"):
        training(model=model, loader=[(x, y + 1)])
    assert same(trainable(model), trainable(Network()))  # before the first step
    run = training(loader=[(x, y), (x, y + 1)])  # only the first batch is looked at before
    with pytest.raises(ValueError, match="Label 3 is out of range"):
        run.train_epoch()
    x[3, 1] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite in epoch 1.*NaN in the data"):
        training(loader=[(x, y)]).run()
    with pytest.raises(ValueError, match="temperature must be positive, not 0"):
        training(temperature=0.0)
    with pytest.raises(ValueError, match="The data is empty"):
        training(loader=[])
    model = Network()
    decaying = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="its own weight decay"):
        training(model=model, optimizer=decaying)
    state = training().state_dict()
    for lacking in ({}, *({k: v for k, v in state.items() if k != key} for key in state)):
        missing = next(key for key in state if key not in lacking)
        message = f"OnlineTraining lacks .*'{missing}'.* Another version .* start again without"
        with pytest.raises(ValueError, match=message):
            training().load_state_dict(lacking)
    linear = nn.Linear(4, 3).double()
    with pytest.raises(ValueError, match="cannot place hooks in a compiled model"):
        kfac = KFAC(linear, "classification", LR)
        training(model=linear, optimizer=kfac, delta=1.0, compile_mode="default")


# --- its loaders ---


def test_a_curvature_loader_of_fewer_examples_is_named(recwarn):
    """N of the decays is its number. Samplers and drop_last may make epochs shorter than N."""
    x, y = torch.randn(30, 4), torch.arange(30) % 3

    def run(size, drop_last):
        model, learner = nn.Linear(4, 3), PriorLearner("classification", epochs=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train = DataLoader(TensorDataset(x, y), 8, drop_last=drop_last)
        return OnlineTraining(
            model, optimizer, train, learner, curvature_loader=[(x[:size], y[:size])]
        )

    assert run(30, True).learner.problem.num_data == run(30, False).learner.problem.num_data == 30
    assert not recwarn
    with pytest.warns(RuntimeWarning, match="loader has 15 examples, and the train_loader 30"):
        run(15, False)


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 8), (True, 6)])
def test_batch_samplers_are_counted_without_loading(drop_last, expected):
    class Loud(TensorDataset):
        def __getitem__(self, index):
            raise AssertionError("loaded")

    dataset = Loud(torch.zeros(8, 3))
    sampler = BatchSampler(RandomSampler(dataset), 3, drop_last)
    assert count_examples(DataLoader(dataset, batch_sampler=sampler)) == expected


# --- schedules and optimisers ---


def test_epochs_of_updates():
    def due(epochs=12, until=None, **options):
        schedule = Schedule(epochs=epochs, **options)
        return [e for e in range(1, (until or epochs) + 1) if schedule.is_due(e)]

    assert due() == list(range(1, 13))  # twenty updates, at most one per epoch
    assert due(100) == list(range(5, 101, 5))
    assert due(30, updates=4) == [8, 15, 23, 30]
    assert due(every=5) == [5, 10]
    assert due(every=4, burn_in=8) == [8, 12]
    assert due(every=5, burn_in=13) == []
    # Where the end is not known, or was passed: a tenth to a twentieth of the epochs so far.
    open_end = due(None, 1000)
    assert open_end[:30] == [*range(1, 20), *range(20, 40, 2), 40]
    assert all(1 / 20 <= (b - a) / a <= 1 / 10 for a, b in pairwise(open_end) if a >= 20)
    assert due(100, 160)[20:] == [104, 112, 120, 128, 136, 144, 152, 160]
    assert due(None, 20, updates=4) == [1, 2, 3, 4, 6, 8, 12, 16]
    for name in ("epochs", "every"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            Schedule(**{name: 0})


def test_optimizer_has_a_tenth_of_the_rate_for_scalars_and_a_schedule():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(1, 1, bias=False))
    optimizer, scheduler = build_optimizer(model, OptimizerConfig(lr=0.1), 10)
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 1]
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.01])
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    cosine = [1e-6 + 0.099999 * (1 + math.cos(math.pi * k / 10)) / 2 for k in range(11)]
    assert rates == pytest.approx(cosine)
    _, scheduler = build_optimizer(model, OptimizerConfig(lr=0.1), None)  # with an average
    assert scheduler is None
    adamw, _ = build_optimizer(model, OptimizerConfig(name="adamw"), 10)
    assert isinstance(adamw, torch.optim.AdamW)
    assert all(g["weight_decay"] == 0 for g in adamw.param_groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adam"}, "optimizer.name='adam' is not supported; choose one of 'sgd', 'adamw'"),
        ({"lr": 0.0}, "optimizer.lr must be positive"),
        ({"damping": 1.0}, "optimizer.name is sgd. Pass --optimizer.name kfac"),
        ({"name": "kfac", "damping": 0.0}, "optimizer.damping must be positive"),
    ],
)
def test_wrong_optimizer_options(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def test_a_step_waits_for_no_number_of_the_device():
    """But for the norms that are read on a CPU alone, where they are at hand.

    A longer epoch reads no more than its further steps do: of each tensor the norm of its gradient,
    by which gradients are limited, and its own, of which the record has the penalty.
    """
    counts = []
    for batches in (2, 6):
        run = training(loader=[batch()] * batches)
        for _ in range(8):  # the first steps are looked at
            run.train_epoch()
        with Dispatched() as dispatched:
            run.train_epoch()
        counts.append(sum(dispatched.counts[name] for name in WAITS))
    assert counts[1] - counts[0] == (6 - 2) * 2 * len(trainable(run.model))
