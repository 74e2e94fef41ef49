"""What a pass proves on its first batches: odd models have the blocks of plain ones, or a name.

`PAIRS` are models that a proof must see through: each equals a plain one. `REFUSED` are those that
it cannot follow. A wrong number is worse than an error.
"""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from kfac_backend import (
    CurvatureOptions,
    KroneckerBlock,
    corrected_factors,
    counted_positions,
    kronecker_factors,
)
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.curvature import CurvaturePass
from kfac_backend.layers import Scale
from kfac_backend.layers.registry import RULES
from tests.kfac_backend.block_checks import MODES, assert_same
from tests.kfac_backend.covariance.posteriors import brute_force, dense_precision, precision_of
from tests.kfac_backend.layer_cases import Quadratic
from tests.kfac_backend.networks import OwnNorm, random_model
from tests.oracles import dense_ggn_blocks, ggn_blocks
from tests.random_numbers import error, normal

EYE = torch.eye(4, dtype=torch.float64)


def factors(model, *xs, **options):
    """Of batches of inputs or mappings; labels of inputs are 0, 1, 0, ..."""
    batches = [x if isinstance(x, dict) else (x, torch.arange(len(x)) % 2) for x in xs]
    return kronecker_factors(model, batches, "classification", **options)


def halved(layer):
    """Other tensors in the places of a layer's parameters."""
    return {name: p.detach() / 2 for name, p in layer.named_parameters()}


def over_a_constant(norm):
    """A linear layer over a norm of what it makes of something that is no example."""

    def forward(m, x):
        constant = norm or m.fc(EYE).norm().detach()
        y = m.fc(x) / constant
        return m.gain(torch.cat([y, y], 1))[:, :2] if hasattr(m, "gain") else y

    return forward


def positions(expanded):
    """An embedding of positions, a norm and a layer, which run once or for each example."""

    def forward(m, x):
        R = x.shape[1]
        ids = torch.arange(R).expand(len(x), R) if expanded else torch.arange(R)
        return m.fc(x + m.lin(m.norm(m.pos(ids)))).tanh().mean(1)

    return forward


def tokens_and_positions(expanded):
    """One embedding for both."""

    def forward(m, x):
        ids = torch.arange(3).expand(x.shape) if expanded else torch.arange(3)
        return m.fc((m.tokens(x) * m.tokens(ids)).tanh()).mean(1)

    return forward


def grid(expanded):
    def forward(m, x):
        points = torch.linspace(-1, 1, 48).double().view(3, 16)
        points = points.expand(len(x), 3, 16) if expanded else points
        return m.fc(m.norm(m.norm(m.grid(points)) + x[:, None]).mean(1))

    return forward


def over_a_shared_norm(expanded):
    """What all examples share is not broadcast, and meets them twice."""

    def forward(m, x):
        norm = m.fc(EYE).norm()
        if expanded:
            norm = m.fc(EYE.expand(len(x), 4, 4)).flatten(1).norm(dim=1, keepdim=True)
        return (m.fc(x) / norm).tanh() * norm

    return forward


def shown(x):
    """A mask that hides one position of each example."""
    return x[..., 0] < x[..., 0].amax(1, keepdim=True)


def attended(query):
    """Keys that are the queries' tensor, or another with the same values."""

    def forward(m, x):
        mask = shown(x)
        with counted_positions(mask):
            y, _ = m.attention(query(x), x, x, key_padding_mask=~mask)
        return m.fc(y.masked_fill(~mask[..., None], 0).sum(1))

    return forward


def in_a_mask(fold):

    def forward(m, x):
        mask = shown(x)
        with counted_positions(mask):
            y = fold(m.fc, x)
        return y.masked_fill(~mask[..., None], 0).mean(1)

    return forward


def folded(fc, x):
    return fc(x.flatten(0, 1)).unflatten(0, (len(x), -1))


def turned(fc, x):
    """Positions in front of examples."""
    return fc(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, len(x))).transpose(0, 1)


class LayerNorm2d(nn.LayerNorm):
    """As torchvision's: the output is a view."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def normed(activation):
    """A norm whose output is a view, and an activation behind it."""
    return lambda m, x: m.head(activation(m.norm(m.conv(x))).mean((2, 3)))


def in_place(x):
    return F.leaky_relu_(x, 0.1)


def out_of_place(x):
    return F.leaky_relu(x, 0.1)


class LayerNormInFloat32(nn.LayerNorm):
    def forward(self, input):
        parameters = self.weight.float(), self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, *parameters).to(input.dtype)


class OfMask(nn.Embedding):
    """As OPT's: positions are computed of a mask."""

    def forward(self, mask):
        return super().forward(mask.cumsum(1).long())


