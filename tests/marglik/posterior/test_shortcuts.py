"""Shortcuts of predictions give the numbers of the general methods, or are not taken.

The oracle of the last layer is `OutputCovariance`, which needs no proof that the model's outputs
are the layer's.
"""

import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import kfac_backend.engine.model_calls
import marglik.laplace
from kfac_backend.covariance import last_layer, output_covariance
from kfac_backend.covariance.gradients import HeldGradients
from kfac_backend.covariance.last_layer import LastLayerCovariance
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.engine.model_calls import call_with, call_with_each
from marglik import KronLaplace, Laplace, Posterior, PredictiveConfig, laplace_predictive
from marglik.models import MLP, LeNet, Standardised
from tests.kfac_backend.covariance.posteriors import brute_force
from tests.kfac_backend.covariance.posteriors import posterior as factors_posterior
from tests.marglik.posteriors import data, network

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Head(nn.Module):
    """A network (3,) -> (3,), whose code after the first layer is a function of h and the model."""

    def __init__(self, code):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm = nn.Linear(3, 6), nn.BatchNorm1d(6)
        self.last, self.code = nn.Linear(6, 3), code
        self.double()

    def forward(self, x):
        return self.code(self.norm(self.inner(x)).tanh(), self)


class Doubled(TorchDispatchMode):
    """Products of matrices return twice their value."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        return 2 * result if "addmm" in str(operation) else result


class Subclass(torch.Tensor):
    """A tensor of which linear layers return twice the output."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return 2 * result if function is functional.linear else result


def after(change):
    """Code that changes the output of the last layer."""

    def code(h, model):
        f = model.last(h)
        changed = change(f)
        return f if changed is None else changed

    return code


def within(context, change=lambda h: h):
    """Code that runs the last layer within a context, after a change of its input."""

    def code(h, model):
        h = change(h)
        with context():
            return model.last(h)

    return code


def input_through_data(h, model):
    f = model.last(h)
    h.data.mul_(2)
    return f


def energy(h, model):
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        (g,) = torch.autograd.grad(h.square().sum(), h)
    return model.last(g)


def inference_before(h, model):
    with torch.inference_mode():
        h = h * 2
    return model.last(h)


def double_gradient(f):
    if f.requires_grad:
        f.register_hook(lambda g: 2 * g)


def double_gradient_of_node(f):
    if f.requires_grad:
        f.grad_fn.register_prehook(lambda g: (2 * g[0],))


def change_without_graph(f):
    with torch.no_grad():
        f.mul_(2)


plain = after(lambda f: None)
CODE = {
    "plain": plain,
    "logits": after(lambda f: {"logits": f}),
    "energy": energy,
    "view": after(lambda f: f.view(-1, 3)),
    "in place": after(lambda f: f.mul_(2)),
    "in place without graph": after(change_without_graph),
    "through .data": after(lambda f: f.data.mul_(2)[:0].sum() + f),
    "input through .data": input_through_data,
    "open gate": after(lambda f: (f + 1e3).relu() - 1e3),
    "open gate in place": after(lambda f: f.add_(1e3).relu_().sub_(1e3)),
    "value alone": after(lambda f: 2 * f - f.detach()),
    "gradient hook": after(double_gradient),
    "node hook": after(double_gradient_of_node),
    "without gradients": within(torch.no_grad),
    "detached": after(lambda f: f.detach_()),
    "dispatch mode": within(Doubled),
    "second use": lambda h, m: m.last(h) + functional.linear(h, m.last.weight),
    "earlier use": lambda h, m: m.last(h + (h @ m.last.weight.mT).sum(-1, True)),
    "twice": lambda h, m: m.last(m.last(h).repeat(1, 2)),
    "subclass": lambda h, m: m.last(h.as_subclass(Subclass)).as_subclass(torch.Tensor),
    "backbone in inference mode": inference_before,
}
GENERAL = {
    # Code with the same outputs and derivatives, for the general method.
    "subclass": after(lambda f: 2 * f),
    "backbone in inference mode": lambda h, m: m.last(2 * h),
    "earlier use": lambda h, m: m.last(h + (h @ m.last.weight.detach().mT).sum(-1, True)),
}


def head_posterior(code=plain, learned=(), **options):
    """A posterior of a network fitted with plain code, which then has other code."""
    model = Head(plain)
    model(X)  # statistics
    if learned:
        model.requires_grad_(False)
        for name in learned:
            getattr(model.last, name).requires_grad_(True)
    options = {"prior_precision": 0.7, "kfac_approx": "expand"} | options
    la = KronLaplace(model.eval(), "classification", **{"kfac_approx": "auto"} | options)
    la.fit([(X, torch.arange(8) % 3)])
    model.code = code
    return la


