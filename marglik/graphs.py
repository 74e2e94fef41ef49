"""Batches of graphs, concatenated in one set of tensors."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["Graphs", "sum_by"]


@dataclass(eq=False)  # not frozen: Lightning sets fields to convert inputs
class Graphs:
    """G directed graphs with V nodes and E edges in total, concatenated.

    Graph 0's nodes come first, then graph 1's, and so on. The edges have the same order. Edge e
    points from node ``senders[e]`` to node ``receivers[e]``, with indices among all V nodes. An
    undirected edge is two edges. Graphs may have no edges or no nodes.

    Models and loaders treat the object like a tensor of G examples: ``len``, ``graphs[which]`` and
    ``graphs.to(device)``. These do not check anything; `check` does so once, when data is loaded.
    """

    nodes: Tensor
    """(V, d_v) features, of floating point."""
    edges: Tensor
    """(E, d_e) features, of floating point; d_e may be 0."""
    senders: Tensor
    """(E,) int64: the node that each edge comes from."""
    receivers: Tensor
    """(E,) int64: the node that each edge points to."""
    node_counts: Tensor
    """(G,) int64: number of nodes of each graph."""
    edge_counts: Tensor
    """(G,) int64: number of edges of each graph."""

    @property
    def node_graph(self) -> Tensor:
        """(V,) int64: the graph of each node."""
        return _owners(self.node_counts, len(self.nodes))

    @property
    def edge_graph(self) -> Tensor:
        """(E,) int64: the graph of each edge."""
        return _owners(self.edge_counts, len(self.senders))

    def __len__(self) -> int:
        """Return G, the number of graphs."""
        return len(self.node_counts)

    def __getitem__(self, index: int | slice | Tensor) -> "Graphs":
        """Return some of the graphs in the given order, with renumbered nodes.

        Args:
            index: a slice, a tensor (K,) of indices, or a boolean mask (G,), on the device of the
                graphs. An integer n selects graph n as a batch of one.

        Raises:
            IndexError: an index out of range, or indices that are not one-dimensional.
        """
        numbers = torch.arange(len(self), device=self.node_counts.device)[index]
        if numbers.dim() > 1:
            raise IndexError(
                f"Graphs cannot be indexed by a tensor of shape {tuple(numbers.shape)}. Use a "
                "slice or a one-dimensional tensor of graph numbers."
            )
        numbers = numbers.reshape(-1)
        node_counts, edge_counts = self.node_counts[numbers], self.edge_counts[numbers]
        first_nodes = _starts(self.node_counts)[numbers]
        node_index, _ = _members(first_nodes, node_counts)
        edge_index, owners = _members(_starts(self.edge_counts)[numbers], edge_counts)
        shift = (_starts(node_counts) - first_nodes)[owners]  # (E',)
        return Graphs(
            self.nodes[node_index],
            self.edges[edge_index],
            self.senders[edge_index] + shift,
            self.receivers[edge_index] + shift,
            node_counts,
            edge_counts,
        )

    def to(self, *args: Any, **kwargs: Any) -> "Graphs":
        """Return the graphs on a device; a dtype applies to the features only."""
        nodes, edges = self.nodes.to(*args, **kwargs), self.edges.to(*args, **kwargs)
        numbers = (self.senders, self.receivers, self.node_counts, self.edge_counts)
        return Graphs(nodes, edges, *(tensor.to(nodes.device) for tensor in numbers))

    def check(self) -> Self:
        """Return the graphs, if their tensors are consistent.

        Raises:
            ValueError: there is no graph; a tensor has the wrong shape, dtype or device; counts are
                negative or do not add up; or an edge leads to a node that does not exist or belongs
                to another graph.
        """
        V, E, G = len(self.nodes), len(self.edges), self.node_counts.numel()
        lengths = {"senders": E, "receivers": E, "node_counts": G, "edge_counts": G}
        for name in ("nodes", "edges", *lengths):
            tensor = getattr(self, name)
            if name in lengths:
                needed = f"({lengths[name]},) and torch.int64"
                fits = tensor.shape == (lengths[name],) and tensor.dtype == torch.int64
            else:
                needed = f"(number of {name}, features of one) and floating point"
                fits = tensor.dim() == 2 and tensor.is_floating_point()
            if not fits or tensor.device != self.nodes.device or not G:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype} on "
                    f"{tensor.device}. It needs {needed}, on the device of nodes, for at least 1 "
                    "graph."
                )
        for name, total in (("node_counts", V), ("edge_counts", E)):
            counts = getattr(self, name)
            if counts.min() < 0 or counts.sum() != total:
                raise ValueError(
                    f"The numbers in {name} must be at least 0 and add up to {total}, because each "
                    f"row of {name.partition('_')[0]}s belongs to one graph. Their minimum is "
                    f"{int(counts.min())}, and their sum {int(counts.sum())}."
                )
        edge_graph = self.edge_graph
        for name in ("senders", "receivers"):
            numbers = getattr(self, name)
            wrong = (numbers < 0) | (numbers >= V)
            wrong[~wrong] = self.node_graph[numbers[~wrong]] != edge_graph[~wrong]
            if wrong.any():
                edge = int(wrong.nonzero()[0])
                raise ValueError(
                    f"{name} has node {int(numbers[edge])} for edge {edge}, which is not a node of "
                    f"the edge's graph {int(edge_graph[edge])}. Number the nodes of all graphs "
                    f"from 0 to {V - 1}, and order the edges by graph."
                )
        return self


def sum_by(index: Tensor, x: Tensor, size: int) -> Tensor:
    """Return sums of rows of x (M, d) with equal index: (size, d), zero if there are none."""
    return x.new_zeros(size, x.shape[1]).index_add(0, index, x)


def _owners(counts: Tensor, total: int) -> Tensor:
    """Return 0 repeated counts[0] times, then 1 repeated counts[1] times, ...; (total,)."""
    numbers = torch.arange(len(counts), device=counts.device)
    return numbers.repeat_interleave(counts, output_size=total)


def _starts(counts: Tensor) -> Tensor:
    """Return the index of each graph's first node or edge."""
    return counts.cumsum(0) - counts


def _members(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return starts[k], ..., starts[k] + counts[k] - 1 of all k, and the k of each."""
    owners = _owners(counts, int(counts.sum()))
    return torch.arange(len(owners), device=counts.device) + (starts - _starts(counts))[
        owners
    ], owners
