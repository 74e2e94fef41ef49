"""What a case is, a network with its data and options, and how it is built from its description.

A case is a tree of frozen dataclasses whose ``repr`` builds it again; all numbers follow from its
seed. So a failing case is printed as a script. Activations are (N, *space, d) with one width d
everywhere, so that any layer may be left out or put elsewhere.
"""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from kfac_backend import CurvatureOptions
from kfac_backend.layers import Bias, Scale
from marglik import LearnedAugmentation
from marglik.augmentation.transforms import Noise
from tests.kfac_backend.layers.recurrent_models import map_of, step

__all__ = ["Case", "Data", "Layer", "Net", "Pass"]

VOCABULARY = 4
OUTPUTS = {"heteroscedastic": 2, "ordinal(cuts=[-0.5, 0.5])": 1}
"""Likelihood -> the number of outputs that it needs."""
CHANNELS_FIRST = (
    "Conv", "ConvTranspose", "BatchNorm", "GroupNorm", "InstanceNorm", "PReLU", "ViewNorm"
)  # fmt: skip
RECURRENT = ("GRU", "RNN", "LSTM")


class Impossible(Exception):
    """There is no such network: torch itself does not run it."""


class Described:
    """A dataclass that is printed without the fields that have their defaults."""

    def __repr__(self) -> str:
        own = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]  # pyright: ignore
        given = [f"{name}={value!r}" for name, value, default in own if value != default]
        return f"{type(self).__name__}({', '.join(given)})"


class ViewNorm(nn.LayerNorm):
    """LayerNorm over channels that come first, as torchvision's, whose output is a view."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class ViewLinear(nn.Linear):
    """A linear layer whose output is a view."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).unflatten(-1, (-1, 1)).squeeze(-1)