def result_of(function):
    try:
        return function()
    except Exception as error:
        return type(error)


def generally(monkeypatch, function):
    """The result by gradients of all outputs."""
    with monkeypatch.context() as patch:
        patch.setattr(LastLayerCovariance, "_run", lambda *_: None)
        return result_of(function)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", CODE)
def test_the_last_layer_alone_gives_the_general_numbers(name, alone, monkeypatch):
    learned = ("weight", "bias") if alone else ()
    # If the layer alone learns, its earlier use counts.
    code = CODE[name] if alone and name == "earlier use" else GENERAL.get(name, CODE[name])
    la, other = head_posterior(CODE[name], learned), head_posterior(code, learned)
    for n, only in product((1, 5), (False, True)):
        arguments = {"x": X[:n], "layers": "last", "variance_only": only}
        found = result_of(partial(la.output_distribution, **arguments))
        expected = generally(monkeypatch, partial(other.output_distribution, **arguments))
        if isinstance(found, type):  # an error instead of a wrong number
            assert name in GENERAL or found == expected
        else:
            assert_close(found, expected, rtol=1e-9, atol=1e-12)
            assert not found[0].requires_grad and not found[1].requires_grad


HOOKS = {
    "on the layer": lambda model, hook: model.last.register_forward_hook(hook),
    "on the network": lambda model, hook: model.register_forward_hook(hook),
    "global": lambda model, hook: nn.modules.module.register_module_forward_hook(
        lambda module, args, f: hook(module, args, f) if module is model.last else None
    ),
}


def data_in_place(layer, args, f):
    f.data.mul_(2)


@pytest.mark.parametrize("change", [lambda layer, args, f: 2 * f, data_in_place])
@pytest.mark.parametrize("place", HOOKS)
def test_hooks_after_a_prediction_are_noticed(place, change, monkeypatch):
    la, other = head_posterior(), head_posterior()
    before = la.output_distribution(X, "last")
    for posterior, run in ((la, result_of), (other, partial(generally, monkeypatch))):
        handle = HOOKS[place](posterior.model, change)
        try:
            result = run(lambda p=posterior: p.output_distribution(X, "last"))
        finally:
            handle.remove()
        if posterior is la:
            found = result
    assert_close(found, result)
    assert (found[0] - before[0]).norm() > 0.1 * before[0].norm()
    assert_close(la.output_distribution(X, "last"), before)


@pytest.mark.parametrize(("n", "only"), [(1, True), (1, False), (5, True), (5, False)])
@pytest.mark.parametrize("diagonal_above", [2, 100])
@pytest.mark.parametrize("learned", [["bias"], ["weight"], ["weight", "bias"]])
def test_results_are_the_callers_own(learned, diagonal_above, only, n, monkeypatch):
    """Writing into results, or into the model's stored output, does not change later ones."""
    la = head_posterior(learned=learned, diagonal_above=diagonal_above)
    call = partial(la.output_distribution, X[:n], "last", variance_only=only)
    expected = generally(monkeypatch, call)
    stored = []
    la.model.code = after(lambda f: stored.append(f))
    for _ in range(2):
        found = call()
        stored[-1].data.zero_()
        assert_close(found, expected, rtol=1e-9, atol=1e-12)
        for tensor in found:
            assert tensor.is_contiguous()
            tensor.mul_(5)


class NodeHook(nn.Sequential):
    """A network whose forward doubles the gradient of its outputs."""

    def forward(self, x):
        f = nn.Sequential.forward(self, x)
        double_gradient_of_node(f)
        return f


