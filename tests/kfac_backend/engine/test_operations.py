"""Parameters that pass no hook: found, proved and exact, or refused by name, without declaring."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import MODES, assert_blocks, randomize
from tests.kfac_backend.networks import random_model
from tests.oracles import dense_ggn_blocks
from tests.random_numbers import error, normal


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
    "functions that take no copies": (
        lambda m, x: m.head(F.prelu(F.instance_norm(x.mT, weight=m.a, bias=m.b), m.slope).mean(2)),
        {name: zeros(3) for name in ("a", "b", "slope")},
    ),
    "mask of attention": (
        lambda m, x: m.head(F.scaled_dot_product_attention(x, x, x, m.bias).mean(1)),
        {"bias": zeros(1, 4, 4)},
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
    model, x = random_model(function, **{"head": head(), **own}), normal(5, 4, 3)
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


def by_value(m, x):
    """Which operation it is depends on the values: vmap cannot follow."""
    scaled = F.linear(x, m.fc.weight) + m.fc.weight.sum()
    return m.head((scaled if scaled.sum() > 1e9 else scaled.tanh()).mean(1))


REFUSED = {
    "a weight, and more": (
        lambda m, x: m.head((m.fc(x) * m.fc.weight.sum()).tanh().mean(1)),
        "is a weight, and also used by other operations",
    ),
    "a matrix in front": (
        lambda m, x: m.head((m.fc.weight @ x.mT).tanh().mean(2)),
        "is a matrix argument of .*matmul",
    ),
    "by value": (by_value, "is a weight, and also used by other operations"),
    "sequence first": (
        lambda m, x: m.head(F.linear(x.transpose(0, 1), m.fc.weight).tanh().mean(0)),
        "is the weight of linear, .* not have the examples first",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_or_an_exact_diagonal(case):
    function, why = REFUSED[case]
    model, x = random_model(function, fc=nn.Linear(3, 3, bias=False), head=head()), normal(5, 4, 3)
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
    model = random_model(OWN["in a loop"][0], head=head(), **OWN["in a loop"][1])
    x, longer, y = normal(4, 3, 3), normal(3, 5, 3, seed=1), torch.tensor([0, 1, 2, 0])
    data = [(x, y), (longer, y[:3])]
    found = kronecker_factors(model, data, "classification")
    parts = [dense_ggn_blocks(model, part, "classification") for part, _ in data]
    assert_blocks(found, {name: parts[0][name] + parts[1][name] for name in ("scale", "shift")})

    changing = random_model(
        lambda m, x: m.head((x * m.scale if x.shape[1] == 3 else x - m.scale).tanh().mean(1)),
        head=head(),
        scale=zeros(3),
    )
    with pytest.raises(NotImplementedError, match="'scale' is used by .*, unlike in the first"):
        kronecker_factors(changing, data, "classification")


def test_rows_that_were_chosen_by_their_values_are_not_taken_for_folded():
    """Experts get as many rows of all examples together as folded ones, not of each."""

    def routed(m, x):
        rows = x.flatten(0, 1)
        chosen = rows[:, 0] > 0
        h = torch.zeros_like(rows)
        h[chosen] = m.fc(rows[chosen])
        return m.head(h.view_as(x).tanh().mean(1))

    model, x = random_model(routed, fc=nn.Linear(3, 3), head=head()), normal(5, 4, 3)
    x[..., 0] = torch.tensor([[1.0, 1, -1, -1]])  # two of each, and so it is with folded rows
    counts = [2, 2, 3, 1, 2]  # two of each on average, and of the first
    uneven = x.clone()
    for n, count in enumerate(counts):
        uneven[n, :, 0] = torch.where(torch.arange(4) < count, 1.0, -1.0)
    assert factors(model, x, kfac_approx="reduce").blocks
    with pytest.raises(NotImplementedError, match="'fc' .*got 10 rows in a batch of 5"):
        factors(model, uneven, kfac_approx="reduce")
    assert factors(model, uneven).blocks  # expand need not know


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
    data = [{"x": x, "attention_mask": mask, "labels": labels}]
    found = kronecker_factors(model, data, "classification", kfac_approx="reduce")
    assert found.blocks["fc.weight"].num_terms == 3
    mask[0, 3] = 0
    with pytest.raises(NotImplementedError, match="'fc' .*6 rows .* of 3.*dict_key_mask=None"):
        kronecker_factors(model, data, "classification")
