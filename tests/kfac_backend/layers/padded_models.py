"""Models of padded sequences and of graphs."""

import torch
from torch import Tensor, nn

from kfac_backend import counted_positions, examples_of_rows
from tests.kfac_backend.networks import Model
from tests.random_numbers import normal

MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0]]).bool()  # what counts, (N, R)
TOKENS = torch.tensor([[1, 0, 2, 2], [3, 4, 0, 0], [0, 1, 4, 3]])
IGNORED = -100


def batch_of(mask: Tensor = MASK, per_position: bool = False) -> dict[str, Tensor]:
    """Sequences with labels 0 or 1, one for each example or each position; padding is ignored."""
    N, R = mask.shape
    labels = torch.randint(2, (N, R), generator=torch.Generator().manual_seed(2))
    labels = labels.masked_fill(~mask, IGNORED) if per_position else labels[:, 0]
    return {"x": normal(N, R, 3), "mask": mask, "labels": labels}


WAYS = {
    # How the positions that count are declared: whether reduce scales by 1/√R_n.
    "counted": False,
    "index": True,
    "sequence first": True,
    "rows": True,
    "rows, means": False,
}


def what_counts(batch: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    """Example n as a batch of its own, of which only the positions that count are there."""
    kept = batch["mask"][n]
    one = {"x": batch["x"][n][kept][None], "mask": kept[kept][None]}
    return one | {"edges": batch["edges"][n][kept][:, kept][None]} if "edges" in batch else one


class Padded(nn.Module):
    """Two layers on padded sequences, aggregated over positions that count; or no aggregation.

    Aggregation: "sum", "mean", "root" (Σ_r / √R_n) or "none". Way: of `WAYS`, or "not at all".
    """

    def __init__(self, aggregation: str, way: str = "counted", head: bool = True, linear=False):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.head = nn.Linear(3, 2) if head else None
        self.aggregation, self.way, self.linear = aggregation, way, linear
        self.ragged = ("first", "second") if WAYS.get(way) else ()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["mask"]
        f = self.layers_of_padded(batch["x"], mask)
        if self.aggregation != "none":
            f = torch.where(mask[..., None], f, 0).sum(1)
            f = f * scale_of(self.aggregation, mask.sum(1))[:, None]
        return f if self.head is None else self.head(f)

    def layers(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x if self.linear else x.tanh())

    def layers_of_padded(self, x: Tensor, mask: Tensor) -> Tensor:
        N, R = mask.shape
        example = torch.arange(N, device=mask.device)[:, None].expand(N, R)
        index = example.masked_fill(~mask, -1)
        by_roots = WAYS.get(self.way, True)
        if self.way == "counted":
            with counted_positions(mask):
                return self.layers(x)
        if self.way == "index":
            with examples_of_rows(index, N, by_roots=by_roots):
                return self.layers(x)
        if self.way == "sequence first":
            with examples_of_rows(index.T, N):
                return self.layers(x.transpose(0, 1)).transpose(0, 1)
        if self.way.startswith("rows"):  # concatenated, in another order: the last example first
            order = example[mask].argsort(descending=True)
            with examples_of_rows(example[mask][order], N, by_roots=by_roots):
                rows = self.layers(x[mask][order])
            f = rows.new_zeros(N, R, rows.shape[-1])
            return f.index_put(mask.nonzero()[order].unbind(1), rows)
        return self.layers(x)


def on_images(layer: nn.Module, by_roots: bool = True) -> nn.Module:
    """A layer with four outputs on K images of each example, (N, K, C, H, W)."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        N, K = x.shape[:2]
        index = torch.arange(N, device=x.device).repeat_interleave(K)
        with examples_of_rows(index, N, by_roots=by_roots):
            f = m.layer(x.flatten(0, 1))
        f = f.movedim(1, -1).tanh().unflatten(0, (N, K)).flatten(1, -2)  # (N, K·R, 4)
        weight = torch.linspace(-1, 2, f.shape[1], dtype=f.dtype, device=f.device)
        return m.head(weight @ f)

    return Model(forward, layer=layer, head=nn.Linear(4, 3))


def scale_of(aggregation: str, count: Tensor) -> Tensor:
    """Factor of Σ_r, of shape of ``count``."""
    count = count.clamp(min=1).double()
    return {"sum": torch.ones_like(count), "mean": 1 / count, "root": count.rsqrt()}[aggregation]


def mean_of_counted(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask[..., None], x, 0).sum(1) / mask.sum(1, keepdim=True)


def padded_transformer() -> nn.Module:
    """A Transformer layer of padded sequences, all of it for positions that count."""

    def forward(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["mask"]
        with counted_positions(mask):
            x = m.layer(batch["x"], src_key_padding_mask=~mask)
        return m.head(mean_of_counted(x, mask))

    layer = nn.TransformerEncoderLayer(3, 1, 4, 0.0, batch_first=True)
    return Model(forward, layer=layer, head=nn.Linear(3, 2))


def padded_tokens(padding_idx: int | None) -> nn.Module:
    """Embedding and layer of padded sentences, the embedding with or without ``padding_idx``."""

    def forward(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["mask"]
        with counted_positions(mask):
            x = m.layer(m.embed(batch["x"])).tanh()
        return m.head(mean_of_counted(x, mask))

    embed = nn.Embedding(5, 3, padding_idx)
    return Model(forward, embed=embed, layer=nn.Linear(3, 3), head=nn.Linear(3, 2))


def on_graphs() -> nn.Module:
    """Messages along edges, twice with one layer, between nodes of graphs of different sizes."""

    def forward(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask, N = batch["mask"], len(batch["mask"])
        graph_of_node = torch.arange(N, device=mask.device)[:, None].expand_as(mask)[mask]
        number = (mask.flatten().cumsum(0) - 1).reshape(mask.shape)  # of each node in the batch
        graph, source, target = batch["edges"].nonzero().unbind(1)
        source, target = number[graph, source], number[graph, target]
        with examples_of_rows(graph_of_node, N):
            h = m.norm(m.embed(batch["x"][mask])).tanh()
        for _ in range(2):
            with examples_of_rows(graph, N):
                messages = m.message(torch.cat([h[source], h[target]], -1)).tanh()
            received = torch.zeros_like(h).index_add(0, target, messages)
            with examples_of_rows(graph_of_node, N):
                h = h + m.update(torch.cat([h, received], -1)).tanh()
        total = h.new_zeros(N, 4).index_add(0, graph_of_node, h)
        return m.head(total / mask.sum(1)[:, None])

    layers = {"embed": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)}
    maps = {"message": nn.Linear(8, 4), "update": nn.Linear(8, 4, bias=False)}
    return Model(forward, ragged=("embed", "message", "update"), **layers, **maps)


def graphs() -> dict[str, Tensor]:
    """Three graphs, the last one of a single node and no edge."""
    batch = batch_of()
    edges = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(4)) > 0.4
    both = MASK[:, :, None] & MASK[:, None, :]
    batch["edges"] = edges & both & ~torch.eye(4, dtype=torch.bool)
    return batch
