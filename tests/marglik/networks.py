"""Small networks for tokens, graphs and images, and networks with random parameters."""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from marglik.graphs import Graphs


class QuadraticForms(nn.Module):
    """Ten quadratic forms of the pixels of 8×8 images; the backend has no rule for it."""

    def __init__(self) -> None:
        super().__init__()
        self.forms = nn.Parameter(torch.zeros(10, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) as logits (N, 10)."""
        return torch.einsum("ni,kij,nj->nk", x.flatten(1), self.forms, x.flatten(1))


class TokenNetwork(nn.Module):
    """Predicts each next token from the present one and the one before it.

    Args:
        num_tokens: C.
        hidden: width.
    """

    def __init__(self, num_tokens: int = 256, hidden: int = 4) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.inner = nn.Linear(2 * num_tokens, hidden)
        self.outer = nn.Linear(hidden, num_tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, R) as logits (N, R, C)."""
        tokens = one_hot(x, self.num_tokens).to(self.inner.weight)
        before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], dim=1)
        return self.outer(torch.tanh(self.inner(torch.cat([tokens, before], dim=-1))))


class NodeCounts(nn.Module):
    """Classifies graphs by their sums of node features.

    Args:
        node_features: of each node.
        num_classes: C.
        hidden: width.
    """

    def __init__(self, node_features: int = 3, num_classes: int = 2, hidden: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(node_features, hidden)
        self.outer = nn.Linear(hidden, num_classes)

    def forward(self, graphs: Graphs) -> Tensor:
        """Graphs as logits (G, C)."""
        sums = graphs.nodes.new_zeros(len(graphs), graphs.nodes.shape[1])
        sums = sums.index_add(0, graphs.node_graph, graphs.nodes)
        return self.outer(torch.tanh(self.inner(sums)))


def randomised(model: nn.Module) -> nn.Module:
    """The model in float64, with random biases and norms too, so that each parameter matters."""
    torch.manual_seed(0)
    model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model
