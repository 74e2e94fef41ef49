"""The online loop: its objective, its schedule, what it keeps, what it refuses."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from marglik import (
    Hyperparameters,
    KronLaplace,
    OnlineTraining,
    PriorGroups,
    PriorLearner,
    Schedule,
)
from marglik.training.optimizers import KfacConfig, OptimizerConfig, build_optimizer


def data(likelihood="classification", n=40):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    y = x[:, :3].argmax(-1) if likelihood == "classification" else x[:, :3].sin()
    return TensorDataset(x, (y > 0).double() if likelihood == "bernoulli" else y)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def training(
    model=None,
    likelihood="classification",
    loader=None,
    schedule=None,
    temperature=1.0,
    lr=0.1,
    prior_precision=1.0,
    sigma_noise=1.0,
    method="adam",
    **options,
):
    model = model or network()
    loader = DataLoader(data(likelihood), 10) if loader is None else loader

    def make_laplace(delta, sigma):
        return KronLaplace(
            model, likelihood, sigma_noise=sigma, prior_precision=delta, temperature=temperature
        )

    hyper = Hyperparameters(
        PriorGroups.from_model(model),
        prior_precision,
        sigma_noise=sigma_noise,
        learn_sigma_noise=likelihood == "regression",
        method=method,
    )
    schedule = schedule or Schedule(epochs=6, every=2, steps=20, average=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    learner = PriorLearner(
        likelihood, temperature=temperature, schedule=schedule, hyperparameters=hyper,
        make_posterior=make_laplace,
    )  # fmt: skip
    return OnlineTraining(model, optimizer, loader, learner, **options)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
def test_a_step_follows_the_tempered_log_joint(likelihood, temperature):
    """The loss's gradient is −σ²·T/N times ∇(log p(D|θ)/T + log p(θ)); σ = 1 but in regression."""
    dataset, sigma, lr = data(likelihood), 0.5 if likelihood == "regression" else 1.0, 0.01
    x, y = dataset.tensors
    delta = torch.tensor([0.5, 2.0, 7.0, 1.0]).double()
    model = network()
    parameters = list(model.parameters())
    f = model(x)
    distribution = {
        "classification": torch.distributions.Categorical(logits=f),
        "regression": torch.distributions.Normal(f, sigma),
        "bernoulli": torch.distributions.Bernoulli(logits=f),
    }[likelihood]
    log_likelihood = distribution.log_prob(y).sum()
    log_prior = sum(
        torch.distributions.Normal(0.0, d**-0.5).log_prob(p).sum()
        for p, d in zip(parameters, delta, strict=True)
    )
    gradients = torch.autograd.grad(log_likelihood / temperature + log_prior, parameters)
    expected = [
        p.detach() + lr * sigma**2 * temperature / len(x) * g
        for p, g in zip(parameters, gradients, strict=True)
    ]
    training(
        model,
        likelihood,
        DataLoader(dataset, len(x)),
        Schedule(epochs=1, burn_in=9, average=None),
        temperature,
        lr,
        delta,
        sigma,
    ).run()
    for p, after in zip(parameters, expected, strict=True):
        assert_close(p.detach(), after)


