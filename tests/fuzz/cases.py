"""What a case is, a network with its data and options, and how it is built from its description.

A case is a tree of frozen dataclasses whose ``repr`` builds it again; all numbers follow from its
seed. So a failing case is printed as a script. Activations are (N, *space, d) with one width d
everywhere: any layer may be left out or put elsewhere.
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

from kfac_backend import CurvatureOptions
from kfac_backend.layers import Bias, Scale
from marglik import LearnedAugmentation
from marglik.augmentation.transforms import Noise
from tests.kfac_backend.layers.recurrent_models import map_of, step

VOCABULARY = 4
FEATURES_OF = {"heteroscedastic": 2, "ordinal(cuts=[-0.5, 0.5])": 1}
"""Likelihood -> the number of outputs that it needs."""


class Impossible(Exception):
    """There is no such network: torch itself does not run it."""


class Described:
    """A dataclass that is printed without the fields that have their defaults."""

    def __repr__(self) -> str:
        own = ((f.name, getattr(self, f.name), f.default) for f in fields(self))  # pyright: ignore[reportArgumentType]
        given = [f"{name}={value!r}" for name, value, default in own if value != default]
        return f"{type(self).__name__}({', '.join(given)})"


# --- layers: each builds a module, and runs it on x (N, *space, d) with a mask (N, R) or None ---


@dataclass(frozen=True, repr=False)
class Layer(Described):
    def build(self, d: int, axes: int, before: list[nn.Module]) -> nn.Module:
        """The module, for a width, a number of axes in space, after other modules."""
        return nn.Identity()

    def run(self, module: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        return module(x)


@dataclass(frozen=True, repr=False)
class Dense(Layer):
    """A linear map; ``tied``: with the weight of the Dense before, if there is one.

    A product ("matmul") has no bias: one that is added has a block of its own, the exact one.
    """

    use: str = "module"
    bias: bool = True
    tied: bool = False

    def build(self, d, axes, before):
        module = nn.Linear(d, d, self.bias and self.use != "matmul")
        others = [m for m in before if isinstance(m, nn.Linear)]
        if self.tied and others:
            module.weight = others[-1].weight
        return module

    def run(self, module, x, mask):
        match self.use:
            case "functional":
                return F.linear(x, module.weight, module.bias)
            case "matmul":
                return x @ module.weight.T
            case "half":  # one more use of the weight
                return module(x) + module(x.tanh())
        return module(x)


@dataclass(frozen=True, repr=False)
class Conv(Layer):
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: bool = False
    bias: bool = True
    transposed: bool = False

    def build(self, d, axes, before):
        name = f"Conv{'Transpose' if self.transposed else ''}{axes}d"
        more = {"dilation": self.dilation, "groups": d if self.groups else 1, "bias": self.bias}
        return getattr(nn, name)(d, d, self.kernel, self.stride, self.padding, **more)

    def run(self, module, x, mask):
        return module(x.movedim(-1, 1)).movedim(1, -1)


@dataclass(frozen=True, repr=False)
class Norm(Layer):
    kind: str = "LayerNorm"

    def build(self, d, axes, before):
        match self.kind:
            case "LayerNorm" | "RMSNorm":
                return getattr(nn, self.kind)(d)
            case "GroupNorm":
                return nn.GroupNorm(1, d)
            case "InstanceNorm":
                return getattr(nn, f"InstanceNorm{axes}d")(d, affine=True)
        return getattr(nn, f"BatchNorm{max(axes, 1)}d")(d)

    def run(self, module, x, mask):
        if self.kind in ("LayerNorm", "RMSNorm"):
            return module(x)
        return module(x.movedim(-1, 1)).movedim(1, -1)


@dataclass(frozen=True, repr=False)
class Act(Layer):
    kind: str = "Tanh"

    def build(self, d, axes, before):
        return nn.ReLU(inplace=True) if self.kind == "ReLU in place" else getattr(nn, self.kind)()


class Own(nn.Module):
    """A parameter of its own, by which inputs are multiplied, or which is added."""

    def __init__(self, d: int, adds: bool):
        super().__init__()
        self.own, self.adds = nn.Parameter(torch.ones(d)), adds

    def forward(self, x: Tensor) -> Tensor:
        return x + self.own if self.adds else x * self.own


@dataclass(frozen=True, repr=False)
class Elementwise(Layer):
    kind: str = "Scale"

    def build(self, d, axes, before):
        match self.kind:
            case "PReLU":
                return nn.PReLU(d)
            case "own scale" | "own shift":
                return Own(d, self.kind == "own shift")
        return Scale() if self.kind == "Scale" else Bias()

    def run(self, module, x, mask):
        if self.kind == "PReLU":
            return module(x.movedim(-1, 1)).movedim(1, -1)
        return module(x)


@dataclass(frozen=True, repr=False)
class Recurrent(Layer):
    """A recurrent layer over sequences; packed, its output ends with the longest of the batch."""

    kind: str = "GRU"
    packed: bool = False
    bidirectional: bool = False
    layers: int = 1

    def build(self, d, axes, before):
        options = {"bidirectional": self.bidirectional, "num_layers": self.layers}
        return getattr(nn, self.kind)(d, d, batch_first=True, **options)

    def run(self, module, x, mask):
        lengths = torch.full((len(x),), x.shape[1]) if mask is None else cut(mask, x).sum(1)
        if getattr(module, "by_hand", False):  # in a copy of the network that an oracle runs
            found = torch.stack([self._by_hand(module, x_n) for x_n in x])
        elif self.packed:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            found, _ = pad_packed_sequence(module(packed)[0], batch_first=True)
        else:
            found, _ = module(x)
        return found.unflatten(-1, (-1, x.shape[-1])).sum(-2)  # both directions

    def _by_hand(self, module: nn.Module, x: Tensor) -> Tensor:
        """The outputs (R, d) for one sequence by the equations of torch's documentation."""
        for k in range(self.layers):
            found = []
            for suffix in (f"_l{k}", f"_l{k}_reverse")[: 2 if self.bidirectional else 1]:
                zero = x.new_zeros(module.hidden_size)  # pyright: ignore[reportArgumentType, reportCallIssue]
                state = (zero, zero) if self.kind == "LSTM" else (zero,)
                maps, steps = [map_of(module, which + suffix) for which in ("ih", "hh")], []
                back = suffix.endswith("reverse")
                for x_t in x.flip(0) if back else x:
                    state = step(str(module.mode), maps, x_t, state)
                    steps.append(state[0])
                found.append(torch.stack(steps[::-1] if back else steps))
            x = torch.cat(found, -1)
        return x