class Same(nn.Conv2d):
    """As timm's Conv2dSame."""

    def forward(self, x):
        return F.conv2d(
            F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, (0, 0), self.dilation,
            self.groups,
        )  # fmt: skip


def tripled():
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda layer, args, output: 3 * output)
    return layer


def linear(m, x):
    return m.head(m.fc(x).tanh().mean(1))


def tied():
    first = nn.Linear(4, 2)
    children = {"fc": first, "other": nn.Linear(4, 2)}
    children["other"].weight, children["other"].bias = first.weight, first.bias
    return children


FC = {"fc": nn.Linear(4, 2)}
LAYER = {"fc": nn.Linear(3, 3), "head": nn.Linear(3, 3)}
POSITIONS = {"pos": nn.Embedding(3, 4), "norm": nn.LayerNorm(4), "lin": nn.Linear(4, 4), **FC}
ATTENTION = {"attention": nn.MultiheadAttention(4, 2, batch_first=True), **FC}
ENCODER = {"encoder": nn.TransformerEncoderLayer(4, 2, 8, dropout=0), **FC}
IDS = torch.tensor([[0, 1, 2], [4, 4, 1], [3, 0, 2], [1, 1, 1]])
PAIRS = {
    # Name: the odd function, the plain one, their layers, batches, and the plain one's own layers
    # where these are others.
    # A run that no derivative goes through is no use, however many rows it has (four, here).
    **{
        f"a constant run beside {N} examples": (
            over_a_constant(None), over_a_constant, FC, (normal(N, 4),)
        )
        for N in (1, 4, 7)
    },
    "a constant run of a tied layer": (
        lambda m, x: m.fc(x) + m.other(EYE).sum().detach(),
        lambda m, x: m.fc(x),  # all logits are shifted by one number
        tied(), (normal(5, 4),),
    ),
    "layers that run once, in batches of other lengths": (
        positions(False), positions(True), POSITIONS, (normal(5, 3, 4), normal(4, 1, 4)),
    ),
    "on examples and on what all share": (
        tokens_and_positions(False), tokens_and_positions(True),
        {"tokens": nn.Embedding(5, 4), **FC}, (IDS,),
    ),
    "what all share and is not broadcast": (
        over_a_shared_norm(False), over_a_shared_norm(True), FC, (normal(5, 4),),
    ),
    "a norm in float32 in a float64 model": (
        grid(False), grid(True),
        {"grid": nn.Linear(16, 64), "norm": LayerNormInFloat32(64), "fc": nn.Linear(64, 2)},
        (normal(5, 64),),
    ),
    "keywords of a transformer layer": (
        lambda m, x: m.fc(m.encoder(src=x.transpose(0, 1)).mean(0)),
        lambda m, x: m.fc(m.encoder(x.transpose(0, 1)).mean(0)),
        ENCODER, (normal(4, 3, 4),),
    ),
    "keys that are not the queries' tensor": (
        attended(lambda x: x * 1.0), attended(lambda x: x), ATTENTION, (normal(3, 3, 4),),
    ),
    "folded positions": (
        lambda m, x: folded(m.fc, x).mean(1),
        lambda m, x: m.fc(x).mean(1),
        FC, (normal(4, 3, 4), normal(3, 2, 4)),
    ),
    "folded positions in a mask": (
        in_a_mask(folded), in_a_mask(lambda fc, x: fc(x)), FC, (normal(4, 3, 4),),
    ),
    "F.linear": (
        lambda m, x: m.head(F.linear(x, m.fc.weight, m.fc.bias).tanh().mean(1)),
        linear, LAYER, (normal(4, 4, 3),),
    ),
    "F.addmm": (
        lambda m, x: m.head(
            torch.addmm(m.fc.bias, x.flatten(0, 1), m.fc.weight.T)
            .tanh()
            .unflatten(0, (-1, 4))
            .mean(1)
        ),
        linear, LAYER, (normal(4, 4, 3),),
    ),
    "matmul with the transpose": (
        lambda m, x: m.head((x @ m.fc.weight.T).tanh().mean(1)),
        linear, {"fc": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3)}, (normal(4, 4, 3),),
    ),
    "a hook that changes the output": (
        linear,
        lambda m, x: m.head((3 * m.fc(x)).tanh().mean(1)),
        {"fc": tripled(), "head": nn.Linear(3, 3)}, (normal(4, 4, 3),), LAYER,
    ),
    "a layer on other tensors": (
        lambda m, x: m.head((m.fc(x) + functional_call(m.fc, halved(m.fc), x)).tanh().mean(1)),
        lambda m, x: m.head((m.fc(x) + F.linear(x, *halved(m.fc).values())).tanh().mean(1)),
        {"fc": nn.Linear(3, 3), "head": nn.Linear(3, 3)}, (normal(4, 4, 3),),
    ),
    "derived convolution": (
        lambda m, x: m.head(m.conv(x).tanh().mean((2, 3))),
        lambda m, x: m.head(m.conv(F.pad(x, (0, 1, 0, 1))).tanh().mean((2, 3))),
        {"conv": Same(3, 3, 2), "head": nn.Linear(3, 3)}, (normal(4, 3, 4, 4),),
        {"conv": nn.Conv2d(3, 3, 2), "head": nn.Linear(3, 3)},
    ),
    "derived embedding": (
        lambda m, x: m.head((x + m.positions(x[..., 0] > 0)).tanh().mean(1)),
        lambda m, x: m.head((x + m.positions((x[..., 0] > 0).cumsum(1))).tanh().mean(1)),
        {"positions": OfMask(6, 3), "head": nn.Linear(3, 3)}, (normal(5, 4, 3),),
        {"positions": nn.Embedding(6, 3), "head": nn.Linear(3, 3)},
    ),
    # The error by which it shows is no mistake in the dtype of the tokens.
    "derived embedding of numbers, behind tokens": (
        lambda m, x: m.head((m.table(x) + m.positions((x > 0).double())).tanh().mean(1)),
        lambda m, x: m.head((m.table(x) + m.positions((x > 0).long().cumsum(1))).tanh().mean(1)),
        {"table": nn.Embedding(5, 3), "positions": OfMask(6, 3), "head": nn.Linear(3, 3)}, (IDS,),
        {"table": nn.Embedding(5, 3), "positions": nn.Embedding(6, 3), "head": nn.Linear(3, 3)},
    ),
    **{
        f"{type(norm).__name__}, a view that is changed in place": (
            normed(in_place), normed(out_of_place),
            {"conv": nn.Conv2d(3, 4, 2), "norm": norm, "head": nn.Linear(4, 3)},
            (normal(4, 3, 4, 4),),
        )
        for norm in (nn.InstanceNorm2d(4, affine=True), LayerNorm2d(4))
    },
    "F.embedding": (
        lambda m, x: m.head(F.embedding(x, m.table.weight, 1).tanh().mean(1)),
        lambda m, x: m.head(m.table(x).tanh().mean(1)),
        {"table": nn.Embedding(5, 3, padding_idx=1), "head": nn.Linear(3, 3)}, (IDS,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS)
def test_odd_models_have_the_blocks_of_plain_ones(case):
    odd, plain, children, xs, *others = PAIRS[case]
    if plain is over_a_constant:
        plain = over_a_constant(random_model(odd, **children).fc(EYE).norm().detach())
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if "float64" in case else {}
    model = random_model(odd, **children)
    blocks = {}
    for mode in MODES:
        found = factors(model, *xs, kfac_approx=mode)
        reference = random_model(plain, **(others[0] if others else children))
        expected = factors(reference, *xs, kfac_approx=mode)
        if case == "F.addmm":  # whose bias is a parameter of its own, with its exact block
            exact = dense_ggn_blocks(model, *xs, "classification")["fc.bias"]
            expected.blocks["fc.bias"] = KroneckerBlock("fc.bias", exact)
        assert_same(found, expected, **tolerance)
        blocks[mode] = [found.to_dense(name) for name in found.blocks]
        f, covariance = OutputCovariance(model, precision_of(found))(xs[0])
        tolerances = {"rtol": 1e-3, "atol": 1e-4} if tolerance else {"rtol": 1e-6, "atol": 1e-8}
        assert_close(covariance, brute_force(model, xs[0], dense_precision(found)), **tolerances)
    # Negative control: where positions share the weight, the other mode has other blocks.
    if xs[0].dim() > 2:
        assert max(error(*pair) for pair in zip(*blocks.values(), strict=True)) > 0.02


@pytest.mark.filterwarnings("ignore:These parameters have no K-FAC")
@pytest.mark.parametrize("unsupported", ["freeze", "diagonal"])
def test_constant_runs_beside_a_layer_without_a_rule(unsupported):
    children, x = {**FC, "gain": OwnNorm(4)}, normal(4, 4)
    model = random_model(over_a_constant(None), **children)
    alone = random_model(over_a_constant(model.fc(EYE).norm().detach()), **children)
    found, expected = (factors(m, x, unsupported=unsupported) for m in (model, alone))
    assert ("gain.weight" in found.blocks) == (unsupported == "diagonal")
    assert_same(found, expected)


def test_a_row_that_no_example_reaches():
    """An expert that the first example is not routed to."""

    def routed(m, x):
        chosen = x[:, 0] > x[0, 0]
        return m.rest(x).index_add(0, chosen.nonzero().flatten(), m.expert(x[chosen]))

    model = random_model(routed, expert=nn.Linear(4, 2), rest=nn.Linear(4, 2))
    found = factors(model, normal(6, 4))
    assert found.blocks["expert.weight"].num_terms < 6
    assert found.to_dense("expert.weight").any()


def test_dropout_beside_what_all_examples_share():
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
    model = random_model(
        lambda m, x: m.fc(m.encoder(x + m.pos(torch.arange(3))).mean(1)),
        encoder=encoder, pos=nn.Embedding(3, 4), fc=nn.Linear(4, 2),
    ).train()  # fmt: skip
    state = torch.random.get_rng_state()
    with torch.random.fork_rng():
        proof = CurvaturePass(model, "classification").driver.proof
    proof.make(normal(4, 3, 4), 4)
    assert torch.equal(torch.random.get_rng_state(), state)  # it draws none of the user's numbers
    assert factors(model, normal(4, 3, 4)).num_data == 4


class ScaledLinear(nn.Linear):
    def forward(self, input):
        return F.linear(input, self.weight, self.bias) / self.weight.norm()


class OwnAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def with_unit_norm():
    model = random_model(lambda m, x: m.fc(x), fc=ScaledLinear(4, 2))
    with torch.no_grad():
        model.fc.weight /= model.fc.weight.norm()
    return model


def with_another_forward(scale):
    model = random_model(lambda m, x: m.fc(x), fc=nn.Linear(4, 2))
    layer = model.fc
    layer.forward = lambda x: (
        F.linear(x, layer.weight, layer.bias) * (1 + (scale - 1) * layer.weight.norm())
    )
    return model


def under_no_grad(m, x):
    with torch.no_grad():
        h = m.fc(x)
    return m.out(h)


def modified_in_place(m, x):
    h = m.fc(x)
    y = m.scale(h)
    h.mul_(2)
    return y + h


def differently(m, x):
    """Twice, once without a derivative: which of them depends on the values."""
    norm = m.fc(x * 2).norm(dim=1, keepdim=True)
    return m.fc(x) / (norm.detach() if x[0, 0] > 0 else norm)


def shared_in_two_ways():
    model = random_model(lambda m, x: m.out(m.norm(m.fc(x))), fc=nn.Linear(4, 4),
                  norm=nn.LayerNorm(4), out=nn.Linear(4, 2))  # fmt: skip
    model.norm.bias = model.fc.bias
    return model


def of(function, **children):
    return lambda: random_model(function, **children)


X, TWO = normal(4, 4), {"fc": nn.Linear(4, 4), "out": nn.Linear(4, 2)}
REFUSED = {
    "a layer without a rule": (
        of(lambda m, x: m.b(x), b=Quadratic(4)), [X], r"Supported: Linear, Conv",
    ),
    "shared in two ways": (
        shared_in_two_ways, [X],
        r"'fc.bias' is used in different ways by 'fc' .* 'norm'",
    ),
    "another function": (of(lambda m, x: m.fc(x), fc=ScaledLinear(4, 2)), [X], r"something oth"),
    "another derivative only": (with_unit_norm, [X], r"something other than its class Linear"),
    # The negative control of PAIRS in float32: without a cast, 1e-6 is another function.
    "another forward, by little": (lambda: with_another_forward(1 + 1e-6), [X], r"something other"),
    "attention with other arguments": (
        of(lambda m, x: m.fc(m.a(x).mean(1)), a=OwnAttention(4, 2, batch_first=True), **FC),
        [normal(4, 3, 4)], r"'a' .*AttentionByParts",
    ),
    "positions first, as many as examples": (
        of(lambda m, x: m.fc(x[:, None] * torch.ones(4, 4, 1)).mean(0), **FC), [X], r"mix",
    ),
    "normalised over the batch": (
        of(lambda m, x: m.out(F.batch_norm(m.fc(x), None, None, training=True)), **TWO), [X],
        r"layer 'fc' \(Linear\) the rows of different examples mix",
    ),
    "examples that mix after a batch of one": (
        of(lambda m, x: m.out(m.fc(x).roll(1, 0)), **TWO), [X[:1], X], r"'fc' .*mix",
    ),
    "turned positions in a mask": (
        of(in_a_mask(turned), **FC), [normal(4, 3, 4)], r"'fc'.* (mix|do not count)",
    ),
    "under no_grad": (of(under_no_grad, **TWO), [X], r"'fc' \(Linear\) runs without gradie"),
    "under vmap": (of(lambda m, x: torch.func.vmap(m.fc)(x), **FC), [X], r"vmap.*whole batch"),
    "checkpointed": (
        of(
            lambda m, x: m.out(
                checkpoint(lambda h: m.fc(h).tanh(), m.first(x), use_reentrant=False)
            ),
            first=nn.Linear(4, 4), **TWO,
        ),
        [X], r"'fc' .*runs again in the backward pass",
    ),
    "no copy for each": (
        of(lambda m, x: m.fc(x) / m.fc(normal(9, 4))[: len(x)].exp(), **FC), [X],
        r"'fc' .*has the same input for all",
    ),
    "other runs in another batch": (
        of(differently, **FC), [X.abs(), -X.abs()], r"'fc' .*unlike in the first batch",
    ),
    "the same, the other way round": (
        of(differently, **FC), [-X.abs(), X.abs()], r"'fc' .*unlike in the first batch",
    ),
    "more runs in another batch": (
        of(lambda m, x: sum(map(m.fc, x.unbind(1))) / m.fc(EYE).norm().detach(), **FC),
        [normal(3, 2, 4), normal(3, 3, 4)], r"runs 4 times instead of 3",
    ),
    "modified in place": (
        of(modified_in_place, **FC, scale=Scale()), [X], r"'scale' .* was modified in place",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_hooks_cannot_see_is_a_named_error(case):
    make, xs, match = REFUSED[case]
    with pytest.raises(NotImplementedError, match=match) as raised:
        factors(make(), *xs)
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:These parameters have no K-FAC")
def test_a_tensor_that_a_layer_without_a_rule_shares(monkeypatch):
    monkeypatch.delitem(RULES, nn.Bilinear)
    model = random_model(lambda m, x: m.b(m.fc(x), x), fc=nn.Linear(4, 3), b=nn.Bilinear(3, 4, 3))
    model.b.bias = model.fc.bias
    for unsupported in ("error", "freeze"):  # what has a rule is not frozen
        with pytest.raises(NotImplementedError, match="'fc.bias' differs.* a layer wi"):
            factors(model, X, unsupported=unsupported)
    found = factors(model, X, unsupported="diagonal")
    exact = dense_ggn_blocks(model, X, "classification")
    for name in ("fc.bias", "b.weight"):
        assert_close(found.to_dense(name), exact[name].diagonal().diag())


def test_rows_folded_in_another_order_are_not_guessed():
    """Expand need not know whose rows they are; reduce and gradients of single examples must."""
    model, x = random_model(lambda m, x: turned(m.fc, x).mean(1), **FC), normal(4, 3, 4)
    found = factors(model, x)
    assert_same(found, factors(random_model(PAIRS["folded positions"][1], **FC), x))
    with pytest.raises(NotImplementedError, match="12 rows in a batch of 4"):
        factors(model, x, kfac_approx="reduce")
    with pytest.raises(NotImplementedError, match="'fc'.*12 rows in a batch of 4"):
        corrected_factors(found, model, [(x, torch.arange(4) % 2)])


def in_order(key):
    """A model that sorts its examples, and puts them back in their order."""

    def forward(m, x):
        order = key(x).argsort(stable=True)
        return m.out(m.fc(x[order]).tanh()[order.argsort()])

    return random_model(forward, **TWO)


KEYS = {
    "ascending": lambda x: x[:, 0],
    "two values": lambda x: (x[:, 0] > x[:, 0].mean()).long(),
    "reversed": lambda x: -torch.arange(len(x)),
    "rolled": lambda x: torch.arange(len(x)).roll(1),
}


@pytest.mark.parametrize("N", [2, 5, 40])
@pytest.mark.parametrize("key", KEYS)
def test_examples_in_another_order_are_seen(key, N):
    """Also where the first batch happens to be in order."""
    model, x = in_order(KEYS[key]), normal(N, 4)
    found = factors(in_order(lambda x: torch.zeros(len(x))), x)  # in order: nothing to see
    for batch in (x, x[x[:, 0].argsort()], x[KEYS[key](x).argsort(stable=True)]):
        with pytest.raises(NotImplementedError, match=r"'fc' .*in another order"):
            factors(model, batch)
    with pytest.raises(NotImplementedError, match=r"'fc' .*in another order"):
        OutputCovariance(model, precision_of(found))(x)


def test_a_proof_runs_on_few_examples_from_all_over_the_batch():
    sizes = []
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model.register_forward_pre_hook(lambda module, args: sizes.append(args[0][:, 0].tolist()))
    x = normal(100, 4)
    x[:, 0] = torch.arange(100)
    factors(model, x)
    whole, (check,) = sizes[-1], [seen for seen in sizes if len(seen) == 9]
    assert len(whole) == 100 and check[:8] == sorted(check[:8])
    assert (check[0], *check[7:]) == (0, 99, 0)


def test_the_proof_is_asked_for_again_after_it_failed():
    curvature = CurvaturePass(with_another_forward(2), "classification")
    y = torch.tensor([0, 1, 1, 0])
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="something other"):
            curvature.add(X, y)
        with pytest.raises(RuntimeError, match="Call reset"):
            curvature.add(X, y)
        curvature.reset()


class Changing(nn.Module):
    """Two layers; a gate mixes the examples between them, and one may run as a function."""

    gate: torch.Tensor

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("gate", torch.zeros(()))
        self.functional = False

    def forward(self, x):
        weight, bias = self.first.weight, self.first.bias
        h = F.linear(x, weight, bias).sin() if self.functional else self.first(x)
        return self.second(torch.tanh(h + self.gate * h.mean(0)))


def test_a_later_pass_proves_what_may_have_changed():
    model, examples = Changing().double(), []
    model.register_forward_pre_hook(lambda m, args: examples.append(len(args[0])))
    data = [(torch.randn(9, 3).double(), torch.arange(9) % 2)]
    curvature = CurvaturePass(model, "classification")
    curvature.factors_of(data)
    first = sum(examples)

    def later(**changes):
        examples.clear()
        return curvature.factors_of(data, **changes), sum(examples)

    def fresh(**options):
        return kronecker_factors(model, data, "classification", **options)

    # Other numbers: less is proved, and the factors are those of a new pass.
    nn.init.normal_(model.first.weight)
    factors, number = later()
    assert number == 9 + 3 and first == 9 + 9 + 4  # two alone, and together
    assert_same(factors, fresh())
    # Another matrix, of which the same proof holds; and back.
    for matrix in (
        {"fisher": "empirical", "kfac_approx": "reduce"},
        {"fisher": "exact", "kfac_approx": "expand"},
    ):
        factors, number = later(**matrix, repeat_proof=False)
        assert number == 9
        assert_same(factors, fresh(**matrix))
        assert factors.options == CurvatureOptions(**matrix)
    # Another structure: all is proved, from the layers and parameters as they are now.
    changes = {
        "frozen": lambda: model.first.requires_grad_(False),
        "trained again": lambda: model.first.requires_grad_(True),
        "a flag": lambda: setattr(model, "functional", True),
        "the flag back": lambda: setattr(model, "functional", False),
        "another layer": lambda: setattr(model, "second", nn.Linear(4, 2).double()),
    }
    for what, change in changes.items():
        change()
        factors, number = later()
        assert number > 9 + 4, what
        assert_same(factors, fresh())
    # Numbers alone let examples mix: that is found on two examples, too.
    model.gate.fill_(1.0)
    with pytest.raises(NotImplementedError, match="the rows of different examples mix"):
        later()


def test_a_pass_after_one_that_failed_proves_all_again():
    """Weights of NaN prove nothing of a layer that runs on what all examples share."""
    model = random_model(
        lambda m, x: m.head(torch.tanh(m.first(x) + m.shared(x.new_ones(1, 3)))),
        first=nn.Linear(3, 4), shared=nn.Linear(3, 4), head=nn.Linear(4, 2),
    )  # fmt: skip
    x, y = normal(5, 3), torch.arange(5) % 2
    curvature = CurvaturePass(model, "classification")
    first = curvature.factors_of([(x, y)])
    state = deepcopy(model.state_dict())
    nn.init.constant_(model.first.weight, torch.nan)
    with pytest.raises(ValueError, match="'first.weight' contains NaN"):
        curvature.factors_of([(x, y)])
    model.load_state_dict(state)
    curvature.reset()
    curvature.add(x, y)
    assert_same(curvature.factors(), first)


def packed(m, batch):
    """Sequences without the positions that their mask hides."""
    mask = batch["mask"]
    rows = m.fc(batch["x"][mask]).tanh()
    return m.head(rows.new_zeros(len(mask), 3).index_add(0, mask.nonzero()[:, 0], rows))


def test_rows_that_are_no_longer_equally_many_are_seen():
    """Where they stay so, in other numbers, the bias's block is the exact one."""

    def batch(*lengths):
        mask = torch.arange(4) < torch.tensor(lengths)[:, None]
        return {"x": normal(4, 4, 4), "mask": mask, "labels": torch.tensor([0, 1, 1, 0])}

    model = random_model(packed, fc=nn.Linear(4, 3), head=nn.Linear(3, 2))
    batches = [batch(3, 3, 3, 3), batch(2, 2, 2, 2)]
    found = factors(model, *batches, kfac_approx="reduce")
    exact = sum(
        ggn_blocks(model, lambda run, b=b: run(b), "classification")["fc.bias"] for b in batches
    )
    assert_close(found.to_dense("fc.bias"), exact)
    for lengths in ((1, 3, 2, 2), (4, 1, 1, 1)):  # multiples of 4 or not
        with pytest.raises(NotImplementedError, match="examples_of_rows"):
            factors(model, batches[0], batch(*lengths), kfac_approx="reduce")


class Gated(nn.Module):
    """A function with a layer's weight; only examples with a positive first entry use it."""

    def __init__(self, is_skipped):
        super().__init__()
        self.fc, self.out = nn.Linear(3, 4, bias=False), nn.Linear(3, 2)
        self.is_skipped = is_skipped

    def forward(self, x):
        uses = x[:, :1] > 0
        if self.is_skipped and not uses.any():
            return self.out(x)
        y = torch.tanh(F.linear(x * uses, self.fc.weight))[:, :3]
        return self.out(x + y)


@pytest.mark.parametrize("is_skipped", [False, True], ids=["zero gradient", "no gradient"])
def test_a_use_that_only_later_batches_have_is_a_named_error(is_skipped):
    model, x = Gated(is_skipped).double(), normal(6, 3)
    uses = torch.cat([x[:, :1].abs(), x[:, 1:]], 1)
    does_not = torch.cat([-x[:, :1].abs(), x[:, 1:]], 1)
    # Control: the function is followed where the first batch has it.
    blocks = factors(model, uses, does_not).blocks
    assert blocks["fc.weight"].B.trace() > 0
    with pytest.warns(UserWarning, match="no part of the forward pass.* 'fc'"):
        idle = factors(model, does_not).blocks["fc.weight"]
    assert idle.B.trace() == 0
    with (
        pytest.warns(UserWarning, match="no part of the forward pass"),
        pytest.raises(NotImplementedError, match=r"uses 'fc\.weight' outside of its layer"),
    ):
        factors(model, does_not, uses)


def test_a_use_without_an_effect_is_no_use():
    """As a term of zero that lets all parameters receive a gradient."""

    class Zero(Gated):
        def forward(self, x):
            return self.out(x) + 0 * self.fc.weight.sum()

    model, x = Zero(False).double(), normal(6, 3)
    with pytest.warns(UserWarning, match="no part of the forward pass"):
        blocks = factors(model, x, x).blocks
    assert blocks["fc.weight"].B.trace() == 0 < blocks["out.weight"].B.trace()
