"""The network's steps: the objective's gradient, precisions, layouts, compilation, the monitor."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import kronecker_factors
from kfac_backend.loss import loss_sum
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.options import CurvatureOptions
from marglik import (
    Hyperparameters,
    PriorGroups,
    PriorLearner,
    marglik_training,
)
from marglik.data import ImageBatches
from marglik.data.images.image_set import ImageSet
from marglik.training.loaders import count_examples
from marglik.training.network import NetworkTraining
from tests.marglik.same_state import same
from tests.marglik.training.online_runs import make, outcome, scaled_fabric

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 0.05


class Network(nn.Module):
    """With a parameter that the outputs do not need, and one that is frozen."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.last = nn.Linear(6, 3)
        self.to(dtype)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) * self.frozen))


def batch(likelihood="classification", dtype=torch.float64, n=7):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    y = {
        "classification": x[:, :3].argmax(-1),
        "regression": x[:, :3].sin(),
        "bernoulli": (x[:, :3] > 0).double(),
    }[likelihood]
    return x.to(dtype), y.to(dtype) if y.is_floating_point() else y


def decays_of(parameters, diagonal):
    torch.manual_seed(4)
    if diagonal:
        return [torch.rand_like(p) + 0.1 for p in parameters]
    return (torch.rand(len(parameters)) + 0.1).tolist()


def steps_of_autograd(likelihood, decays, variance, steps, make_optimizer):
    """Parameters after steps on σ² times the whole objective, written out, and its mean."""
    model, (x, y) = Network(), batch(likelihood)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters)
    values = []
    for _ in range(steps):
        f = model(x)
        log_likelihood = {
            "classification": lambda f=f: torch.distributions.Categorical(logits=f),
            "bernoulli": lambda f=f: torch.distributions.Bernoulli(logits=f),
            "regression": lambda f=f: torch.distributions.Normal(f, 1.0),
        }[likelihood]().log_prob(y)
        constant = -0.5 * math.log(2 * math.pi) if likelihood == "regression" else 0.0
        loss = -(log_likelihood - constant).sum() / len(x)
        penalty = sum((0.5 * d * p**2).sum() for d, p in zip(decays, parameters, strict=True))
        objective = loss / variance + penalty
        optimizer.zero_grad()
        (variance * objective).backward()
        optimizer.step()
        values.append(objective.item())
    return parameters, values


def learner_of(model, optimizer, loader, likelihood="classification", decays=1e-3, variance=1.0):
    """A learner with these weight decays; it learns nothing."""
    if isinstance(decays, list):
        diagonal = isinstance(decays[0], torch.Tensor)
        decays = torch.cat([torch.as_tensor(d).double().flatten() for d in decays])
    else:
        diagonal = False
    learner = PriorLearner(
        likelihood, CurvatureOptions(unsupported="diagonal"), average=None,
        hyperparameters=Hyperparameters(
            PriorGroups.from_model(model, "diagonal" if diagonal else "layerwise"),
            decays * count_examples(loader), sigma_noise=variance**0.5,
        ),
    )  # fmt: skip
    learner.start(model, optimizer, loader, 1, sums_terms=True)
    return learner


def training(
    likelihood="classification", fabric=None, dtype=torch.float64, make_optimizer=None,
    decays=1e-3, variance=1.0,
):  # fmt: skip
    """Steps of one batch; and the network's trainable parameters."""
    model = Network(dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = (make_optimizer or momentum)(parameters)
    fabric = fabric or Fabric(accelerator="cpu", devices=1)
    loader = DataLoader(TensorDataset(*batch(likelihood, dtype)), 7)
    learner = learner_of(model, optimizer, loader, likelihood, decays, variance)
    return NetworkTraining(model, optimizer, loader, learner, fabric), parameters


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, nesterov=True)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=LR)


