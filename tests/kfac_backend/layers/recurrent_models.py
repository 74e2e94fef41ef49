"""Recurrent models, each with its reference for one example, step by step."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from kfac_backend import counted_positions
from tests.random_numbers import normal

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


def step(mode: str, maps, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The equations of torch's documentation; maps of inputs, of states, and of the projection."""
    a, b = maps[0](x), maps[1](state[0])
    if mode == "LSTM":
        i, f, g, o = (a + b).chunk(4)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (maps[2](h) if len(maps) > 2 else h), c
    if mode == "GRU":
        r, z, _ = torch.sigmoid(a + b).chunk(3)
        n = torch.tanh(a.chunk(3)[2] + r * b.chunk(3)[2])
        return ((1 - z) * n + z * state[0],)
    return (torch.tanh(a + b) if mode == "RNN_TANH" else torch.relu(a + b),)


def map_of(layer: nn.Module, which: str):
    """The map with the parameters ``weight_{which}`` and ``bias_{which}``."""
    weight, bias = getattr(layer, f"weight_{which}"), getattr(layer, f"bias_{which}", None)
    return lambda x: nn.functional.linear(x[None], weight, bias)[0]


def reading(model: Reading, x: Tensor, length: int) -> Tensor:
    """Reference of `Reading` for one example, (1, C)."""
    layer, ends = model.rnn, []
    zero = torch.zeros(4, dtype=x.dtype)
    h0 = zero[: layer.proj_size or 4]
    if model.begin is not None:
        h0 = model.begin(x[:1])[0]
    x = x[:length]
    for k in range(layer.num_layers):
        outputs = []
        for suffix in (f"_l{k}", f"_l{k}_reverse")[: 2 if layer.bidirectional else 1]:
            state = (h0, zero) if layer.mode == "LSTM" else (h0,)
            kinds = ("ih", "hh", "hr")[: 3 if layer.proj_size else 2]
            maps = [map_of(layer, kind + suffix) for kind in kinds]
            of_steps = []
            for x_t in x.flip(0) if suffix.endswith("reverse") else x:
                state = step(layer.mode, maps, x_t, state)
                of_steps.append(state[0])
            ends.append(state[0])
            outputs.append(torch.stack(of_steps[::-1] if suffix.endswith("reverse") else of_steps))
        x = torch.cat(outputs, -1)
    D = 2 if layer.bidirectional else 1
    return model.head(torch.cat([x.sum(0), *ends[-D:]])[None])


def cells(model: Cells, x: Tensor) -> Tensor:
    """Reference of `Cells` for one example, (1, C)."""
    zero = torch.zeros(4, dtype=x.dtype)
    a, b, c = (zero, zero), (zero[:3],), (zero,)
    first, second, third = (
        [map_of(layer, which) for which in ("ih", "hh")]
        for layer in (model.first, model.second, model.third)
    )
    for x_t in x:
        a = step("LSTM", first, x_t, a)
        b = step("GRU", second, a[0], b)
        c = step("RNN_RELU", third, b[0], c)
    return model.head((c[0] + a[1])[None])
