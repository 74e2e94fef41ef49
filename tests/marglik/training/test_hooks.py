"""The two lines in a loop: hooks do what the functions do in their places, to the bit."""

import gc
import pickle
import weakref
from copy import deepcopy
from functools import partial
from itertools import product
from math import inf, log

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset

from kfac_backend.likelihoods import StudentT
from marglik import Hyperparameters, PriorGroups, PriorLearner
from marglik.training.algorithm import end_of_epoch, finish, penalty
from marglik.training.decay_policy import stable_decays
from marglik.training.hooks import fingerprints, view_like, view_of_bits
from tests.marglik.callbacks.online import dataset, loader, network, sgd
from tests.marglik.plain_loop import learn
from tests.marglik.states import same

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS, BATCHES, OPTIONS = 6, 4, {"every": 2, "steps": 2}


def halves(model):
    return [sgd(model[0]), torch.optim.Adam(model[2].parameters(), 1e-3)]


def fused(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)


# --- loops; `add` stands where the prior's gradient is added, and does nothing beside hooks ---


def plain(model, optimizer, add, x, y, step, clip=inf):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    if clip < inf:  # the gradient of the data
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    add()
    optimizer.step()


def accumulated(model, optimizer, add, x, y, step):
    (cross_entropy(model(x), y) / 2).backward()
    if step % 2:
        add()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def by_closure(model, optimizer, add, x, y, step):
    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        add()
        return loss

    assert optimizer.step(closure) > 0


def one_after_the_other(model, optimizers, add, x, y, step):
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    for part, optimizer in enumerate(optimizers):
        add(part=part)
        optimizer.step()


class Scheduled:
    def __init__(self, optimizer):
        self.rate = StepLR(optimizer, 3, 0.7)

    def __call__(self, model, optimizer, add, x, y, step):
        plain(model, optimizer, add, x, y, step)
        self.rate.step()


class Scaled:
    """By a factor that grows with every second step."""

    def __init__(self, optimizer, clip=inf):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.clip = clip

    def __call__(self, model, optimizer, add, x, y, step):
        optimizer.zero_grad()
        scale = torch.tensor(self.scaler.get_scale())
        self.scaler.scale(cross_entropy(model(x), y)).backward()
        if self.clip < inf:
            self.scaler.unscale_(optimizer)
            scale = 1.0
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        add(scale=scale)
        self.scaler.step(optimizer)
        self.scaler.update()


class Accelerated:
    """Accelerate's own accumulation, whatever loaders of other tests are still in its state."""

    def __init__(self, optimizer):
        every_second = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=every_second)
        self.prepared = self.accelerator.prepare_optimizer(optimizer)

    def __call__(self, model, optimizer, add, x, y, step):
        with self.accelerator.accumulate(model):
            self.accelerator.backward(cross_entropy(model(x), y))
            if self.accelerator.sync_gradients:
                add()
            self.prepared.step()
            self.prepared.zero_grad()


CASES = {
    "plain": (sgd, lambda _: plain),
    "clipped": (sgd, lambda _: partial(plain, clip=0.05)),
    "accumulated": (sgd, lambda _: accumulated),
    "a closure": (sgd, lambda _: by_closure),
    "two optimisers": (halves, lambda _: one_after_the_other),
    "a scheduler": (sgd, Scheduled),
    "a scaler": (sgd, Scaled),
    "a scaler, fused": (fused, Scaled),
    "a scaler, clipped": (sgd, partial(Scaled, clip=0.05)),
    "a scaler, fused, clipped": (fused, partial(Scaled, clip=0.05)),
    "accelerate": (sgd, Accelerated),
}


