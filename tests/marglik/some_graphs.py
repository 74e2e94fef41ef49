"""Small graphs for tests, given as lists of edges, and put together by loops."""

import torch

from marglik.graphs import Graphs

__all__ = ["SHAPES", "assembled", "features", "some_graphs"]

SHAPES = (
    (3, ((0, 1), (1, 0), (1, 2), (2, 0))),
    (1, ()),  # an isolated node
    (4, ((0, 0), (3, 1), (3, 1))),  # an edge to itself, two between the same nodes
    (0, ()),  # no nodes
    (2, ((1, 0), (0, 1))),
    (3, ()),
)
"""(number of nodes, edges (sender, receiver) by the numbers within the graph)."""


def features(shapes, node_features=3, edge_features=2, seed=0):
    """For each graph the features of nodes and of edges, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    return [(draw(n, node_features), draw(len(edges), edge_features)) for n, edges in shapes]


def assembled(shapes, values):
    """A batch of these graphs."""
    senders, receivers, start = [], [], 0
    for n, edges in shapes:
        senders += [start + s for s, _ in edges]
        receivers += [start + r for _, r in edges]
        start += n
    return Graphs(
        torch.cat([nodes for nodes, _ in values]),
        torch.cat([edges for _, edges in values]),
        torch.tensor(senders, dtype=torch.int64),
        torch.tensor(receivers, dtype=torch.int64),
        torch.tensor([n for n, _ in shapes]),
        torch.tensor([len(edges) for _, edges in shapes]),
    ).check()


def some_graphs(shapes=SHAPES, **sizes):
    """A batch of graphs with random features."""
    return assembled(shapes, features(shapes, **sizes))
