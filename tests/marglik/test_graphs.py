"""Batches of graphs: who owns what, choosing some, errors."""

from dataclasses import fields, replace

import pytest
import torch
from torch.testing import assert_close

from marglik.graphs import Graphs, sum_by
from tests.marglik.some_graphs import SHAPES, assembled, features, some_graphs

NAMES = [field.name for field in fields(Graphs)]


def assert_same(graphs, expected):
    for name in NAMES:
        assert_close(getattr(graphs, name), getattr(expected, name), rtol=0, atol=0, msg=name)


def test_every_node_and_edge_has_its_graph():
    graphs = some_graphs()
    assert len(graphs) == 6
    assert graphs.node_graph.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 4, 4, 5, 5, 5]
    assert graphs.edge_graph.tolist() == [0, 0, 0, 0, 2, 2, 2, 4, 4]
    assert graphs.senders.tolist() == [0, 1, 1, 2, 4, 7, 7, 9, 8]


@pytest.mark.parametrize(
    ("which", "numbers"),
    [
        (slice(2, 5), [2, 3, 4]),
        (slice(-2, None), [4, 5]),
        (slice(2, 2), []),
        (torch.tensor([2, 2, -1, 2]), [2, 2, 5, 2]),
        (torch.tensor([False, True, True, False, False, True]), [1, 2, 5]),
        (-2, [4]),
    ],
)
def test_chosen_graphs_are_those_that_loops_put_together(which, numbers):
    values = features(SHAPES)
    chosen = assembled(SHAPES, values)[which]
    if not numbers:
        assert len(chosen) == len(chosen.nodes) == len(chosen.senders) == 0
        assert chosen.nodes.shape == (0, 3) and chosen.edges.shape == (0, 2)
        return
    assert_same(chosen, assembled([SHAPES[n] for n in numbers], [values[n] for n in numbers]))


def test_nodes_of_chosen_graphs_are_renumbered():
    """Negative control: their old numbers would be those of other nodes, or of none."""
    graphs = some_graphs()
    with pytest.raises(IndexError, match=r"shape \(2, 1\). Use a slice or a one-dimensional"):
        graphs[torch.tensor([[0], [1]])]
    late = graphs[4:]
    assert late.senders.tolist() == [1, 0]
    with pytest.raises(ValueError, match="senders has node 9 for edge 0"):
        replace(late, senders=graphs.senders[7:]).check()


def test_moving_changes_the_dtype_of_features_alone():
    graphs = some_graphs()
    moved = graphs.to("meta", torch.float32)
    assert all(getattr(moved, name).device.type == "meta" for name in NAMES)
    assert moved.nodes.dtype == moved.edges.dtype == torch.float32
    assert all(getattr(moved, name).dtype == torch.int64 for name in NAMES[2:])
    assert_same(graphs.to("cpu"), graphs)


def test_gradients_pass_through_the_choice():
    graphs = some_graphs()
    graphs.nodes.requires_grad_()
    graphs[torch.tensor([0, 4, 0])].nodes.sum().backward()
    times = torch.tensor([2.0, 0, 0, 0, 1, 0], dtype=torch.float64)
    assert_close(graphs.nodes.grad, times[graphs.node_graph][:, None].expand(-1, 3))


def test_sums_by_index():
    x = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    assert sum_by(torch.tensor([2, 0, 2]), x, 4).tolist() == [[3, 4], [0, 0], [6, 8], [0, 0]]
    assert sum_by(torch.tensor([], dtype=torch.int64), x[:0], 2).tolist() == [[0, 0], [0, 0]]


INT = torch.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": torch.zeros(13, 3, dtype=INT)}, "nodes has .* torch.int64 .* floating point"),
        ({"edges": torch.zeros(8, 2)}, r"senders has shape \(9,\) .* needs \(8,\) and torch.int64"),
        ({"edges": torch.zeros(9, 2, device="meta")}, "edges has .* on meta"),
        ({"node_counts": torch.tensor([3, 1, 4, 0, 2, 4])}, "add up to 13.*their sum 14"),
        ({"receivers": torch.tensor([1, 0, 2, 0, 4, 5, 5, 8, 13])}, "receivers has node 13 .* 8"),
        ({"senders": torch.tensor([0, 1, -1, 2, 4, 7, 7, 9, 8])}, "senders has node -1 for edge 2"),
        (  # numbered within each graph, as files often do
            {"receivers": torch.tensor([1, 0, 2, 0, 0, 1, 1, 0, 1])},
            "receivers has node 0 for edge 4, which is not a node of the edge's graph 2",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    graphs = some_graphs()
    assert graphs.check() is graphs
    with pytest.raises(ValueError, match=message):
        replace(graphs, **change).check()
