"""Graph convolutional network: logits of every node of one graph."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu

from kfac_backend import examples_of_rows
from marglik.graphs import Graphs, sum_by
from marglik.sizes import check_sizes

__all__ = ["GCN", "propagate"]


class GCN(nn.Module):
    """Logits of the nodes of one graph, from layers H' = ReLU(Â H Wᵀ + bias).

    Â = D^(-1/2) (A + I) D^(-1/2) is the adjacency matrix with self-loops, D the degrees in A + I;
    the last layer has no ReLU. The graph is one example whose R nodes have a loss term each: K-FAC
    sees the paper's expand setting. Mark nodes without a label as targets to be ignored.

    Source: Kipf & Welling 2017, "Semi-Supervised Classification with Graph Convolutional Networks",
    eq. 2; without dropout, which would make the loss random. Neighbours are summed before the
    linear layer, which gives the same numbers, so that the output depends only on the last layer's
    input. Weights are initialised as in Glorot & Bengio 2010, biases to zero.

    Args:
        in_features: features of a node.
        num_classes: C, the number of classes.
        dim: features of a node in the hidden layers.
        depth: number of layers, and so the distance from which a node receives information.

    Raises:
        ValueError: if an argument is below 1.
    """

    def __init__(self, in_features: int, num_classes: int, dim: int = 16, depth: int = 2) -> None:
        super().__init__()
        check_sizes(in_features=in_features, num_classes=num_classes, dim=dim, depth=depth)
        self.in_features = in_features
        widths = [in_features, *[dim] * (depth - 1), num_classes]
        layers = [nn.Linear(d_in, d_out) for d_in, d_out in pairwise(widths)]
        self.layers = nn.ModuleList(layers)
        for linear in layers:
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, graph: Graphs) -> Tensor:
        """Return the logits (1, R, C) of the R nodes of one graph; edge features are ignored."""
        if len(graph) != 1:
            raise ValueError(
                f"GCN got {len(graph)} graphs; it takes one, whose nodes it classifies. Select one "
                "with graphs[0], or classify whole graphs with a GraphNetwork."
            )
        x = graph.nodes  # (R, d)
        if x.shape[1] != self.in_features:
            raise ValueError(
                f"GCN got nodes with {x.shape[1]} features and was built for {self.in_features}; "
                "set in_features to that of the data."
            )
        node_graph, last = graph.node_graph, len(self.layers) - 1
        for i, linear in enumerate(self.layers):
            # Â (x Wᵀ) = (Â x) Wᵀ; in this order nodes mix before the layer, not behind it.
            x = propagate(graph, x)
            with examples_of_rows(node_graph, 1):
                x = linear(x)
            x = relu(x) if i < last else x
        return x.unsqueeze(0)


def propagate(graph: Graphs, x: Tensor) -> Tensor:
    """Â x: for each node r, the sum of x_s / √(D_r D_s) over r itself and the s with an edge to r.

    A node's degree is 1 plus the number of edges to it. Undirected graphs have each edge in both
    directions. An edge from a node to itself adds to the self-loop that all nodes have.
    """
    ones = x.new_ones(len(graph.receivers), 1)
    scale = (1 + sum_by(graph.receivers, ones, len(x))).rsqrt()  # (R, 1), D^(-1/2)
    # The self-loop adds a node's own scaled row to those that its edges bring.
    scaled = scale * x
    incoming = scaled.index_select(0, graph.senders)
    return scale * (scaled + sum_by(graph.receivers, incoming, len(x)))