def begun(case, explicit=False, stop=EPOCHS * BATCHES):
    """The network, its optimiser and its learner, after a number of batches."""
    optimizer_of, loop_of = CASES[case]
    model = network()
    optimizer = optimizer_of(model)
    prior = PriorLearner("classification", **OPTIONS)
    per_epoch = BATCHES // 2 if case in ("accumulated", "accelerate") else BATCHES
    hooks = "none" if explicit else "all"
    prior.start(model, optimizer, loader(), EPOCHS, steps_per_epoch=per_epoch, hooks=hooks)
    loop = loop_of(optimizer)

    def add(scale=1.0, part=0):
        if explicit:
            penalty(prior.problem, prior.state, scale, part)

    for step, (x, y) in enumerate((list(loader()) * EPOCHS)[:stop]):
        loop(model, optimizer, add, x, y, step)
        if explicit and (step + 1) % BATCHES == 0:
            end_of_epoch(prior.problem, prior.state, (step + 1) // BATCHES)
    return model, optimizer, prior


def trained(case, explicit=False):
    model, optimizer, prior = begun(case, explicit)
    finish(prior.problem, prior.state) if explicit else prior.finish()
    return model, optimizer, prior


def outcome(run):
    model, _, prior = run
    state = prior.state_dict()
    state["measures"]["rate"] = None  # which depends on when the scheduler steps
    return {"model": model.state_dict(), "learner": state, "mean": prior.posterior.mean}


@pytest.mark.parametrize("case", CASES)
def test_hooks_do_what_the_calls_do_in_their_places(case):
    explicit, hooked = (outcome(trained(case, explicit)) for explicit in (True, False))
    assert same(explicit, hooked)
    assert len(hooked["learner"]["evidences"]) == 3  # after epochs 2 and 4, and at the end
    assert hooked["learner"]["decays"] != [5e-4] * 4
    # Negative control: without the prior's gradient.
    model = network()
    optimizer = CASES[case][0](model)
    loop = CASES[case][1](optimizer)
    for step, (x, y) in enumerate(list(loader()) * EPOCHS):
        loop(model, optimizer, lambda **_: None, x, y, step)
    assert not same(dict(model.state_dict()), dict(hooked["model"]))


@pytest.mark.parametrize("stop", [4, 6, 17, 24])
def test_a_loop_that_goes_on_from_a_state_comes_to_the_same(stop):
    """At the end of an epoch, within one, and before `finish`."""
    whole = outcome(trained("plain"))
    states = deepcopy([of.state_dict() for of in begun("plain", stop=stop)])
    model = network(seed=1)
    optimizer = sgd(model)
    prior = PriorLearner("classification", **OPTIONS)
    prior.load_state_dict(states[2])
    prior.start(model, optimizer, loader(), EPOCHS)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    for x, y in (list(loader()) * EPOCHS)[stop:]:
        plain(model, optimizer, lambda: None, x, y, 0)
    prior.finish()
    assert same(outcome((model, optimizer, prior)), whole)


@pytest.mark.parametrize("optimizer_of", [sgd, fused])
def test_a_step_that_a_scaler_skips_is_none(optimizer_of):
    """Its first factor is so large that gradients are infinite."""
    model = network()
    optimizer, loop = optimizer_of(model), Scaled(None)
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    prior = PriorLearner("classification", every=1, steps=2)
    prior.start(model, optimizer, loader(), 2)
    moved = 0
    for step, (x, y) in enumerate(list(loader()) * 4):
        before = model[0].weight.clone()
        loop(model, optimizer, lambda **_: None, 100 * x, y, step)
        moved += not torch.equal(before, model[0].weight)
        assert prior.state.steps == [moved] and prior.state.epoch == moved // BATCHES
    assert 8 < moved < 16
    assert all(p.isfinite().all() for p in model.parameters())


# --- early ends ---


@pytest.mark.parametrize("stop", [3, 16, 23, 24, 30])
def test_a_training_may_end_at_any_step(stop):
    """Of six epochs of four steps that were announced, or none: with the average of all steps."""
    model, optimizer, prior = begun("plain", stop=stop)
    if stop > EPOCHS * BATCHES:  # it goes on for longer, and so do updates
        for step, (x, y) in enumerate(list(loader()) * 2):
            plain(model, optimizer, lambda: None, x, y, step)
    number = len(prior.evidences)
    assert number == prior.state.epoch // 2 - (prior.state.epoch >= EPOCHS)
    with prior.averaged():
        average = deepcopy(model.state_dict())
    prior.finish()
    assert same(dict(model.state_dict()), dict(average))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(prior.posterior.mean, weights)
    assert len(prior.evidences) == number + 1
    assert prior.state.kept_epoch == -(-prior.state.steps[0] // BATCHES)  # the last may be cut off


def test_a_loop_that_never_steps_is_told_so():
    model = network()
    prior = PriorLearner("classification")
    with pytest.raises(RuntimeError, match="made no step since start.*Call start"):
        prior.finish()
    prior.start(model, sgd(model), loader(), 2)
    with pytest.raises(RuntimeError, match="made no step since start.*whose step"):
        prior.finish()


class Failing:
    """Batches that raise an error in one of their readings, after one batch."""

    def __init__(self, batches):
        self.batches, self.readings, self.fails_in = batches, 0, None

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.readings += 1
        for index, batch in enumerate(self.batches):
            if index and self.readings == self.fails_in:
                raise OSError("the disk")
            yield batch


def test_an_update_whose_data_fails_is_made_by_the_second_call():
    """In the pass, or in that of its derivative, which has the outputs, too; to the bit."""

    def run(call, reading):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 1), dataset().tensors[0]
        y = x[:, :1] + 0.3 * torch.randn(len(x), 1).abs()
        data = Failing([(x[:10], y[:10]), (x[10:20], y[10:20]), (x[20:], y[20:])])
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        prior = PriorLearner("student_t", every=1, steps=3, average=None)
        prior.start(model, optimizer, data, 2, hooks="none")

        def called(name, *arguments):
            if call == name and arguments in ((), (1,)):
                data.readings, data.fails_in = 0, reading
                with pytest.raises(OSError, match="the disk"):
                    FUNCTIONS[name](prior.problem, prior.state, *arguments)
            return FUNCTIONS[name](prior.problem, prior.state, *arguments)

        for epoch in (1, 2):
            for x, y in data:
                optimizer.zero_grad()
                (prior.likelihood.loss(model(x), y) / len(x)).backward()
                penalty(prior.problem, prior.state)
                optimizer.step()
            assert called("end_of_epoch", epoch) or epoch == 2  # which ends with the training
        assert called("finish")
        return prior

    whole = run(None, 0)
    assert len(whole.evidences) == 2 and whole.likelihood != StudentT(df=4, scale=1)
    for call, reading in product(FUNCTIONS, (1, 2)):
        resumed = run(call, reading)
        assert resumed.evidences == whole.evidences, (call, reading)
        assert resumed.likelihood == whole.likelihood
        assert torch.equal(resumed.weight_decays(), whole.weight_decays())


FUNCTIONS = {"end_of_epoch": end_of_epoch, "finish": finish}


def test_an_error_in_a_step_leaves_the_loop_able_to_go_on():
    """The step that ends the epoch is made; the next one makes the update."""
    x, y = dataset().tensors
    data, model = Failing([(x[:15], y[:15]), (x[15:], y[15:])]), network()
    prior, optimizer = PriorLearner("classification", every=1, steps=2), sgd(model)
    prior.start(model, optimizer, data, 3)
    plain(model, optimizer, lambda: None, x, y, 0)
    data.fails_in = data.readings + 1
    with pytest.raises(OSError, match="the disk"):
        plain(model, optimizer, lambda: None, x, y, 1)
    assert prior.state.steps == [2] and prior.state.epoch == 0 and not prior.evidences
    plain(model, optimizer, lambda: None, x, y, 2)
    assert prior.state.epoch == 1 and len(prior.evidences) == 1


# --- weights that change between steps ---


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def weights(model):
    return deepcopy({**model.state_dict()})


def by_data(model, state):
    for name, p in model.named_parameters():
        p.data.copy_(state[name])


def of_one_value(model, state):
    with torch.no_grad():  # by its last bit
        model[0].weight[2, 1] = torch.nextafter(model[0].weight[2, 1], torch.tensor(9.0))


def of_one_value_by_data(model, state):
    model[0].weight.data[2, 1] = torch.nextafter(model[0].weight.data[2, 1], torch.tensor(9.0))


def in_new_memory(model, state):
    for name, p in model.named_parameters():
        p.data = state[name].clone()


def there_and_back(model, state):
    """As an evaluation of other weights does."""
    present = weights(model)
    model.load_state_dict(state)
    model.load_state_dict(present)


def clip(model):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)


