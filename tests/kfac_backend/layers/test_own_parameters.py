"""A module's own parameters, declared by register_parameters: exact blocks, and named errors."""

import pytest
import torch
from torch import Tensor, nn

from kfac_backend import kronecker_factors, register_parameters
from kfac_backend.layers import registry
from kfac_backend.model.rule_assignment import assign_rules
from marglik.models import VisionTransformer
from tests.kfac_backend.block_checks import (
    MODES,
    assert_blocks,
    randomize,
)
from tests.oracles import dense_ggn_blocks, empirical_fisher_blocks, ggn_blocks
from tests.random_numbers import error, normal


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch):
    known = {cls: dict(views) for cls, views in registry.PARAMETERS.items()}
    monkeypatch.setattr(registry, "PARAMETERS", known)


class Tokens(nn.Module):
    """All kinds of own parameters at once, on (N, R, d); logits of the example or of positions."""

    def __init__(self, positions: bool = False):
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, 3))
        self.position_embedding = nn.Parameter(torch.zeros(1, 3, 3))
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.temperature = nn.Parameter(torch.ones(1))
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        token = self.class_token.expand(len(x), -1, -1)
        x = torch.cat([token, x], 1) + self.position_embedding
        x = torch.tanh(self.inner(x)) * self.scale + self.shift
        x = torch.sin(x * self.temperature)
        x = x + 0.4 * x.roll(1, 1)
        return self.head(x if self.positions else x.mean(1))


VIEWS = {"scale": (1, 1, -1), "shift": (1, 1, 3), "temperature": (1, 1, 1)}
OWN = ["class_token", "position_embedding", *VIEWS]


def declare(cls: type[nn.Module] = Tokens) -> type[nn.Module]:
    return register_parameters("class_token", "position_embedding", **VIEWS)(cls)


def setting(positions: bool = False, N: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    model, x = randomize(Tokens(positions)), normal(N, 2, 3, seed=1)
    return model, x, torch.arange(model(x)[..., 0].numel()).view(model(x).shape[:-1]) % 3


def own(blocks: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: blocks[name] for name in OWN}


@pytest.mark.parametrize(
    ("positions", "likelihood"),
    [
        (False, "classification"),
        (True, "classification"),
        (True, "regression"),
        (False, "bernoulli"),
    ],
)
def test_exact_in_both_modes_and_for_the_empirical_fisher(positions, likelihood):
    declare()
    model, x, y = setting(positions)
    y = y if likelihood == "classification" else normal(*model(x).shape).sigmoid()
    exact = dense_ggn_blocks(model, x, likelihood)
    data = [(x[:1], y[:1]), (x[1:], y[1:])]
    for mode in MODES:
        factors = kronecker_factors(model, data, likelihood, kfac_approx=mode)
        assert list(factors.blocks) == [name for name, _ in model.named_parameters()]
        assert_blocks(factors, own(exact))
    # Negative control: what a linear layer has under expand is not what they have.
    assert error(kronecker_factors(model, [(x, y)], likelihood).to_dense("inner.bias"),
                 exact["inner.bias"]) > 0.05  # fmt: skip
    fisher = own(empirical_fisher_blocks(model, x, y, likelihood))
    assert_blocks(kronecker_factors(model, data, likelihood, fisher="empirical"), fisher)


def test_classes_of_others_and_subclasses():
    class Another(Tokens):
        pass

    class Derived(Another):
        def __init__(self):
            super().__init__()
            self.extra = nn.Parameter(torch.ones(1, 3))

        def forward(self, x):
            return super().forward(x) + self.extra.tanh()

    model, x, y = randomize(Derived()), *setting()[1:]
    assert declare(Another) is Another
    register_parameters("extra")(Derived)
    assert assign_rules(model).unknown == {}
    exact = dense_ggn_blocks(model, x, "classification")
    factors = kronecker_factors(model, [(x, y)], "classification")
    assert_blocks(factors, {"extra": exact["extra"], **own(exact)})
    # Not what it is derived from.
    assert registry.declared_parameters(Tokens()) == {}


def test_a_subclass_declares_another_view():
    @register_parameters("p")
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.head = nn.Parameter(torch.ones(1, 3)), nn.Linear(3, 2)

        def forward(self, x):  # (N, R, d)
            return self.head(torch.tanh(x * self.p)).mean(1)

    @register_parameters(p=(1, 1, 3))
    class Other(Base):
        pass

    x, y = normal(4, 2, 3), torch.tensor([0, 1, 1, 0])
    with pytest.raises(NotImplementedError, match="copy for each example of 'p'"):
        kronecker_factors(randomize(Base()), [(x, y)], "classification")
    model = randomize(Other())
    exact = {"p": dense_ggn_blocks(model, x, "classification")["p"]}
    assert_blocks(kronecker_factors(model, [(x, y)], "classification"), exact)


def test_one_parameter_of_two_modules_and_uses_add_up():
    @register_parameters(p=(1, 1, -1))
    class Scales(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p = p

        def forward(self, x):
            return torch.tanh(x * self.p) + self.p.sin()

    p = nn.Parameter(torch.ones(3))
    model = randomize(nn.Sequential(Scales(p), nn.Linear(3, 3), Scales(p), nn.Flatten(),
                                    nn.Linear(6, 2)))  # fmt: skip
    x, y = normal(4, 2, 3), torch.tensor([0, 1, 1, 0])
    exact = ggn_blocks(model, lambda run: run(x), "classification")
    for options in ({}, {"kfac_approx": "reduce"}):
        factors = kronecker_factors(model, [(x, y)], "classification", **options)
        assert list(factors.blocks) == list(exact)
        assert_blocks(factors, {"0.p": exact["0.p"]})


def test_undeclared_ones_are_found_and_have_the_same_blocks():
    model, x, y = setting()
    found = kronecker_factors(model, [(x, y)], "classification")
    declare()
    declared = kronecker_factors(model, [(x, y)], "classification")
    assert_blocks(found, {name: declared.to_dense(name) for name in declared.blocks})


@pytest.mark.parametrize("view", [(), (3,), (-1, 3), (2, 1, 3)])
def test_a_view_that_does_not_begin_with_one(view):
    with pytest.raises(ValueError, match="'scale' must begin with 1, which becomes N"):
        register_parameters(scale=view)


class Uses(nn.Module):
    """One own parameter, used as a function says."""

    def __init__(self, use, shape=(1, 2, 3)):
        super().__init__()
        self.p, self.head, self.use = nn.Parameter(torch.ones(shape)), nn.Linear(3, 2), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(x, self.p)).mean(1))


