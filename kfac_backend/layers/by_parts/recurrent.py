"""Split recurrent layers into their linear maps, of the inputs and of the states.

All gates are rows of one matrix W_ih for the inputs and one W_hh for the states, and all steps
share them: time is a shared axis. The equations are those of torch's documentation.

Each map is called once for all steps, because a call for each step took two to three times as long.
But a step's state is known only after the previous step. So the steps run twice. The first run
computes the values of the states, which are the input of one call of the map W_hh. The second run
uses that call's outputs, with graphs, and `_Known` propagates each step's gradients to the previous
step.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from kfac_backend.layers.layer_by_parts import LayerByParts, LinearPart
from kfac_backend.layers.rows import rows_of_sequences

State = tuple[Tensor, ...]
"""Output h of a step, and an LSTM's cell c, (N, d) each."""

Map = Callable[[int, Tensor], Tensor]
"""Linear map in a step, of the step's number and the map's input (N, d)."""


class PastPart(LinearPart):
    """Map of constant values from the first run of the steps."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b, where x is a constant."""
        return super().forward(x.detach())


class _Known(torch.autograd.Function):
    """Known output y of a map W x + b, with gradients b to y and Wᵀ b to x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the map's output y, which is known already."""
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save the weight, by which `backward` multiplies."""
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of y and x; the weight's come from the map's call."""
        (b,), (weight,) = gradients, ctx.saved_tensors
        return b, b @ weight, None


class RecurrentByParts(LayerByParts):
    """Parts of nn.RNN, nn.GRU and nn.LSTM with all options, for sequences (N, T, d) or packed ones.

    Steps beyond the end of a packed sequence do not count: its length is R_n.
    """

    def parts(self, layer: nn.RNNBase) -> dict[str, LinearPart]:
        """Return the maps of inputs, states and an LSTM's projection, by layer and direction."""
        linear_maps: dict[str, LinearPart] = {}
        for suffix in _suffixes(layer):
            for name, kind, letters in (
                ("inputs", LinearPart, "ih"),
                ("states", PastPart, "hh"),
            ):
                bias = f"bias_{letters}{suffix}" if layer.bias else None
                linear_maps[name + suffix] = kind(layer, f"weight_{letters}{suffix}", bias)
            if layer.proj_size:
                linear_maps["projected" + suffix] = PastPart(layer, f"weight_hr{suffix}")
        return linear_maps

    def forward(
        self,
        layer: nn.RNNBase,
        parts: Mapping[str, LinearPart],
        input: Tensor | PackedSequence,
        hx: Tensor | State | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor | State]:
        """Compute the layer's own forward for a batch. Dropout draws its own random numbers."""
        # Step 1: sequences (N, T, d), and their steps beyond the end.
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input, batch_first=True)
            lengths = lengths.to(x.device)
        elif input.dim() == 3:
            x = input if layer.batch_first else input.transpose(0, 1)
            lengths = torch.full(x.shape[:1], x.shape[1], device=x.device)
        else:
            raise _needs_batch(layer, input, "of sequences, of three axes")
        numbers, steps = (torch.arange(size, device=x.device) for size in x.shape[:2])
        over = steps >= lengths[:, None]  # (N, T)
        padding = over if isinstance(input, PackedSequence) else None
        # Step 2: the layers, each in one or two directions. The reverse one begins at the end.
        from_the_end = torch.where(over, steps, lengths[:, None] - 1 - steps)
        suffixes, states, ends = _suffixes(layer), _initial(layer, x, hx), []
        for k in range(layer.num_layers):
            outputs = []
            for suffix in (s for s in suffixes if s.removesuffix("_reverse") == f"_l{k}"):
                order = from_the_end if suffix.endswith("_reverse") else None
                names = [name for name in _PARTS if name + suffix in parts]
                maps = {name: parts[name + suffix] for name in names}
                with rows_of_sequences(x, layer.batch_first, padding):
                    run = _run(layer.mode, maps, x, states[len(ends)], order, self.differentiable)
                ends.append([s[numbers, lengths - 1] for s in run])
                outputs.append(_turned(run[0], order))
            x = torch.cat(outputs, -1)
            if k + 1 < layer.num_layers:
                x = F.dropout(x, layer.dropout, layer.training)
        # Step 3: outputs and last states in the layer's format.
        last = tuple(torch.stack(state) for state in zip(*ends, strict=True))
        final = last if layer.mode == "LSTM" else last[0]
        if isinstance(input, PackedSequence):
            return _packed(x, lengths, input), final
        return x if layer.batch_first else x.transpose(0, 1), final


