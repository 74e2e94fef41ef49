"""Preconditioned gradients against dense algebra, and when factors and inverses are made."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from kfac_backend import KroneckerBlock, kronecker_factors
from kfac_backend.optimizer import KfacPreconditioner, PreconditionerOptions
from kfac_backend.optimizer.damped_inverse import damped_inverses, precondition
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.networks import Model, OwnNorm, data, network
from tests.random_numbers import error, normal

LAMBDA = 0.03
EVERY = {"factor_every": 1, "update_every": 1, "kl_clip": None}


def preconditioner(model, likelihood="classification", *, exclude=(), **options):
    names = ("kfac_approx", "fisher", "diagonal_above")
    curvature = {k: options.pop(k) for k in names if k in options}
    options = PreconditionerOptions(**{"damping": LAMBDA, **EVERY, **options})
    return KfacPreconditioner(
        model, likelihood, options, exclude=exclude, **{"fisher": "exact", **curvature}
    )


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def preconditioned(model, conditioner, loss):
    """Gradients before and after."""
    before = gradients(model, loss)
    conditioner.step(lr=0.1)
    return before, {name: p.grad.clone() for name, p in model.named_parameters()}


def dense_step(blocks, g, damping=LAMBDA):
    return {
        name: torch.linalg.solve(
            block + damping * torch.eye(len(block)).double(), g[name].flatten()
        ).view(g[name].shape)
        for name, block in blocks.items()
    }


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("damping_on", ["product", "factors"])
def test_everywhere_else_it_is_the_formula(kfac_approx, damping_on):
    """`test_damped_inverse` has the formula by dense algebra."""
    model, (x, y) = network(), data()
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    conditioner = preconditioner(model, damping_on=damping_on, kfac_approx=kfac_approx)
    g, found = preconditioned(model, conditioner, F.cross_entropy(model(x), y))
    for name, block in factors.blocks.items():
        mean = KroneckerBlock(name, block.B / len(x), block.A)
        right = precondition(damped_inverses([mean], [LAMBDA], damping_on), [g[name]])[0]
        assert_close(found[name], right, rtol=1e-9, atol=1e-11)
        assert error(found[name], g[name]) > 0.05, name


def test_the_moving_average_of_what_is_unfrozen_begins_with_its_first_batch():
    """The others' goes on; what is frozen for a batch begins anew; see the test above."""
    model, (x, y) = network(), data(6)
    conditioner = preconditioner(model, ema_decay=0.7)
    batches = [(x[i : i + 2], y[i : i + 2]) for i in (0, 2, 4)]
    frozen = [(model[0], model[3]), (model[3],), (model[10],)]
    for (x_i, y_i), layers in zip(batches, frozen, strict=True):
        for layer in (model[0], model[3], model[10]):
            layer.requires_grad_(layer not in layers)
        model.zero_grad()
        F.cross_entropy(model(x_i), y_i).backward()
        conditioner.step()
    model.requires_grad_(True)
    each = [kronecker_factors(model, [batch], "classification").blocks for batch in batches]
    since = {"0": [0.7, 1.0], "3": [1.0], "8": [0.49, 0.7, 1.0]}
    assert {name.split(".")[0] for name in conditioner.blocks} == {"0", "1", "3", "4", "5", "8"}
    for name, block in conditioner.blocks.items():
        weights = torch.tensor(since.get(name.split(".")[0], since["8"])).double()
        of_batches = list(zip(weights / weights.sum(), each[-len(weights) :], strict=True))
        assert_close(block.B, sum(w * blocks[name].B / 2 for w, blocks in of_batches), msg=name)
        if block.A is not None:
            assert_close(block.A, sum(w * blocks[name].A for w, blocks in of_batches), msg=name)


class Tied(nn.Module):
    """Weights that are stored inputs first, and used as the output layer or before the pooling."""

    def __init__(self, head_is="of its own"):
        super().__init__()
        self.pools = head_is == "pooled"
        self.tokens, self.up = nn.Embedding(6, 6), nn.ConvTranspose1d(6, 6, 1)
        self.other, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        tied_to = {"tokens": self.tokens, "pooled": self.other}.get(head_is, self.head)
        self.head.weight = tied_to.weight

    def forward(self, x):
        x = self.up(torch.tanh(self.tokens(x)).mT).mT
        x = torch.tanh(self.other(x))
        return self.head(x.mean(1) if self.pools else x)