def clip_data(model):
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def in_a_loop(after_step=None, restore=None, take=7, **options):
    """A network, its learner, and the state that it was given back or has from the last step."""
    model, data = normalised(), list(loader()) * EPOCHS
    optimizer, prior = sgd(model), PriorLearner("classification", **OPTIONS | options)
    prior.start(model, optimizer, loader(), EPOCHS)
    state = {}
    for step, (x, y) in enumerate(data):
        plain(model.train(), optimizer, lambda: None, x, y, step)
        if after_step is not None:
            after_step(model, step)
        if step == take:
            state = weights(model)
    if restore is not None:
        restore(model, state)
    return model, prior, weights(model)


RESTORED = {
    "load_state_dict": nn.Module.load_state_dict,
    "p.data": by_data,
    "one value": of_one_value,
    "one value of p.data": of_one_value_by_data,
    "p.data itself": in_new_memory,
}


@pytest.mark.parametrize("options", [{}, {"keep": "best"}], ids=["last", "best"])
@pytest.mark.parametrize("restore", RESTORED.values(), ids=RESTORED)
def test_finish_keeps_weights_that_changed_since_the_last_step(restore, options, caplog):
    model, prior, state = in_a_loop(restore=restore, **options)
    caplog.set_level("INFO")
    with prior.averaged() as shown:
        assert same(weights(shown), state)  # the network that finish leaves
    assert prior.finish()["averaged"] == 0
    assert same(weights(model), state)  # BatchNorm's statistics, too
    assert torch.equal(prior.posterior.mean, torch.cat([p.flatten() for p in model.parameters()]))
    assert "keeps the parameters, because they have changed since" in caplog.text
    assert prior.finish()["averaged"] == 0 and same(weights(model), state)  # again, too