@pytest.mark.parametrize(("make_optimizer", "diagonal"), [(momentum, False), (adam, True)])
@pytest.mark.parametrize(
    ("likelihood", "variance"), [("classification", 1.0), ("bernoulli", 1.0), ("regression", 0.3)]
)
def test_steps_are_autograds_of_the_whole_objective(likelihood, variance, diagonal, make_optimizer):
    decays = decays_of([p for p in Network().parameters() if p.requires_grad], diagonal)
    network, parameters = training(
        likelihood, make_optimizer=make_optimizer, decays=decays, variance=variance
    )
    expected, values = steps_of_autograd(likelihood, decays, variance, 4, make_optimizer)
    before = [p.detach().clone() for p in parameters]
    records = [network.epoch(i + 1) for i in range(4)]
    for p, after, first in zip(parameters, expected, before, strict=True):
        assert_close(p, after, rtol=1e-12, atol=1e-14)
        assert (p - first).abs().min() > 0  # the unused ones, too
    assert [r["objective"] for r in records] == pytest.approx(values, rel=1e-12)
    assert torch.equal(network.model.frozen, Network().frozen)
    assert network.model.frozen.grad is None
    # Negative control: another decay of any one parameter is seen.
    other = [*decays[:-1], 2 * decays[-1]]
    unlike, _ = steps_of_autograd(likelihood, other, variance, 4, make_optimizer)
    assert (parameters[-1] - unlike[-1]).abs().max() > 1e-4


@pytest.mark.parametrize(("make_optimizer", "diagonal"), [(momentum, False), (adam, True)])
def test_a_scaled_loss_has_a_scaled_penalty(make_optimizer, diagonal):
    """What the optimiser sees is unscaled again; a power of two changes no bit."""

    class Scaled(Fabric):
        def backward(self, tensor, *arguments, **keywords):
            super().backward(1024 * tensor, *arguments, **keywords)

    ends, gradients = [], []
    for kind, scale in ((Fabric, 1), (Scaled, 1024)):
        fabric = kind(accelerator="cpu", devices=1)
        decays = decays_of([p for p in Network().parameters() if p.requires_grad], diagonal)
        network, parameters = training(fabric=fabric, make_optimizer=make_optimizer, decays=decays)

        def unscale(*_, parameters=parameters, scale=scale):
            gradients.append([p.grad.clone() for p in parameters])
            for p in parameters:
                p.grad /= scale

        network.optimizer.optimizer.register_step_pre_hook(unscale)
        record = network.epoch(1)
        ends.append([record["objective"], *(p.detach() for p in parameters)])
    assert same(ends[0], ends[1])
    for plain, scaled in zip(*gradients, strict=True):
        assert plain.abs().max() > 0 and torch.equal(1024 * plain, scaled)


def test_float16_with_a_scaler_follows_float32():
    """The loss's scale starts at 64 and doubles every second step."""
    curves, ends = [], []
    for fabric in (None, scaled_fabric()):
        decays = decays_of([p for p in Network().parameters() if p.requires_grad], False)
        network, parameters = training(fabric=fabric, dtype=torch.float32, decays=decays)
        curves.append([network.epoch(i)["objective"] for i in range(1, 13)])
        ends.append(torch.cat([p.detach().flatten() for p in parameters]))
    assert curves[1] == pytest.approx(curves[0], rel=5e-3)
    assert curves[1] != curves[0]  # negative control: it was float16
    assert_close(ends[1], ends[0], rtol=0, atol=5e-3)
    start = torch.cat([p.flatten() for p in training(dtype=torch.float32)[1]])
    assert (ends[0] - start).abs().max() > 0.1