TIED = {
    # name: the head, options
    "stored inputs first": ("of its own", {}),
    "in two orientations": ("tokens", {}),
    "in two modes": ("pooled", {"kfac_approx": {"other": "expand", "*": "reduce"}}),
}


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("name", TIED)
def test_averages_do_not_depend_on_the_sizes_of_batches(name, fisher):
    """Examples that are repeated have the mean curvature of themselves once."""
    head, options = TIED[name]
    torch.manual_seed(0)
    x, y = torch.randint(6, (2, 4, 5))
    y = y[:, 0] if head == "pooled" else y
    found = []
    for repeats in ([1], [1, 64, 1, 64]):
        torch.manual_seed(1)
        model = Tied(head).double()
        conditioner = preconditioner(model, fisher=fisher, ema_decay=0.5, **options)
        for n in repeats:
            f, labels = model(x.repeat(n, 1)), y.repeat(n, *[1] * (y.dim() - 1))
            F.cross_entropy(f.flatten(0, -2), labels.flatten()).backward()
            conditioner.step()
        found.append({n: block.to_dense() for n, block in conditioner.blocks.items()})
    assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_damping_by_parameter_must_cover_what_is_unfrozen():
    model, (x, y) = network(), data()
    model[8].requires_grad_(False)
    conditioner = preconditioner(model, damping_on="product")
    lambdas = dict.fromkeys(conditioner.names, 0.1)
    for damping, is_enough in (
        (lambdas, False),
        (lambdas | {"8.weight": 0.2, "8.bias": 0.2}, True),
    ):
        conditioner.damping = damping
        model[8].requires_grad_(True)
        F.cross_entropy(model(x), y).backward()
        if is_enough:
            conditioner.step()
        else:
            with pytest.raises(ValueError, match="no damping for '8.weight'"):
                conditioner.step()


def test_intervals():
    """Factors change in steps 0, 2, 4, 6 and inverses in steps 0, 3, 6."""
    model, (x, y) = network(), data()
    conditioner = preconditioner(model, ema_decay=0.5, factor_every=2, update_every=3)
    changed, before = {"blocks": [], "inverses": []}, {}
    for step in range(7):
        F.cross_entropy(model(x + 0.1 * step), y).backward()
        conditioner.step()
        for part, steps in changed.items():
            now = next(iter(conditioner.state_dict()[part]["10.weight"].values())).clone()
            if part not in before or not torch.equal(now, before[part]):
                steps.append(step)
            before[part] = now
    assert changed == {"blocks": [0, 2, 4, 6], "inverses": [0, 3, 6]}


@pytest.mark.parametrize("ema_decay", [0.0, 0.5])
def test_updates_between_new_factors_take_the_old_ones(ema_decay):
    """With more updates than factors, a new damping meets the latest factors."""
    model, (x, y) = network(), data()
    conditioner = preconditioner(
        model, factor_every=3, update_every=1, damping_on="product", ema_decay=ema_decay
    )
    factors = kronecker_factors(model, [(x, y)], "classification")
    for damping in (0.03, 0.5):
        conditioner.damping = damping
        g, found = preconditioned(model, conditioner, F.cross_entropy(model(x), y))
        blocks = {name: factors.to_dense(name) / len(x) for name in factors.blocks}
        for name, right in dense_step(blocks, g, damping).items():
            assert_close(found[name], right, rtol=1e-9, atol=1e-11)


def test_damping_by_parameter_holds_from_the_next_update_on():
    """The posterior's precision λ_g = T δ_g / N of each tensor is its damping of the product."""
    model, (x, y) = network(), data()
    conditioner = preconditioner(model, damping_on="product")
    lambdas = {name: 0.01 * (i + 1) for i, name in enumerate(conditioner.names)}
    conditioner.damping = lambdas
    g, found = preconditioned(model, conditioner, F.cross_entropy(model(x), y))
    factors = kronecker_factors(model, [(x, y)], "classification")
    for name, damping in lambdas.items():
        right = dense_step({name: factors.to_dense(name) / len(x)}, g, damping)[name]
        assert_close(found[name], right, rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match=r"no damping for '0.weight'.*preconditioned parameters"):
        conditioner.damping = {"10.bias": 1.0}
    with pytest.raises(ValueError, match="must be positive, not 0"):
        conditioner.damping = 0.0


def test_kl_clip_needs_the_learning_rate():
    """`test_kfac` has the limit by dense algebra."""
    model, (x, y) = network(), data()
    conditioner = preconditioner(model, kl_clip=1e-4)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=r"step\(lr=...\)"):
        conditioner.step()


