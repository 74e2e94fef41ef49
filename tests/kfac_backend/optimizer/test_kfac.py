"""`KFAC` is an optimiser of torch like any other, and trains."""

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.optimizer import KFAC, KfacPreconditioner, PreconditionerOptions
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
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 1.0, 100, div_factor=10.0, cycle_momentum=False
    ),
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


def test_averaged_factors_are_not_those_of_the_first_batches_rows():
    """Eight rows of 64 inputs are few, and their inner products stand for A until it changes."""
    torch.manual_seed(0)
    model = nn.Linear(64, 3).double()
    options = PreconditionerOptions(factor_every=1, update_every=1)
    optimizer = KFAC(model, "classification", options=options)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 64).double()), torch.arange(8) % 3).backward()
        optimizer.step()
    block = optimizer.preconditioner.blocks["weight"]
    expected = torch.linalg.eigvalsh(block.A).clamp(min=0)
    assert_close(block.factor_eigenvalues()[1], expected, rtol=1e-9, atol=1e-12)
    assert (expected > 1e-6).sum() > 8  # of more rows than one batch has