class Mix(nn.Module):
    """What mixes some examples of a batch; it keeps its last input."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.input = kind, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.input, rows = x, x.flatten(1)
        match self.kind:
            case "MixNearest":  # each with its nearest neighbour
                distances = torch.cdist(rows.detach(), rows.detach()).fill_diagonal_(math.inf)
                others, some = rows[distances.argmin(1)], torch.ones(len(x), dtype=torch.bool)
            case "MixRest":  # all but the first with their mean
                others, some = rows[1:].mean(0), torch.arange(len(x)) > 0
            case _:  # those whose inputs have a positive sum with their mean
                some = rows.detach().sum(1) > 0
                others = (rows * some[:, None]).sum(0) / some.sum().clamp(min=1)
        return torch.where(some[:, None], 0.5 * (rows + others), rows).view_as(x)


class Own(nn.Module):
    """A parameter of its own, by which inputs are multiplied, or which is added."""

    def __init__(self, d: int, adds: bool):
        super().__init__()
        self.own, self.adds = nn.Parameter(torch.ones(d)), adds

    def forward(self, x: Tensor) -> Tensor:
        return x + self.own if self.adds else x * self.own


@dataclass(frozen=True, repr=False)
class Layer(Described):
    """A layer from d to d features.

    Args:
        kind: a class of `torch.nn` without its number of axes; or "own scale" and "own shift",
            parameters without a module; "Shift", a scalar; "attention"; "encoder", a transformer's
            layer; "BatchScale", which divides by the largest entry of the batch, a constant; a
            `ViewNorm` or `ViewLinear`; or a `Mix`.
        use: of the weight of "Linear": "module", "functional", "matmul" (which has no bias: one
            that is added has the exact block), or "twice".
        again: whether it is the module of the kind before, if there is one, once more.
        tied: whether it shares that module's weight.
        residual: whether its input is added to its output.
        conv: kernel, stride, padding and dilation of convolutions.
        packed: whether a recurrent layer reads packed sequences; its output is as long as the
            longest of them.
        flag: bidirectional (recurrent), groups (convolutions), a causal mask (attention).
        in_place: whether the output of one of the others is changed in place.
    """

    kind: str = "Linear"
    use: str = "module"
    bias: bool = True
    again: bool = False
    tied: bool = False
    residual: bool = False
    conv: tuple[int, int, int, int] = (3, 1, 1, 1)
    packed: bool = False
    depth: int = 1
    flag: bool = False
    in_place: bool = False

    def build(self, d: int, axes: int, before: list[nn.Module]) -> nn.Module:
        """The module, for activations with so many axes, after other modules."""
        module = self._new(d, axes)
        same = [m for m in before if type(m) is type(module)]
        if self.again and same:
            return same[-1]
        weight = getattr(same[-1], "weight", None) if self.tied and same else None
        if weight is not None and weight.shape == module.weight.shape:
            module.weight = weight
        return module

    def _new(self, d: int, axes: int) -> nn.Module:
        match self.kind:
            case "Linear":
                return nn.Linear(d, d, self.bias and self.use != "matmul")
            case "Conv" | "ConvTranspose":
                kernel, stride, padding, dilation = self.conv
                options = {"groups": d if self.flag else 1, "bias": self.bias, "dilation": dilation}
                build = getattr(nn, f"{self.kind}{axes}d")
                return build(d, d, kernel, stride, padding, **options)
            case "GRU" | "RNN" | "LSTM":
                build = getattr(nn, self.kind)
                return build(d, d, self.depth, batch_first=True, bidirectional=self.flag)
            case "attention":
                return nn.MultiheadAttention(d, 1, batch_first=True)
            case "encoder":
                return nn.TransformerEncoderLayer(d, 1, 3, 0.0, batch_first=True)
            case "GroupNorm":
                return nn.GroupNorm(1, d)
            case "InstanceNorm":
                return getattr(nn, f"InstanceNorm{axes}d")(d, affine=True)
            case "BatchNorm":
                return getattr(nn, f"BatchNorm{max(axes, 1)}d")(d)
            case "LayerNorm" | "RMSNorm" | "PReLU":
                return getattr(nn, self.kind)(d)
            case "Bilinear":
                return nn.Bilinear(d, d, d)
            case "ViewNorm":
                return ViewNorm(d)
            case "ViewLinear":
                return ViewLinear(d, d, self.bias)
            case "MixNearest" | "MixRest" | "MixGroup":
                return Mix(self.kind)
            case "own scale" | "own shift":
                return Own(d, self.kind == "own shift")
            case "Scale" | "Shift":
                return Scale() if self.kind == "Scale" else Bias()
            case "ReLU in place":
                return nn.ReLU(inplace=True)
            case "BatchScale":
                return nn.Identity()
        return getattr(nn, self.kind)()

    def run(self, module: Any, x: Tensor, mask: Tensor | None) -> Tensor:
        """The output for x (N, *space, d), with a mask (N, R) of what is no padding, or None."""
        y = self._output(module, x.clone() if self.residual else x, mask)
        fits = self.residual and y.shape[2:] == x.shape[2:]  # packed sequences may end before
        return y + x[:, : y.shape[1]] if fits else y

    def _output(self, module: Any, x: Tensor, mask: Tensor | None) -> Tensor:
        hidden = None if mask is None else ~cut(mask, x)
        match self.kind, self.use:
            case "Linear", "functional":
                return self._changed(F.linear(x, module.weight, module.bias))
            case "Linear", "matmul":
                return self._changed(x @ module.weight.T)
            case "Linear", "twice":
                return module(x) + module(x.tanh())
            case "GRU" | "RNN" | "LSTM", _:
                y = self._sequences(module, x, hidden)
                return y.unflatten(-1, (-1, x.shape[-1])).sum(-2)  # of both directions
            case "attention" | "encoder", _:
                causal = torch.ones(2 * x.shape[1:2], dtype=torch.bool).triu(1)
                if self.kind == "encoder":
                    return module(x, causal if self.flag else None, hidden)
                options = {"attn_mask": causal if self.flag else None, "need_weights": False}
                return module(x, x, x, key_padding_mask=hidden, **options)[0]
            case "BatchScale", _:
                return x / x.detach().abs().max().clamp(min=1e-3)
            case "Bilinear", _:
                return module(x, x.sin())
        first = self.kind in CHANNELS_FIRST
        x, in_order = x.movedim(-1, 1) if first else x, self.kind in ("BatchNorm", "InstanceNorm")
        if in_order:
            # torch's gradients are wrong for a single example in channels-last order whose batch
            # stride differs from its size, as after `unsqueeze(0)`. Use contiguous memory for the
            # input here, and for the gradient of the output below.
            x = x.clone(memory_format=torch.contiguous_format)
        y = self._changed(module(x))
        y = torch.stack([y])[0] if in_order else y
        return y.movedim(1, -1) if first else y

    def _changed(self, y: Tensor) -> Tensor:
        return F.leaky_relu_(y, 0.3) if self.in_place else y

    def _sequences(self, module: Any, x: Tensor, hidden: Tensor | None) -> Tensor:
        if getattr(module, "by_hand", False):  # in a copy of the network that an oracle runs
            return torch.stack([self._by_hand(module, x_n) for x_n in x])
        if not self.packed:
            return module(x)[0]
        lengths = torch.full((len(x),), x.shape[1]) if hidden is None else (~hidden).sum(1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(module(packed)[0], batch_first=True)[0]

    def _by_hand(self, module: Any, x: Tensor) -> Tensor:
        """The outputs for one sequence (R, d) by the equations of torch's documentation."""
        for k in range(self.depth):
            of_directions = []
            for suffix in (f"_l{k}", f"_l{k}_reverse")[: 2 if self.flag else 1]:
                backwards = suffix.endswith("reverse")
                maps, outputs = [map_of(module, which + suffix) for which in ("ih", "hh")], []
                state = (x.new_zeros(module.hidden_size),) * (2 if self.kind == "LSTM" else 1)
                for x_t in x.flip(0) if backwards else x:
                    state = step(module.mode, maps, x_t, state)
                    outputs.append(state[0])
                of_directions.append(torch.stack(outputs[::-1] if backwards else outputs))
            x = torch.cat(of_directions, -1)
        return x


