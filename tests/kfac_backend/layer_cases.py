"""Networks around each kind of layer, with inputs, and their blocks by the definition."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models import GraphNetwork
from kfac_backend import counted_positions, register_parameters
from kfac_backend.layers import Bias, Scale
from marglik.graphs import Graphs
from tests.kfac_backend.block_checks import randomize, with_statistics
from tests.kfac_backend.layers import padded_models, recurrent_models
from tests.kfac_backend.layers.padded_models import (
    TOKENS,
    Padded,
    mean_of_counted,
    on_images,
    padded_tokens,
    padded_transformer,
)
from tests.kfac_backend.layers.recurrent_models import Cells, Reading, packed_batch
from tests.kfac_backend.networks import Model
from tests.marglik.some_graphs import some_graphs
from tests.random_numbers import normal


class Around(nn.Module):
    """The layer, and logits of all of its outputs together."""

    def __init__(self, layer: nn.Module, x: Tensor, times: int = 1):
        super().__init__()
        self.layer, self.times = layer, times
        self.head = nn.Linear(layer(x)[0].numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x).tanh()
        return self.head(x.flatten(1))


class Quadratic(nn.Module):
    """A quadratic form for each output, which has no rule."""

    def __init__(self, features: int = 3):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, features, features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,kij,nj->nk", x, self.weight, x)


class LayerNorm2d(nn.LayerNorm):
    """ConvNeXt's, over the channels of images (N, C, H, W)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class RMSNorm2d(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Residual(nn.LayerNorm):
    """Another output than the class's, but the same derivative in weight and bias."""

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


@register_parameters("token", "position", scale=(1, 1, -1), gain=(1, 1, 1))
class Own(nn.Module):
    """Own parameters, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.token, self.position = (nn.Parameter(torch.zeros(1, n, 3)) for n in (1, 3))
        self.scale, self.gain = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(torch.tanh(x * self.scale + self.gain).sum(1)) * self.gain[..., 0]


def two_norms():
    """Two norms with one weight, and biases of their own."""
    model = Model(
        lambda m, x: m.head(m.second(m.first(x).sin()).flatten(1)),
        first=nn.LayerNorm(3),
        second=nn.LayerNorm(3),
        head=nn.Linear(9, 3),
    )
    model.second.weight = model.first.weight
    return model


def scalar_of_two_widths(scalar):
    """A scalar between layers of different widths."""
    return Model(
        lambda m, x: m.head(m.layer(m.second(m.layer(m.first(x)).tanh())).tanh().mean((2, 3))),
        layer=scalar,
        first=nn.Conv2d(2, 4, 2),
        second=nn.Conv2d(4, 6, 2),
        head=nn.Linear(6, 3),
    )


# --- weights that are used more than once ---


class Pooled(Model):
    """A loss term per position, or, if ``pool``, one of their scaled sum."""

    pool = True

    def forward(self, x: Tensor) -> Tensor:
        f = super().forward(x)
        return 0.5 * f.sum(1) if self.pool else f


def two_layers():
    """Two layers that have one weight and biases of their own, one after the other."""
    model = Pooled(
        lambda m, x: m.second(m.first(x).tanh()), first=nn.Linear(3, 3), second=nn.Linear(3, 3)
    )
    model.second.weight = model.first.weight
    return model


def tied_bias():
    """Two layers with one bias and weights of their own."""
    model = Pooled(
        lambda m, x: m.second(m.first(x).tanh()), first=nn.Linear(3, 3), second=nn.Linear(3, 3)
    )
    model.second.bias = model.first.bias
    return model


def two_names():
    """One layer that the model has under two names."""
    layer = nn.Linear(3, 3)
    return Pooled(lambda m, x: m.second(m.first(x).tanh()), first=layer, second=layer)


def recurrent():
    """A recurrent network by hand: the state's layer is called once for each position."""

    def forward(m, x):
        read, state, f = m.read(x), torch.zeros_like(x[:, 0]), []
        for r in range(x.shape[1]):
            state = (m.state(state) + read[:, r]).tanh()
            f.append(m.head(state))
        return torch.stack(f, 1)

    layers = {"state": nn.Linear(3, 3), "read": nn.Linear(3, 3), "head": nn.Linear(3, 2)}
    return Pooled(forward, **layers)


def positions_then_mean():
    """One layer for each position and, later, for their mean: three positions and one."""

    def forward(m, x):
        x = m.layer(x).tanh()
        return x + m.layer(x.mean(1, keepdim=True))

    return Pooled(forward, layer=nn.Linear(3, 3))