def test_weights_that_are_those_of_the_steps_are_averaged():
    """The negative control; it is the average that finish(average=True) takes of a restored one."""
    model, prior, state = in_a_loop(restore=there_and_back)
    assert prior.finish()["averaged"] == 1
    assert not same(weights(model), state)
    other, prior, _ = in_a_loop()
    assert prior.finish()["averaged"] == 1 and same(weights(other), weights(model))
    other, prior, state = in_a_loop(restore=nn.Module.load_state_dict)
    assert prior.finish(average=True)["averaged"] == 1
    assert not same(weights(other), state)


def test_weights_that_are_not_of_a_step_are_not_averaged():
    """Restored ones at finish(average=True), nor other ones in an evaluation."""
    held_out = list(loader())
    whole, prior, _ = in_a_loop()
    prior.finish()
    without_last, prior, _ = in_a_loop(restore=nn.Module.load_state_dict)
    average = prior.state.averages[0]
    before = [value.clone() for value in average.values]
    prior.finish(average=True)
    assert all(map(torch.equal, without_last.parameters(), before))
    assert not same(weights(without_last), weights(whole))

    def evaluate_others(model, state):
        present = weights(model)
        model.load_state_dict({name: torch.zeros_like(v) for name, v in present.items()})
        assert prior.validation_loss(held_out) == pytest.approx(log(3), abs=1e-6)  # of zeros
        model.load_state_dict(present)

    model, prior, _ = in_a_loop()
    evaluate_others(model, None)
    assert prior.finish()["averaged"] == 1 and same(weights(model), weights(whole))


def test_a_cast_is_a_change_only_if_values_are_lost():
    for dtype, averaged in ((torch.float64, "unchanged"), (torch.bfloat16, "changed")):
        model, prior, _ = in_a_loop()
        model.to(dtype)
        assert prior._hooks.weights_since_steps() == averaged


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fingerprints_show_a_last_bit_in_any_layout(dtype):
    """Of odd sizes, at odd places, of channels last; the same values elsewhere have the same."""
    numbers = torch.linspace(-0.7, 1, 97).to(dtype)
    images = numbers[1:].view(2, 3, 4, 4)
    for values in (
        numbers[:15].view(5, 3),
        numbers[1:14],
        images.to(memory_format=torch.channels_last),
        images[0, 0].T,
    ):
        view = view_of_bits(values)
        (before,) = fingerprints([view])
        assert fingerprints([view_like(values.contiguous(), view)]) == [before]
        changed = values.flatten()
        changed[-1:] = torch.nextafter(changed[-1:], torch.full_like(changed[-1:], 9))
        assert fingerprints([view_like(changed.view(values.shape), view)]) != [before]


