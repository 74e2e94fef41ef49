"""What a pass proves on its first batches: which runs of layers are uses, and in which order."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from kfac_backend import examples_of_rows, kronecker_factors, register_parameters
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.curvature import CurvaturePass
from kfac_backend.laplace_torch.interface import KfacGGN
from kfac_backend.layers import Scale
from kfac_backend.model.proof import with_first_again
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.covariance.posteriors import precision_of
from tests.kfac_backend.model.odd_models import Gain, Model, assert_same_blocks, factors, noise


def covariance(model, x, found):
    return OutputCovariance(model, precision_of(found))(x)[1]


def scaled_by(constant):
    """A linear layer over a norm of what it makes of something that is no example."""

    def forward(layers, x):
        y = layers["fc"](x)
        y = y / (
            layers["fc"](torch.eye(4).double()).norm().detach() if constant is None else constant
        )
        return layers["gain"](torch.cat([y, y], 1))[:, :2] if "gain" in layers else y

    return forward


CONSTANTS = {
    "error": {},
    "freeze": {"gain": Gain()},
    "diagonal": {"gain": Gain()},
}


@pytest.mark.filterwarnings("ignore:Treated as constants")
@pytest.mark.parametrize(
    ("N", "kfac_approx"),  # with N = 4 the constant's four rows look like examples
    [(1, "expand"), (3, "reduce"), (4, "expand"), (4, "reduce"), (7, "expand")],
)
@pytest.mark.parametrize("unsupported", CONSTANTS)
def test_a_run_that_no_derivative_goes_through_is_no_use(unsupported, kfac_approx, N):
    children = {"fc": nn.Linear(4, 2)} | CONSTANTS[unsupported]
    model = Model(scaled_by(None), **children)
    norm = children["fc"](torch.eye(4).double()).norm().detach()
    alone = Model(scaled_by(norm), **children)
    options = {"unsupported": unsupported, "kfac_approx": kfac_approx}
    x = noise(N, 4)
    found, expected = factors(model, x, **options), factors(alone, x, **options)
    assert_same_blocks(found, expected)
    assert found.blocks["layers.fc.weight"].num_terms == N
    assert_close(covariance(model, x, found), covariance(alone, x, expected))


def test_a_tied_layer_that_no_derivative_goes_through():
    def both(layers, x, with_other=True):
        other = layers["other"](torch.eye(4).double()).sum().detach() if with_other else 0.0
        return layers["fc"](x) + other

    children = {"fc": nn.Linear(4, 2), "other": nn.Linear(4, 2)}
    children["other"].weight = children["fc"].weight
    children["other"].bias = children["fc"].bias
    found, expected = (
        Model(lambda layers, x, w=w: both(layers, x, w), **children) for w in (True, False)
    )
    x = noise(5, 4)
    assert_same_blocks(factors(found, x), factors(expected, x))


def test_runs_on_examples_and_on_what_all_share():
    def tied(layers, x, expanded=False):
        positions = torch.arange(3)
        positions = positions.expand(x.shape) if expanded else positions
        return layers["fc"]((layers["tokens"](x) * layers["tokens"](positions)).tanh()).mean(1)

    children = {"tokens": nn.Embedding(5, 4), "fc": nn.Linear(4, 2)}
    x = torch.randint(5, (6, 3), generator=torch.Generator().manual_seed(0))
    for kfac_approx in MODES:
        once = factors(Model(tied, **children), x, kfac_approx=kfac_approx)
        each = Model(lambda layers, x: tied(layers, x, True), **children)
        assert_same_blocks(once, factors(each, x, kfac_approx=kfac_approx))


def test_what_all_share_and_is_not_broadcast():
    once = Model(
        lambda layers, x: layers["fc"](x) / layers["fc"](torch.eye(4).double()).norm(),
        fc=nn.Linear(4, 2),
    )
    each = Model(
        lambda layers, x: (
            layers["fc"](x)
            / layers["fc"](torch.eye(4).double().expand(len(x), 4, 4))
            .flatten(1)
            .norm(dim=1, keepdim=True)
        ),
        **once.layers,
    )
    x = noise(5, 4)
    for kfac_approx in MODES:
        found = factors(once, x, kfac_approx=kfac_approx)
        assert_same_blocks(found, factors(each, x, kfac_approx=kfac_approx))


def test_what_all_share_and_no_copy_can_be_given():
    model = Model(
        lambda layers, x: layers["fc"](x) / layers["fc"](noise(9, 4))[: len(x)].exp(),
        fc=nn.Linear(4, 2),
    )
    with pytest.raises(NotImplementedError, match="'layers.fc' .*has the same input for all"):
        factors(model, noise(5, 4))


@pytest.mark.parametrize("first", [True, False])
def test_runs_that_change_between_batches(first):
    def sometimes(layers, x):
        norm = layers["fc"](x * 2).norm(dim=1, keepdim=True)
        return layers["fc"](x) / (norm.detach() if (x[0, 0] > 0) == first else norm)

    model, y = Model(sometimes, fc=nn.Linear(4, 2)), torch.tensor([0, 1, 1])
    batches = [(noise(3, 4).abs(), y), (-noise(3, 4).abs(), y)]
    with pytest.raises(NotImplementedError, match="'layers.fc' .*differs from the first batch"):
        kronecker_factors(model, batches, "classification")


def test_more_runs_than_in_the_first_batch():
    def steps(layers, x):
        norm = layers["fc"](torch.eye(4).double()).norm().detach()
        return sum(layers["fc"](x_t) for x_t in x.unbind(1)) / norm

    model, y = Model(steps, fc=nn.Linear(4, 2)), torch.tensor([0, 1, 1])
    batches = [(noise(3, 2, 4), y), (noise(3, 3, 4), y)]
    with pytest.raises(NotImplementedError, match="runs 4 times instead of 3"):
        kronecker_factors(model, batches, "classification")


def test_constant_runs_of_graphs():
    """Rows of which no input tells how to take single examples."""

    def network(layers, batch, constant=None):
        with examples_of_rows(batch["index"], 3):
            rows = layers["edge"](batch["rows"])
        if constant is None:
            constant = layers["edge"](torch.eye(4).double()).norm().detach()
        return rows.new_zeros(3, 2).index_add(0, batch["index"], rows) / constant

    edge = nn.Linear(4, 2)
    batch = {"rows": noise(5, 4), "index": torch.tensor([0, 1, 1, 2, 2])}
    model = Model(network, edge=edge)
    norm = edge(torch.eye(4).double()).norm().detach()
    alone = Model(lambda layers, x: network(layers, x, norm), edge=edge)
    y = torch.tensor([0, 1, 1])
    assert_same_blocks(factors(model, batch, y), factors(alone, batch, y))


def in_order(key):
    """A model that sorts its examples, and puts them back in their order."""

    def forward(layers, x):
        order = key(x).argsort(stable=True)
        h = layers["first"](x[order]).tanh()
        return layers["last"](h[order.argsort()])

    return Model(forward, first=nn.Linear(4, 3), last=nn.Linear(3, 2))


KEYS = {
    "ascending": lambda x: x[:, 0],
    "descending": lambda x: -x[:, 0],
    "another feature": lambda x: x[:, 1],
    "two values": lambda x: (x[:, 0] > x[:, 0].mean()).long(),
    "a norm": lambda x: x.norm(dim=1),
    "reversed": lambda x: -torch.arange(len(x)),
    "rolled": lambda x: torch.arange(len(x)).roll(1),
}


@pytest.mark.parametrize("N", [2, 4, 5, 40])
@pytest.mark.parametrize("key", KEYS)
def test_examples_in_another_order_are_seen(key, N):
    """Also where the first batch happens to be in order."""
    model, x = in_order(KEYS[key]), noise(N, 4)
    found = factors(in_order(lambda x: torch.zeros(len(x))), x)  # in order: nothing to see
    for batch in (x, x[x[:, 0].argsort()], x[KEYS[key](x).argsort(stable=True)]):
        with pytest.raises(NotImplementedError, match="'layers.first' .*in another order"):
            factors(model, batch)
        with pytest.raises(NotImplementedError, match="'layers.first' .*in another order"):
            covariance(model, batch, found)


@pytest.mark.parametrize(("N", "splits"), [(2, True), (3, True), (4, True), (4, False), (5, False)])
def test_no_sort_leaves_the_proofs_examples_in_order(N, splits):
    """Whatever the examples' keys are, if the first has not that of all that are there."""
    numbers = with_first_again(torch.arange(N), splits)[1]
    assert numbers is not None and len(numbers) == (N + 2 if splits else N)
    there = numbers.unique().tolist()
    is_first = numbers == 0
    for keys in product(range(len(there)), repeat=N):
        key = torch.tensor(keys)[numbers]
        moved = not torch.equal(is_first[key.argsort(stable=True)], is_first)
        assert moved == any(keys[n] != keys[0] for n in there)


