# %% [markdown]
# # Graphs of different sizes
#
# For graph networks. Their layers run on the concatenated nodes and edges of all graphs of a batch,
# so rows are not examples. The model declares the graph of each row with
# `kfac_backend.examples_of_rows`. Reduce then multiplies both sums over the R rows of a graph by
# 1/√R.
#
# The graphs are random. The class says whether a graph has more edges than nodes. Ten seconds on
# one core.

# %%
import torch
from matplotlib import pyplot
from torch import nn

from kfac_backend import examples_of_rows, kronecker_factors
from marglik import calibrate, compute_metrics, map_predictive, marglik_training, predict_all
from marglik.data import Batches
from marglik.graphs import Graphs, sum_by

torch.manual_seed(0)


def made_graphs(number):
    """Graphs of 5 to 15 nodes with random edges, and whether edges outnumber nodes."""
    nodes = torch.randint(5, 16, (number,))
    edges = (nodes * (0.5 + torch.rand(number))).long()
    first = nodes.cumsum(0) - nodes
    size, start = nodes.repeat_interleave(edges), first.repeat_interleave(edges)
    ends = [start + (torch.rand(len(size)) * size).long() for _ in range(2)]
    features = torch.randn(int(nodes.sum()), 37), torch.ones(len(size), 1)
    return Graphs(*features, *ends, nodes, edges), (edges > nodes).long()


(x, y), (x_test, y_test) = made_graphs(1000), made_graphs(300)
held_out = [(x[800:1000], y[800:1000])]
x, y = x[:800], y[:800]
print(f"{len(x)} graphs of {x.node_counts.min()} to {x.node_counts.max()} nodes")

# %% [markdown]
# ## The network
#
# The network passes messages along the edges twice. It then sums the nodes of each graph.


# %%
class GraphNetwork(nn.Module):
    """Logits (G, 2) of G graphs; v are features of nodes, e features of edges."""

    def __init__(self, d=24):
        super().__init__()
        self.embed = nn.Linear(37, d)
        self.edges = nn.ModuleList(nn.Linear(2 * d, d) for _ in range(2))
        self.nodes = nn.ModuleList(nn.Linear(2 * d, d) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.head = nn.Linear(d, 2)

    def forward(self, graphs):
        """Update edges from their ends, nodes from the sum of the edges that point to them."""
        of_nodes, G = graphs.node_graph, len(graphs)
        with examples_of_rows(of_nodes, G):
            v = self.embed(graphs.nodes)
        for edge, node, norm in zip(self.edges, self.nodes, self.norms, strict=True):
            with examples_of_rows(graphs.edge_graph, G):
                e = edge(torch.cat([v[graphs.senders], v[graphs.receivers]], 1)).relu()
            incoming = sum_by(graphs.receivers, e, len(v))
            with examples_of_rows(of_nodes, G):
                v = norm(node(torch.cat([v, incoming], 1)).relu())
        return self.head(sum_by(of_nodes, v, G))


model = GraphNetwork()

# %% [markdown]
# ## The curvature of a batch
#
# The sizes of A and B depend on the layer, not on the sizes of the graphs.

# %%
factors = kronecker_factors(model, [(x[:64], y[:64])], "classification", kfac_approx="reduce")
for name, block in list(factors.blocks.items())[:6]:
    A = "" if block.A is None else f"A {tuple(block.A.shape)}"
    print(f"{name:28} B {tuple(block.B.shape)} {A}")

# %% [markdown]
# ## Training

# %%
loader = Batches(x, y, 50, shuffle=True)
laplace, model, negative_evidences, losses = marglik_training(
    model, loader, n_epochs=20, marglik_frequency=5, n_hypersteps=50,
    optimizer_kwargs={"lr": 3e-3}, kfac_approx="reduce",
)  # fmt: skip
figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
left.plot(losses)
left.set(xlabel="epoch", ylabel="training loss (nats)")
right.plot([-value / laplace.n_data for value in negative_evidences])
right.set(xlabel="hyperparameter step", ylabel="log evidence per graph")

# %%
predict = calibrate(laplace, held_out)
print(predict.calibration.in_words)
for name, predictive in {"MAP": map_predictive(model), "calibrated": predict}.items():
    metrics = compute_metrics(*predict_all(predictive, [(x_test, y_test)]), "classification")
    print(f"{name:10} NLL {metrics.nll:.3f} accuracy {metrics.accuracy:.3f}")