@pytest.mark.parametrize("change", [clip, clip_data])
def test_what_a_loop_does_after_each_step_is_a_part_of_the_step(change):
    """Clipped weights are averaged; clipped after some steps alone, finish asks."""
    model, prior, state = in_a_loop(lambda model, step: change(model))
    assert prior.finish()["averaged"] == 1
    assert not same(weights(model), state)

    def after_some(model, step):
        if step % 4 == 3:  # the last step's, too
            change(model)

    model, prior, state = in_a_loop(after_some)
    with pytest.raises(RuntimeError, match=r"not after others.*average=False\).*average=True"):
        prior.finish()
    assert same(weights(model), state)
    assert prior.finish(average=False)["averaged"] == 0
    assert same(weights(model), state)
    model, prior, state = in_a_loop(after_some)
    assert prior.finish(average=True)["averaged"] == 1
    # After the first ten steps, too, which torch's version counters show.
    model, prior, state = in_a_loop(lambda model, step: clip(model) if step > 12 else None)
    with pytest.raises(RuntimeError, match="not after others"):
        prior.finish()


def test_the_end_of_training_is_no_part_of_averaged():
    _, prior, _ = in_a_loop()
    with pytest.raises(RuntimeError, match=r"within averaged\(\)"), prior.averaged():
        prior.finish()
    assert prior.finish()["averaged"] == 1


# --- optimisers that start was not called with ---


def test_a_new_optimiser_in_the_midst_of_training_is_an_error_with_a_way_out():
    model, optimizer, prior = begun("plain", stop=6)
    new = torch.optim.Adam(model.parameters(), 1e-3)
    (x, y), *_ = loader()
    with pytest.raises(RuntimeError, match=r"Adam .*'0.weight'.*as a list.*detach\(\)"):
        plain(model, new, lambda: None, x, y, 0)
    prior.detach()
    prior.load_state_dict(prior.state_dict())
    prior.start(model, new, loader(), EPOCHS)
    for x, y in (list(loader()) * EPOCHS)[6:]:
        plain(model, new, lambda: None, x, y, 0)
    assert prior.state.steps == [EPOCHS * BATCHES] and prior.finish()["averaged"] == 1
    plain(model, optimizer, lambda: None, x, y, 0)  # after the end, anything goes


class Lookahead(torch.optim.Optimizer):
    """A wrapper that sets the weights itself after every fifth step of another optimiser."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.number = optimizer, 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        self.number += 1
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            if self.number % 5 == 0:
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class TwoSteps(torch.optim.Optimizer):
    """A wrapper without a name for the optimiser inside that `start` knows."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base_optimizer = base

    def step(self, closure=None):
        self.base_optimizer.step()


@pytest.mark.parametrize("wrapper", [Lookahead, TwoSteps])
def test_a_wrapper_of_the_optimiser_is_no_other_optimiser(wrapper):
    model = network()
    optimizer, prior = wrapper(sgd(model)), PriorLearner("classification", **OPTIONS)
    prior.start(model, optimizer, loader(), EPOCHS)
    others = network(seed=1)
    another = sgd(others)
    for x, y in list(loader()) * EPOCHS:
        plain(model, optimizer, lambda: None, x, y, 0)
        plain(others, another, lambda: None, x, y, 0)  # which is no concern of the learner's
    assert prior.state.steps == [EPOCHS * BATCHES]
    assert prior.finish()["averaged"] == 1


# --- what is refused ---


def test_what_cannot_be_trained_is_named_at_the_start():
    model, prior = network(), PriorLearner("classification")
    head = torch.optim.SGD(model[2].parameters(), 0.1)
    cases = [
        (ValueError, "not have 0.weight, 0.bias, 2.weight, 2.bias. T", sgd(deepcopy(model))),
        (ValueError, "not have 0.weight, 0.bias. Their.*requires_grad_", head),
        (TypeError, "is Linear. Pass a torch.optim.Optimizer", model[0]),
        (ValueError, "LBFGS evaluates.*Pass SGD", torch.optim.LBFGS(model.parameters())),
    ]
    for error, message, optimizer in cases:
        with pytest.raises(error, match=message):
            prior.start(model, optimizer, loader(), 2)
    with pytest.raises(TypeError, match="generator, which can be read only once"):
        prior.start(model, sgd(model), (batch for batch in loader()), 2)
    model[0].requires_grad_(False)
    prior.start(model, head, loader(), 2)