@dataclass(frozen=True, repr=False)
class Attention(Layer):
    kind: str = "attention"
    causal: bool = False
    norm_first: bool = False

    def build(self, d, axes, before):
        if self.kind == "attention":
            return nn.MultiheadAttention(d, 1, batch_first=True)
        return nn.TransformerEncoderLayer(
            d, 1, 3, 0.0, batch_first=True, norm_first=self.norm_first
        )

    def run(self, module, x, mask):
        R = x.shape[1]
        causal = torch.ones(R, R, dtype=torch.bool).triu(1) if self.causal else None
        hidden = None if mask is None else ~cut(mask, x)
        if self.kind == "attention":
            options = {"key_padding_mask": hidden, "attn_mask": causal, "need_weights": False}
            return module(x, x, x, **options)[0]
        return module(x, src_mask=causal, src_key_padding_mask=hidden)


@dataclass(frozen=True, repr=False)
class BatchScale(Layer):
    """Divides by the largest entry of the batch, a constant."""

    def run(self, module, x, mask):
        return x / x.detach().abs().max().clamp(min=1e-3)


@dataclass(frozen=True, repr=False)
class Dropout(Layer):
    p: float = 0.5

    def build(self, d, axes, before):
        return nn.Dropout(self.p)


@dataclass(frozen=True, repr=False)
class Unruled(Layer):
    """A layer that has no rule."""

    def build(self, d, axes, before):
        return nn.Bilinear(d, d, d)

    def run(self, module, x, mask):
        return module(x, x.sin())


@dataclass(frozen=True, repr=False)
class Again(Layer):
    """The module before, once more, if there is one with parameters."""

    inner: Layer = Dense()

    def build(self, d, axes, before):
        fitting = [m for m in before if type(m) is type(self.inner.build(d, axes, []))]
        return fitting[-1] if fitting else self.inner.build(d, axes, before)

    def run(self, module, x, mask):
        return self.inner.run(module, x, mask)


@dataclass(frozen=True, repr=False)
class Residual(Layer):
    """Adds the input of a layer to its output, where they have one shape."""

    inner: Layer = Dense()

    def build(self, d, axes, before):
        return self.inner.build(d, axes, before)

    def run(self, module, x, mask):
        y = self.inner.run(module, x.clone(), mask)
        return y + x[:, : y.shape[1]] if y.shape[2:] == x.shape[2:] else y


def cut(mask: Tensor, x: Tensor) -> Tensor:
    """The mask of what is left of sequences."""
    return mask[:, : x.shape[1]]


# --- the network ---