def known_posterior():
    """A posterior of a network of `VECTORISED` classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(), nn.Linear(6, 3)).double().eval()
    la = Posterior(model, "classification", prior_precision=0.7, kfac_approx="expand")
    la.fit([(X, torch.arange(8) % 3)])
    return la


# Each changes the derivative of the outputs, but no value.
CHANGED_CODE = {
    "hook on a tensor": lambda m: m.register_forward_hook(lambda m, args, f: double_gradient(f)),
    "hook on a node": lambda m: m.register_forward_hook(
        lambda m, args, f: double_gradient_of_node(f)
    ),
    "global hook": lambda m: nn.modules.module.register_module_forward_hook(
        lambda module, args, f: double_gradient_of_node(f) if module is m else None
    ),
    "other class": lambda m: setattr(m, "__class__", NodeHook),
    "own forward": lambda m: setattr(m, "forward", partial(NodeHook.forward, m)),
}


@pytest.mark.parametrize("name", CHANGED_CODE)
def test_known_code_is_checked_in_each_prediction(name, monkeypatch):
    la, other = known_posterior(), known_posterior()
    predict = partial(la.output_distribution, X, "last")
    before = predict()
    assert_close(before, generally(monkeypatch, partial(other.output_distribution, X, "last")))
    handle = CHANGED_CODE[name](la.model)
    try:
        for _ in range(2):  # the error stays until the code is restored
            with pytest.raises(NotImplementedError, match="code or hooks may have changed"):
                predict()
        # Negative control: if the code is taken for known, nothing is noticed.
        monkeypatch.setattr(last_layer, "has_known_code", lambda model: True)
        assert_close(predict(), before)
    finally:
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize(
    "layers", [(nn.ReLU(inplace=True),), (nn.ReLU(),), (nn.Tanh(),), (nn.Flatten(),), ()]
)
def test_known_layers_after_the_last_one_count(layers, monkeypatch):
    la = known_posterior()
    la.output_distribution(X, "last")
    la.model.extend(layers)
    with torch.no_grad():
        order = la.model[:4](X).amin(1).argsort(descending=True)
        la.model[3].bias += 0.1 - la.model[:4](X[order[:1]]).amin()
    la.fit([(X, torch.arange(8) % 3)])
    x = X[order]  # of the first example, all outputs are positive, and ReLU changes nothing
    found = la.output_distribution(x, "last")
    assert_close(found, generally(monkeypatch, partial(la.output_distribution, x, "last")))


def test_known_code_of_the_last_layer_is_compared_by_value(monkeypatch):
    la, other = known_posterior(), known_posterior()
    before = la.output_distribution(X, "last")
    twice = lambda layer, x: 2 * functional.linear(x, layer.weight, layer.bias)  # noqa: E731
    monkeypatch.setattr(nn.Linear, "forward", twice)
    found = la.output_distribution(X, "last")
    expected = generally(monkeypatch, partial(other.output_distribution, X, "last"))
    assert_close(found, expected)
    assert (found[1] - before[1]).norm() > 0.1 * before[1].norm()


CONTEXTS = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
def test_predictions_equal_the_general_ones(likelihood, context, monkeypatch):
    """In all modes and contexts, for all sizes of batches, at the first call and later."""
    dtype = torch.float32 if context == "autocast" else torch.float64
    la, other = (Posterior(network(dtype), likelihood, prior_precision=0.7) for _ in range(2))
    x, y = data(likelihood, dtype)
    for posterior in (la, other):
        posterior.fit([(x, y)])
    config = PredictiveConfig(layers="last")
    predict = laplace_predictive(la, config)
    for training, n in product((False, True), (5, 1)):
        la.model.train(training)
        with CONTEXTS[context]():
            found, again = predict(x[:n]), predict(x[:n])
            # Made within the context as well: what is cached must not depend on it.
            expected = generally(monkeypatch, lambda n=n: laplace_predictive(other, config)(x[:n]))
        # Under autocast the general gradients have eight bits.
        rtol, atol = (2e-2, 2e-2) if context == "autocast" else (1e-6, 1e-9)
        assert_close(found.tensors(), expected.tensors(), rtol=rtol, atol=atol)
        assert_close(again.tensors(), found.tensors())
        assert all(module.training == training for module in la.model.modules())
    results = []
    thread = threading.Thread(target=lambda: results.append(predict(x)))
    thread.start()
    thread.join()
    fresh = Posterior(network(dtype), likelihood, prior_precision=0.7)
    fresh.restore(la.factors)  # was never in the context
    for prediction in (predict(x), *results):
        assert_close(prediction.tensors(), laplace_predictive(fresh, config)(x).tensors())


class Lengths(nn.Module):
    """Outputs (N, R, 3) whose number of positions is in the input's values."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(3, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, batch):
        x, keep = batch["x"], int(batch["keep"][0])
        f = self.last(self.inner(x).tanh())  # (N, R, 3)
        return f[:, 0] if keep == 0 else f[:, :keep]


