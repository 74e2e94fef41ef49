"""`KFAC` is an optimiser of torch like any other, and trains."""

import copy
import pickle
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.optimizer import KFAC, KfacPreconditioner, PreconditionerOptions
from kfac_backend.options import CurvatureOptions
from tests.kfac_backend.networks import data, network
from tests.kfac_backend.optimizer.test_preconditioner import dense_step
from tests.random_numbers import error

OPTIONS = PreconditionerOptions(damping=0.05, factor_every=2, update_every=2)


def train(model, optimizer, steps, x, y, preconditioner=None):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if preconditioner is not None:
            preconditioner.step(lr=0.01)
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_that_of_the_gradients_and_is_preconditioned_with_todays_factors(nesterov):
    """Against dense algebra: m ← μm + g, v = g + μm, θ ← θ − η(ν F⁻¹v + wθ), for three steps.

    Without Nesterov's v = m.
    ν = min(1, √(κ / (η² Σ⟨F⁻¹v, v⟩))). Momentum of preconditioned gradients takes other steps.
    """
    mu, lr, decay, damping, kappa = 0.8, 0.5, 0.02, 0.02, 0.3
    model, (x, y) = network(), data()
    options = PreconditionerOptions(
        damping=damping, damping_on="product", factor_every=1, update_every=1, ema_decay=0.0,
        kl_clip=kappa,
    )  # fmt: skip
    optimizer = KFAC(
        model, "classification", lr, momentum=mu, nesterov=nesterov, weight_decay=decay,
        options=options, fisher="exact",
    )  # fmt: skip
    m, after = {}, {}
    for _ in range(3):
        factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx="expand")
        theta = {name: p.detach().clone() for name, p in model.named_parameters()}
        F.cross_entropy(model(x), y).backward()
        g = {name: p.grad.clone() for name, p in model.named_parameters()}
        m = {name: mu * m.get(name, 0.0) + g[name] for name in g}
        v = {name: g[name] + mu * m[name] for name in g} if nesterov else m

        blocks = {name: factors.to_dense(name) / len(x) for name in factors.blocks}
        p = dense_step(blocks, v, damping)
        nu = (kappa / (lr**2 * sum((p[n] * v[n]).sum() for n in p))).sqrt().clamp(max=1.0)
        assert nu < 1
        # The control: momentum of the preconditioned gradients.
        now = dense_step(blocks, g, damping)
        after = {name: mu * after.get(name, 0.0) + now[name] for name in now}
        other = {name: now[name] + mu * after[name] for name in now} if nesterov else after
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            expected = theta[name] - lr * (nu * p[name] + decay * theta[name])
            assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-8)  # ν is a float32
    assert max(error(other[name], p[name]) for name in p) > 0.1
    assert optimizer.param_groups[0]["momentum"] == mu


def test_a_gradient_that_is_not_finite_is_not_in_the_momentum():
    model, (x, y) = network(), data()
    optimizer = KFAC(model, "classification", options=OPTIONS)
    F.cross_entropy(model(x), y).backward()
    model[8].weight.grad[0] = torch.inf
    with pytest.raises(FloatingPointError, match="gradient of '8.weight' is not finite"):
        optimizer.step()
    assert not optimizer.state


def test_a_grad_scaler_unscales_gradients_and_leaves_steps_out():
    """A step is that without a scaler; after an infinite gradient nothing has changed."""
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=64.0)):
        model, (x, y) = network(), data()
        optimizer = KFAC(model, "classification", options=OPTIONS)
        for is_infinite in (False, True) if scaler else (False,):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if scaler is None:
                loss.backward()
                optimizer.step()
                continue
            scaler.scale(loss).backward()
            if is_infinite:
                model[8].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        found.append(list(model.parameters()))
    for expected, p in zip(*found, strict=True):
        assert_close(p, expected)
    assert scaler.get_scale() < 64