ELEMENTWISE = {
    "added": lambda x, p: x + p,
    "without its first axis": lambda x, p: x * p.squeeze(0),
    "twice": lambda x, p: x * p + p.sin(),
    "some of it": lambda x, p: x + p[:, :1],
    "normalised within": lambda x, p: x * p.softmax(-1) / p.norm(dim=(1, 2), keepdim=True),
}
NOT_ELEMENTWISE = {
    "summed": lambda x, p: x + p.sum(0),
    "averaged": lambda x, p: x + p.mean(0),
    "the first": lambda x, p: x + p[0],
    "repeated": lambda x, p: x + p.repeat(len(x), 1, 1),
    "reshaped": lambda x, p: x + p.view(2, 3),
    "normalised": lambda x, p: x * p / p.norm(),
    "softmax over the first axis": lambda x, p: x * p.softmax(0),
    "unpacked": lambda x, p: x + next(iter([row for (row,) in [p]])),
    "with another derivative": lambda x, p: x + p.detach() + 2 * (p - p.detach()) * (len(p) == 1),
}


@pytest.mark.parametrize("use", ELEMENTWISE)
def test_elementwise_uses(use):
    register_parameters("p")(Uses)
    model, x = randomize(Uses(ELEMENTWISE[use])), normal(4, 2, 3)
    exact = {"p": dense_ggn_blocks(model, x, "classification")["p"]}
    y = torch.tensor([0, 1, 1, 0])
    for batches in ([(x, y)], [(x[:1], y[:1]), (x[1:], y[1:])]):
        assert_blocks(kronecker_factors(model, batches, "classification"), exact)


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("use", NOT_ELEMENTWISE)
def test_other_uses_are_a_named_error(use, first):
    register_parameters("p")(Uses)
    model, x, y = randomize(Uses(NOT_ELEMENTWISE[use])), normal(4, 2, 3), torch.arange(4) % 2
    batches = [(x[:first], y[:first]), (x, y)]  # one example mixes with none
    with pytest.raises(NotImplementedError, match="a copy for each example of 'p'.*elementwise"):
        kronecker_factors(model, batches, "classification")


def test_shapes_that_need_a_view_or_do_not_fit_theirs():
    x, y = normal(4, 2, 3), torch.arange(4) % 2
    model = randomize(Uses(lambda x, p: x * p, (3,)))
    register_parameters("p")(Uses)
    with pytest.raises(NotImplementedError, match=r"'p' of Uses has shape \(3,\).*p=\(1, ...\)"):
        kronecker_factors(model, [(x, y)], "classification")
    for view in ((1, 1, 4), (1, -1, -1)):
        register_parameters(p=view)(Uses)
        with pytest.raises(ValueError, match="'p' of Uses has shape .3,., of which .* cannot make"):
            kronecker_factors(model, [(x, y)], "classification")
    register_parameters(p=(1, -1))(Uses)  # (N, d) is not broadcast to (N, R, d)
    with pytest.raises(NotImplementedError, match="give register_parameters the shape as which"):
        kronecker_factors(model, [(x, y)], "classification")


@pytest.mark.parametrize("N", [1, 4])
def test_examples_that_cannot_be_counted(N):
    class Opaque:
        def __init__(self, x):
            self.x = x

    class Wrapped(Uses):
        def forward(self, opaque):
            return super().forward(opaque.x)

    register_parameters("p")(Wrapped)
    model = randomize(Wrapped(lambda x, p: x + p))
    data = [(Opaque(normal(N, 2, 3)), torch.arange(N) % 2)]
    with pytest.raises(NotImplementedError, match="'p' needs a copy .* of type Opaque.*__len__"):
        kronecker_factors(model, data, "classification")
    Opaque.__len__ = lambda self: len(self.x)
    Opaque.to = lambda self, device: self
    factors = kronecker_factors(model, data, "classification")
    exact = ggn_blocks(model, lambda run: run(data[0][0]), "classification")
    assert_blocks(factors, {"p": exact["p"]})


@pytest.mark.parametrize("pool", ["mean", "class_token"])
def test_vision_transformer(pool):
    model = VisionTransformer(
        num_classes=3, in_channels=1, image_size=4, patch_size=2, dim=4, depth=1, heads=2, pool=pool
    )
    model, x, y = randomize(model), normal(3, 1, 4, 4), torch.tensor([0, 1, 2])
    exact = ggn_blocks(model, lambda run: run(x), "classification")
    names = [n for n in exact if "norm" in n or n in ("class_token", "position_embedding")]
    assert len(names) == (7 if pool == "mean" else 8)
    for options in ({"kfac_approx": "reduce"}, {}):
        factors = kronecker_factors(model, [(x[:2], y[:2]), (x[2:], y[2:])],
                                    "classification", **options)  # fmt: skip
        assert_blocks(factors, {name: exact[name] for name in names})
