"""Networks of graphs: formulas written out, batches, symmetries, rows declared, errors."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.models import GraphNetwork
from kfac_backend.layers.rows import current_rows
from tests.marglik.networks import randomised
from tests.marglik.some_graphs import SHAPES, assembled, features, some_graphs


def graph_network(depth=2, num_classes=4):
    return randomised(GraphNetwork(3, num_classes, edge_features=2, dim=5, depth=depth))


def norm(module, x):
    centred = x - x.mean()
    return centred / (centred.square().mean() + module.eps).sqrt() * module.weight + module.bias


def updated(update, *inputs):
    linear = update.linear
    return norm(update.norm, linear.weight @ torch.cat(inputs) + linear.bias).clamp(min=0)


def encoded(encoder, x):
    return norm(encoder[1], encoder[0].weight @ x + encoder[0].bias)


def graph_network_written_out(model, nodes, edges, pairs):
    """The logits of one graph, edge by edge and node by node."""
    v = [encoded(model.node_encoder, x) for x in nodes]
    e = [encoded(model.edge_encoder, x) for x in edges]
    zero = torch.zeros(5, dtype=torch.float64)
    u = zero[:0]
    for block in model.blocks:
        e = [
            updated(block.edge_update, x, v[s], v[r], u) for x, (s, r) in zip(e, pairs, strict=True)
        ]
        new = []
        for i, x in enumerate(v):
            incoming = sum((y for y, (_, r) in zip(e, pairs, strict=True) if r == i), zero)
            new.append(updated(block.node_update, x, incoming, u))
        v = new
        u = updated(block.global_update, u, sum(v, zero), sum(e, zero))
    return model.head.weight @ u + model.head.bias


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_graph_network_equals_its_formula_written_out(depth):
    model, values = graph_network(depth), features(SHAPES)
    expected = [
        graph_network_written_out(model, *pair, edges)
        for pair, (_, edges) in zip(values, SHAPES, strict=True)
    ]
    assert_close(model(assembled(SHAPES, values)), torch.stack(expected))


def test_every_layer_on_nodes_or_edges_declares_whose_rows_it_sees():
    """Curvature would else take every node and every edge for an example."""
    model, graphs = graph_network(depth=2), some_graphs()
    owners = {len(graphs.nodes): graphs.node_graph, len(graphs.edges): graphs.edge_graph}
    assert len(owners | {len(graphs): None}) == 3  # no two sizes are alike
    seen = []

    def look(module, args):
        rows = current_rows()
        if len(args[0]) == len(graphs):
            assert rows is None
        else:
            assert rows is not None and rows.num_examples == len(graphs)
            assert torch.equal(rows.index, owners[len(args[0])])
        seen.append(module)

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]
    for layer in layers:
        layer.register_forward_pre_hook(look)
    model(graphs)
    assert len(layers) == len(set(seen)) == 4 + 2 * 6 + 1


@pytest.mark.parametrize("shapes", [[(2, ()), (0, ()), (1, ())], [(0, ())]])
def test_graphs_without_any_edge(shapes):
    model = graph_network()
    graphs = some_graphs(shapes)
    logits = model(graphs)
    expected = [graph_network_written_out(model, *pair, ()) for pair in features(shapes)]
    assert_close(logits, torch.stack(expected))
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_parameters_of_the_graph_network():
    model = GraphNetwork(37, 2)  # NCI1's
    d, norms = 32, 2 * 32
    encoders = (37 * d + d + norms) + (d + d + norms)
    first = (3 * d * d + d + norms) + 2 * (2 * d * d + d + norms)
    second = (4 * d * d + d + norms) + 2 * (3 * d * d + d + norms)
    total = sum(p.numel() for p in model.parameters())
    assert total == encoders + first + second + 2 * d + 2 == 19_458
    names = dict(model.named_parameters())
    assert {"node_encoder.0.weight", "blocks.1.global_update.norm.bias", "head.bias"} <= set(names)