def test_factors_of_a_scaled_loss_are_refused():
    model, (x, y) = network(), data()
    optimizer = KFAC(model, "classification", fisher="empirical")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(ValueError, match="GradScaler has scaled.*fisher='mc'"):
        scaler.step(optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


def test_nadamw_is_the_preconditioner_and_torchs_optimiser():
    x, y = data()
    ours, theirs = network(), network()
    optimizer = KFAC(
        ours, "classification", 0.01, base="nadamw", weight_decay=0.02, options=OPTIONS,
        betas=(0.8, 0.95), eps=1e-7,
    )  # fmt: skip
    train(ours, optimizer, 5, x, y)
    preconditioner = KfacPreconditioner(theirs, "classification", OPTIONS)

    def plain(model):
        return torch.optim.NAdam(
            model.parameters(), 0.01, (0.8, 0.95), 1e-7, 0.02, decoupled_weight_decay=True
        )

    train(theirs, plain(theirs), 5, x, y, preconditioner)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
    unconditioned = network()
    train(unconditioned, plain(unconditioned), 5, x, y)
    assert not torch.allclose(unconditioned[8].weight, ours[8].weight)


def test_schedulers_closures_and_groups():
    model, (x, y) = network(), data()
    groups = [
        {"params": list(model[:8].parameters()), "lr": 0.01},
        {"params": list(model[8:].parameters())},
    ]
    optimizer = KFAC(model, "classification", 0.02, params=groups, options=OPTIONS)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert torch.is_tensor(loss) and loss.grad_fn is not None
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.01]
    assert optimizer.base.param_groups is optimizer.param_groups


def by_hand(optimizer):
    """A warm-up without a scheduler, up to the constructor's rate."""
    for group in optimizer.param_groups:
        group["lr"] /= 10


WARM_UPS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.1 * (step + 1)),
    "by hand": by_hand,
}


@pytest.mark.parametrize("name", WARM_UPS)
def test_the_limit_leaves_the_schedule_in_force(name):
    """A tenth of the peak's rate is a tenth of its step, though both are clipped."""
    lengths = []
    for warm_up in (None, WARM_UPS[name]):
        model, (x, y) = network(), data()
        options = PreconditionerOptions(kl_clip=1e-5)
        optimizer = KFAC(
            model, "classification", 1.0, momentum=0.0, options=options, fisher="exact"
        )
        if warm_up is not None:
            warm_up(optimizer)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        train(model, optimizer, 1, x, y)
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        lengths.append((after - before).norm())
    at_peak, in_warm_up = lengths
    assert (in_warm_up / at_peak).item() == pytest.approx(0.1, rel=1e-5)


def test_the_limit_is_for_the_rates_of_the_groups():
    """As if the highest of them were the constructor's, whose own no group takes."""
    found = []
    for lr, rates in ((0.01, (0.01, 0.001)), (1.0, (0.01, 0.001)), (1.0, (0.01, None))):
        model, (x, y) = network(), data()
        halves = (list(model[:8].parameters()), list(model[8:].parameters()))
        groups = [
            {"params": half} if rate is None else {"params": half, "lr": rate}
            for half, rate in zip(halves, rates, strict=True)
        ]
        optimizer = KFAC(
            model, "classification", lr, params=groups, fisher="exact", momentum=0.0, kl_clip=1e-6
        )
        before = model[0].weight.detach().clone()
        train(model, optimizer, 1, x, y)
        found.append((model[0].weight - before).norm())
    assert_close(found[1], found[0])
    assert_close(found[2], found[0] / 100)  # the control: a group takes the constructor's


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_with_accumulation_and_clipping(precision):
    """Two halves of a batch under Fabric are the whole batch by hand."""
    x, y = (tensor.float() if tensor.is_floating_point() else tensor for tensor in data(8))
    options = PreconditionerOptions(damping=0.05, factor_every=1, update_every=1)
    make = lambda model: KFAC(  # noqa: E731
        model, "classification", 0.01, options=options, fisher="exact"
    )
    model, plain = network().float(), network().float()
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    wrapped, optimizer = fabric.setup(model, make(model))
    for _ in range(2):
        optimizer.zero_grad()
        for part in (slice(4), slice(4, 8)):
            fabric.backward(F.cross_entropy(wrapped(x[part]), y[part]) / 2)
        fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
        optimizer.step()
    by_hand = make(plain)
    for _ in range(2):
        by_hand.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        by_hand.step()
    rough = {"rtol": 1e-4, "atol": 1e-6} if precision == "32-true" else {"rtol": 0.2, "atol": 5e-3}
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(p, q, **rough)


