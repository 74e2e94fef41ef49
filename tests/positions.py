"""Positions of the layers of torch: where their weight meets which inputs, index by index.

Positions of a linear layer are all axes but the last; of a convolution its output's pixels, a_nr is
a patch of the input. Positions of a transposed convolution, whose weight is stored
(C_in, C_out / groups, *kernel), are its *input's* pixels; what position q makes is a patch, which
is added onto the output where it falls, so that b_nq is the patch of output gradients that q writes
to. Every function checks that its positions reproduce the layer's output.
"""

import itertools

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED)


Positions = list[tuple[tuple[str, int], Tensor, Tensor]]  # (parameter, group), a_nr, b_nr


def positions_of(layer: nn.Module, a_n: Tensor, b_n: Tensor) -> Positions:
    """Inputs a_nr (R, d_in) and Jacobians b_nr (T, R, C, d_out) of each parameter and group.

    Args:
        layer: one of ``LAYERS``.
        a_n: its input for one example: (..., d_in), ([images,] C_in, *spatial) or tokens (...).
        b_n: Jacobian (T, C, *output) of the loss terms with respect to its output.
    """
    if isinstance(layer, nn.Embedding):
        return _embedding_positions(layer, a_n, b_n)
    if isinstance(layer, nn.Linear):
        return _linear_positions(layer, a_n.double(), b_n)
    if a_n.dim() == layer.weight.dim():  # several images of one example, one after the other
        images = [positions_of(layer, a, b_n[:, :, m]) for m, a in enumerate(a_n)]
        return [
            (found[0][0], torch.cat([a for _, a, _ in found]), torch.cat([b for *_, b in found], 1))
            for found in zip(*images, strict=True)
        ]
    if isinstance(layer, CONVOLUTIONS):
        found = _convolution_positions(layer, a_n.double(), b_n)
    elif isinstance(layer, TRANSPOSED):
        found = _transposed_positions(layer, a_n.double(), b_n)
    else:
        raise NotImplementedError(f"This oracle knows no {type(layer)}.")
    if layer.bias is not None:  # positions of a bias are the pixels of the output, for both
        b_bias = b_n.flatten(3).permute(0, 3, 1, 2)  # (T, R, C, C_out)
        found.append((("bias", 0), torch.ones(b_bias.shape[1], 1).double(), b_bias))
    return found


def _linear_positions(layer: nn.Linear, a_n: Tensor, b_n: Tensor) -> Positions:
    """Rows of the input, and ones for the bias."""
    a = a_n.reshape(-1, layer.in_features)
    b = b_n.reshape(*b_n.shape[:2], -1, layer.out_features).transpose(1, 2)  # (T, R, C, d_out)
    bias = 0 if layer.bias is None else layer.bias.detach().double()
    out = a @ layer.weight.detach().double().T + bias
    expected = layer(a_n.to(layer.weight.dtype)).detach().double().reshape(out.shape)
    tolerances = {} if layer.weight.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out, expected, **tolerances)
    ones = torch.ones(len(a), 1, dtype=torch.float64)
    return [(("weight", 0), a, b)] + [(("bias", 0), ones, b)] * (layer.bias is not None)


def _convolution_positions(layer: nn.Module, a_n: Tensor, b_n: Tensor) -> Positions:
    """Patches of the input for each pixel of the output."""
    G, c_in, c_out = layer.groups, layer.in_channels // layer.groups, layer.out_channels
    c_out //= G
    size_in, size_out = a_n.shape[1:], b_n.shape[3:]
    pads = [_pad_left(layer, axis) for axis in range(len(size_in))]
    weight = layer.weight.detach().double()
    out = torch.zeros(b_n.shape[2:], dtype=torch.float64)
    found: Positions = []
    for g in range(G):
        a, b = [], []
        for pixel in itertools.product(*map(range, size_out)):
            patch = []
            for c in range(c_in):
                for k in itertools.product(*map(range, layer.kernel_size)):
                    source = [
                        _source(
                            p * layer.stride[i] - pads[i] + k[i] * layer.dilation[i],
                            size_in[i],
                            layer.padding_mode,
                        )
                        for i, p in enumerate(pixel)
                    ]
                    inside = all(s is not None for s in source)
                    patch.append(float(a_n[(g * c_in + c, *source)]) if inside else 0.0)
            channels = slice(g * c_out, (g + 1) * c_out)
            a.append(torch.tensor(patch, dtype=torch.float64))
            b.append(b_n[(slice(None), slice(None), channels, *pixel)])  # (T, C, d_out)
            out[(channels, *pixel)] = weight[channels].flatten(1) @ a[-1]
        found.append((("weight", g), torch.stack(a), torch.stack(b, dim=1)))
    _check_output(layer, a_n, out)
    return found


