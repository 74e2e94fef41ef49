"""Parameters that pass no hook: found, proved and exact, or refused by name, without declaring."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import MODES, assert_blocks, randomize
from tests.oracles import dense_ggn_blocks
from tests.random_numbers import error, normal


class Model(nn.Module):
    """A function of parameters and children."""

    def __init__(self, function, **own):
        super().__init__()
        for name, value in own.items():
            value = nn.Parameter(value) if isinstance(value, Tensor) else value
            setattr(self, name, value)
        self.function = function
        randomize(self)

    def forward(self, x):
        return self.function(self, x)


def head(d=3):
    return nn.Linear(d, 3)


def zeros(*shape):
    return torch.zeros(shape)


def factors(model, x, **options):
    y = torch.arange(len(x)) % 3
    return kronecker_factors(model, [(x, y)], "classification", **options)


def rms(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def attention_bias(m, x):
    """A table of relative positions, indexed, permuted, and added to scores of folded windows."""
    index = torch.tensor([[0, 1], [2, 0]])
    windows = x.unflatten(1, (2, 2)).flatten(0, 1)  # (N·2, 2, d)
    scores = windows @ windows.mT
    bias = m.table[index.view(-1)].view(2, 2, -1).permute(2, 0, 1)  # (h, 2, 2)
    scores = (scores[:, None] + bias[None]).softmax(-1)  # (N·2, h, 2, 2)
    mixed = (scores @ windows[:, None]).mean(1)
    return m.head(mixed.unflatten(0, (-1, 2)).mean((1, 2)))


def looped(m, x):
    h = x[:, 0]
    for r in range(x.shape[1]):
        h = torch.tanh(h * m.scale + x[:, r] * m.shift)
    return m.head(h)


def packed_bias(m, x):
    bias = torch.cat([m.q, torch.zeros_like(m.q), m.v])
    return m.head(F.linear(x, m.qkv.weight, bias).tanh().mean(1))


def zeroed_bias(m, x):
    bias = m.bias.clone()
    bias[1:2].zero_()
    return m.head((x + bias).tanh().mean(1))


def standardised(m, x):
    weight = (m.fc.weight - m.fc.weight.mean(1, keepdim=True)) / m.fc.weight.std(1, keepdim=True)
    return m.head(F.linear(x, weight).tanh().mean(1))


OWN = {
    "class token": (
        lambda m, x: m.head(torch.cat([m.token.expand(len(x), -1, -1), x], 1).tanh().mean(1)),
        {"token": zeros(1, 1, 3)},
    ),
    "class token of CLIP": (
        lambda m, x: m.head(torch.cat([m.token.expand(len(x), 1, -1), x], 1).tanh().mean(1)),
        {"token": zeros(3)},
    ),
    "position embedding, interpolated": (
        lambda m, x: m.head(
            (x + F.interpolate(m.positions.mT, x.shape[1], mode="linear").mT).tanh().mean(1)
        ),
        {"positions": zeros(1, 2, 3)},
    ),
    "layer scale, channels first": (
        lambda m, x: m.head((x.mT[..., None] * m.gamma).tanh().mean((2, 3))),
        {"gamma": zeros(3, 1, 1)},
    ),
    "RMSNorm": (lambda m, x: m.head((m.weight * rms(x)).tanh().mean(1)), {"weight": zeros(3)}),
    "RMSNorm with 1 + weight": (
        lambda m, x: m.head((rms(x.float()).double() * (1.0 + m.weight.float())).tanh().mean(1)),
        {"weight": zeros(3)},
    ),
    "functional norms": (
        lambda m, x: m.head(
            F.group_norm(
                F.layer_norm(F.rms_norm(x, (3,), m.a), (3,), m.b, m.c).tanh().mT, 1, m.d, m.e
            ).mean(2)
        ),
        {name: zeros(3) for name in "abcde"},
    ),
    "table of a folded attention": (attention_bias, {"table": zeros(3, 2)}),
    "several biases in one": (
        packed_bias,
        {"q": zeros(2), "v": zeros(2), "qkv": nn.Linear(3, 6, bias=False), "head": head(6)},
    ),
    "a bias that is changed in place": (zeroed_bias, {"bias": zeros(3)}),
    "in place": (
        lambda m, x: m.head(x.sin().mul_(m.s).add_(m.t).tanh().mean(1)),
        {"s": zeros(3), "t": zeros(1, 1, 3)},
    ),  # fmt: skip
    "in a loop": (looped, {"scale": zeros(3), "shift": zeros(1, 3)}),
    "two in one expression": (
        lambda m, x: m.head((x * (m.s[:, None] @ m.t[None]).sum(0)).tanh().mean(1)),
        {"s": zeros(4), "t": zeros(3)},
    ),
    "latent queries": (
        lambda m, x: m.head(
            F.scaled_dot_product_attention(m.queries.expand(len(x), -1, -1), x, x).mean(1)
        ),
        {"queries": zeros(2, 3)},
    ),
    "sequence first": (
        lambda m, x: m.head((x.transpose(0, 1) * m.s + m.p).tanh().mean(0)),
        {"s": zeros(3), "p": zeros(4, 1, 3)},
    ),
    "weight standardisation": (standardised, {"fc": nn.Linear(3, 3, bias=False)}),
    "weight norm": (
        lambda m, x: m.head(m.fc(x).tanh().mean(1)),
        {"fc": weight_norm(nn.Linear(3, 3, bias=False))},
    ),
    "weight norm of folded lines": (
        lambda m, x: m.head(m.fc(x.flatten(0, 1)[:, None]).tanh().view(-1, 12, 2).mean(2)),
        {"fc": weight_norm(nn.Conv1d(1, 3, 2, bias=False)), "head": head(12)},
    ),
    "used twice": (lambda m, x: m.head((x * m.s).tanh().mul(m.s).mean(1)), {"s": zeros(3)}),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", OWN)
def test_exact(case):
    function, own = OWN[case]
    model, x = Model(function, **{"head": head(), **own}), normal(5, 4, 3)
    exact = dense_ggn_blocks(model, x, "classification")
    skipped = ("head", "qkv.weight")
    exact = {name: block for name, block in exact.items() if not name.startswith(skipped)}
    tolerance = 1e-5 if "1 + weight" in case else 1e-9  # it computes in float32
    for mode in MODES:
        found = factors(model, x, kfac_approx=mode)
        assert list(found.blocks) == [name for name, _ in model.named_parameters()]
        for name, block in exact.items():
            assert_close(found.to_dense(name), block, rtol=tolerance, atol=tolerance)
            assert block.norm() > 1e-3, name  # a control: there is something to compare
            assert error(block, block.diagonal().diag()) > 0.01 or len(block) == 1


class OtherArguments(nn.Embedding):
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


def linear(m, x):
    return m.head(m.fc(x).tanh().mean(1))


def image(m, x):
    return m.head(m.conv(F.pad(x, (0, 1, 0, 1))).tanh().mean((2, 3)))


def embedded(m, x):
    return m.head(m.table(x).tanh().mean(1))


IDS = torch.tensor([[0, 1, 1, 2], [2, 2, 0, 1], [3, 1, 2, 4], [4, 4, 0, 3]])
LAYERS = {
    "F.linear": (
        lambda m, x: m.head(F.linear(x, m.fc.weight, m.fc.bias).tanh().mean(1)),
        linear,
        {"fc": nn.Linear(3, 3)},
        normal(4, 4, 3),
    ),
    "matmul with the transpose": (
        lambda m, x: m.head((x @ m.fc.weight.T + m.fc.bias).tanh().mean(1)),
        linear,
        {"fc": nn.Linear(3, 3)},
        normal(4, 4, 3),
    ),
    "F.linear on folded rows": (
        lambda m, x: m.head(
            F.linear(x.flatten(0, 1), m.fc.weight, m.fc.bias).tanh().unflatten(0, (-1, 4)).mean(1)
        ),
        linear,
        {"fc": nn.Linear(3, 3)},
        normal(4, 4, 3),
    ),
    "folded windows": (
        lambda m, x: m.head(
            m.fc(x.unflatten(1, (2, 2)).flatten(0, 1)).tanh().unflatten(0, (-1, 2)).mean((1, 2))
        ),
        linear,
        {"fc": nn.Linear(3, 3)},
        normal(4, 4, 3),
    ),
    "derived convolution": (
        lambda m, x: m.head(m.conv(x).tanh().mean((2, 3))),
        image,
        {"conv": Same(3, 3, 2)},
        normal(4, 3, 4, 4),
    ),
    "F.embedding": (
        lambda m, x: m.head(F.embedding(x, m.table.weight, 1).tanh().mean(1)),
        embedded,
        {"table": nn.Embedding(5, 3, padding_idx=1)},
        IDS,
    ),
    "a hook that changes the output": (
        lambda m, x: m.head(m.fc(x).tanh().mean(1)),
        lambda m, x: m.head((3 * m.fc(x)).tanh().mean(1)),
        {"fc": nn.Linear(3, 3)},
        normal(4, 4, 3),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", LAYERS)
def test_as_the_layer_itself(case, mode):
    function, by_layer, children, x = LAYERS[case]
    model = Model(function, head=head(), **children)
    plain = {
        name: nn.Conv2d(3, 3, 2) if isinstance(layer, Same) else type(layer)(*layer.weight.T.shape)
        for name, layer in children.items()
        if not isinstance(layer, nn.Embedding)
    }
    plain |= {name: nn.Embedding(5, 3, 1) for name, v in children.items() if name not in plain}
    reference = Model(by_layer, head=head(), **plain)
    reference.load_state_dict(model.state_dict())
    if "hook" in case:
        handle = model.fc.register_forward_hook(lambda layer, args, output: 3 * output)
    found, expected = (factors(m, x, kfac_approx=mode) for m in (model, reference))
    if "hook" in case:
        handle.remove()
    blocks = {name: expected.to_dense(name) for name in expected.blocks}
    if "matmul" in case:  # whose bias is a parameter of its own, with its exact block
        blocks["fc.bias"] = dense_ggn_blocks(model, x, "classification")["fc.bias"]
    assert_blocks(found, blocks)
    other = factors(reference, x, kfac_approx="reduce" if mode == "expand" else "expand")
    name = next(name for name in expected.blocks if name.endswith("weight") and "head" not in name)
    assert error(found.to_dense(name), other.to_dense(name)) > 0.02


def scores(m, x, tables):
    """As DeBERTa: projections of a table of relative positions, repeated for all heads."""
    index = torch.tensor([[0, 1], [2, 0]])
    q = m.query(x).unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1)  # (N·h, 2, d / h)
    bias = [(table @ q.mT).mT[:, torch.arange(2)[:, None], index].tanh() for table in tables(m, x)]
    weights = (q @ q.mT + bias[0] + bias[1]).softmax(-1)
    return m.head((weights @ q).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2).mean(1))


def shared_tables(m, x):
    for layer in (m.query, m.key):
        table = layer(m.norm(m.table.weight)).unflatten(-1, (2, -1)).transpose(0, 1)
        yield table.repeat(len(x), 1, 1)


def tables_for_each(m, x):
    for layer in (m.query, m.key):
        ids = torch.arange(3).expand(len(x), 3)
        table = layer(m.norm(m.table(ids))).unflatten(-1, (2, -1)).transpose(1, 2)
        yield table.flatten(0, 1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_layers_that_run_once_and_whose_outputs_are_not_broadcast():
    """Each layer's block is as if it ran for each example; that of the table is exact."""

    def layers():
        return {
            "table": nn.Embedding(3, 4),
            "norm": nn.LayerNorm(4),
            "query": nn.Linear(4, 4),
            "key": nn.Linear(4, 4),
            "head": head(4),
        }

    model = Model(lambda m, x: scores(m, x, shared_tables), **layers())
    each = Model(lambda m, x: scores(m, x, tables_for_each), **layers())
    each.load_state_dict(model.state_dict())
    x = normal(5, 2, 4)
    exact = dense_ggn_blocks(model, x, "classification")["table.weight"]
    for mode in MODES:
        found = factors(model, x, kfac_approx=mode)
        expected = factors(each, x, kfac_approx=mode)
        blocks = {name: expected.to_dense(name) for name in expected.blocks}
        assert error(blocks["table.weight"], exact) > 0.02
        assert_blocks(found, blocks | {"table.weight": exact})