STEADY = {"factor_every": 1, "update_every": 1, "ema_decay": 0.0, "kl_clip": 1e-3, "momentum": 0.0}
"""Options of steps that depend on the present parameters and batch alone."""


def kfac(model, **options):
    return KFAC(model, "classification", 0.3, fisher="exact", **{**STEADY, **options})


def loss_of(model):
    x, y = data()
    return F.cross_entropy(model(x), y)


def one_step(optimizer, model, **zero):
    optimizer.zero_grad(**zero)
    loss_of(model).backward()
    optimizer.step()


def assert_same(model, expected):
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert_close(p, q, rtol=1e-10, atol=1e-12, msg=name)


def is_same(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))  # noqa: B905


@pytest.mark.parametrize("how", ["a group", "a flag"])
def test_unfrozen_parameters_are_preconditioned_and_count_from_the_next_step_on(how):
    """That step is the first of K-FAC over the whole model, though no new factors are due."""
    model = network()
    model[:8].requires_grad_(False)
    params = None if how == "a group" else model.parameters()
    optimizer = kfac(model, params=params, factor_every=5, update_every=5)
    one_step(optimizer, model)
    head, plain = copy.deepcopy(model), copy.deepcopy(model)
    model[:8].requires_grad_(True)
    if how == "a group":
        optimizer.add_param_group({"params": model[:8].parameters()})
    whole = copy.deepcopy(model)
    one_step(optimizer, model)
    one_step(kfac(whole), whole)
    assert_same(model, whole)
    # The control: plain gradients, as steps without factors of them would take.
    one_step(kfac(head), head)
    assert error(model[8].weight, head[8].weight) > 1e-4
    loss_of(plain.requires_grad_(True)).backward()
    step = model[0].weight - plain[0].weight
    assert error(-0.3 * plain[0].weight.grad, step) > 0.5
    assert set(optimizer.preconditioner.blocks) == {name for name, _ in model.named_parameters()}


def test_an_optimiser_of_some_parameters_takes_the_steps_where_the_others_are_frozen():
    """The others keep their values, and the gradients of the loss."""
    model, frozen = network(), network()
    frozen[:8].requires_grad_(False)
    optimizer = kfac(model, params=model[8:].parameters(), momentum=0.9)
    other = kfac(frozen, momentum=0.9)
    for _ in range(3):
        one_step(optimizer, model)
        one_step(other, frozen)
    assert_same(model, frozen)
    assert is_same(model[:8], network()[:8]) and not is_same(model[8:], network()[8:])
    model.zero_grad()
    loss_of(model).backward()
    expected = model[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model[0].weight.grad, expected)


@pytest.mark.parametrize("layer", [0, 3, 8, 10])
def test_a_layer_that_is_frozen_later_is_no_longer_part_of_it(layer):
    """Neither its old gradient nor its momentum moves it."""
    model = network()
    optimizer = kfac(model)
    one_step(optimizer, model)
    model[layer].requires_grad_(False)
    expected, trained = copy.deepcopy(model), copy.deepcopy(model)
    one_step(optimizer, model)
    one_step(kfac(expected), expected)
    assert_same(model, expected)
    one_step(kfac(trained.requires_grad_(True)), trained)  # the control
    assert not is_same(trained, model)

    model = network()
    optimizer = kfac(model, momentum=0.9, weight_decay=0.1, factor_every=3)
    one_step(optimizer, model)
    model[layer].requires_grad_(False)
    before = model[layer].weight.clone()
    for _ in range(4):
        one_step(optimizer, model, set_to_none=False)
    assert torch.equal(model[layer].weight, before)
    model[layer].requires_grad_(True)
    one_step(optimizer, model)
    assert not torch.equal(model[layer].weight, before)