def cut(mask: Tensor, x: Tensor) -> Tensor:
    """The mask of what is left of sequences."""
    return mask[:, : x.shape[1]]


# --- the network ---


@dataclass(frozen=True, repr=False)
class Net(Described):
    """Layers between an input and a head, and how positions become outputs.

    Args:
        layers: from the input on.
        space: sizes of the axes that examples have besides their features.
        width: d.
        outputs: C, where the likelihood does not say it.
        pool: "mean", "sum", "masked" (the mean over what is no padding), "flatten", "last", or
            None for an output at each position.
        head_first: whether the head's outputs are pooled, and not its inputs.
        embeds: whether inputs are tokens.
        padding_idx: whether token 0 is the embedding's padding.
        positions: a table that is added: "parameter" or "embedding".
        trims: whether it cuts each batch to its longest sequence.
        head_tied: whether the head's weight is the embedding's.
        frozen: numbers of parameters.
        copies: how many noisy copies of an input have their mean as output; 0 for the input alone.
    """

    layers: tuple[Layer, ...] = ()
    space: tuple[int, ...] = ()
    width: int = 2
    outputs: int = 2
    pool: str | None = "mean"
    head_first: bool = False
    embeds: bool = False
    padding_idx: bool = False
    positions: str | None = None
    trims: bool = False
    head_tied: bool = False
    frozen: tuple[int, ...] = ()
    copies: int = 0


