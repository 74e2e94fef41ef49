"""Models that once gave a wrong number, or were refused though they are right."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from kfac_backend import counted_positions, examples_of_rows, kronecker_factors
from kfac_backend.covariance.output_covariance import OutputCovariance
from marglik import KronLaplace
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.covariance.posteriors import brute_force, dense_precision, precision_of
from tests.kfac_backend.model.odd_models import Gain, Model, assert_same_blocks, factors, noise


def test_sums_over_many_rows_in_half_precision():
    def pooled(layers, x):
        with counted_positions(torch.ones(x.shape[:2], dtype=torch.bool)):
            return layers["out"](layers["fc"](x)).mean(1)

    model = Model(pooled, fc=nn.Linear(4, 4), out=nn.Linear(4, 2))
    x = 1 + 0.1 * noise(2, 3000, 4)
    exact = factors(model, x, kfac_approx="reduce").blocks["layers.fc.weight"].A
    half = factors(model.bfloat16(), x.bfloat16(), kfac_approx="reduce")
    assert_close(half.blocks["layers.fc.weight"].A.double(), exact, rtol=0.01, atol=0.01)


def once(layers, x):
    return layers["fc"](x + layers["pos"](torch.arange(x.shape[1]))).tanh().mean(1)


def each(layers, x):
    return (
        layers["fc"](x + layers["pos"](torch.arange(x.shape[1]).expand(x.shape[:2]))).tanh().mean(1)
    )


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("lengths", [(3, 1), (1, 1), (3, 2)])
def test_positions_of_all_examples_in_batches_of_other_lengths(lengths, kfac_approx):
    children = {"pos": nn.Embedding(3, 4), "fc": nn.Linear(4, 2)}
    batches = [(noise(5, R, 4), torch.arange(5) % 2) for R in lengths]
    found, expected = (
        kronecker_factors(
            Model(function, **children), batches, "classification", kfac_approx=kfac_approx
        )
        for function in (once, each)
    )
    assert_same_blocks(found, expected)


@pytest.mark.parametrize("kfac_approx", MODES)
def test_a_chain_of_layers_that_run_once(kfac_approx):
    def chain(layers, x, expanded=False):
        positions = torch.arange(3).expand(len(x), 3) if expanded else torch.arange(3)
        return layers["fc"](x + layers["lin"](layers["norm"](layers["pos"](positions)))).mean(1)

    children = {"pos": nn.Embedding(3, 4), "norm": nn.LayerNorm(4), "lin": nn.Linear(4, 4)}
    children["fc"] = nn.Linear(4, 2)
    found = factors(Model(chain, **children), noise(5, 3, 4), kfac_approx=kfac_approx)
    whole = Model(lambda layers, x: chain(layers, x, True), **children)
    assert_same_blocks(found, factors(whole, noise(5, 3, 4), kfac_approx=kfac_approx))


def test_layers_that_run_again_in_the_backward_pass():
    model = Model(
        lambda layers, x: layers["b"](
            checkpoint(lambda h: layers["a"](h).tanh(), layers["first"](x), use_reentrant=False)
        ),
        first=nn.Linear(8, 8),
        a=nn.Linear(8, 8),
        b=nn.Linear(8, 2),
    )
    with pytest.raises(NotImplementedError, match="'layers.a' .*runs again in the backward pass"):
        factors(model, noise(8, 8))


def test_a_row_that_no_example_reaches():
    """An expert that the first example is not routed to."""

    def routed(layers, x):
        chosen = x[:, 0] > x[0, 0]
        y = layers["rest"](x)
        return y.index_add(0, chosen.nonzero().flatten(), layers["expert"](x[chosen]))

    model = Model(routed, expert=nn.Linear(4, 2), rest=nn.Linear(4, 2))
    found = factors(model, noise(6, 4))
    assert found.blocks["layers.expert.weight"].num_terms < 6
    assert found.to_dense("layers.expert.weight").any()


def graphs(edges_of):
    generator = torch.Generator().manual_seed(1)
    edge_graph = torch.tensor([g for g, number in enumerate(edges_of) for _ in range(number)])
    return {
        "edges": torch.randn(len(edge_graph), 3, generator=generator).double(),
        "edge_graph": edge_graph.long(),
        "labels": torch.arange(len(edges_of)) % 2,
    }


def graph_network(layers, batch):
    N = len(batch["labels"])
    with examples_of_rows(batch["edge_graph"], N):
        edges = layers["edge"](batch["edges"]).tanh()
    sums = edges.new_zeros(N, 4).index_add(0, batch["edge_graph"], edges)
    return layers["out"](layers["gain"](sums) if "gain" in layers else sums)


@pytest.mark.parametrize("kfac_approx", MODES)
def test_batches_that_do_not_reach_a_layer_add_up(kfac_approx):
    model = Model(graph_network, edge=nn.Linear(3, 4), out=nn.Linear(4, 2))
    some, none = graphs([2, 0, 3]), graphs([0, 0])
    options = {"likelihood": "classification", "kfac_approx": kfac_approx}
    added = kronecker_factors(model, [some], **options) + kronecker_factors(
        model, [none], **options
    )
    assert_same_blocks(added, kronecker_factors(model, [some, none], **options))
    laplace = KronLaplace(model, "classification", kfac_approx=kfac_approx)
    laplace.fit([none])
    laplace.fit([some], override=False)
    assert laplace.factors is not None
    assert_same_blocks(laplace.factors, added)
    laplace.output_distribution(none)


def test_covariances_of_graphs_with_a_diagonal_block():
    model = Model(graph_network, edge=nn.Linear(3, 4), gain=Gain(), out=nn.Linear(4, 2))
    batch = graphs([2, 1, 1])  # four edges, three graphs
    found = factors(model, batch, unsupported="diagonal")
    covariance = OutputCovariance(model, precision_of(found))(batch)[1]
    expected = brute_force(model, batch, dense_precision(found))
    assert_close(covariance, expected)


def test_dropout_beside_what_all_examples_share():
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
    model = Model(
        lambda layers, x: layers["fc"](
            layers["encoder"](x + layers["pos"](torch.arange(3))).mean(1)
        ),
        encoder=encoder,
        pos=nn.Embedding(3, 4),
        fc=nn.Linear(4, 2),
    ).train()
    assert factors(model, noise(4, 3, 4)).num_data == 4


class OwnAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def test_attention_with_other_arguments_is_a_named_error():
    model = Model(
        lambda layers, x: layers["fc"](layers["attention"](x).mean(1)),
        attention=OwnAttention(4, 2, batch_first=True),
        fc=nn.Linear(4, 2),
    )
    with pytest.raises(NotImplementedError, match="'layers.attention' .*AttentionByParts"):
        factors(model, noise(4, 3, 4))


def test_keywords_of_a_transformer_layer():
    children = {"encoder": nn.TransformerEncoderLayer(4, 2, 8, dropout=0), "fc": nn.Linear(4, 2)}
    by_name, by_place = (
        Model(lambda layers, x, f=f: layers["fc"](f(layers["encoder"], x).mean(0)), **children)
        for f in (lambda e, x: e(src=x.transpose(0, 1)), lambda e, x: e(x.transpose(0, 1)))
    )
    x = noise(4, 3, 4)
    assert_same_blocks(factors(by_name, x), factors(by_place, x))


@pytest.mark.parametrize("kfac_approx", MODES)
def test_keys_that_are_not_the_queries_tensor(kfac_approx):
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])

    def attended(layers, x, query):
        with counted_positions(mask):
            y, _ = layers["attention"](query(x), x, x, key_padding_mask=~mask)
        y = y.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True)
        return layers["fc"](y)

    children = {"attention": nn.MultiheadAttention(4, 2, batch_first=True), "fc": nn.Linear(4, 2)}
    same, other = (
        Model(lambda layers, x, q=q: attended(layers, x, q), **children)
        for q in (lambda x: x, lambda x: x * 1.0)
    )
    x = noise(3, 3, 4)
    assert_same_blocks(
        factors(same, x, kfac_approx=kfac_approx), factors(other, x, kfac_approx=kfac_approx)
    )


@pytest.mark.parametrize("kfac_approx", MODES)
def test_positions_folded_inside_of_a_mask(kfac_approx):
    mask = torch.tensor([[True, False, True]] * 3 + [[True, True, True]])

    def pooled(layers, x, fold):
        with counted_positions(mask):
            y = fold(layers["fc"], x)
        return y.masked_fill(~mask[..., None], 0).mean(1)

    def of(way):
        model = Model(lambda layers, x: pooled(layers, x, way), fc=nn.Linear(4, 2))
        return factors(model, noise(4, 3, 4), kfac_approx=kfac_approx)

    def turned(fc, x):  # positions in front of examples
        return fc(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (3, 4)).transpose(0, 1)

    folded = of(lambda fc, x: fc(x.flatten(0, 1)).unflatten(0, (4, 3)))
    assert_same_blocks(of(lambda fc, x: fc(x)), folded)
    with pytest.raises(NotImplementedError, match="'layers.fc'.* (mix|do not count)"):
        of(turned)


def test_a_mapping_with_the_only_arguments_name():
    model = Model(lambda layers, x: layers["fc"](x["x"]), fc=nn.Linear(4, 2))
    batch = {"x": noise(3, 4), "labels": torch.tensor([0, 1, 1])}
    assert factors(model, batch).num_data == 3


def test_modes_of_axes_in_another_order_do_not_add_up():
    model = Model(lambda layers, x: layers["fc"](x).mean((1, 2)), fc=nn.Linear(4, 2))
    x = noise(3, 2, 2, 4)
    first = factors(model, x, kfac_approx={"*": {"a": "reduce", "b": "expand"}})
    second = factors(model, x, kfac_approx={"*": {"b": "expand", "a": "reduce"}})
    with pytest.raises(ValueError, match="Cannot add factors with kfac_approx"):
        first + second