def test_freezing_within_a_step_and_tensors_of_other_models_are_named_errors():
    model, other = network(), network()
    with pytest.raises(ValueError, match=r"\(4, 2, 3, 3\) is not a parameter of the model"):
        KFAC(model, "classification", params=other.parameters())
    optimizer = kfac(model, params=model[8:].parameters())
    with pytest.raises(ValueError, match=r"\(4, 2, 3, 3\) is not a parameter of the model"):
        optimizer.add_param_group({"params": other.parameters()})
    assert len(optimizer.param_groups) == 1
    one_step(optimizer, model)
    optimizer.zero_grad()
    loss_of(model).backward()
    model[8].requires_grad_(False)
    with pytest.raises(RuntimeError, match="between the batches of one step"):
        loss_of(model)


def test_every_option_is_a_keyword():
    """The same as in the objects, which keep what no keyword names."""
    model = network()
    options = PreconditionerOptions(damping=0.1, kl_clip=None)
    curvature = CurvatureOptions(kfac_approx="reduce", fisher="mc", mc_samples=3)
    found = KFAC(model, "classification", damping=0.1, kl_clip=None, kfac_approx="reduce",
                 mc_samples=3).preconditioner  # fmt: skip
    assert found.options == options
    expected = KFAC(model, "classification", options=options, curvature=curvature).preconditioner
    assert found.state_dict()["made_with"] == expected.state_dict()["made_with"]
    also = KfacPreconditioner(model, "classification", options, curvature, damping=0.2)
    assert also.options == replace(options, damping=0.2)
    for part in (PreconditionerOptions(), curvature):
        for field in fields(part):
            KFAC(model, "classification", **{field.name: getattr(part, field.name)})


UNUSED = {"unsupported": "diagonal", "shift_labels": True, "dict_key_x": "x", "dict_key_y": "y"}


@pytest.mark.parametrize("make", [KFAC, KfacPreconditioner])
@pytest.mark.parametrize("name", UNUSED)
def test_keywords_that_a_step_does_not_use_are_refused(make, name):
    with pytest.raises(ValueError, match=f"{name}={UNUSED[name]!r} has no effect"):
        make(network(), "classification", **{name: UNUSED[name]})
    curvature = CurvatureOptions(kfac_approx="expand", fisher="mc", **{name: UNUSED[name]})
    make(network(), "classification", curvature=curvature)  # which other passes share


def test_options_of_kfac_in_groups_are_refused():
    model = network()
    group = {"params": list(model[:8].parameters()), "damping": 1.0, "exclude": ["0.*"]}
    with pytest.raises(ValueError, match="'damping', 'exclude', .* for all groups"):
        KFAC(model, "classification", params=[group])
    optimizer = KFAC(model, "classification", params=model[8:].parameters())
    with pytest.raises(ValueError, match="'damping', 'exclude', .* for all groups"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("make", [KFAC, KfacPreconditioner])
def test_copies_are_refused_and_those_of_the_model_are_plain(make):
    model, (x, y) = network(), data()
    optimizer = make(model, "classification", kl_clip=None)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=f"Make a new {make.__name__} .*load_state_dict"):
            copied(optimizer)
    other = copy.deepcopy(model)
    again = make(other, "classification", kl_clip=None)
    again.load_state_dict(optimizer.state_dict())
    for network_, its in ((model, optimizer), (other, again)):
        F.cross_entropy(network_(x), y).backward()
        its.step()
    assert_same(other, model)
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("make", [KFAC, KfacPreconditioner])
def test_a_wrong_name_lists_all_options(make):
    with pytest.raises(TypeError, match=r"'dampng' is not an option; choose from ") as raised:
        make(network(), "classification", dampng=0.1)
    listed = str(raised.value).split("choose from ")[1].rstrip(".").split(", ")
    options = PreconditionerOptions, CurvatureOptions
    assert {field.name for one in options for field in fields(one)} < set(listed)