def convolutions(channels_last=False, compile_mode=None, epochs=8):
    """Loss curve of a small convolutional network, the layouts of its batches, its parameters."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (40, 3, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(4, (40,), generator=generator)
    batches = ImageBatches(
        ImageSet(pixels, labels), [128.0] * 3, [70.0] * 3, 16, shuffle=True, augment="crop_flip",
        channels_last=channels_last,
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(72, 4),
    )  # fmt: skip
    seen = set()
    if compile_mode is None:
        model[0].register_forward_pre_hook(
            lambda module, inputs: seen.add(
                inputs[0].is_contiguous(memory_format=torch.channels_last)
            )
        )
    optimizer = momentum(model.parameters())
    network = NetworkTraining(
        model, optimizer, batches, learner_of(model, optimizer, batches),
        Fabric(accelerator="cpu", devices=1), compile_mode=compile_mode,
    )  # fmt: skip
    losses = [network.epoch(i)["loss"] for i in range(1, epochs + 1)]
    return losses, seen, [p.detach() for p in model.parameters()]


def test_channels_last_changes_rounding_alone():
    losses, seen, parameters = convolutions()
    others, seen_others, ends = convolutions(channels_last=True)
    assert (seen, seen_others) == ({False}, {True})
    assert others == pytest.approx(losses, rel=1e-4)
    assert abs(losses[-1] - losses[0]) > 1e-2 * losses[0]
    for p, q in zip(parameters, ends, strict=True):
        assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_compilation_changes_rounding_alone():
    losses, _, parameters = convolutions()
    others, _, ends = convolutions(compile_mode="default")
    assert others == pytest.approx(losses, rel=1e-4)
    for p, q in zip(parameters, ends, strict=True):
        assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_a_monitor_looks_and_changes_nothing():
    """Whose model has dropout, which eval mode turns off; it is back on after each look."""
    case = "SGD"
    plain = make(case)
    expected = outcome(plain, plain.run())
    run, looks = make(case), []

    def look(epoch):
        modes = {module.training for module in run.model.modules()}
        looks.append((epoch, modes, torch.is_grad_enabled()))
        return {"epochs seen": float(len(looks)), "twice": 2.0 * epoch} if epoch % 2 == 0 else {}

    run.monitor = look
    found = outcome(run, run.run())
    assert looks == [(epoch, {False}, False) for epoch in (1, 2, 3, 4)]
    numbers = [{k: r.pop(k, None) for k in ("epochs seen", "twice")} for r in found["records"]]
    of_epochs = [n for n, r in zip(numbers, found["records"], strict=True) if r["kind"] == "epoch"]
    assert [n["twice"] for n in of_epochs] == [None, 4.0, None, 8.0]
    assert [n["epochs seen"] for n in of_epochs] == [None, 2.0, None, 4.0]
    assert same(expected, found)


def test_targets_are_looked_at_before_the_first_step():
    x, y = batch()
    network, parameters = training()
    wrong = [(x, y + 1)]
    network = NetworkTraining(
        network.model, momentum(parameters), wrong, network.learner, network.fabric
    )
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(ValueError, match="Label 3 is out of range: the model has 3 outputs"):
        network.epoch(1)
    assert same(before, [p.detach() for p in parameters])


train: Any = partial(marglik_training, unsupported="diagonal")


class Halving(Network):
    """Changes its input in place, or (the reference) not."""

    in_place = True

    def forward(self, x):
        return super().forward(x.mul_(0.5) if self.in_place else x * 0.5)


def test_batches_that_stay_in_memory_are_left_as_they_are():
    x, y = batch()
    ends = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model, data = Halving(), [(x.clone(), y)]
        model.in_place = in_place
        train(model, data, n_epochs=4)
        assert torch.equal(data[0][0], x)
        ends.append([p.detach() for p in model.parameters()])
    assert same(*ends)


@pytest.mark.parametrize(("likelihood", "variance"), [("classification", 1.0), ("regression", 0.3)])
@pytest.mark.parametrize("prior_is_damping", [True, False])
def test_kfac_takes_natural_gradient_steps_on_the_posterior(likelihood, variance, prior_is_damping):
    """Δ = −lr (F + (λ + σ² T δ/N) I)⁻¹ (g + σ² T δ/N θ), F of the mean loss with unit noise."""
    model, (x, y) = Network(), batch(likelihood)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    decays = decays_of(list(parameters.values()), False)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    factors = kronecker_factors(model, [(x, y)], likelihood, unsupported="diagonal")
    (loss_sum(model(x), y, likelihood) / len(x)).backward()
    gradients = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()
    }
    model.zero_grad()
    with pytest.warns(UserWarning, match="No K-FAC rule for unused"):
        optimizer = KFAC(
            model, likelihood, LR, momentum=0.0, fisher="exact",
            options=PreconditionerOptions(
                damping=0.02, damping_on="product", norm_control="none"
            ),
        )  # fmt: skip
    learner = learner_of(model, optimizer, [(x, y)], likelihood, decays, variance)
    NetworkTraining(
        model, optimizer, [(x, y)], learner, Fabric(accelerator="cpu", devices=1),
        prior_is_damping=prior_is_damping,
    ).epoch(1)  # fmt: skip
    for decay, (name, p) in zip(decays, parameters.items(), strict=True):
        g = (gradients[name] + variance * decay * before[name]).flatten()
        if name != "unused":
            damping = 0.02 + (variance * decay if prior_is_damping else 0.0)
            block = factors.to_dense(name) / len(x)
            g = torch.linalg.solve(block + damping * torch.eye(len(block)).double(), g)
        assert_close(p.detach(), before[name] - LR * g.view(p.shape))


def test_kfac_needs_layers_that_it_can_see():
    model = nn.Linear(4, 3)
    optimizer = KFAC(model, "classification", LR)
    with pytest.raises(ValueError, match="hides its layers from K-FAC"):
        NetworkTraining(
            model, optimizer, [], PriorLearner("classification"),
            Fabric(accelerator="cpu", devices=1),
            compile_mode="default",
        )  # fmt: skip
