"""The learner's protocol: each call left out or made twice is an error; no right loop trips."""

import gc
import weakref
from copy import deepcopy

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy

from kfac_backend.likelihoods import StudentT
from marglik import OnlineTraining, PriorLearner
from tests.marglik.callbacks.online import dataset, loader, network, sgd
from tests.marglik.plain_loop import learn

pytestmark = pytest.mark.usefixtures("one_thread")


def started(optimizer_of=sgd, **options):
    """A network, its optimiser, and a learner that has started for two epochs."""
    model = network()
    optimizer = optimizer_of(model)
    prior = PriorLearner("classification", **{"every": 1, "steps": 2, **options})
    prior.start(model, optimizer, loader(), 2)
    return model, optimizer, prior


def backward(model, index=0):
    x, y = list(loader())[index]
    cross_entropy(model(x), y).backward()


# --- calls that are left out, or made twice ---


def test_a_step_without_the_priors_gradient_is_an_error():
    model, optimizer, prior = started()
    backward(model)
    with pytest.raises(RuntimeError, match="without the prior's gradient.*add_to_gradients"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model)
    prior.add_to_gradients()
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    with pytest.raises(RuntimeError, match="without the prior's gradient"):  # a later one, too
        optimizer.step()


@pytest.mark.parametrize("between", [lambda model: None, backward])
def test_the_priors_gradient_twice_is_an_error(between):
    """Also after each of several backward passes whose gradients add up."""
    model, optimizer, prior = started()
    backward(model)
    prior.add_to_gradients()
    between(model)
    before, state = [p.grad.clone() for p in model.parameters()], prior.state_dict()
    with pytest.raises(RuntimeError, match="twice for one step.*Call it once"):
        prior.add_to_gradients()
    assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
    assert prior.state_dict()["steps"] == state["steps"] == 1
    optimizer.step()
    prior.add_to_gradients()  # negative control: after a step, without clearing


def test_the_priors_gradient_before_each_of_two_steps_is_an_error():
    """It is in the gradients of both optimisers since the first call."""
    model, (first, second), prior = started(halves)
    backward(model)
    prior.add_to_gradients()
    first.step()
    with pytest.raises(RuntimeError, match="twice for one step"):
        prior.add_to_gradients()
    second.step()
    with pytest.raises(RuntimeError, match="without the prior's gradient"):
        second.step()


def test_an_end_of_training_without_ends_of_epochs_is_an_error():
    model, optimizer, prior = started()
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        prior.add_to_gradients()
        optimizer.step()
    with pytest.raises(RuntimeError, match="in 4 steps.*Call end_of_epoch"):
        prior.end_of_training()
    prior.end_of_epoch(1)  # the way out, and nothing was lost
    prior.end_of_training()
    assert len(prior.evidences) == 1 and len(set(prior.weight_decays().tolist())) == 4


def test_an_optimiser_of_other_parameters_is_an_error():
    model, prior = network(), PriorLearner("classification")
    with pytest.raises(ValueError, match="does not hold 0.weight, 0.bias, 2.weight, 2.bias, whose"):
        prior.start(model, sgd(deepcopy(model)), loader(), 2)
    head = torch.optim.SGD(model[2].parameters(), 0.1)
    with pytest.raises(ValueError, match="does not hold 0.weight, 0.bias, whose.*requires_grad_"):
        prior.start(model, head, loader(), 2)
    with pytest.raises(TypeError, match="is Linear; a torch.optim.Optimizer"):
        prior.start(model, model[0], loader(), 2)
    model[0].requires_grad_(False)
    prior.start(model, head, loader(), 2)


def test_a_state_that_comes_after_the_start_is_an_error():
    first = learn(model := network(), sgd(model), PriorLearner("classification"), loader(), 2)
    model, optimizer, prior = started()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(state\) before start"):
        prior.load_state_dict(first.state_dict())
    again = PriorLearner("classification")
    again.load_state_dict(first.state_dict())
    again.start(model, optimizer, loader(), 2)
    assert torch.equal(again.weight_decays(), first.weight_decays())


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


@pytest.mark.parametrize("call", ["end_of_epoch", "end_of_training"])
@pytest.mark.parametrize("reading", [1, 2, 3])
def test_an_update_whose_data_fails_is_made_by_the_second_call(call, reading):
    """In the pass, in that of its derivative, in that of the outputs; to the bit."""

    def run(fails):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 1), dataset().tensors[0]
        y = x[:, :1] + 0.3 * torch.randn(len(x), 1).abs()
        data = Failing([(x[:10], y[:10]), (x[10:20], y[10:20]), (x[20:], y[20:])])
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        prior = PriorLearner("student_t", every=1, steps=3, average=None)
        prior.start(model, optimizer, data, 2)
        for epoch in (1, 2):
            for x, y in data:
                optimizer.zero_grad()
                (prior.likelihood.loss(model(x), y) / len(x)).backward()
                prior.add_to_gradients()
                optimizer.step()
            if fails and call == "end_of_epoch" and epoch == 1:
                data.readings, data.fails_in = 0, reading
                with pytest.raises(OSError, match="the disk"):
                    prior.end_of_epoch(epoch)
            assert prior.end_of_epoch(epoch) or epoch == 2  # which ends with the training
        if fails and call == "end_of_training":
            data.readings, data.fails_in = 0, reading
            with pytest.raises(OSError, match="the disk"):
                prior.end_of_training()
        assert prior.end_of_training()
        return prior

    whole, resumed = run(fails=False), run(fails=True)
    assert resumed.evidences == whole.evidences and len(whole.evidences) == 2
    assert resumed.likelihood == whole.likelihood != StudentT(df=4, scale=1)
    assert torch.equal(resumed.weight_decays(), whole.weight_decays())


