"""Networks around each kind of layer, with inputs, and their blocks by the definition."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from experiments.models import GraphNetwork
from kfac_backend import register_parameters
from kfac_backend.layers import Bias, Scale
from marglik.graphs import Graphs
from tests.kfac_backend.block_checks import randomize, with_statistics
from tests.kfac_backend.layers import attention_models as attend
from tests.kfac_backend.layers import padded_models, recurrent_models
from tests.kfac_backend.layers import tied_models as tied
from tests.kfac_backend.layers.attention_models import CAUSAL, PADDING, Attending, Layered
from tests.kfac_backend.layers.expert_models import routed, routed_batch
from tests.kfac_backend.layers.padded_models import (
    TOKENS,
    Padded,
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
    return lambda: (Attending(**options), attend.batch_of(d=d, **more))


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
    "BatchNorm3d": layer(lambda: nn.BatchNorm3d(2).eval(), 3, 2, 1, 2, 2),
    "SyncBatchNorm": layer(lambda: nn.SyncBatchNorm(2).eval(), 3, 2, 3),
    "GroupNorm": layer(lambda: nn.GroupNorm(2, 4), 3, 4, 3),
    "InstanceNorm1d": layer(lambda: nn.InstanceNorm1d(2, affine=True), 3, 2, 4),
    "PReLU": layer(lambda: nn.PReLU(2), 3, 2, 4),
    "InstanceNorm2d, running": layer(
        lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True), 3, 2, 2, 2
    ),
    "InstanceNorm3d": layer(lambda: nn.InstanceNorm3d(2, affine=True), 3, 2, 1, 2, 2),
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
        attend.batch_of(mask=normal(3, 2, 3, 4, seed=6) > 1),
    ),
    "attention, sequence first": attention(batch_first=False),
    "attention, separate projections": attention(kdim=3, vdim=2),
    "attention, more keys": attention(add_bias_kv=True, add_zero_attn=True, padding=False),
    "attention, its weights": lambda: (attend.WeightsToo(True), attend.batch_of()),
    "attention, weights of heads": lambda: (attend.WeightsToo(False), attend.batch_of()),
    "transformer": lambda: (
        Layered(causal=True, batch_first=False),
        attend.batch_of(d=(4, 4, 4), padding_mask=PADDING),
    ),
    "transformer, norm first": lambda: (
        Layered(norm_first=True, activation="gelu", bias=False),
        attend.batch_of(d=(4, 4, 4)),
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
        attend.stack(), attend.batch_of(padding_mask=PADDING)
    ),
    "one layer for two halves": lambda: (tied.called_twice(), normal(3, 3, 3)),
    "one layer for positions and their mean": lambda: (tied.positions_then_mean(), normal(3, 3, 3)),
    "two linear layers": lambda: (tied.two_layers(), normal(3, 3, 3)),
    "two linear layers, one bias": lambda: (tied.tied_bias(), normal(3, 3, 3)),
    "one layer, two names": lambda: (tied.two_names(), normal(3, 3, 3)),
    "recurrent": lambda: (tied.recurrent(), normal(3, 3, 3)),
    "encoder layer twice": lambda: (tied.encoder_twice(), normal(3, 3, 3)),
    "grouped convolution twice": lambda: (tied.groups_twice(), normal(3, 4, 3)),
    "language model": lambda: (tied.language_model(), tokens(4, 3)),
    "language model with padding": lambda: (tied.language_model(padding_idx=0), tokens(4, 3)),
    "embedded twice, read twice": lambda: (tied.embedded_twice(), tokens(4, 3)),
    "autoencoder": lambda: (tied.autoencoder(), normal(3, 4, 3)),
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