class Network(nn.Module):
    """The network that a `Net` describes; its ``fails_at``-th call raises ``error``."""

    def __init__(self, net: Net, pads: bool):
        super().__init__()
        self.net, self.pads, self.calls, self.fails_at = net, pads, 0, 0
        self.error: type[BaseException] = ValueError
        self.position: Any = None
        d = net.width
        if net.embeds:
            self.embedding = nn.Embedding(VOCABULARY, d, padding_idx=0 if net.padding_idx else None)
        if net.positions == "parameter":
            self.position = nn.Parameter(torch.zeros(1, *net.space, d))
        elif net.positions == "embedding":
            self.position = nn.Embedding(net.space[0], d)
        self.layers = nn.ModuleList()
        for layer in net.layers:
            self.layers.append(layer.build(d, len(net.space), list(self.layers)))
        if net.pool == "flatten" and not net.head_first:
            x = torch.ones(1, *net.space, dtype=torch.long)
            x = x if net.embeds else torch.ones(1, *net.space, d)
            d = self.eval().features(x, None).numel()
        self.head = nn.Linear(d, net.outputs)
        if net.head_tied:
            self.head.weight = self.embedding.weight

    def features(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embedding(x) if self.net.embeds else x
        if self.net.positions == "embedding":
            x = x + self.position(torch.arange(x.shape[1]))
        elif self.net.positions:
            x = x + self.position[:, : x.shape[1]]
        for layer, module in zip(self.net.layers, self.layers, strict=True):
            x = layer.run(module, x, mask)
        return x

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise self.error("a failure of the user's code")
        mask = None if attention_mask is None else attention_mask != 0
        if mask is None and self.pads:
            mask = x != 0 if self.net.embeds else (x != 0).any(-1)
        if mask is not None and self.net.trims:
            longest = int(mask.sum(1).max())
            x, mask = x[:, :longest], mask[:, :longest]
        x = self.features(x, mask)
        x = x if self.net.head_first else self.pooled(x, mask)
        x = self.head(x)
        return self.pooled(x, mask) if self.net.head_first else x

    def pooled(self, x: Tensor, mask: Tensor | None) -> Tensor:
        space = tuple(range(1, x.dim() - 1))
        match self.net.pool if space else None:
            case None:
                return x
            case "flatten":
                return x.flatten(1)
            case "sum":
                return x.sum(space)
            case "last":
                return x.flatten(1, -2)[:, -1]
            case "masked" if mask is not None:
                counts = cut(mask, x)[..., None]
                return torch.where(counts, x, 0.0).sum(1) / counts.sum(1)
        return x.mean(space)


# --- data and options ---


@dataclass(frozen=True, repr=False)
class Data(Described):
    """Batches, and how a loader yields them.

    Args:
        sizes: numbers of examples.
        pads: whether sequences have lengths of their own, and zeros behind them.
        trimmed: whether a batch is as long as its longest sequence.
        mapping: whether batches are mappings, with a mask where there is padding.
        loader: "list", "iterator", "reused" (its memory) or "DataLoader".
        ignored: whether some labels are -100.
    """

    sizes: tuple[int, ...] = (1,)
    pads: bool = False
    trimmed: bool = False
    mapping: bool = False
    loader: str = "list"
    ignored: bool = False


@dataclass(frozen=True, repr=False)
class Pass(Described):
    """Options of a pass; ``approx`` may also be "head expand" or "head reduce", the others not."""

    approx: str = "expand"
    fisher: str = "exact"
    unsupported: str = "error"
    diagonal_above: int | None = None
    masks: bool = True

    def build(self, ignored: bool) -> CurvatureOptions:
        approx: Any = self.approx
        if "head" in approx:
            modes = ["expand", "reduce"][:: 1 if "expand" in approx else -1]
            approx = dict(zip(("*head*", "*"), modes, strict=True))
        mask, mark = "attention_mask" if self.masks else None, -100 if ignored else None
        options: Any = {"fisher": self.fisher, "unsupported": self.unsupported}
        options |= {"dict_key_mask": mask, "ignore_index": mark}
        return CurvatureOptions(kfac_approx=approx, diagonal_above=self.diagonal_above, **options)


class Built(NamedTuple):
    """A network in eval mode, all batches of its data, the likelihood and the options."""

    model: nn.Module
    batches: list[Any]
    likelihood: str
    options: CurvatureOptions


@dataclass(frozen=True, repr=False)
class Case(Described):
    """All that a relation is tried on; ``dice`` decides what the relation leaves open."""

    net: Net = Net()
    data: Data = Data()
    likelihood: str = "classification"
    options: Pass = Pass()
    seed: int = 0
    dice: int = 0

    @property
    def counts(self) -> bool:
        """Whether a mask says which positions count."""
        return self.data.pads and self.data.mapping and self.options.masks

    @property
    def depends_on_batches(self) -> bool:
        """Whether an example's numbers depend on the batch in which it comes."""
        cuts = self.net.trims or any(layer.packed for layer in self.net.layers)
        # Other pools take padding, too, whose length is the batch's.
        is_masked = self.counts and self.net.pool in (None, "masked")
        cuts = cuts or (self.data.trimmed and not is_masked)
        scales = any(layer.kind == "BatchScale" for layer in self.net.layers)
        return scales or (self.data.pads and cuts)

    def build(self) -> Built:
        """The network and its data, the same each time.

        Raises:
            Impossible: torch does not run it.
        """
        g, C = torch.Generator().manual_seed(self.seed), OUTPUTS.get(self.likelihood)
        C = VOCABULARY if self.net.head_tied else C or self.net.outputs
        try:
            network = Network(replace(self.net, outputs=C), self.data.pads)
            fill(network, self.net.frozen, g)
            x, mask = self._inputs(g)
            with torch.no_grad():
                f = network.eval()(x.clone(), mask)
        except (RuntimeError, ValueError) as error:
            raise Impossible(str(error)) from error
        y = targets(self.likelihood, f.shape, g)
        ignored = self.data.ignored and not y.is_floating_point()
        if ignored:
            y.flatten()[1::3] = -100
        batches = [self._batch(*parts) for parts in split(self.data.sizes, x, y, mask)]
        found = check_runs(network, batches)
        if self.net.pool is None and self.net.space:  # as long as the outputs of their batch
            batches = list(map(cut_targets, batches, found))
        model: nn.Module = network
        if self.net.copies:
            model = LearnedAugmentation(network, [Noise()], self.net.copies, {"noise": 0.4})
        options = self.options.build(ignored)
        model.double()
        return Built(model.eval(), batches, self.likelihood, options)

    def _inputs(self, g: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """The inputs of all examples, and the mask of what is no padding."""
        N, net = sum(self.data.sizes), self.net
        if net.embeds:
            x = torch.randint(1 if self.data.pads else 0, VOCABULARY, (N, *net.space), generator=g)
        else:
            x = normal(torch.Size((N, *net.space, net.width)), g)
        if not self.data.pads:
            return x, None
        lengths = torch.randint(1, net.space[0] + 1, (N,), generator=g)
        mask = torch.arange(net.space[0]) < lengths[:, None]
        return x * (mask if net.embeds else mask[..., None]), mask

    def _batch(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Any:
        if mask is not None and self.data.trimmed:
            longest = int(mask.sum(1).max())
            x, mask = x[:, :longest], mask[:, :longest]
        if not self.data.mapping:
            return x.clone(), y.clone()
        masks = {} if mask is None else {"attention_mask": mask.long()}
        return {"x": x.clone(), **masks, "labels": y.clone()}


def normal(shape: torch.Size, g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def fill(model: nn.Module, frozen: tuple[int, ...], g: torch.Generator) -> None:
    """Random numbers of float64 in parameters and statistics; some parameters are frozen."""
    parameters = list(model.double().parameters())
    with torch.no_grad():
        for p in parameters:
            p.copy_(0.6 * normal(p.shape, g))  # the padding's row, too, so that it matters
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                numbers = normal(buffer.shape, g)
                buffer.copy_(numbers if name.endswith("mean") else 0.5 + numbers.square())
    for number in {n % len(parameters) for n in frozen}:
        if sum(p.requires_grad for p in parameters) > 1:
            parameters[number].requires_grad_(False)


def targets(likelihood: str, shape: torch.Size, g: torch.Generator) -> Tensor:
    """Possible targets of outputs (N, ..., C)."""
    numbers = normal(shape, g)
    positive = 0.5 + numbers.abs()
    match likelihood.partition("(")[0]:
        case "classification":
            return torch.randint(shape[-1], shape[:-1], generator=g)
        case "ordinal":
            return torch.randint(3, shape[:-1], generator=g)
        case "bernoulli":
            return (numbers > 0).double()
        case "known_noise":
            return torch.cat([numbers, positive], -1)
        case "heteroscedastic":
            return numbers[..., : shape[-1] // 2]
        case "poisson" | "negative_binomial":
            return (2 * positive).round()
        case "weibull":
            return torch.cat([positive, (numbers > -0.5).double()], -1)
        case "weighted":
            others = targets(likelihood.split("'")[1], shape, g)
            others = others[..., None] if others.dim() < len(shape) else others
            return torch.cat([others.double(), positive[..., :1]], -1)
    return numbers


def split(sizes: tuple[int, ...], *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Batches of these sizes of all tensors."""
    start = 0
    for size in sizes:
        yield tuple(None if t is None else t[start : start + size] for t in tensors)
        start += size


def check_runs(model: nn.Module, batches: list[Any]) -> list[Tensor]:
    """The outputs for batches; raises Impossible where torch does not run a model or its gradients.

    In train mode norms may have too few numbers; what is changed in place may have no gradient.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        found = [outputs(model, batch) for batch in batches]
        torch.autograd.grad(found[0].sum(), parameters, allow_unused=True)
        return found
    except (RuntimeError, ValueError) as error:
        raise Impossible(str(error)) from error


def cut_targets(batch: Any, f: Tensor) -> Any:
    y = targets_of(batch)[:, : f.shape[1]]
    return {**batch, "labels": y} if isinstance(batch, dict) else (batch[0], y)


def inputs_of(batch: Any) -> Any:
    """What the model gets of a batch."""
    return (
        {k: t for k, t in batch.items() if k != "labels"} if isinstance(batch, dict) else batch[0]
    )


def targets_of(batch: Any) -> Tensor:
    return batch["labels"] if isinstance(batch, dict) else batch[1]


def outputs(model: nn.Module, batch: Any) -> Tensor:
    """The model's outputs for a batch, as it is called by hand."""
    x = deepcopy(inputs_of(batch))
    return model(**x) if isinstance(x, dict) else model(x)


class Reused:
    """A loader that has one memory for all batches of a shape, and spoils it after each."""

    def __init__(self, batches: list[Any]):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        memory: dict[Any, Tensor] = {}

        def lent(key: Any, t: Tensor) -> Tensor:
            return memory.setdefault((key, t.shape), torch.empty_like(t)).copy_(t)

        for batch in self.batches:
            if isinstance(batch, dict):
                yield {key: lent(key, t) for key, t in batch.items()}
            else:
                yield tuple(lent(i, t) for i, t in enumerate(batch))
            for tensor in memory.values():
                tensor.fill_(math.nan if tensor.is_floating_point() else 1)


def loader(batches: list[Any], kind: str) -> Any:
    """What yields the batches."""
    match kind:
        case "iterator":
            return iter(batches)
        case "reused":
            return Reused(batches)
        case "DataLoader":
            return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]
    return batches
