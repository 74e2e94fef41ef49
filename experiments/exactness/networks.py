"""The networks of `modes`, without biases, and batches for them."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kfac_backend import examples_of_rows

Setting = Literal["expand", "reduce"]
"""The paper's settings: a loss term at each position, or one for each example."""
Aggregation = Literal["sum", "mean", "root"]


@dataclass(frozen=True)
class Config:
    """Sizes of networks and batches; each network is drawn anew with each seed."""

    name: str = "exactness"
    seeds: int = 5
    num_examples: int = 8
    num_positions: int = 5
    width: int = 4
    num_outputs: int = 3
    depth: int = 3
    channels: int = 2
    image_size: int = 4
    nodes: tuple[int, ...] = (3, 4, 6, 9)
    edges_per_node: int = 2


class Case(NamedTuple):
    """A network in one of the settings; ``build`` draws its parameters and a batch (x, y) for it.

    The batch is a mapping if x is not a tensor.
    """

    network: str
    setting: Setting
    build: Callable[[], tuple[nn.Module, Any]]


class PositionMean(nn.Module):
    """(N, R, d) as (N, d): the mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean over axis 1."""
        return x.mean(1)


class ChannelsLast(nn.Module):
    """(N, C, H, W) as (N, H, W, C): an output at each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        """A view."""
        return x.permute(0, 2, 3, 1)


class SelfAttention(nn.Module):
    """One attention head; its weights are softmaxed scores or, simplified, the scores themselves.

    Without softmax the output Σ_s (q_r·k_s) W^O v_s is linear in each q_r by the same matrix.

    Args:
        d_in: features of inputs, queries, keys and values.
        d_out: features of outputs; None for d_in, with the input added to the output.
        softmax: whether the scores are softmaxed.
    """

    def __init__(self, d_in: int, d_out: int | None, softmax: bool) -> None:
        super().__init__()
        self.residual = d_out is None
        self.query = nn.Linear(d_in, d_in, bias=False)
        self.key = nn.Linear(d_in, d_in, bias=False)
        self.value = nn.Linear(d_in, d_in, bias=False)
        self.output = nn.Linear(d_in, d_out or d_in, bias=False)
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        """(N, R, d_in) as (N, R, d_out)."""
        scores = self.query(x) @ self.key(x).mT / math.sqrt(x.shape[-1])  # (N, R, R)
        weights = scores.softmax(-1) if self.softmax else scores / x.shape[1]
        output = self.output(weights @ self.value(x))
        return x + output if self.residual else output


class GraphNetwork(nn.Module):
    """A linear GraphNetwork that updates edges, then nodes, then graphs; graphs are concatenated.

    Source: Battaglia et al. 2018 (arXiv:1806.01261), Algorithm 1, with linear updates. Nodes sum up
    their incoming edges; graphs aggregate their V_n nodes: Σ, 1/V_n Σ or 1/√V_n Σ.
    """

    def __init__(self, features: int, num_outputs: int, aggregation: Aggregation) -> None:
        super().__init__()
        self.edge = nn.Linear(3 * features, features, bias=False)
        self.node = nn.Linear(2 * features, features, bias=False)
        self.graph = nn.Linear(features, num_outputs, bias=False)
        self.aggregation: Aggregation = aggregation

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Outputs (N, C) of N graphs with nodes (V, d) and edges (E, d) in all."""
        v, e, N = batch["nodes"], batch["edges"], len(batch["labels"])
        sender, receiver, graph = batch["sender"], batch["receiver"], batch["graph_of_node"]
        with examples_of_rows(graph[receiver], N):
            e = self.edge(torch.cat([e, v[sender], v[receiver]], -1))
        received = torch.zeros_like(v).index_add(0, receiver, e)
        with examples_of_rows(graph, N):
            v = self.node(torch.cat([v, received], -1))
        u = v.new_zeros(N, v.shape[-1]).index_add(0, graph, v)
        V_n = graph.bincount(minlength=N).to(u)[:, None]
        scale = {"sum": torch.ones_like(V_n), "mean": 1 / V_n, "root": V_n.rsqrt()}
        return self.graph(u * scale[self.aggregation])


def _deep_linear(config: Config, setting: Setting) -> nn.Module:
    """Linear layers, applied at all positions; in the reduce setting outputs are averaged."""
    widths = [config.width] * config.depth + [config.num_outputs]
    layers: dict[str, nn.Module] = {
        f"layer {i + 1}": nn.Linear(*widths[i : i + 2], bias=False) for i in range(config.depth)
    }
    if setting == "reduce":
        layers["mean"] = PositionMean()
    return _sequential(layers)