def encoder_twice():
    """A whole Transformer layer, called twice."""
    layer = nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True)
    return Pooled(lambda m, x: m.layer(m.layer(m.embed(x))), layer=layer, embed=nn.Linear(3, 4))


def groups_twice():
    """A convolution with groups, called twice."""

    def forward(m, x):
        x = m.layer(x.reshape(len(x), 2, 2, -1)).tanh()
        return m.layer(x[:, ::2]).flatten(2).transpose(1, 2)

    layer = nn.Conv2d(2, 4, 2, padding=1, stride=2, groups=2, bias=False)
    return Pooled(forward, layer=layer)


def language_model(forward=None, padding_idx=None):
    """The embedding's weight is the output layer's, too: opposite orientations.

    Padding is no position of the embedding, but one of the output layer.
    """
    model = Pooled(
        forward or (lambda m, x: m.head(m.hidden(m.embed(x)).tanh())),
        embed=nn.Embedding(5, 2, padding_idx),
        hidden=nn.Linear(2, 2),
        head=nn.Linear(2, 5, bias=False),
    )
    model.head.weight = model.embed.weight
    return model


def embedded_twice():
    """As above; the tokens are embedded twice, and two layers read the weight out."""

    def forward(m, x):
        x = m.hidden(m.embed(x) + m.embed(x.flip(1)).tanh()).tanh()
        return m.head(x) + m.head(x.sin())

    return language_model(forward)


def autoencoder():
    """A convolution, and a transposed one with its weight: opposite orientations."""
    model = Pooled(
        lambda m, x: m.decode(m.encode(x.reshape(len(x), 2, -1)).tanh()).transpose(1, 2),
        encode=nn.Conv1d(2, 3, 2, stride=1, bias=False),
        decode=nn.ConvTranspose1d(3, 2, 2, stride=1, bias=False),
    )
    model.decode.weight = model.encode.weight
    return model


# --- attention ---


class Attending(nn.Module):
    """Attention between two sequences, and a linear head on the positions' mean."""

    def __init__(self, attn_mask: Tensor | None = None, **options):
        super().__init__()
        options = {"batch_first": True, **options}
        self.attention = nn.MultiheadAttention(options.pop("embed_dim", 4), 2, **options)
        self.head = nn.Linear(self.attention.embed_dim, 3)
        self.register_buffer("attn_mask", attn_mask)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = [batch["query"], batch["key"], batch.get("value", batch["key"])]
        if not self.attention.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        mask, padding = batch.get("mask", self.attn_mask), batch.get("padding_mask")
        if mask is not None and mask.dim() == 4:  # (N, heads, R, S)
            mask = mask.flatten(0, 1)
        x, _ = self.attention(*inputs, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        return self.head(x.mean(1))


def attention_batch(N: int = 3, R: int = 3, S: int = 4, d=(4, 4, 4), **more) -> dict:
    batch = {"query": normal(N, R, d[0]), "key": normal(N, S, d[1], seed=1), **more}
    if d[2] != d[1]:
        batch["value"] = normal(N, S, d[2], seed=2)
    return {**batch, "labels": torch.arange(N) % 3}


class WeightsToo(Attending):
    """The attention weights, averaged over the heads, are outputs, too."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, weights = self.attention(batch["query"], batch["key"], batch["key"])
        return self.head(x.mean(1)) + weights.mean(1)[:, :3]


PADDING = torch.tensor([[False] * 2 + [True] * 2, [False, True, False, False], [False] * 4])
CAUSAL = torch.ones(3, 4).triu(1).bool()


class Layered(nn.Module):
    """An encoder layer, a decoder layer with another sequence for memory, and a linear head."""

    def __init__(self, causal: bool = False, **options):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, **options}
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, **options)
        self.decoder = nn.TransformerDecoderLayer(4, 2, 6, **options)
        self.head = nn.Linear(4, 3)
        self.batch_first = options["batch_first"]
        self.register_buffer("mask", torch.ones(3, 3).triu(1).bool() if causal else None)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, memory, padding = batch["query"], batch["key"], batch.get("padding_mask")
        if not self.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        memory = self.encoder(memory, src_key_padding_mask=padding)
        x = self.decoder(x, memory, tgt_mask=self.mask, memory_key_padding_mask=padding)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(x.mean(1))


def stack() -> nn.Module:
    """Several encoder layers with padding, pooled over positions that all examples have."""

    def forward(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = m.stack(batch["key"], src_key_padding_mask=batch["padding_mask"])
        return m.head(x[:, 1:3].mean(1))

    layer = nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2)  # nested tensors, were gradients off
    return Model(forward, stack=layers, head=nn.Linear(4, 3))


# --- mixtures of experts whose weights are stacked ---

E, K = 4, 2


class Experts(nn.Module):
    """The attributes and arguments of transformers' experts, and a loop over positions.

    Without ``has_post_expert_norm``, which transformers has had since 5.20.
    """

    def __init__(self, has_gate: bool, has_bias: bool, is_transposed: bool):
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = has_gate, has_bias, is_transposed
        self.num_experts, self.act_fn = E, torch.tanh
        for name, out, into in ((self.up, 6 if has_gate else 3, 3), ("down_proj", 3, 3)):
            shape = (E, into, out) if is_transposed else (E, out, into)
            setattr(self, name, nn.Parameter(torch.zeros(shape)))
            if has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.zeros(E, out)))

    @property
    def up(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    def _apply_gate(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up

    def map(self, name: str, e: int, x: Tensor) -> Tensor:
        weight = getattr(self, name)[e]
        bias = getattr(self, f"{name}_bias")[e] if self.has_bias else None
        return F.linear(x, weight.T if self.is_transposed else weight, bias)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        outputs = []
        for x_m, experts, weights in zip(x, top_k_index, top_k_weights, strict=True):
            of_experts = []
            for e in map(int, experts):  # tolist() fails under jacrev of torch 2.9
                h = self.map(self.up, e, x_m)
                h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
                of_experts.append(self.map("down_proj", e, h))
            outputs.append(weights @ torch.stack(of_experts))
        return torch.stack(outputs)


def routed(**options: bool) -> nn.Module:
    """Each position goes to two of four experts; the mean over the positions that count."""

    def forward(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, mask = batch["x"], batch["mask"]
        with counted_positions(mask):
            rows = x.flatten(0, 1)
            weights, index = m.router(rows).softmax(-1).topk(K)
            y = m.experts(rows, index, weights).view_as(x).tanh()
        return m.head(mean_of_counted(y, mask))

    layers = {"router": nn.Linear(3, E), "head": nn.Linear(3, 3), "experts": Experts(**options)}
    return Model(forward, **layers)


def routed_batch() -> dict[str, Tensor]:
    """Three sequences, one of them padded; the first ones choose fewer experts than there are."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    return {"x": normal(3, 3, 3), "mask": mask}


# --- the cases ---


class OfGraphs(GraphNetwork):
    """Ours; reduce scales what it does to nodes and edges."""

    ragged = ("node_encoder", "edge_encoder", "blocks.0.edge_update", "blocks.0.node_update")


def tokens(*shape: int) -> Tensor:
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(0))