def test_a_proof_runs_on_few_examples_from_all_over_the_batch():
    sizes = []
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model.register_forward_pre_hook(lambda module, args: sizes.append(args[0][:, 0].tolist()))
    x = noise(100, 4)
    x[:, 0] = torch.arange(100)
    factors(model, x)
    whole, uses, independence = sizes[-1], *(seen for seen in sizes if len(seen) in (8, 10))
    assert len(whole) == 100 and len(uses) == 8 and uses == sorted(uses)
    assert (uses[0], uses[-1]) == (0, 99) and independence == [*uses, 0, 0]


@register_parameters(weight=(1, 1, -1))
class NormInFloat32(nn.Module):
    """As language models have them, with a weight of its own."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return (self.weight.float() * F.rms_norm(x.float(), x.shape[-1:])).to(x.dtype)


class LayerNormInFloat32(nn.LayerNorm):
    def forward(self, input):
        parameters = self.weight.float(), self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, *parameters).to(input.dtype)


@pytest.mark.parametrize("norm", [NormInFloat32, LayerNormInFloat32])
def test_a_norm_in_float32_inside_of_a_float64_model(norm):
    def forward(layers, x, expanded=False):
        grid = torch.linspace(-1, 1, 48).double().view(3, 16)
        grid = grid.expand(len(x), 3, 16) if expanded else grid
        h = layers["norm"](layers["grid"](grid))
        return layers["out"](layers["norm"](h + layers["fc"](x)[:, None]).mean(1))

    children = {"fc": nn.Linear(16, 64), "grid": nn.Linear(16, 64), "norm": norm(64)}
    children["out"] = nn.Linear(64, 2)
    x = noise(9, 16)
    found = factors(Model(forward, **children), x)
    each = factors(Model(lambda layers, x: forward(layers, x, True), **children), x)
    for name, block in found.blocks.items():
        assert_close(block.to_dense(), each.to_dense(name), rtol=1e-4, atol=1e-5)


def test_in_float64_rounding_of_float32_is_seen():
    """The negative control: without a cast, 1e-6 is another function."""
    layer = nn.Linear(4, 2).double()
    scaled = nn.functional.linear
    layer.forward = lambda x: scaled(x, layer.weight * (1 + 1e-6), layer.bias)
    with pytest.raises(NotImplementedError, match="computes something other"):
        factors(nn.Sequential(layer), noise(5, 4))


def test_nan_is_said_before_what_it_looks_like():
    model = Model(lambda layers, x: layers["fc"](x.nan_to_num()).roll(1, 0), fc=nn.Linear(4, 2))
    x = noise(5, 4)
    with pytest.raises(NotImplementedError, match="rows of different examples mix"):
        factors(model, x)
    x[2] = torch.nan
    with pytest.raises(ValueError, match="inputs contain NaN"):
        factors(model, x)


@pytest.mark.parametrize("model", [None, "resnet18", nn.Linear], ids=str)
def test_what_is_no_model(model):
    for use in (
        lambda: kronecker_factors(model, [(noise(3, 4), torch.zeros(3).long())], "regression"),
        lambda: CurvaturePass(model, "regression"),
        lambda: OutputCovariance(model, {}),
    ):
        with pytest.raises(TypeError, match="torch.nn.Module is needed"):
            use()


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: nn.Sequential(nn.DataParallel(m))])
def test_data_parallel_models_name_the_way_out(wrap):
    model = wrap(nn.Linear(4, 2))
    for use in (
        lambda: factors(model, noise(3, 4).float()),
        lambda: CurvaturePass(model, "regression"),
        lambda: KfacGGN(model, "classification").kron(
            noise(3, 4).float(), torch.zeros(3).long(), 3
        ),
    ):
        with pytest.raises(TypeError, match="nn.DataParallel.*Pass what it holds: model.*module"):
            use()


def test_the_proof_is_asked_for_again_after_it_failed():
    class Bypassed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.out(nn.functional.linear(x, self.fc.weight.tanh(), self.fc.bias))

    curvature = CurvaturePass(Bypassed(), "classification")
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="outside of the forward"):
            curvature.add(x, y)
        with pytest.raises(RuntimeError, match="Call reset"):
            curvature.add(x, y)
        curvature.reset()


def test_an_input_that_is_modified_in_place_afterwards_is_an_error():
    class Modifies(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 3), Scale()

        def forward(self, x):
            h = self.fc(x)
            y = self.scale(h)
            h.mul_(2)
            return y + h

    with pytest.raises(NotImplementedError, match="'scale' \\(Scale\\) was modified in place"):
        kronecker_factors(
            Modifies(), [(torch.randn(3, 4), torch.tensor([0, 1, 2]))], "classification"
        )
