"""The networks of MLCommons AlgoPerf's workloads that the paper trains: molecules and ImageNet."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from kfac_backend import examples_of_rows
from marglik.graphs import Graphs, sum_by


@dataclass(eq=False)
class Molecules:
    """G molecules, and which of their C properties are known; indexed like a tensor of G."""

    graphs: Graphs
    known: Tensor
    """(G, C) bool."""

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: Any) -> "Molecules":
        return Molecules(self.graphs[index], self.known[index])

    def to(self, *args: Any, **kwargs: Any) -> "Molecules":
        """Return the molecules on a device."""
        graphs = self.graphs.to(*args, **kwargs)
        return replace(self, graphs=graphs, known=self.known.to(graphs.nodes.device))


class MoleculeNetwork(nn.Module):
    """Logits of a graph network for the properties of molecules.

    It differs from `GraphNetwork` as AlgoPerf's does: a node is updated from the edges that leave
    it, too, inputs are embedded without a norm, and updates end with dropout. AlgoPerf's graphs
    begin with features of zero, whose weights act on nothing and are left out here. Properties that
    are not known have no derivative, so that K-FAC leaves them out like the loss.

    Args:
        node_features: features of an atom.
        edge_features: features of a bond.
        num_classes: C, the number of properties.
        dim: features of nodes, edges and graphs within the network.
        depth: number of blocks.
        dropout: its probability.
    """

    def __init__(
        self,
        node_features: int = 9,
        edge_features: int = 3,
        num_classes: int = 128,
        dim: int = 256,
        depth: int = 5,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.node_encoder = nn.Linear(node_features, dim)
        self.edge_encoder = nn.Linear(edge_features, dim)

        def update(inputs: int) -> nn.Module:
            layers = nn.Linear(inputs * dim, dim), nn.LayerNorm(dim), nn.ReLU(), nn.Dropout(dropout)
            return nn.Sequential(*layers)

        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"edge": update(3 + has), "node": update(3 + has), "graph": update(2 + has)}
            )
            for has in (min(i, 1) for i in range(depth))  # whether graphs have features already
        )
        self.head = nn.Linear(dim, num_classes)
        self.apply(_scaled_normal)

    def forward(self, molecules: Molecules) -> Tensor:
        """Return the logits (G, C)."""
        graphs, G = molecules.graphs, len(molecules)
        of_node, of_edge = graphs.node_graph, graphs.edge_graph
        with examples_of_rows(of_node, G):
            v = self.node_encoder(graphs.nodes)  # (V, d)
        with examples_of_rows(of_edge, G):
            e = self.edge_encoder(graphs.edges)  # (E, d)
        u = v.new_zeros(G, 0)
        for block in self.blocks:
            parts: Any = block
            ends = v[graphs.senders], v[graphs.receivers]
            with examples_of_rows(of_edge, G):
                e = parts["edge"](torch.cat([e, *ends, u[of_edge]], 1))
            sums = [sum_by(index, e, len(v)) for index in (graphs.senders, graphs.receivers)]
            with examples_of_rows(of_node, G):
                v = parts["node"](torch.cat([v, *sums, u[of_node]], 1))
            sums = sum_by(of_node, v, G), sum_by(of_edge, e, G)
            u = parts["graph"](torch.cat([*sums, u], 1))
        f = self.head(u)
        return torch.where(molecules.known, f, f.detach())


class _Block(nn.Module):
    """Attention with separate queries, keys and values, and an MLP; each normalises its input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(N, R, d) to (N, R, d)."""
        z = self.norm1(x)
        q, k, v = (
            layer(z).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (N, h, R, d/h)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


class ImageTransformer(nn.Module):
    """Logits of AlgoPerf's vision transformer, by default S/16 for ImageNet, without dropout.

    Positions have fixed sines and cosines of both coordinates. The mean of all positions passes a
    hidden tanh layer before the head, whose weights begin at zero. Sources: Dosovitskiy et al.
    2021; Beyer et al. 2022, "Better plain ViT baselines for ImageNet-1k".

    Args:
        num_classes: C.
        image_size: height and width of the images, a multiple of ``patch_size``.
        patch_size: height and width of a patch.
        dim: d, a multiple of 4 and of ``heads``.
        depth: number of blocks.
        heads: attention heads of a block.
    """

    positions: Tensor

    def __init__(
        self,
        num_classes: int = 1000,
        image_size: int = 224,
        patch_size: int = 16,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
    ) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, dim, patch_size, patch_size)
        side = torch.arange(image_size // patch_size, dtype=torch.float32)
        rates = 10_000.0 ** -torch.linspace(0, 1, dim // 4)
        y, x = (z.flatten()[:, None] * rates for z in torch.meshgrid(side, side, indexing="ij"))
        positions = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], 1)[None]  # (1, R, d)
        self.register_buffer("positions", positions, persistent=False)
        self.blocks = nn.Sequential(*[_Block(dim, heads) for _ in range(depth)])
        self.norm, self.hidden = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, num_classes)
        self.apply(_scaled_normal)
        for block in self.blocks.modules():
            if isinstance(block, nn.Linear):
                nn.init.xavier_uniform_(block.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, C) of images (N, 3, image_size, image_size)."""
        x = self.patch_embedding(x).flatten(2).mT + self.positions  # (N, R, d)
        return self.head(self.hidden(self.norm(self.blocks(x)).mean(1)).tanh())


def _scaled_normal(module: nn.Module) -> None:
    """N(0, 1/d_in), cut off at two standard deviations, for weights; zero for biases."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        std = module.weight[0].numel() ** -0.5 / 0.8796  # of what is cut off
        nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType]