class CellByParts(LayerByParts):
    """Parts of nn.RNNCell, nn.GRUCell and nn.LSTMCell, whose steps run in the model's loop."""

    def parts(self, layer: nn.RNNCellBase) -> dict[str, LinearPart]:
        """Return the maps of the input and of the state."""
        return {
            "inputs": LinearPart(layer, "weight_ih", "bias_ih" if layer.bias else None),
            "states": LinearPart(layer, "weight_hh", "bias_hh" if layer.bias else None),
        }

    def forward(
        self,
        layer: Any,
        parts: Mapping[str, LinearPart],
        input: Tensor,
        hx: Tensor | State | None = None,
    ) -> Tensor | State:
        """Compute the layer's own forward for a batch."""
        if input.dim() != 2:
            raise _needs_batch(layer, input, "of two axes")
        mode = "LSTM" if isinstance(layer, nn.LSTMCell) else "GRU"
        mode = f"RNN_{layer.nonlinearity.upper()}" if isinstance(layer, nn.RNNCell) else mode
        if hx is None:
            zero = input.new_zeros(len(input), layer.hidden_size)
            hx = (zero, zero) if mode == "LSTM" else zero
        state = hx if isinstance(hx, tuple) else (hx,)
        new = _step(mode, parts["inputs"](input), parts["states"](state[0]), state)
        return new if mode == "LSTM" else new[0]


_PARTS = ("inputs", "states", "projected")


def _suffixes(layer: nn.RNNBase) -> list[str]:
    """Return torch's suffixes of the parameters of each layer and direction."""
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    return [f"_l{k}{direction}" for k in range(layer.num_layers) for direction in directions]


def _initial(layer: nn.RNNBase, x: Tensor, hx: Tensor | State | None) -> list[State]:
    """Return the state before the first step of each layer and direction; zero by default."""
    runs = len(_suffixes(layer))
    if hx is None:
        widths = [layer.proj_size or layer.hidden_size, layer.hidden_size]
        hx = tuple(x.new_zeros(runs, len(x), d) for d in widths[: 1 + (layer.mode == "LSTM")])
    states = hx if isinstance(hx, tuple) else (hx,)
    return [tuple(state[i] for state in states) for i in range(runs)]


def _run(
    mode: str,
    parts: Mapping[str, LinearPart],
    x: Float[Tensor, "N T d"],
    state: State,
    order: Int[Tensor, "N T"] | None,
    differentiable: bool,
) -> State:
    """Return the states of all steps, (N, T, d) each, in running order.

    ``order`` has the index of the input that each step reads; None means the running order. With
    ``differentiable`` the values of the first run keep their graph.
    """
    read = _turned(parts["inputs"](x), order).unbind(1)
    maps = [parts[name] for name in _PARTS[1:] if name in parts]
    weights = [part.weight.detach() for part in maps]
    biases = [None if part.bias is None else part.bias.detach() for part in maps]
    values: list[list[Tensor]] = [[] for _ in maps]

    def first(k: int, t: int, h: Tensor) -> Tensor:
        values[k].append(h)
        return F.linear(h, weights[k], biases[k])

    def second(k: int, t: int, h: Tensor) -> Tensor:
        return _Known.apply(mapped[k][t], h, weights[k])  # pyright: ignore[reportReturnType]

    # Step 1: the inputs of the maps in each step, only their values.
    with torch.set_grad_enabled(differentiable):
        _steps(mode, read, state, [partial(first, k) for k in range(len(maps))])
    # Step 2: the maps of all steps at once, with hooks, in the order of the inputs.
    inputs = [_turned(torch.stack(steps, 1), order) for steps in values]
    mapped = [_turned(part(a), order).unbind(1) for part, a in zip(maps, inputs, strict=True)]
    # Step 3: the steps again, with graphs.
    return _steps(mode, read, state, [partial(second, k) for k in range(len(maps))])


def _steps(mode: str, read: tuple[Tensor, ...], state: State, maps: list[Map]) -> State:
    """Return the states after each step, (N, T, d), from W_ih x + b_ih and the other maps."""
    of_steps = []
    for t, x in enumerate(read):
        state = _step(mode, x, maps[0](t, state[0]), state)
        if len(maps) > 1:
            state = (maps[1](t, state[0]), *state[1:])
        of_steps.append(state)
    return tuple(torch.stack(steps, 1) for steps in zip(*of_steps, strict=True))


def _step(mode: str, x: Tensor, h: Tensor, state: State) -> State:
    """Return the next state from x = W_ih x + b_ih and h = W_hh h + b_hh, (N, gates · d)."""
    if mode == "LSTM":
        i, f, g, o = (x + h).chunk(4, 1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if mode == "GRU":
        (r, z, n), (r_h, z_h, n_h) = x.chunk(3, 1), h.chunk(3, 1)
        z = (z + z_h).sigmoid()
        n = (n + (r + r_h).sigmoid() * n_h).tanh()
        return ((1 - z) * n + z * state[0],)
    return ((x + h).tanh() if mode == "RNN_TANH" else (x + h).relu(),)


def _turned(x: Float[Tensor, "N T d"], order: Int[Tensor, "N T"] | None) -> Tensor:
    return x if order is None else x.gather(1, order[..., None].expand_as(x))


def _packed(x: Float[Tensor, "N T d"], lengths: Tensor, like: PackedSequence) -> PackedSequence:
    """Pack sequences like others of the same lengths."""
    order = like.sorted_indices
    x, lengths = (x, lengths) if order is None else (x[order], lengths[order])
    return PackedSequence(pack_padded_sequence(x, lengths.cpu(), True).data, *like[1:])


def _needs_batch(layer: nn.Module, x: Tensor, request: str) -> ValueError:
    return ValueError(
        f"nn.{type(layer).__name__} got an input of shape {tuple(x.shape)}, but the curvature "
        f"needs a batch {request}."
    )