def test_epochs_of_updates():
    def due(epochs=12, **options):
        schedule = Schedule(epochs=epochs, **options)
        return [epoch for epoch in range(1, (epochs or 45) + 1) if schedule.is_due(epoch)]

    assert due() == list(range(1, 9))  # twenty updates, at most one per epoch, before the average
    assert due(average=None) == list(range(1, 13))
    assert due(150) == list(range(5, 101, 5))
    assert due(30, updates=4, average="ema") == [8, 15, 23, 30]
    assert due(None, updates=5) == [1, 2, 3, 4, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert due(every=5) == [5, 10]
    assert due(every=4, burn_in=8) == [8, 12]
    assert due(every=5, burn_in=13) == []


def test_epochs_that_are_averaged():
    def averaged(epochs=12, **options):
        schedule = Schedule(epochs=epochs, **options)
        return [epoch for epoch in range(1, 13) if schedule.is_averaged(epoch)]

    assert averaged() == [9, 10, 11, 12]
    assert averaged(average="ema") == averaged(None, average="ema") == list(range(1, 13))
    assert averaged(average=None) == averaged(keep="best") == averaged(None) == []


def test_learns_and_records():
    records = []
    run = training(on_record=records.append)
    result = run.run()
    assert records == result.records
    assert [(r["kind"], r["epoch"]) for r in records] == [
        ("epoch", 1), ("epoch", 2), ("update", 2), ("epoch", 3), ("epoch", 4), ("update", 4),
        ("epoch", 5), ("epoch", 6), ("update", 6),
    ]  # fmt: skip
    updates = [r for r in records if r["kind"] == "update"]
    assert all(u["evidence"] > u["evidence_before"] for u in updates)
    assert result.evidence == updates[-1]["evidence"]
    assert len(result.evidences) == 3 * 20
    last = updates[-1]
    assert len(set(last["weight_decay"].values())) == 4
    assert last["weight_decay"]["0.weight"] == pytest.approx(
        last["prior_precision"]["0.weight"] / 40
    )
    assert set(last["seconds"]) == {"pass", "eigenvalues", "steps"}
    losses = [r["loss"] for r in records if r["kind"] == "epoch"]
    assert losses[-1] < losses[0]
    assert all(r["objective"] > r["loss"] for r in records if r["kind"] == "epoch")
    assert 0 <= records[-2]["accuracy"] <= 1


@pytest.mark.parametrize("keep", ["best", "last"])
def test_best_evidence_comes_back(keep):
    """A last epoch that wrecks the network loses against the update before it, unless asked for."""
    run = training(schedule=Schedule(epochs=2, every=1, steps=5, keep=keep, average=None))
    seen = []

    def wreck(record):
        if record["kind"] == "epoch":
            seen.append([p.detach().clone() for p in run.model.parameters()])
        if record["kind"] == "update" and record["epoch"] == 1:
            with torch.no_grad():
                for p in run.model.parameters():
                    p.add_(30 * torch.randn_like(p))

    run.on_record = wreck
    result = run.run()
    evidences = [r["evidence"] for r in result.records if r["kind"] == "update"]
    assert evidences[0] > evidences[1] + 10
    kept = {"best": 0, "last": 1}[keep]
    assert result.epoch == kept + 1
    for p, expected in zip(run.model.parameters(), seen[kept], strict=True):
        assert_close(p.detach(), expected)
    assert_close(result.laplace.mean, torch.cat([p.flatten() for p in seen[kept]]))
    delta = result.records[2 * kept + 1]["prior_precision"].values()
    assert_close(result.laplace.prior_precision, torch.tensor(list(delta)).double())
    assert float(result.laplace.log_marginal_likelihood()) == pytest.approx(result.evidence)


def test_without_any_update_the_laplace_is_fitted_at_the_end():
    run = training(schedule=Schedule(epochs=2, every=5, burn_in=10, average=None))
    result = run.run()
    assert result.epoch == 2
    assert_close(result.laplace.prior_precision, torch.ones(4).double())
    assert float(result.laplace.log_marginal_likelihood()) == pytest.approx(result.evidence)


def test_a_decay_that_sgd_cannot_follow_is_limited_and_named():
    """Without the limit lr · T·δ/N = 25 would multiply the parameter by −24 in each step."""
    model = network()
    delta = torch.tensor([1.0, 1e4, 1.0, 1.0]).double()
    schedule = Schedule(epochs=3, burn_in=9, average=None)
    run = training(model, schedule=schedule, prior_precision=delta)
    with pytest.warns(RuntimeWarning, match="weight decay of 0.bias has grown beyond") as told:
        result = run.run()
    assert len(told) == 1
    assert [r["limited_weight_decay"] for r in result.records] == [["0.bias"]] * 3
    assert model[0].bias.abs().max() < 0.1
    gentle = training(schedule=Schedule(epochs=1, burn_in=9)).run()
    assert "limited_weight_decay" not in gentle.records[0]


def test_the_mode_of_the_model_is_kept():
    for mode in (True, False):
        model = network().train(mode)
        training(model, schedule=Schedule(epochs=1, every=1, steps=1)).run()
        assert all(module.training == mode for module in model.modules())


def test_frozen_parameters_stay():
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    result = training(model).run()
    assert_close(model[0].weight, before)
    assert list(result.records[-1]["weight_decay"]) == ["2.weight", "2.bias"]


def test_optimizer_has_a_tenth_of_the_rate_for_scalars_and_a_schedule():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(1, 1, bias=False))
    optimizer, scheduler = build_optimizer(model, OptimizerConfig(lr=0.1, min_lr=1e-3), 10)
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 1]
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.01])
    assert all(g["weight_decay"] == 0 for g in optimizer.param_groups)
    for _ in range(10):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    settling = OptimizerConfig(lr=0.1)
    optimizer, scheduler = build_optimizer(model, settling, 10, settles=True)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1] * 5 + [0.06] * 5)
    adamw, _ = build_optimizer(model, OptimizerConfig(name="adamw"), 10)
    assert isinstance(adamw, torch.optim.AdamW)
    assert all(g["weight_decay"] == 0 for g in adamw.param_groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "optimizer.lr must be positive"),
        ({"min_lr": 1.0}, "optimizer.min_lr"),
        ({"scalar_lr_factor": 0.0}, "scalar_lr_factor"),
        ({"momentum": 1.0}, "optimizer.momentum"),
        ({"momentum": 0.0}, "nesterov needs momentum"),
        ({"kfac": KfacConfig(damping=1.0)}, "optimizer.name is sgd; pass --optimizer.name kfac"),
    ],
)
def test_wrong_optimizer_options(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


@pytest.mark.parametrize("field", ["epochs", "every"])
def test_wrong_schedules(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, not 0"):
        Schedule(**{field: 0})


def test_refusals():
    with pytest.raises(ValueError, match="temperature must be positive, not 0"):
        training(temperature=0.0)
    with pytest.raises(ValueError, match="The data is empty"):
        training(loader=DataLoader(TensorDataset(torch.zeros(0, 4), torch.zeros(0)), 2))
    model = network()
    with pytest.raises(ValueError, match="weight decay of its own"):
        OnlineTraining(
            model, torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1),
            DataLoader(data(), 10), PriorLearner("classification", epochs=1),
        )  # fmt: skip


def test_divergence_is_named():
    x, y = data().tensors
    x[3, 1] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite in epoch 1.*NaN in the data"):
        training(loader=DataLoader(TensorDataset(x, y), 10)).run()


def test_a_loader_that_does_not_keep_its_word():
    class Short(DataLoader):
        num_examples = 41

    with pytest.raises(ValueError, match="saw 40 examples, but the loader promised 41"):
        training(loader=Short(data(), 10)).run()