# --- loops that are right ---


def plain(model, prior, optimizer, x, y, step):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    prior.add_to_gradients()
    optimizer.step()


def accumulated(model, prior, optimizer, x, y, step):
    optimizer.zero_grad(set_to_none=False)
    for part in (slice(4), slice(4, None)):
        (cross_entropy(model(x[part]), y[part], reduction="sum") / len(x)).backward()
    prior.add_to_gradients()
    optimizer.step()


def by_closure(model, prior, optimizer, x, y, step):
    """As of L-BFGS, which evaluates it several times, and of Lightning."""

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss + prior.add_to_gradients()

    optimizer.step(closure)


def one_after_the_other(model, prior, optimizers, x, y, step):
    """The second steps more rarely, and its gradients are cleared each time."""
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    prior.add_to_gradients()
    optimizers[0].step()
    if step % 2:
        optimizers[1].step()


def accelerated(model, prior, optimizer, x, y, step):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    if optimizer.gradient_state.sync_gradients:
        prior.add_to_gradients()
    optimizer.step()


class Scaled:
    """With a gradient scaler, whose first factor is so large that steps are skipped."""

    def __init__(self, to_none):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        self.to_none, self.skipped = to_none, 0

    def __call__(self, model, prior, optimizer, x, y, step):
        optimizer.zero_grad(set_to_none=self.to_none)
        scale = torch.tensor(self.scaler.get_scale())
        self.scaler.scale(100 * cross_entropy(model(x), y)).backward()
        prior.add_to_gradients(scale)
        before = model[0].weight.clone()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.skipped += torch.equal(before, model[0].weight)


def halves(model):
    return [sgd(model[0]), torch.optim.Adam(model[2].parameters(), 1e-3)]


RIGHT = {
    "plain": (sgd, plain),
    "accumulation": (sgd, accumulated),
    "a closure": (lambda m: torch.optim.LBFGS(m.parameters(), 0.1, max_iter=3), by_closure),
    "two optimisers": (halves, one_after_the_other),
    "accelerate": (lambda m: Accelerator(cpu=True).prepare_optimizer(sgd(m)), accelerated),
    "a scaler": (sgd, Scaled(to_none=True)),
    "a scaler, zeros": (sgd, Scaled(to_none=False)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_trips_no_check(name):
    optimizer_of, step_of = RIGHT[name]
    model, optimizer, prior = started(optimizer_of, average=None)
    before = [p.detach().clone() for p in model.parameters()]
    for epoch in (1, 2):
        for step, (x, y) in enumerate(loader()):
            step_of(model, prior, optimizer, x, y, step)
        assert prior.end_of_epoch(epoch) or epoch == 2
    prior.end_of_training()
    assert not any(map(torch.equal, before, model.parameters()))
    if isinstance(step_of, Scaled):
        assert 0 < step_of.skipped < 8


def test_both_optimisers_decays_are_limited():
    """By each one's learning rate, of the parameters that it holds."""
    model = network()
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.5), sgd(model[2])]
    prior = PriorLearner("classification", weight_decay=4.0, updates=0)
    prior.start(model, optimizers, loader(), 2)
    with pytest.warns(RuntimeWarning, match="decay of 0.weight, 0.bias has grown beyond 1 / learn"):
        prior._stable_decays()
    assert prior._stable_decays() == pytest.approx([2.0, 2.0, 4.0, 4.0])


# --- hooks ---


def hooks(optimizer):
    return len(optimizer._optimizer_step_post_hooks)


def test_hooks_go_with_the_training_and_keep_nothing_alive():
    model, optimizer, prior = started(average=None)
    assert hooks(optimizer) == 1
    prior.start(model, optimizer, loader(), 2)
    assert hooks(optimizer) == 1  # not another one
    for epoch in (1, 2):
        for x, y in loader():
            plain(model, prior, optimizer, x, y, 0)
        prior.end_of_epoch(epoch)
    prior.end_of_training()
    assert hooks(optimizer) == 0
    optimizer.step()  # which is the loop's own business now

    model, optimizer, prior = started()
    alive = weakref.ref(prior)
    with pytest.raises(ValueError):  # a loop that ends in an error
        raise ValueError
    del prior
    gc.collect()
    assert alive() is None and hooks(optimizer) == 0
    model, optimizer, prior = started()
    prior.detach()
    assert hooks(optimizer) == 0


def test_the_own_loop_leaves_no_hooks_after_an_exception():
    x, y = dataset().tensors
    data, model = Failing([(x[:15], y[:15]), (x[15:], y[15:])]), network()
    optimizer, learner = sgd(model), PriorLearner("classification", epochs=2)
    training = OnlineTraining(model, optimizer, data, learner)
    assert hooks(optimizer) == 1
    data.fails_in = data.readings + 1
    with pytest.raises(OSError, match="the disk"):
        training.run()
    assert hooks(optimizer) == 0