def test_derived_layers_with_other_arguments():
    model = Model(
        lambda m, x: m.head((x + m.positions(x[..., 0] > 0)).tanh().mean(1)),
        positions=OtherArguments(6, 3),
        head=head(),
    )
    x = normal(5, 4, 3)
    plain = Model(
        lambda m, x: m.head((x + m.positions((x[..., 0] > 0).cumsum(1))).tanh().mean(1)),
        positions=nn.Embedding(6, 3),
        head=head(),
    )
    plain.load_state_dict(model.state_dict())
    for mode in MODES:
        expected = factors(plain, x, kfac_approx=mode)
        assert_blocks(
            factors(model, x, kfac_approx=mode),
            {name: expected.to_dense(name) for name in expected.blocks},
        )


def by_value(m, x):
    """Which operation it is depends on the values: vmap cannot follow."""
    scaled = F.linear(x, m.fc.weight) + m.fc.weight.sum()
    return m.head((scaled if scaled.sum() > 1e9 else scaled.tanh()).mean(1))


REFUSED = {
    "a weight, and more": (
        lambda m, x: m.head((m.fc(x) * m.fc.weight.sum()).tanh().mean(1)),
        "is a weight, and also meets other operations",
    ),
    "a matrix in front": (
        lambda m, x: m.head((m.fc.weight @ x.mT).tanh().mean(2)),
        "meets .*matmul.* as a matrix",
    ),
    "by value": (by_value, "is a weight, and also meets other operations"),
    "sequence first": (
        lambda m, x: m.head(F.linear(x.transpose(0, 1), m.fc.weight).tanh().mean(0)),
        "is the weight of linear, whose examples do not come first",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_or_an_exact_diagonal(case):
    function, why = REFUSED[case]
    model, x = Model(function, fc=nn.Linear(3, 3, bias=False), head=head()), normal(5, 4, 3)
    with pytest.raises(NotImplementedError, match=f"'fc.weight' {why}") as raised:
        factors(model, x)
    assert "\n" not in str(raised.value) and "requires_grad_(False)" in str(raised.value)
    exact = dense_ggn_blocks(model, x, "classification")["fc.weight"]
    for mode in MODES:
        found = factors(model, x, unsupported="diagonal", kfac_approx=mode)
        assert_close(found.to_dense("fc.weight"), exact.diagonal().diag())
        assert error(exact, exact.diagonal().diag()) > 0.02
    model.fc.requires_grad_(False)
    assert list(factors(model, x).blocks) == ["head.weight", "head.bias"]


def test_a_longer_loop_and_other_operations_in_another_batch():
    model = Model(OWN["in a loop"][0], head=head(), **OWN["in a loop"][1])
    x, longer, y = normal(4, 3, 3), normal(3, 5, 3, seed=1), torch.tensor([0, 1, 2, 0])
    data = [(x, y), (longer, y[:3])]
    found = kronecker_factors(model, data, "classification")
    parts = [dense_ggn_blocks(model, part, "classification") for part, _ in data]
    assert_blocks(found, {name: parts[0][name] + parts[1][name] for name in ("scale", "shift")})

    changing = Model(
        lambda m, x: m.head((x * m.scale if x.shape[1] == 3 else x - m.scale).tanh().mean(1)),
        head=head(),
        scale=zeros(3),
    )
    with pytest.raises(NotImplementedError, match="'scale' meets .* as it did not in the first"):
        kronecker_factors(changing, data, "classification")


def test_rows_that_were_chosen_by_their_values_are_not_taken_for_folded():
    """Experts get as many rows of all examples together as folded ones, not of each."""

    def routed(m, x):
        rows = x.flatten(0, 1)
        chosen = rows[:, 0] > 0
        h = torch.zeros_like(rows)
        h[chosen] = m.fc(rows[chosen])
        return m.head(h.view_as(x).tanh().mean(1))

    model, x = Model(routed, fc=nn.Linear(3, 3), head=head()), normal(5, 4, 3)
    x[..., 0] = torch.tensor([[1.0, 1, -1, -1]])  # two of each, and so it is with folded rows
    counts = [2, 2, 3, 1, 2]  # two of each on average, and of the first
    uneven = x.clone()
    for n, count in enumerate(counts):
        uneven[n, :, 0] = torch.where(torch.arange(4) < count, 1.0, -1.0)
    assert factors(model, x, kfac_approx="reduce").blocks
    with pytest.raises(NotImplementedError, match="'fc' .*got 10 rows in a batch of 5"):
        factors(model, uneven, kfac_approx="reduce")
    assert factors(model, uneven).blocks  # expand need not know
    with pytest.raises(NotImplementedError, match="'fc' .*got 9 rows in a batch of 5"):
        factors(model, torch.where(uneven == uneven[2, 0, 0], uneven, uneven)[[0, 1, 4, 0, 3]],
                kfac_approx="reduce")  # fmt: skip


def test_masked_positions_of_folded_rows_are_not_guessed():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(3, 3), head()

        def forward(self, x, attention_mask):
            windows = self.fc(x.unflatten(1, (2, 2)).flatten(0, 1)).tanh()
            tokens = windows.unflatten(0, (-1, 2)).flatten(1, 2)
            return self.head((tokens * attention_mask[..., None]).mean(1))

    model, x, labels = randomize(Folded()), normal(3, 4, 3), torch.tensor([0, 1, 2])
    mask = torch.ones(3, 4).long()
    factors = kronecker_factors(
        model,
        [{"x": x, "attention_mask": mask, "labels": labels}],
        "classification",
        kfac_approx="reduce",
    )
    assert factors.blocks["fc.weight"].num_terms == 3
    mask[0, 3] = 0
    with pytest.raises(NotImplementedError, match="'fc' .*got 6 rows in a batch of 3"):
        kronecker_factors(
            model, [{"x": x, "attention_mask": mask, "labels": labels}], "classification"
        )