@pytest.mark.parametrize("layers", ["last", "all"])
def test_outputs_of_other_lengths_at_inputs_of_the_same_shape(layers):
    x = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def batch(keep, n=4, length=5):
        return {"x": x[:n, :length], "keep": torch.full((n,), keep)}

    la = Posterior(Lengths(), "classification", prior_precision=0.7, kfac_approx="expand")
    la.fit([{**batch(0), "labels": torch.arange(4) % 3}])
    predict = laplace_predictive(la, PredictiveConfig(layers=layers))
    for keep, n, length in ((0, 4, 5), (0, 4, 5), (3, 4, 5), (2, 1, 5), (2, 4, 3), (0, 4, 5)):
        one = batch(keep, n, length)
        found = predict(one)
        assert found.mean.shape == ((n, 3) if keep == 0 else (n, keep, 3))
        fresh = Posterior(la.model, "classification", prior_precision=0.7, kfac_approx="expand")
        fresh.restore(la.factors)
        assert_close(
            found.tensors(),
            laplace_predictive(fresh, PredictiveConfig(layers=layers))(one).tensors(),
        )
        mask = torch.ones(found.mean.shape[:-1], dtype=torch.bool)
        mask[0] = n == 1
        for positions in (None, mask):
            found, expected = (
                p.output_distribution(one, layers, positions=positions) for p in (la, fresh)
            )
            assert_close(found, expected)


# Samples of networks