def test_parameters_without_a_rule_keep_their_gradients_and_are_named_once():
    model = nn.Sequential(nn.Linear(3, 4), OwnNorm(4), nn.Linear(4, 2)).double()
    with pytest.warns(UserWarning, match=r"No K-FAC rule for 1.weight, 1.bias. .*plain gradient"):
        conditioner = preconditioner(model)
    x, y = normal(5, 3), torch.tensor([0, 1, 1, 0, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            g, found = preconditioned(model, conditioner, F.cross_entropy(model(x), y))
        conditioner.detach()
        preconditioner(model, exclude=["1.*"])
    assert torch.equal(found["1.weight"], g["1.weight"])
    assert error(found["0.weight"], g["0.weight"]) > 0.05


def test_excluded_parameters_keep_their_gradients():
    model, (x, y) = network(), data()
    conditioner = preconditioner(model, exclude=["8.*", "0.weight"])
    g, found = preconditioned(model, conditioner, F.cross_entropy(model(x), y))
    for name in g:
        assert torch.equal(g[name], found[name]) == (name.startswith("8.") or name == "0.weight")
    with pytest.raises(ValueError, match=r"'nine\*'. The parameters are 0.weight"):
        preconditioner(network(), exclude=["nine*"])
    with pytest.raises(ValueError, match=r"exclude=\['\*'\] leaves no parameter"):
        preconditioner(network(), exclude=["*"])


def test_a_parameter_without_axes_that_is_the_only_one_is_named():
    with pytest.raises(ValueError, match=r"'scale' is 0-dimensional.*shape \(1,\)"):
        preconditioner(Model(lambda m, x: m.scale * x, scale=torch.ones(())))


@pytest.mark.parametrize(
    ("fisher", "weight", "message"),
    [
        ("exact", 1e30, "is not finite: the training diverges"),  # factors that overflow
        ("mc", torch.inf, "output is not finite: the training diverges"),  # no label can be drawn
    ],
)
def test_divergence_is_a_named_error(fisher, weight, message):
    model, (x, y) = network().float(), data()
    x = x.float()
    conditioner = preconditioner(model, fisher=fisher)
    F.cross_entropy(model(x), y).backward()
    conditioner.step()  # the first batch is proved on
    with torch.no_grad():
        model[8].weight.fill_(weight)
    with pytest.raises(FloatingPointError, match=message):
        F.cross_entropy(model(x), y).backward()
        conditioner.step()


def test_a_gradient_that_only_float64_holds_is_finite():
    model, (x, y) = network(), data()
    conditioner = preconditioner(model)
    F.cross_entropy(model(x), y).backward()
    model[8].weight.grad.fill_(1e39)
    conditioner.check_gradients()
    model[8].weight.grad.fill_(torch.inf)
    with pytest.raises(FloatingPointError, match="gradient of '8.weight' is not finite"):
        conditioner.check_gradients()


def test_autocast_trains_with_float32_factors():
    model, (x, y) = network().float(), data()
    x = x.float()
    conditioner = preconditioner(model, fisher="mc")
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    conditioner.step()
    tensors = conditioner.state_dict()["inverses"]["8.weight"]
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    exact = preconditioner(reference := network().float())
    F.cross_entropy(reference(x), y).backward()
    exact.step()
    assert error(model[8].weight.grad, reference[8].weight.grad) < 0.6


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("damping", 0.0, "damping must be positive, not 0"),
        ("damping_on", "both", "'factors', 'product'"),
        ("factor_every", 0, "factor_every must be an integer of at least 1, not 0"),
        ("ema_decay", 1.0, r"ema_decay must be in \[0, 1\), not 1.0"),
        ("kl_clip", -1.0, "kl_clip must be positive"),
    ],
)
def test_options_that_are_not_supported(option, value, message):
    with pytest.raises(ValueError, match=message):
        PreconditionerOptions(**{option: value})


def test_paused_forward_passes_are_no_part_of_the_training():
    model, (x, y) = network(), data()
    conditioner = preconditioner(model)
    loss = F.cross_entropy(model(x), y)
    with conditioner.paused():
        model(2 * x).sum().backward()
        model.zero_grad()
    loss.backward()
    conditioner.step()
    plain = network()
    other = preconditioner(plain)
    F.cross_entropy(plain(x), y).backward()
    other.step()
    assert torch.equal(model[8].weight.grad, plain[8].weight.grad)