def test_what_changes_after_the_start_is_named():
    """A weight decay, and which parameters are trained; and a step within the average."""
    model, prior = network(), PriorLearner("classification", every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, maximize=True)
    with pytest.raises(ValueError, match="optimiser maximises"):
        prior.start(model, optimizer, loader(), 2)
    for steps in (0, 2.5):
        with pytest.raises(ValueError, match="steps_per_epoch must be"):
            prior.start(model, sgd(model), loader(), 2, steps_per_epoch=steps)

    prior.start(model, optimizer := sgd(model), loader(), 3)

    def epoch():
        for x, y in loader():
            plain(model, optimizer, lambda: None, x, y, 0)

    epoch()
    optimizer.param_groups[0]["weight_decay"] = 4.0
    with pytest.raises(ValueError, match="its own weight decay"):
        epoch()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0.bias' was frozen or unfrozen after start"):
        epoch()
    model[0].bias.requires_grad_(True)
    epoch()
    with pytest.raises(RuntimeError, match="stepped within averaged"), prior.averaged():
        epoch()
    prior.finish()


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*dataset().tensors, strict=True)


def test_updates_of_a_stream_follow_rounds_of_steps(monkeypatch):
    """Whose length is unknown: of N examples, or as many as ten samples, and later more rarely."""
    data = DataLoader(Stream(), 4)

    def trained(steps, rate=lambda step: 1.0, **options):
        model, prior, updates = network(), PriorLearner("classification", rest=None, **options), []
        prior.start(model, optimizer := sgd(model), data)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        for step in range(steps):
            x, y = list(data)[step % len(list(data))]
            plain(model, optimizer, lambda: None, x, y, step)
            scheduler.step()
            updates += [step + 1] if len(prior.evidences) > len(updates) else []
        return prior, updates

    prior, updates = trained(72, updates=4)
    assert updates == [8, 16, 24, 32, 48, 64]  # of rounds of eight steps, with 30 examples
    assert prior.problem.examples_per_epoch == 32
    prior.finish()
    assert prior.state.epoch == 9 and len(prior.evidences) == 7
    # Another learning rate is followed by an update.
    _, updates = trained(72, lambda step: 1.0 if step < 50 else 0.6, updates=4)
    assert updates == [8, 16, 24, 32, 48, 56, 64]
    monkeypatch.setattr("marglik.training.problem.FEWEST", 1)
    prior, updates = trained(17, updates=4)
    assert updates == [3, 6, 9, 12]  # rounds of ten examples


def test_epochs_of_a_stream_are_passes_over_it(monkeypatch):
    """The schedule counts their rounds, also of accumulated batches."""
    data, early = DataLoader(Stream(), 4), PriorLearner("classification")
    for accumulated, rounds in ((1, 4), (2, 4)):
        model, prior = network(), PriorLearner("classification", every=1)
        prior.start(model, optimizer := sgd(model), data, 4)
        step = 0
        for _ in range(4):
            for x, y in data:
                (cross_entropy(model(x), y) / accumulated).backward()
                step += 1
                if step % accumulated == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        assert prior.problem.options.schedule.epochs == prior.state.epoch == rounds
        prior.finish()
        assert len(prior.evidences) == rounds
    monkeypatch.setattr("marglik.training.problem.FEWEST", 1)
    early.start(model, sgd(model), data, 4)
    assert early.problem.options.schedule.epochs == 11  # rounds of 3 of all 32 steps