@dataclass(frozen=True, repr=False)
class Net(Described):
    """Layers between an input and a head, and how positions become outputs.

    ``embeds`` reads tokens by an embedding; ``padding_idx``: token 0 is padding there. ``positions``
    adds a table over positions: "parameter" or "embedding". ``trims`` cuts each batch to its longest
    sequence. ``pool``: "mean", "sum", "masked" (the mean over what counts), "flatten", "last" or
    None, for an output at each position. ``head_first``: it is the head's outputs that are pooled.
    ``head_tied``: the head's weight is the embedding's. ``frozen``: numbers of parameters.
    ``copies``: how many noisy copies of an input have the mean output.
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


class Wrapped(nn.Module):
    """A module in another, as FSDP and others have it."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            return super().__getattr__(name)
        return getattr(self.inner, name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.inner(*arguments, **keywords)


class Network(nn.Module):
    """The network that a `Net` describes; a test may let its ``fails_at``-th call fail."""

    def __init__(self, net: Net, pads: bool):
        super().__init__()
        self.net, self.pads, self.calls, self.fails_at, self.error = net, pads, 0, 0, ValueError
        d, axes, R = net.width, len(net.space), net.space[0] if net.space else 1
        if net.embeds:
            self.embedding = nn.Embedding(VOCABULARY, d, padding_idx=0 if net.padding_idx else None)
        if net.positions == "parameter":
            self.position = nn.Parameter(torch.zeros(1, R, d))
        elif net.positions == "embedding":
            self.position = nn.Embedding(R, d)
        self.layers = nn.ModuleList()
        for layer in net.layers:
            self.layers.append(layer.build(d, axes, list(self.layers)))
        self.head = nn.Linear(d, net.outputs)
        if net.pool == "flatten" and not net.head_first:
            self.eval()
            self.head = nn.Linear(self.features(*self.example())[0].numel(), net.outputs)
        if net.head_tied and net.embeds:
            self.head.weight = self.embedding.weight

    def example(self) -> tuple[Tensor, None]:
        shape = (1, *self.net.space)
        return torch.ones(*shape).long() if self.net.embeds else torch.ones(*shape, self.net.width), None

    def features(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embedding(x) if self.net.embeds else x
        if isinstance(getattr(self, "position", None), nn.Module):
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
        if self.net.head_first:
            return self.pooled(self.head(x), mask)
        return self.head(self.pooled(x, mask))

    def pooled(self, x: Tensor, mask: Tensor | None) -> Tensor:
        space = tuple(range(1, x.dim() - 1))
        if not space or self.net.pool is None:
            return x
        match self.net.pool:
            case "flatten":
                return x.flatten(1)
            case "sum":
                return x.sum(space)
            case "last":
                return x.flatten(1, -2)[:, -1]
            case "masked" if mask is not None:
                mask = cut(mask, x)[..., None]
                return torch.where(mask, x, 0.0).sum(1) / mask.sum(1)
        return x.mean(space)


# --- data and options ---


@dataclass(frozen=True, repr=False)
class Data(Described):
    """Batches: their sizes, and how a loader yields them.

    ``pads``: sequences have lengths of their own, and zeros behind them; ``trimmed``: each batch is
    as long as its longest. ``mapping``: batches are mappings, with a mask where there is padding.
    ``loader``: "list", "iterator", "reused" (its memory) or "DataLoader". ``ignored``: some labels
    are -100.
    """

    sizes: tuple[int, ...] = (2,)
    pads: bool = False
    trimmed: bool = False
    mapping: bool = False
    loader: str = "list"
    ignored: bool = False


@dataclass(frozen=True, repr=False)
class Pass(Described):
    """Options of a pass. ``approx`` may also be "head expand": the head's alone, or "head reduce"."""

    approx: str = "expand"
    fisher: str = "exact"
    unsupported: str = "error"
    diagonal_above: int | None = None
    masks: bool = True
    precision: str = "auto"

    def build(self, ignored: bool = False) -> CurvatureOptions:
        first, other = "expand", "reduce"
        if self.approx == "head reduce":
            first, other = other, first
        approx: Any = {"*head*": first, "*": other} if "head" in self.approx else self.approx
        return CurvatureOptions(
            kfac_approx=approx,
            fisher=self.fisher,  # pyright: ignore[reportArgumentType]
            unsupported=self.unsupported,  # pyright: ignore[reportArgumentType]
            diagonal_above=self.diagonal_above,
            dict_key_mask="attention_mask" if self.masks else None,
            backward_precision=self.precision,  # pyright: ignore[reportArgumentType]
            ignore_index=-100 if ignored else None,
        )


class Built(NamedTuple):
    """A network in eval mode, all batches of its data, the likelihood and the options."""

    model: nn.Module
    batches: list[Any]
    likelihood: str
    options: CurvatureOptions


@dataclass(frozen=True, repr=False)
class Case(Described):
    """All that a relation is tried on. ``dice`` decides what a relation leaves open."""

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
        kinds = str(self.net.layers)
        packed = self.net.trims or "packed=True" in kinds
        trimmed = self.data.trimmed and not self.counts
        return "BatchScale" in kinds or (self.data.pads and (packed or trimmed))

    def build(self, dtype: torch.dtype = torch.float64) -> Built:
        net, g = self.net, torch.Generator().manual_seed(self.seed)
        C = FEATURES_OF.get(self.likelihood, net.outputs)
        net = replace(net, outputs=VOCABULARY if net.head_tied and net.embeds else C)
        try:
            model = Network(net, self.data.pads)
            fill(model, net.frozen, g)
            x, mask = self.inputs(g)
            with torch.no_grad():
                f = model.eval()(x.clone(), mask)
        except (RuntimeError, ValueError) as error:
            raise Impossible(str(error)) from error
        y = targets(self.likelihood, f.shape, g)
        ignored = self.data.ignored and not y.is_floating_point()
        if ignored:
            y.flatten()[1::3] = -100
        made: nn.Module = model
        if net.copies:
            made = LearnedAugmentation(model, [Noise()], net.copies, {"noise": 0.4}).double()
        batches = [self.batch(*parts) for parts in split(self.data.sizes, x, y, mask)]
        try:
            with torch.no_grad():
                for batch in batches:
                    outputs(model, batch)
        except (RuntimeError, ValueError) as error:  # of one position, say
            raise Impossible(str(error)) from error
        return Built(made.eval(), batches, self.likelihood, self.options.build(ignored))

    def inputs(self, g: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """The inputs of all examples, and the mask of what is no padding."""
        N, net = sum(self.data.sizes), self.net
        if net.embeds:
            x = torch.randint(1 if self.data.pads else 0, VOCABULARY, (N, *net.space), generator=g)
        else:
            x = torch.randn(N, *net.space, net.width, generator=g, dtype=torch.float64)
        if not self.data.pads:
            return x, None
        lengths = torch.randint(1, net.space[0] + 1, (N,), generator=g)
        mask = torch.arange(net.space[0]) < lengths[:, None]
        return x * (mask if net.embeds else mask[..., None]), mask

    def batch(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Any:
        if mask is not None and self.data.trimmed:
            longest, padded = int(mask.sum(1).max()), mask.shape[1]
            cuts_y = self.net.pool is None and y.dim() > 1 and y.shape[1] == padded
            x, y, mask = x[:, :longest], y[:, :longest] if cuts_y else y, mask[:, :longest]
        if not self.data.mapping:
            return x.clone(), y.clone()
        masks = {} if mask is None else {"attention_mask": mask.long()}
        return {"x": x.clone(), **masks, "labels": y.clone()}


def fill(model: nn.Module, frozen: tuple[int, ...], g: torch.Generator) -> None:
    """Random numbers of float64 in parameters and statistics; some parameters are frozen."""
    model.double()
    parameters = list(model.parameters())
    with torch.no_grad():
        for p in parameters:
            p.copy_(0.6 * torch.randn(p.shape, generator=g, dtype=p.dtype))
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                numbers = torch.randn(buffer.shape, generator=g, dtype=buffer.dtype)
                buffer.copy_(numbers if name.endswith("mean") else 0.5 + numbers.square())
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0.3  # not 0, so that it makes a difference
    for number in {n % len(parameters) for n in frozen}:
        if sum(p.requires_grad for p in parameters) > 1:
            parameters[number].requires_grad_(False)


def targets(likelihood: str, shape: torch.Size, g: torch.Generator) -> Tensor:
    """Possible targets of outputs (N, ..., C)."""
    numbers = torch.randn(shape, generator=g, dtype=torch.float64)
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
            of = targets(likelihood.split("'")[1], shape, g)
            of = of[..., None] if of.dim() < len(shape) else of
            return torch.cat([of.double(), positive[..., :1]], -1)
    return numbers


def split(sizes: tuple[int, ...], *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Batches of these sizes of all tensors."""
    start = 0
    for size in sizes:
        yield tuple(None if t is None else t[start : start + size] for t in tensors)
        start += size


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
            return torch.utils.data.DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]
    return batches


def inputs_of(batch: Any) -> Any:
    """What the model gets of a batch."""
    return {k: t for k, t in batch.items() if k != "labels"} if isinstance(batch, dict) else batch[0]


def targets_in(batch: Any) -> Tensor:
    return batch["labels"] if isinstance(batch, dict) else batch[1]


def outputs(model: nn.Module, batch: Any) -> Tensor:
    """The model's outputs for a batch, as it is called by hand."""
    x = deepcopy(inputs_of(batch))
    return model(**x) if isinstance(x, dict) else model(x)