def _pad_left(layer: nn.Module, axis: int) -> int:
    """Padding before an axis; "same" puts an odd one at the end."""
    if layer.padding == "same":
        return layer.dilation[axis] * (layer.kernel_size[axis] - 1) // 2
    return 0 if layer.padding == "valid" else layer.padding[axis]


def _source(index: int, size: int, padding_mode: str) -> int | None:
    """Entry of the input that the padded index stands for; None for a zero."""
    if 0 <= index < size:
        return index
    if padding_mode == "replicate":
        return min(max(index, 0), size - 1)
    if padding_mode == "circular":
        return index % size
    if padding_mode == "reflect":
        return -index if index < 0 else 2 * (size - 1) - index
    return None


def _transposed_positions(layer: nn.Module, a_n: Tensor, b_n: Tensor) -> Positions:
    """Patches of the output gradient for each pixel of the input."""
    G, c_in, c_out = layer.groups, layer.in_channels // layer.groups, layer.out_channels
    c_out //= G
    size_out = b_n.shape[3:]
    T, C = b_n.shape[:2]
    weight = layer.weight.detach().double()  # (C_in, c_out, *kernel)
    out = torch.zeros(b_n.shape[2:], dtype=torch.float64)
    found: Positions = []
    for g in range(G):
        a, b = [], []
        for pixel in itertools.product(*map(range, a_n.shape[1:])):
            a_q = a_n[(slice(g * c_in, (g + 1) * c_in), *pixel)]  # (c_in,)
            patch = []
            for c in range(c_out):
                for k in itertools.product(*map(range, layer.kernel_size)):
                    target = [
                        q * layer.stride[i] - layer.padding[i] + k[i] * layer.dilation[i]
                        for i, q in enumerate(pixel)
                    ]
                    if all(0 <= p < size_out[i] for i, p in enumerate(target)):
                        w = weight[(slice(g * c_in, (g + 1) * c_in), c, *k)]
                        out[(g * c_out + c, *target)] += w @ a_q
                        patch.append(b_n[(slice(None), slice(None), g * c_out + c, *target)])
                    else:  # cropped by the padding
                        patch.append(torch.zeros(T, C, dtype=torch.float64))
            a.append(a_q)
            b.append(torch.stack(patch, dim=-1))  # (T, C, c_out * kernel)
        found.append((("weight", g), torch.stack(a), torch.stack(b, dim=1)))
    _check_output(layer, a_n, out)
    return found


def _embedding_positions(layer: nn.Embedding, tokens: Tensor, b_n: Tensor) -> Positions:
    """One-hot vectors of the tokens; those that are ``padding_idx`` are no positions."""
    b = b_n.reshape(*b_n.shape[:2], -1, layer.embedding_dim).transpose(1, 2)  # (T, R, C, d)
    one_hot = torch.zeros(tokens.numel(), layer.num_embeddings, dtype=torch.float64)
    counted = []
    for r, token in enumerate(tokens.flatten().tolist()):
        one_hot[r, token] = 1
        if token != layer.padding_idx:
            counted.append(r)
    out = one_hot @ layer.weight.detach().double()
    torch.testing.assert_close(out.reshape(*tokens.shape, -1), layer(tokens).detach().double())
    return [(("weight", 0), one_hot[counted], b[:, counted])]


def _check_output(layer: nn.Module, a_n: Tensor, out: Tensor) -> None:
    """The layer's own output is ``out`` plus its bias."""
    if layer.bias is not None:
        out = out + layer.bias.detach().double().reshape(-1, *[1] * (out.dim() - 1))
    expected = layer(a_n.to(layer.weight.dtype)[None])[0].detach().double()
    tolerances = {} if layer.weight.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out, expected, **tolerances)
