"""A graph network: messages pass along edges, to nodes, and to the graph as a whole."""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from kfac_backend import examples_of_rows
from marglik.graphs import Graphs, sum_by


class Update(nn.Module):
    """One of a block's three updates: ReLU(LayerNorm(W [a, b, ...] + bias)).

    Args:
        in_features: features of all inputs together.
        dim: d, features of the output.
    """

    def __init__(self, in_features: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return (M, d) for inputs (M, ...) with ``in_features`` features in all."""
        return relu(self.norm(self.linear(torch.cat(inputs, dim=1))))


class GraphNetworkBlock(nn.Module):
    """One step of message passing; e, v, u are the features of edges, nodes and graphs.

    For an edge from node s to node r of graph g

        e' = φ_e(e, v_s, v_r, u_g),  v' = φ_v(v, Σ e' of incoming edges, u_g),
        u' = φ_u(u, Σ v' of the nodes, Σ e' of the edges).

    Source: Battaglia et al. 2018 (arXiv:1806.01261), algorithm 1, with sums for all ρ.

    Args:
        dim: d, features of edges, of nodes, and of graphs afterwards.
        global_features: features of graphs before: d, or 0 where there are none yet.
    """

    def __init__(self, dim: int, global_features: int) -> None:
        super().__init__()
        self.edge_update = Update(3 * dim + global_features, dim)
        self.node_update = Update(2 * dim + global_features, dim)
        self.global_update = Update(2 * dim + global_features, dim)

    def forward(
        self, graphs: Graphs, e: Tensor, v: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return e' (E, d), v' (V, d) and u' (G, d) of e (E, d), v (V, d) and u (G, d or 0)."""
        node_graph, edge_graph, G = graphs.node_graph, graphs.edge_graph, len(graphs)
        # Each edge is updated from itself, its two ends and its graph: (E, 3 d + d_u).
        ends = v.index_select(0, graphs.senders), v.index_select(0, graphs.receivers)
        with examples_of_rows(edge_graph, G):
            e = self.edge_update(e, *ends, u.index_select(0, edge_graph))
        # Then each node from the new edges that point to it: (V, 2 d + d_u).
        incoming = sum_by(graphs.receivers, e, len(v))
        with examples_of_rows(node_graph, G):
            v = self.node_update(v, incoming, u.index_select(0, node_graph))
        # And each graph from all that is new in it. A graph is one row: nothing to declare.
        u = self.global_update(u, sum_by(node_graph, v, G), sum_by(edge_graph, e, G))
        return e, v, u


class GraphNetwork(nn.Module):
    """Logits of a graph network with features of edges, nodes and whole graphs.

    Nodes and edges are embedded linearly and normalised, blocks pass messages, and the graph's
    features are classified. Graphs start without features of their own. All layers on edges and
    nodes run in `kfac_backend.examples_of_rows`, which says which graph each row belongs to.

    Sources: Battaglia et al. 2018, "Relational inductive biases, deep learning, and graph
    networks"; Eschenhagen et al. 2023 (arXiv:2311.00636), appendix on graph neural networks, whose
    benchmark uses the same updates (a linear layer, LayerNorm, ReLU). Weights are initialised as in
    He et al. 2015, biases to zero.

    Args:
        node_features: d_v, features of a node.
        num_classes: C, the number of classes.
        edge_features: d_e, features of an edge.
        dim: d, features of nodes, edges and graphs within the network.
        depth: number of blocks.
    """

    def __init__(
        self,
        node_features: int,
        num_classes: int,
        edge_features: int = 1,
        dim: int = 32,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.node_encoder = nn.Sequential(nn.Linear(node_features, dim), nn.LayerNorm(dim))
        self.edge_encoder = nn.Sequential(nn.Linear(edge_features, dim), nn.LayerNorm(dim))
        blocks = [GraphNetworkBlock(dim, global_features=dim * (i > 0)) for i in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(dim, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, graphs: Graphs) -> Tensor:
        """Return the logits (G, C) of G graphs."""
        G = len(graphs)
        with examples_of_rows(graphs.node_graph, G):
            v = self.node_encoder(graphs.nodes)  # (V, d)
        with examples_of_rows(graphs.edge_graph, G):
            e = self.edge_encoder(graphs.edges)  # (E, d)
        u = v.new_zeros(G, 0)  # graphs have no features before the first block
        for block in self.blocks:
            e, v, u = block(graphs, e, v, u)
        return self.head(u)