def test_accumulated_batches_need_their_number_of_steps(recwarn):
    for steps_per_epoch in (BATCHES // 2, None):
        model, prior = network(), PriorLearner("classification")
        prior.start(
            model, optimizer := sgd(model), loader(), EPOCHS, steps_per_epoch=steps_per_epoch
        )
        for step, (x, y) in enumerate(list(loader()) * EPOCHS):
            accumulated(model, optimizer, lambda: None, x, y, step)
        warned = [str(w.message) for w in recwarn if "pass steps_per_epoch" in str(w.message)]
        assert [prior.state.epoch, len(warned)] == ([6, 0] if steps_per_epoch else [3, 1])
    assert "gradients of 2 batches" in warned[0] and "4 in an epoch" in warned[0]


def test_two_backward_passes_with_gradients_set_to_zero_are_one_batch(recwarn):
    """As in SAM; the loss is then not twice the likelihood's."""
    model, prior = network(), PriorLearner("classification")
    prior.start(model, optimizer := sgd(model), loader(), 2)
    for x, y in loader():
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not [w for w in recwarn if "loss differs" in str(w.message)]
    assert not [w for w in recwarn if "steps_per_epoch" in str(w.message)]


def test_a_stream_that_can_be_read_once_is_an_error():
    class Once(IterableDataset):
        def __init__(self):
            self.examples = iter(dataset())

        def __iter__(self):
            return self.examples

    model = network()
    with pytest.raises(ValueError, match="a generator that was already read"):
        PriorLearner("classification").start(model, sgd(model), DataLoader(Once(), 4))


def test_rounds_of_a_stream_count_all_batches_of_a_step():
    """Also of a training that resumes within a round, which goes on to the bit."""
    data, ends = DataLoader(Stream(), 4), []
    batches = list(data)
    for parts in ([range(36)], [range(10), range(10, 36)]):
        model, updates, states = network(), [], None
        for steps in parts:
            optimizer, prior = sgd(model), PriorLearner("classification", rest=None, updates=4)
            if states is not None:
                optimizer.load_state_dict(states[0])
                prior.load_state_dict(states[1])
            prior.start(model, optimizer, data)
            for step in steps:
                for number in (2 * step, 2 * step + 1):
                    x, y = batches[number % len(batches)]
                    (cross_entropy(model(x), y) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
                updates += [step + 1] if len(prior.evidences) > len(updates) else []
            states = deepcopy((optimizer.state_dict(), prior.state_dict()))
        # The rounds of the test above have eight steps, of as many examples.
        assert updates == [4, 8, 12, 16, 24, 32] and prior.problem.examples_per_epoch == 32
        prior.finish()
        ends.append((weights(model), prior.evidences, prior.weight_decays()))
    (whole, *learned), (resumed, *again) = ends
    assert same(resumed, whole) and again[0] == learned[0] and torch.equal(again[1], learned[1])


def test_decays_are_replayed_by_networks_of_one_architecture():
    model, prior = network(), PriorLearner("classification")
    learn(model, sgd(model), prior, loader(), 2)
    other = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"parameters 0.weight, 0.bias, 2.weight.* has 0.weight"):
        prior.replay().start(other, sgd(other), loader(), 2)


@pytest.mark.parametrize("updates", [0, 3])
def test_parameters_that_are_unfrozen_after_the_start_are_an_error(updates):
    model, prior = network(), PriorLearner("classification", updates=updates)
    first = next(model.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match="was frozen or unfrozen after start"):
        learn(model, sgd(model), prior, loader(), 2, after_step=lambda: first.requires_grad_(True))


@pytest.mark.parametrize("kind", ["replay", "hyperparameters"])
def test_a_learner_that_starts_twice_begins_with_the_same_decays(kind):
    first = Hyperparameters(PriorGroups.from_model(network()), torch.tensor(0.3))
    learner = PriorLearner("classification", hyperparameters=first, every=1)
    if kind == "replay":
        learn(model := network(), sgd(model), learner, loader(), 3)
        learner = learner.replay()
    ends = []
    for _ in range(2):
        learn(model := network(), sgd(model), learner, loader(), 3)
        ends.append((weights(model), learner.weight_decays()))
    assert same(ends[1], ends[0])
    assert not torch.allclose(learner.weight_decays(), torch.tensor(0.01).double())  # it learned


def test_a_replay_has_the_noise_of_regression_too():
    x = dataset().tensors[0]
    data = [(part, part[:, :1] + part[:, 1:2].sin()) for part in (x[:15], x[15:])]
    sigmas, prior = [], PriorLearner("regression", every=1)
    for learner in (prior, None):
        learner, model = learner or prior.replay(), nn.Linear(4, 1)
        learn(model, sgd(model), learner, data, 3, loss=mse_loss)
        sigmas.append(learner.state.hyperparameters.sigma_noise)
    assert_close(sigmas[1], sigmas[0], rtol=1e-12, atol=0)
    assert sigmas[0] > 0.11  # it was 0.1


def test_a_closure_that_is_evaluated_twice_is_an_error():
    class Twice(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            closure()
            return super().step(closure)

    model = network()
    optimizer = Twice(model.parameters(), 0.1)
    prior = PriorLearner("classification")
    prior.start(model, optimizer, loader(), 2)
    with pytest.raises(RuntimeError, match="Twice evaluated its closure twice"):
        optimizer.step(lambda: None)


def test_a_state_that_comes_after_the_start_is_an_error():
    first = learn(model := network(), sgd(model), PriorLearner("classification"), loader(), 2)
    model, prior = network(), PriorLearner("classification")
    prior.start(model, sgd(model), loader(), 2)
    with pytest.raises(RuntimeError, match=r"load_state_dict\(state\) before start"):
        prior.load_state_dict(first.state_dict())


def test_both_optimisers_decays_are_limited():
    """By each one's learning rate, of the parameters that it holds, and the scale of the loss."""
    model = network()
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.5), sgd(model[2])]
    prior = PriorLearner("classification", weight_decay=4.0, updates=0, loss_scale=2.0)
    prior.start(model, optimizers, loader(), 2)
    problem, state = prior.problem, prior.state
    with pytest.warns(RuntimeWarning, match="decay of 0.weight, 0.bias has grown beyond 1 / learn"):
        assert stable_decays(problem, state, problem.parts[0]) == pytest.approx([1.0, 1.0])
    assert stable_decays(problem, state, problem.parts[1]) == pytest.approx([4.0, 4.0])
    assert state.measures.limited == ["0.bias", "0.weight"]