class Odd(nn.Module):
    """A network with a state, whose forward is a function of the model and the input."""

    def __init__(self, code, is_tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.code, self.stored = nn.Linear(3, 3), code, None
        if is_tied:
            self.other = nn.Linear(3, 3)
            self.other.weight = self.layer.weight
        self.double()

    def forward(self, x):
        return self.code(self, x)


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(3, 3, batch_first=True).double()

    def forward(self, x):
        return self.lstm(x[:, None])[0][:, -1]


def write_input(model, x):
    x[:, 0] = model.layer(x)[:, 0]
    return x


def replace_weight(model, x):
    model.layer.weight = nn.Parameter(2 * model.layer.weight.detach())
    return model.layer(x)


def store(model, x):
    model.stored = model.layer(x)
    return model.stored * 2


def count_calls(model, x):
    """Scale by a buffer that each call doubles in place."""
    if not hasattr(model, "calls"):
        model.register_buffer("calls", torch.ones(()))
    return model.layer(x) * model.calls.mul_(2)


SAMPLED = {
    "plain": lambda: Odd(lambda m, x: m.layer(x)),
    "sorted": lambda: Odd(lambda m, x: m.layer(x).sort(-1).values.cumsum(-1)),
    "tied": lambda: Odd(lambda m, x: m.other(m.layer(x)), is_tied=True),
    "branch": lambda: Odd(lambda m, x: m.layer(x) if m.layer(x).sum() > 0 else -m.layer(x)),
    "random": lambda: Odd(lambda m, x: m.layer(x) + torch.randn(3)),
    "random by numpy": lambda: Odd(lambda m, x: m.layer(x) + np.random.rand()),
    "through numpy": lambda: Odd(lambda m, x: torch.from_numpy(2 * m.layer(x).detach().numpy())),
    "unused": lambda: Odd(lambda m, x: 2 * x),
    "input in place": lambda: Odd(write_input),
    "replaced weight": lambda: Odd(replace_weight),
    "stored output": lambda: Odd(store),
    "buffer in place": lambda: Odd(count_calls),
    "recurrent": Recurrent,
}


def at_three_weights(model):
    """Three values of each parameter."""
    return {
        n: torch.stack([scale * p.detach() for scale in (1, 1.1, -0.9)])
        for n, p in model.named_parameters()
    }


def each_in_turn(model, parameters, x):
    samples = ({n: values[s] for n, values in parameters.items()} for s in range(3))
    return torch.stack([call_with(model, sample, x) for sample in samples])


@contextmanager
def counted_vmaps(monkeypatch):
    calls, original = [], torch.vmap
    with monkeypatch.context() as patch:
        patch.setattr(torch, "vmap", lambda *a, **k: calls.append(a) or original(*a, **k))
        yield calls


def seed():
    torch.manual_seed(1)
    np.random.seed(1)


@pytest.mark.parametrize("name", SAMPLED)
def test_own_code_runs_at_one_value_of_the_weights_after_the_other(name, monkeypatch):
    model = SAMPLED[name]().eval()
    before = dict(model.named_parameters())
    parameters = at_three_weights(model)
    seed()
    with counted_vmaps(monkeypatch) as calls:
        found, state = call_with_each(model, parameters, X), torch.get_rng_state()
    assert not calls
    if name == "buffer in place":
        model.calls.fill_(1)
    seed()
    assert_close(found, each_in_turn(model, parameters, X))
    assert torch.equal(torch.get_rng_state(), state)
    assert found.is_contiguous()
    assert all(p is before[n] for n, p in model.named_parameters())
    assert name == "unused" or (found[0] - found[1]).norm() > 1e-3
    assert getattr(model, "stored", None) is None or torch.isfinite(model.stored).all()


def test_own_code_could_be_wrong_at_many_weights_at_once(monkeypatch):
    """Negative control: here code that draws its random numbers once, without an error."""
    model = SAMPLED["random by numpy"]().eval()
    monkeypatch.setattr(kfac_backend.engine.model_calls, "VECTORISED", {Odd, nn.Linear})
    parameters = at_three_weights(model)
    seed()
    with counted_vmaps(monkeypatch) as calls:
        found = call_with_each(model, parameters, X)
    seed()
    assert calls
    assert (found - each_in_turn(model, parameters, X)).norm() > 0.1


def by_name(name, d, *arguments, **keywords):
    return getattr(nn, f"{name}{d}d")(*arguments, **keywords)


def spatial(d):
    """Layers (1, 6, ...) -> (2, 2 · 3^d) of each kind with d spatial axes."""
    return (
        by_name("Conv", d, 1, 2, 3, padding=1), by_name("BatchNorm", d, 2), nn.ReLU(inplace=True),
        by_name("Dropout", d), by_name("MaxPool", d, 2), by_name("AvgPool", d, 1),
        by_name("AdaptiveAvgPool", d, 2), nn.GroupNorm(2, 2), nn.Flatten(),
    )  # fmt: skip


LAYERS = {
    **{f"{d} axes": (lambda d=d: spatial(d), (3, 1, *[6] * d)) for d in (1, 2, 3)},
    "activations": (
        lambda: (
            nn.Linear(4, 6), nn.ELU(), nn.GELU(), nn.Identity(), nn.LeakyReLU(), nn.LayerNorm(6),
            nn.Sigmoid(), nn.SiLU(), nn.Softplus(), nn.Tanh(), nn.Dropout(),
            nn.Unflatten(1, (2, 3)), nn.Flatten(),
        ),
        (3, 4),
    ),
    "mlp": (lambda: (Standardised(MLP(4, (5,), 3), [1.0] * 4, [2.0] * 4),), (3, 4)),
    "lenet": (lambda: (LeNet(3, 1, 6),), (3, 1, 6, 6)),
}  # fmt: skip


def layers_of(name):
    torch.manual_seed(0)
    layers, shape = LAYERS[name]
    return nn.Sequential(*layers()).double().eval(), torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("at_once", [2**20, 200, 1])
@pytest.mark.parametrize("name", LAYERS)
def test_known_layers_run_at_many_weights_at_once(name, at_once, monkeypatch):
    monkeypatch.setattr(kfac_backend.engine.model_calls, "MOST_ENTRIES", at_once)
    model, x = layers_of(name)
    parameters = at_three_weights(model)
    with counted_vmaps(monkeypatch) as calls:
        found = call_with_each(model, parameters, x)
    assert bool(calls) == (at_once == 2**20) or at_once == 200
    assert_close(found, each_in_turn(model, parameters, x))
    assert found.is_contiguous() and (found[0] - found[1]).norm() > 1e-3


def test_all_classes_that_are_known_to_be_vectorised_are_tested():
    tested = {type(module) for name in LAYERS for module in layers_of(name)[0].modules()}
    assert tested == kfac_backend.engine.model_calls.VECTORISED


class OwnLinear(nn.Linear):
    """A layer of a class of its own."""


def drawn(module, *_):
    return _[-1] + np.random.rand()


CHANGED_MODELS = {
    "subclass": lambda model: model.append(OwnLinear(3, 3).double()),
    "hook": lambda model: model[0].register_forward_hook(drawn),
    "pre-hook": lambda model: model[0].register_forward_pre_hook(lambda m, args: None),
    "backward hook": lambda model: model[0].register_full_backward_hook(lambda *_: None),
    "own forward": lambda model: setattr(
        model[0], "forward", lambda x: model[0].weight.sum() + x + np.random.rand()
    ),
    "train mode": lambda model: model.append(nn.Dropout()).train(),
    "parametrized": lambda model: nn.utils.parametrizations.weight_norm(model[0]),
}


@pytest.mark.parametrize("change", [*CHANGED_MODELS, "global hook"])
def test_changed_models_run_at_one_value_of_the_weights_after_the_other(change, monkeypatch):
    torch.manual_seed(0)
    model, handle = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double().eval(), None
    parameters = at_three_weights(model)
    with counted_vmaps(monkeypatch) as calls:
        call_with_each(model, parameters, X)
        assert calls  # without the change
        calls.clear()
        if change == "global hook":
            handle = nn.modules.module.register_module_forward_hook(drawn)
        else:
            CHANGED_MODELS[change](model)
        parameters = at_three_weights(model)
        try:
            seed()
            found = call_with_each(model, parameters, X)
            seed()
            assert_close(found, each_in_turn(model, parameters, X))
        finally:
            if handle is not None:
                handle.remove()
    assert not calls


def test_an_error_in_own_code_restores_the_parameters():
    calls = []

    def fail_at_last(model, x):
        calls.append(model.layer.weight)
        return model.layer(x) if len(calls) < 3 else 1 / 0

    model = Odd(fail_at_last).eval()
    before = dict(model.named_parameters())
    with pytest.raises(ZeroDivisionError):
        call_with_each(model, at_three_weights(model), X)
    assert len(calls) == 3 and (calls[0] - calls[1]).norm() > 0.01
    assert all(p is before[n] for n, p in model.named_parameters())


@pytest.mark.parametrize("last", [False, True])
def test_outputs_of_sampled_networks_and_their_gradient(last):
    x, y = data()
    la = Laplace(network(), "classification", "last_layer" if last else "all")
    la.fit([(x, y)])
    samples = la.sample(4)
    x = x.clone().requires_grad_()
    found = la.network_outputs(samples, x)
    la.model.eval()
    names = [name for name, p in la.model.named_parameters() if p.requires_grad]
    for f, sample in zip(found, samples, strict=True):
        parts = zip(names, sample.split([p.numel() for p in la.params]), la.params, strict=True)
        values = {name: part.view_as(p) for name, part, p in parts}
        assert_close(f, functional_call(la.model, values, (x,)))
    (g,) = torch.autograd.grad(found.sum(), x)
    assert g.norm() > 0
    assert (found[0] - found[1]).norm() > 0.1 * found[0].norm()


# All layers


@contextmanager
def counted_layers(monkeypatch):
    """The layers of which weight and bias are contracted together."""
    layers, original = [], output_covariance.layer_part
    with monkeypatch.context() as patch:
        patch.setattr(
            output_covariance,
            "layer_part",
            lambda *a, **k: layers.append(a) or original(*a, **k),
        )
        yield layers


@pytest.mark.parametrize("name", LAYERS)
def test_vectors_of_known_layers_at_once_give_the_dense_covariance(name, monkeypatch, recwarn):
    model, x = layers_of(name)
    if name == "lenet":  # of fewer features, or its dense blocks would take gigabytes
        model[0].fc1, model[0].fc2 = nn.Linear(16, 6), nn.Linear(6, 4)
        model[0].fc3 = nn.Linear(4, 3)
        model.double().eval()
    blocks, dense = factors_posterior(model, x)
    expected = brute_force(model, x, dense)
    covariance = OutputCovariance(model, blocks)
    for n in (1, 3):
        with counted_vmaps(monkeypatch) as calls, counted_layers(monkeypatch) as layers:
            f, found = covariance(x[:n])
            variance = covariance(x[:n], variance_only=True)[1]
        assert len(calls) == 2 and layers
        assert_close(f, model(x[:n]).detach())
        assert_close(found, expected[:n], rtol=1e-10, atol=1e-12)
        assert_close(variance, found.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-12)
        with monkeypatch.context() as patch, counted_vmaps(monkeypatch) as calls:
            patch.setattr(output_covariance, "AT_ONCE", 0)  # vectors are too large
            assert_close(covariance(x[:n])[1], found, rtol=1e-10, atol=1e-12)
            assert not calls
    assert not [w for w in recwarn if "performance drop" in str(w.message)]  # torch has its rule
    # Negative control: gradients of the other outputs.
    original = HeldGradients.store_at_once
    flipped = lambda sink, backward, vectors: original(sink, backward, vectors.flip(0))  # noqa: E731
    monkeypatch.setattr(HeldGradients, "store_at_once", flipped)
    assert (covariance(x)[1] - expected).norm() > 1e-3 * expected.norm()


def branch_in_hook(x):
    y = x.tanh()
    if y.requires_grad:
        y.register_hook(lambda g: g.clone() if g.sum() > 0 else g)
    return y


UNKNOWN_CODE = {
    "subclass": lambda model: model.insert(1, OwnLinear(3, 3).double()),
    "hook": lambda model: model[0].register_forward_hook(lambda *_: None),
    "pre-hook": lambda model: model[0].register_forward_pre_hook(lambda *_: None),
    "own forward": lambda model: setattr(model[1], "forward", torch.tanh),
    "branch in a hook": lambda model: setattr(model[1], "forward", branch_in_hook),
}


@pytest.mark.parametrize("change", UNKNOWN_CODE)
def test_vectors_of_unknown_code_are_propagated_one_after_the_other(change, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double().eval()
    before = OutputCovariance(model, factors_posterior(model, X)[0])
    with counted_vmaps(monkeypatch) as calls:
        before(X[:1])
        assert calls  # without the change
    UNKNOWN_CODE[change](model)
    covariance = OutputCovariance(model, factors_posterior(model, X)[0])
    for n in (1, 8):
        with counted_vmaps(monkeypatch) as calls:
            found = covariance(X[:n])
        assert not calls
    if change == "branch in a hook":  # negative control: torch cannot map its backward pass
        monkeypatch.setattr(output_covariance, "has_known_code", lambda model: True)
        with pytest.raises(RuntimeError, match="vmap"):
            covariance(X)
        model[1].forward = torch.tanh  # without the hook, for the oracle
    expected = brute_force(model, X, factors_posterior(model, X)[1])
    assert_close(found[1], expected, rtol=1e-10, atol=1e-12)


def test_a_bias_with_other_eigenvectors_is_contracted_alone(monkeypatch):
    model, x = layers_of("mlp")
    blocks, _ = factors_posterior(model, x)
    (name, (block, spectrum)) = next(item for item in blocks.items() if "bias" in item[0])
    same = OutputCovariance(model, blocks)(x)[1]
    other = replace(block, Q_B=block.Q_B.flip(-1))  # of the same values, in another order
    changed = OutputCovariance(model, {**blocks, name: (other, spectrum.flip(-2))})
    assert_close(changed(x)[1], same, rtol=1e-10, atol=1e-12)
    # Negative control: the weight's eigenvectors with the bias's own eigenvalues.
    wrong = OutputCovariance(model, {**blocks, name: (block, spectrum.flip(-2))})
    assert (wrong(x)[1] - same).norm() > 1e-3 * same.norm()


# The prior

STRUCTURES = {
    "kron": {},
    "last": {"subset_of_weights": "last_layer"},
    "full": {"hessian_structure": "full"},
    "diag": {"hessian_structure": "diag"},
    "lowrank": {"hessian_structure": "lowrank"},
    "corrected": {},
}


def laplace_of(name, likelihood="classification", dtype=torch.float64):
    options = {"subset_of_weights": "all", "hessian_structure": "kron"} | STRUCTURES[name]
    la = Laplace(network(dtype), likelihood, **options)
    la.fit([data(likelihood, dtype)], corrected=name == "corrected")
    return la, data(likelihood, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_variances_at_many_priors_are_those_at_each(name, likelihood, dtype):
    (la, (x, _)), (oracle, (x64, _)) = (
        laplace_of(name, likelihood, d) for d in (dtype, torch.float64)
    )
    for posterior in (la, oracle):
        posterior.temperature = 0.6
        posterior.sigma_noise = 0.3 if likelihood == "regression" else 1.0
    own, grid = la.prior_precision.clone(), torch.tensor([1e-2, 0.3, 20.0, 1e4]).double()
    f, variances = la.output_variances(x, grid)
    assert torch.equal(la.prior_precision, own) and variances.dtype == dtype
    for delta, variance in zip(grid, variances, strict=True):
        oracle.prior_precision = delta
        expected = oracle.output_distribution(x64, variance_only=True)
        rtol = 1e-6 if dtype == torch.float64 else 1e-3
        assert_close((f.double(), variance.double()), expected, rtol=rtol, atol=rtol)
    assert (variances[1] - variances[3]).norm() > 0.1 * variances[1].norm()  # negative control
    with pytest.raises(ValueError, match="prior_precisions must be positive"):
        la.output_variances(x, torch.zeros(2))
    with pytest.raises(ValueError, match="no examples"):
        la.output_variances(x[:0], grid)


def test_variances_at_many_priors_of_outputs_with_positions():
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    la = KronLaplace(model, "classification", prior_precision=0.7)
    x = X.reshape(2, 4, 3)
    la.fit([(x, torch.zeros(2, 4, dtype=torch.int64))])
    f, (variance,) = la.output_variances(x, torch.tensor([0.7]))
    assert_close((f, variance), la.output_distribution(x, variance_only=True))


class Square(torch.autograd.Function):
    """Squares without a rule for torch's transforms."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


def hidden(change):
    """A network with two layers and a change of the hidden activations."""
    model = Odd(lambda m, x: m.other(m.change(m.layer(x))))
    model.other, model.change = nn.Linear(3, 3).double(), change
    return model


ODD = {
    "without a rule": lambda: hidden(Square.apply),
    "branch": lambda: hidden(lambda z: z if z.sum() > 0 else -z),
    "buffer in place": lambda: Odd(count_calls),
    "half precision": lambda: network(torch.bfloat16),
    "tied": SAMPLED["tied"],
    "recurrent": Recurrent,
}


@pytest.mark.parametrize("name", ODD)
def test_variances_at_many_priors_of_odd_models(name):
    """They need what predictions need: hooks and backward passes of the model's own code."""
    model = ODD[name]()
    x = data(dtype=torch.bfloat16)[0] if name == "half precision" else X
    la = KronLaplace(model, "classification", kfac_approx="auto")
    la.fit([(x, torch.arange(len(x)) % 3)])
    grid = torch.tensor([0.1, 3.0])
    f, variances = la.output_variances(x, grid)
    for delta, variance in zip(grid, variances, strict=True):
        la.prior_precision = delta
        expected = la.output_distribution(x, variance_only=True)
        if name == "buffer in place":  # scales the outputs by another number in each call
            expected = f, expected[1] * (f / expected[0]).square()
        rtol = 1e-2 if name == "half precision" else 1e-6
        assert_close((f, variance), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("hook", [double_gradient, double_gradient_of_node])
def test_variances_at_many_priors_refuse_changed_gradients(hook):
    model = hidden(lambda z: z)
    la = KronLaplace(model, "classification", kfac_approx="auto")
    la.fit([(X, torch.arange(8) % 3)])
    model.change = lambda z: hook(z) or z
    for call in (la.output_distribution, lambda x: la.output_variances(x, torch.ones(2))):
        with pytest.raises(NotImplementedError, match="Hooks .* gradient of 'layer.weight'"):
            call(X)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_a_grid_selects_as_it_does_one_by_one(name, likelihood, monkeypatch):
    la, _ = laplace_of(name, likelihood)
    x, y = data(likelihood, n=6)
    loader = [(x[:4], y[:4].flip(0)), (x[4:], y[4:])]
    options = {"method": "gridsearch", "val_loader": loader, "grid_size": 9}
    la.optimize_prior_precision(**options)
    at_once = la.prior_precision
    nlls = la._grid_nlls(torch.logspace(-4, 4, 9), loader, False)
    monkeypatch.setattr(marglik.laplace, "MOST_VARIANCES", 30)
    assert_close(la._grid_nlls(torch.logspace(-4, 4, 9), loader, False), nlls)
    one_by_one = []
    for delta in torch.logspace(-4, 4, 9):
        la.prior_precision = delta
        one_by_one.append(la._grid_loss(loader, None, "glm", "probit", 100))
    assert_close(nlls, one_by_one, rtol=1e-5, atol=1e-8)
    assert at_once.item() == pytest.approx(10.0 ** (min(range(9), key=nlls.__getitem__) - 4))
    assert max(nlls) - min(nlls) > 1e-3


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_grid_needs_finite_losses_and_data_that_can_be_read_again(pred_type):
    la, batch = laplace_of("kron")
    grid = partial(la.optimize_prior_precision, method="gridsearch", pred_type=pred_type)
    with pytest.raises(ValueError, match="not finite at any prior precision"):
        grid(val_loader=[])
    with pytest.raises(ValueError, match="not finite at any prior precision"):
        grid(val_loader=[batch], loss=lambda p, y: torch.nan)
    with pytest.raises(TypeError, match="read only once"):
        grid(val_loader=iter([batch]))


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("kron", "scalar"), ("kron", "layerwise"), ("last", "layerwise"), ("full", "scalar"),
        ("full", "layerwise"), ("diag", "diag"), ("diag", "layerwise"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_steps_on_the_evidence_are_those_of_autograd(name, structure, likelihood):
    la, _ = laplace_of(name, likelihood)
    la.temperature = 0.6
    sizes = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}
    log_delta = torch.full((sizes[structure],), 0.3, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([log_delta], lr=0.1)
    for _ in range(7):
        adam.zero_grad()
        (-Posterior.log_marginal_likelihood(la, log_delta.exp())).backward()
        adam.step()
    la.optimize_prior_precision(
        n_steps=7, prior_structure=structure, init_prior_prec=torch.tensor(0.3).exp().item()
    )
    found = la.prior_precision
    assert_close(found, log_delta.detach().exp().to(found), rtol=1e-5, atol=0)
    assert (found.log() - 0.3).abs().max() > 0.1


def test_evidence_that_is_not_finite_names_its_cause():
    la = KronLaplace(network(), "classification")
    la.fit([data()])
    with pytest.raises(FloatingPointError, match="not finite"):
        la.optimize_prior_precision(init_prior_prec=1e307, lr=10.0)