def cases(config: Config) -> Iterator[Case]:
    """All networks, in the order of the table."""
    settings: tuple[Setting, ...] = ("expand", "reduce")
    sequence = (config.num_positions, config.width)
    image = (config.channels, config.image_size, config.image_size)
    batch = config.num_examples

    def case(name: str, setting: Setting, model: Callable[[], nn.Module], *shape: int) -> Case:
        return Case(name, setting, lambda: _with_noise(model(), shape))

    for s in settings:
        yield case("deep linear network", s, lambda s=s: _deep_linear(config, s), batch, *sequence)
    pooled = "convolution, average pooling, linear layer"
    yield case(pooled, "reduce", lambda: _pooled_convolution(config), batch, *image)
    kinds = {
        "two circular convolutions": ("circular", False),
        "two circular convolutions, ReLU between": ("circular", True),
        "two zero-padded convolutions": ("zeros", False),
    }
    for name, kind in kinds.items():
        for s in settings:
            yield case(name, s, lambda s=s, k=kind: _two_convolutions(config, s, *k), batch, *image)
    for softmax in (False, True):
        for N in (1, batch):
            name = f"{'softmax' if softmax else 'linear'} self-attention, N = {N}"
            for s in settings:
                yield case(name, s, lambda s=s, on=softmax: _attention(config, s, on), N, *sequence)
    mean = round(sum(config.nodes) / len(config.nodes))
    yield _graphs(config, "sum", [mean] * len(config.nodes), "equal sizes, sum")
    yield _graphs(config, "sum", config.nodes, "different sizes, sum")
    yield _graphs(config, "mean", config.nodes, "different sizes, mean")
    yield _graphs(config, "root", config.nodes, "different sizes, sum / √V")


def _sequential(layers: dict[str, nn.Module]) -> nn.Module:
    return nn.Sequential(OrderedDict(layers))


def _initialised(model: nn.Module) -> nn.Module:
    """Draw normal weights that keep the size of activations, in float64."""
    for p in model.double().parameters():
        nn.init.normal_(p, std=p[0].numel() ** -0.5)
    return model


def _with_noise(model: nn.Module, shape: Sequence[int]) -> tuple[nn.Module, Any]:
    model = _initialised(model)
    x = torch.randn(*shape, dtype=torch.float64)
    with torch.no_grad():
        y = torch.zeros_like(model(x))
    return model, (x, y)


def _pooled_convolution(config: Config) -> nn.Module:
    return _sequential(
        {
            "convolution": nn.Conv2d(config.channels, config.width, 3, bias=False),
            "pooling": nn.AdaptiveAvgPool2d(1),
            "flat": nn.Flatten(),
            "linear": nn.Linear(config.width, config.num_outputs, bias=False),
        }
    )


def _two_convolutions(config: Config, setting: Setting, padding_mode: Any, relu: bool) -> nn.Module:
    padded: dict[str, Any] = {"padding": 1, "padding_mode": padding_mode, "bias": False}
    layers: dict[str, nn.Module] = {
        "convolution 1": nn.Conv2d(config.channels, config.width, 3, **padded)
    }
    if relu:
        layers["ReLU"] = nn.ReLU()
    layers["convolution 2"] = nn.Conv2d(config.width, config.num_outputs, 3, **padded)
    if setting == "expand":
        return _sequential(layers | {"pixels": ChannelsLast()})
    return _sequential(layers | {"pooling": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()})


def _attention(config: Config, setting: Setting, softmax: bool) -> nn.Module:
    layers: dict[str, nn.Module] = {
        "block 1": SelfAttention(config.width, None, softmax),
        "block 2": SelfAttention(config.width, config.num_outputs, softmax),
    }
    if setting == "reduce":
        layers["mean"] = PositionMean()
    return _sequential(layers)


def _graphs(config: Config, aggregation: Aggregation, nodes: Sequence[int], words: str) -> Case:
    """Random graphs; all nodes have the same number of incoming edges."""

    def build() -> tuple[nn.Module, Any]:
        model = _initialised(GraphNetwork(config.width, config.num_outputs, aggregation))
        V, d = torch.tensor(nodes), config.width
        graph_of_node = torch.arange(len(V)).repeat_interleave(V)
        receiver = torch.arange(len(graph_of_node)).repeat_interleave(config.edges_per_node)
        graph = graph_of_node[receiver]
        first = V.cumsum(0) - V
        sender = first[graph] + (torch.rand(len(graph)) * V[graph]).long()
        return model, {
            "nodes": torch.randn(len(graph_of_node), d, dtype=torch.float64),
            "edges": torch.randn(len(receiver), d, dtype=torch.float64),
            "sender": sender,
            "receiver": receiver,
            "graph_of_node": graph_of_node,
            "labels": torch.zeros(len(V), config.num_outputs, dtype=torch.float64),
        }

    return Case(f"GraphNetwork, {words}", "reduce", build)