# --- their lives ---


def hooks(optimizer):
    return len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)


def test_hooks_go_with_the_training_and_keep_nothing_alive():
    model = network()
    optimizer, prior = sgd(model), PriorLearner("classification", average=None)
    prior.start(model, optimizer, loader(), 2)
    assert hooks(optimizer) == (1, 1)
    prior.start(model, optimizer, loader(), 2)
    assert hooks(optimizer) == (1, 1)  # not others beside them
    other = PriorLearner("classification", average=None)
    with pytest.raises(RuntimeError, match=r"Another PriorLearner.*detach\(\).*create a new"):
        other.start(model, optimizer, loader(), 2)
    prior.detach()
    other.start(model, optimizer, loader(), 2)
    assert hooks(optimizer) == (1, 1)
    for x, y in loader():
        plain(model, optimizer, lambda: None, x, y, 0)
    assert (prior.state.steps, other.state.steps) == ([0], [4])
    other.finish()
    assert hooks(optimizer) == (0, 0)

    alive = weakref.ref(prior)
    prior.start(model, optimizer, loader(), 2)
    with pytest.raises(ValueError):  # a loop that ends in an error
        raise ValueError
    del prior
    gc.collect()
    assert alive() is None and hooks(optimizer) == (0, 0)
    other.start(model, optimizer, loader(), 2)
    other.detach()
    assert hooks(optimizer) == (0, 0)


def test_an_optimiser_whose_tensors_are_all_frozen_is_in_the_training_too():
    model = network()
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)]
    first, second = (PriorLearner("classification", weight_decay=1.0) for _ in range(2))
    first.start(model, optimizers, loader(), 2)
    model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="Another PriorLearner"):
        second.start(model, optimizers, loader(), 2)
    first.detach()
    second.start(model, optimizers, loader(), 2)
    with pytest.raises(RuntimeError, match="Another PriorLearner"):
        first.start(model, [optimizers[0], sgd(model[2])], loader(), 2)


def test_a_learner_in_training_says_why_it_is_not_copied():
    """A copy's optimiser would have no hooks; before and after the training it is copied."""
    model, optimizer, prior = begun("plain", stop=3)
    for copied in (deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"in training.*state_dict\(\).*finish\(\)"):
            copied(prior)
    prior.finish()
    again = pickle.loads(pickle.dumps(prior))
    assert torch.equal(again.posterior.mean, prior.posterior.mean)
    assert deepcopy(PriorLearner("classification")).posterior is None
