"""Recurrent models, each with its reference for one example, step by step."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from kfac_backend import counted_positions
from tests.attention_references import linear
from tests.random_numbers import normal
from tests.taps import Taps

LENGTHS = torch.tensor([2, 4, 1])


class Reading(nn.Module):
    """A recurrent layer of sequences of different lengths, read at all steps and at the end.

    Way: how the lengths are told, "packed" or "counted"; "all" takes all sequences whole.
    """

    def __init__(self, kind: str, way: str, begins: bool = False, **options):
        super().__init__()
        self.rnn = getattr(nn, kind)(3, 4, **options)
        D = 2 if self.rnn.bidirectional else 1
        self.begin = nn.Linear(3, 4) if begins else None  # makes the state before the first step
        d = D * (self.rnn.proj_size or 4)
        self.head = nn.Linear(2 * d, 3)
        self.way = way

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, lengths = batch["x"], self.lengths(batch)
        N, T, _ = x.shape
        mask = torch.arange(T) < lengths[:, None]
        hx = None if self.begin is None else self.begin(x[:, 0]).expand(self.runs, -1, -1)
        first = x if self.rnn.batch_first else x.transpose(0, 1)
        if self.way == "packed":
            packed = pack_padded_sequence(first, lengths, self.rnn.batch_first, False)
            y, last = self.rnn(packed, hx)
            y, _ = pad_packed_sequence(y, True)
        else:
            with counted_positions(mask):
                y, last = self.rnn(first, hx)
            y = y if self.rnn.batch_first else y.transpose(0, 1)
            y = torch.where(mask[..., None], y, 0)
        last = last[0] if isinstance(last, tuple) else last
        D = 2 if self.rnn.bidirectional else 1
        ends = last[-D:].transpose(0, 1).flatten(1)
        return self.head(torch.cat([y.sum(1), ends], -1))

    def lengths(self, batch: dict[str, Tensor]) -> Tensor:
        N, T, _ = batch["x"].shape
        return batch["lengths"] if self.way == "packed" else torch.full((N,), T)

    @property
    def runs(self) -> int:
        return self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)


class Cells(nn.Module):
    """The three cells, one after the other in each step, from states of zero."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTMCell(3, 4), nn.GRUCell(4, 3, bias=False)
        self.third, self.head = nn.RNNCell(3, 4, nonlinearity="relu"), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = b = c = None
        for x_t in x.unbind(1):
            a = self.first(x_t, a)
            b = self.second(a[0], b)
            c = self.third(b, c)
        return self.head(c + a[1])


def packed_batch() -> dict[str, Tensor]:
    return {"x": normal(3, 4, 3), "lengths": LENGTHS}


def step(taps: Taps, mode: str, maps, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The equations of torch's documentation; maps of inputs, of states, and of the projection."""
    a, b = maps[0](taps, x), maps[1](taps, state[0])
    if mode == "LSTM":
        i, f, g, o = (a + b).chunk(4)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (maps[2](taps, h) if len(maps) > 2 else h), c
    if mode == "GRU":
        r, z, _ = torch.sigmoid(a + b).chunk(3)
        n = torch.tanh(a.chunk(3)[2] + r * b.chunk(3)[2])
        return ((1 - z) * n + z * state[0],)
    return (torch.tanh(a + b) if mode == "RNN_TANH" else torch.relu(a + b),)


def map_of(layer: nn.Module, name: str, which: str, counted: bool = True):
    """Taps of the map with the parameters ``weight_{which}`` and ``bias_{which}``."""
    bias = getattr(layer, f"bias_{which}", None)
    names = (f"{name}.weight_{which}", f"{name}.bias_{which}")
    rows = torch.tensor([counted])
    weight = getattr(layer, f"weight_{which}")
    return lambda taps, x: taps.linear(x[None], weight, bias, names, counted=rows)[0]


def reading(taps: Taps, model: Reading, x: Tensor, length: int) -> Tensor:
    """Reference of `Reading`; steps beyond the length run, and are dropped."""
    layer, ends = model.rnn, []
    T, zero = len(x), torch.zeros(4, dtype=x.dtype)
    h0 = zero[: layer.proj_size or 4]
    if model.begin is not None:
        h0 = linear(taps, model.begin, "begin", x[:1])[0]
    for k in range(layer.num_layers):
        outputs = []
        for suffix in (f"_l{k}", f"_l{k}_reverse")[: 2 if layer.bidirectional else 1]:
            state = (h0, zero) if layer.mode == "LSTM" else (h0,)
            of_steps = [torch.zeros_like(h0)] * T
            for t in range(T):
                at = length - 1 - t if suffix.endswith("reverse") and t < length else t
                kinds = ("ih", "hh", "hr")[: 3 if layer.proj_size else 2]
                maps = [map_of(layer, "rnn", kind + suffix, t < length) for kind in kinds]
                new = step(taps, layer.mode, maps, x[at], state)
                if t < length:
                    state, of_steps[at] = new, new[0]
            ends.append(state[0])
            outputs.append(torch.stack(of_steps))
        x = torch.cat(outputs, -1)
    D = 2 if layer.bidirectional else 1
    return linear(taps, model.head, "head", torch.cat([x.sum(0), *ends[-D:]])[None])[0]


def cells(taps: Taps, model: Cells, x: Tensor) -> Tensor:
    """Reference of `Cells`."""
    zero = torch.zeros(4, dtype=x.dtype)
    a, b, c = (zero, zero), (zero[:3],), (zero,)
    of = {n: [map_of(getattr(model, n), n, w) for w in ("ih", "hh")]
          for n in ("first", "second", "third")}  # fmt: skip
    for x_t in x:
        a = step(taps, "LSTM", of["first"], x_t, a)
        b = step(taps, "GRU", of["second"], a[0], b)
        c = step(taps, "RNN_RELU", of["third"], b[0], c)
    return linear(taps, model.head, "head", (c[0] + a[1])[None])[0]


def examples_of(model: nn.Module, x: Tensor | dict[str, Tensor]) -> list[tuple]:
    """Arguments of the references, example by example."""
    if isinstance(model, Cells):
        return [(model, x_n) for x_n in x]
    return [(model, x_n, int(n)) for x_n, n in zip(x["x"], model.lengths(x), strict=True)]