def layer(build, *shape: int, times: int = 1):
    return lambda: (Around(build(), torch.zeros(1, *shape[1:]), times), normal(*shape))


def attention(**options):
    more = {"padding_mask": PADDING} if options.pop("padding", True) else {}
    d = (options.get("embed_dim", 4), options.get("kdim", 4), options.get("vdim", 4))
    return lambda: (Attending(**options), attention_batch(d=d, **more))


def embedding(*shape: int, **options):
    return lambda: (
        nn.Sequential(nn.Embedding(5, 3, **options), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)),
        tokens(*shape),
    )


CASES = {
    "Linear": layer(lambda: nn.Linear(3, 4), 3, 3),
    "Linear, two shared axes": layer(lambda: nn.Linear(3, 4, bias=False), 3, 2, 3, 3),
    "scalars": layer(lambda: nn.Sequential(Bias(), nn.Tanh(), Scale()), 3, 2, 3),
    "scalars of images": layer(
        lambda: nn.Sequential(nn.Conv2d(2, 2, 2), Bias(), nn.Tanh(), Scale()), 3, 2, 2, 3
    ),
    "one Bias, two widths": lambda: (scalar_of_two_widths(Bias()), normal(3, 2, 5, 5)),
    "one Scale, two widths": lambda: (scalar_of_two_widths(Scale()), normal(3, 2, 5, 5)),
    "Conv1d": layer(lambda: nn.Conv1d(2, 4, 2, stride=2, padding=1, groups=2), 3, 2, 5),
    "Conv3d": layer(lambda: nn.Conv3d(2, 3, (1, 2, 2), dilation=(1, 1, 2)), 3, 2, 2, 3, 4),
    "Conv1d twice": layer(lambda: nn.Conv1d(2, 2, 3, padding=1), 3, 2, 4, times=2),
    "ConvTranspose1d": layer(lambda: nn.ConvTranspose1d(2, 3, 3, 2, 1, 1), 3, 2, 3),
    "ConvTranspose2d, groups": layer(
        lambda: nn.ConvTranspose2d(2, 4, (1, 3), (2, 2), groups=2, dilation=2), 3, 2, 2, 2
    ),
    "ConvTranspose2d twice": layer(
        lambda: nn.ConvTranspose2d(2, 2, 3, padding=1, bias=False), 3, 2, 2, 3, times=2
    ),
    "ConvTranspose3d": layer(lambda: nn.ConvTranspose3d(2, 2, (1, 2, 1)), 3, 2, 1, 2, 2),
    "Embedding": embedding(4, 3),
    "Embedding of grids": embedding(3, 2, 2),
    "Embedding with padding": embedding(4, 3, padding_idx=1),
    "LayerNorm": layer(lambda: nn.LayerNorm(3), 3, 2, 3),
    "LayerNorm twice": layer(lambda: nn.LayerNorm((2, 3)), 3, 4, 2, 3, times=2),
    "LayerNorm, as many channels as columns": layer(lambda: LayerNorm2d(3), 3, 3, 2, 3),
    "LayerNorm in a derived layer": layer(lambda: Residual(4), 3, 3, 4),
    "RMSNorm over channels": layer(lambda: RMSNorm2d(3), 3, 3, 2, 2),
    "RMSNorm": layer(lambda: nn.RMSNorm(3), 3, 2, 3),
    "BatchNorm2d": layer(lambda: nn.BatchNorm2d(2).eval(), 3, 2, 2, 3),
    "SyncBatchNorm": layer(lambda: nn.SyncBatchNorm(2).eval(), 3, 2, 3),
    "GroupNorm": layer(lambda: nn.GroupNorm(2, 4), 3, 4, 3),
    "InstanceNorm1d": layer(lambda: nn.InstanceNorm1d(2, affine=True), 3, 2, 4),
    "PReLU": layer(lambda: nn.PReLU(2), 3, 2, 4),
    "InstanceNorm2d, running": layer(
        lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True), 3, 2, 2, 2
    ),
    "BatchNorm1d, no positions": layer(lambda: nn.BatchNorm1d(3).eval(), 3, 3),
    "PReLU, one slope": layer(nn.PReLU, 3, 2, 2, 2),
    "PReLU twice": layer(nn.PReLU, 3, 2, 4, times=2),
    "own parameters": lambda: (Own(), normal(4, 2, 3)),
    "two norms, one weight": lambda: (two_norms(), normal(4, 3, 3)),
    "no rule": lambda: (
        Model(lambda m, x: m.head(m.layer(x).tanh()), layer=Quadratic(), head=nn.Linear(2, 3)),
        normal(4, 3),
    ),
    "Bilinear": lambda: (
        Model(
            lambda m, x: m.head(m.layer(input2=x.sin(), input1=x[..., :2]).tanh().mean(1)),
            layer=nn.Bilinear(2, 3, 2), head=nn.Linear(2, 3),
        ),
        normal(4, 5, 3),
    ),
    "Bilinear of what one layer computes": lambda: (
        Model(
            lambda m, x: m.layer(h := m.first(x).tanh(), h.sin()),
            first=nn.Linear(3, 2), layer=nn.Bilinear(2, 2, 3, bias=False),
        ),
        normal(4, 3),
    ),
    "attention": attention(attn_mask=CAUSAL),
    "attention, mask per head": lambda: (
        Attending(bias=False),
        attention_batch(mask=normal(3, 2, 3, 4, seed=6) > 1),
    ),
    "attention, sequence first": attention(batch_first=False),
    "attention, separate projections": attention(kdim=3, vdim=2),
    "attention, more keys": attention(add_bias_kv=True, add_zero_attn=True, padding=False),
    "attention, its weights": lambda: (WeightsToo(), attention_batch()),
    "transformer": lambda: (
        Layered(causal=True, batch_first=False),
        attention_batch(d=(4, 4, 4), padding_mask=PADDING),
    ),
    "transformer, norm first": lambda: (
        Layered(norm_first=True, activation="gelu", bias=False),
        attention_batch(d=(4, 4, 4)),
    ),
    "encoder and decoder": lambda: (
        Model(
            lambda m, x: m.head(m.layer(x, x.sin()).mean(1)),
            layer=nn.Transformer(4, 2, 1, 1, 3, 0.0, batch_first=True), head=nn.Linear(4, 3),
        ),
        normal(3, 2, 4),
    ),
    "adaptive softmax": lambda: (
        Model(
            lambda m, x: m.layer.log_prob(x),  # of clustered classes
            layer=nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2], div_value=1.0),
        ),
        normal(3, 4),
    ),
    "stack of encoder layers": lambda: (
        stack(), attention_batch(padding_mask=PADDING)
    ),
    "one layer for positions and their mean": lambda: (positions_then_mean(), normal(3, 3, 3)),
    "two linear layers": lambda: (two_layers(), normal(3, 3, 3)),
    "two linear layers, one bias": lambda: (tied_bias(), normal(3, 3, 3)),
    "one layer, two names": lambda: (two_names(), normal(3, 3, 3)),
    "recurrent": lambda: (recurrent(), normal(3, 3, 3)),
    "encoder layer twice": lambda: (encoder_twice(), normal(3, 3, 3)),
    "grouped convolution twice": lambda: (groups_twice(), normal(3, 4, 3)),
    "language model": lambda: (language_model(), tokens(4, 3)),
    "language model with padding": lambda: (language_model(padding_idx=0), tokens(4, 3)),
    "embedded twice, read twice": lambda: (embedded_twice(), tokens(4, 3)),
    "autoencoder": lambda: (autoencoder(), normal(3, 4, 3)),
    "counted positions": lambda: (Padded("mean", "counted"), padded_models.batch_of()),
    "positions by their index": lambda: (Padded("mean", "index"), padded_models.batch_of()),
    "means of rows": lambda: (Padded("mean", "rows, means"), padded_models.batch_of()),
    "rows in another order": lambda: (Padded("root", "rows"), padded_models.batch_of()),
    "sequence first": lambda: (Padded("sum", "sequence first"), padded_models.batch_of()),
    "padded transformer": lambda: (padded_transformer(), padded_models.batch_of()),
    "padded tokens": lambda: (padded_tokens(None), {**padded_models.batch_of(), "x": TOKENS}),
    "padded tokens, one of them padding": lambda: (
        padded_tokens(0), {**padded_models.batch_of(), "x": TOKENS}
    ),
    "graphs": lambda: (padded_models.on_graphs(), padded_models.graphs()),
    "graph network": lambda: (OfGraphs(3, 2, 2, 3, 1), some_graphs()),
    "LSTM, packed": lambda: (
        Reading("LSTM", "packed", num_layers=2, bidirectional=True), packed_batch()
    ),
    "LSTM, projected": lambda: (
        Reading("LSTM", "packed", proj_size=2, batch_first=True, bias=False), packed_batch()
    ),
    "GRU": lambda: (
        Reading("GRU", "counted", begins=True, bidirectional=True), {"x": normal(3, 3, 3)}
    ),
    "RNN": lambda: (
        Reading("RNN", "packed", begins=True, dropout=0.5, num_layers=2),
        packed_batch(),
    ),
    "cells": lambda: (Cells(), normal(3, 3, 3)),
    "experts": lambda: (
        routed(has_gate=True, has_bias=False, is_transposed=False), routed_batch()
    ),
    "experts, inputs first": lambda: (
        routed(has_gate=False, has_bias=True, is_transposed=True), routed_batch()
    ),
    "rows of images": lambda: (
        on_images(nn.Conv2d(2, 4, 2, padding=1, groups=2)), normal(3, 2, 2, 3, 3)
    ),
    "means of images": lambda: (
        on_images(nn.Conv2d(2, 4, 2), by_roots=False), normal(3, 2, 2, 3, 3)
    ),
    "rows of transposed images": lambda: (
        on_images(nn.ConvTranspose2d(2, 4, 2, 2, groups=2)), normal(3, 2, 2, 2, 2)
    ),
}  # fmt: skip


def case(name: str):
    model, x = CASES[name]()
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        model(x)
    model = randomize(model)
    with_statistics(model)
    return model, x


def runs(model: nn.Module, x: Tensor | Mapping | Graphs) -> list[Callable[[], Tensor]]:
    """For each example, what runs it alone, without padding, and returns its outputs (1, ..., C).

    Recurrent layers have a reference, whose products with weights are seen.
    """
    N = len(next(iter(x.values()))) if isinstance(x, Mapping) else len(x)
    match model:
        case recurrent_models.Cells():
            return [partial(recurrent_models.cells, model, x_n) for x_n in x]
        case recurrent_models.Reading():
            pairs = zip(x["x"], model.lengths(x).tolist(), strict=True)
            return [partial(recurrent_models.reading, model, *pair) for pair in pairs]
    if isinstance(x, Mapping) and "mask" in x and "x" in x:
        return [partial(model, padded_models.what_counts(x, n)) for n in range(N)]
    if isinstance(x, Mapping):
        return [partial(model, {k: v[n : n + 1] for k, v in x.items()}) for n in range(N)]
    return [partial(model, x[n : n + 1]) for n in range(N)]
