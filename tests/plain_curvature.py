"""K-FAC as plainly as it can be written: unfolded patches, kept activations, no shortcuts.

The oracle of the fast implementation where brute force is too large, and the implementation that it
replaced: every patch is unfolded, every output's gradient kept, each layer by itself. The root of
the loss Hessian is the package's, which `test_loss_hessian.py` checks by brute force.
"""

import torch
import torch.nn.functional as F
from torch import nn

from kfac_backend.layers import Bias, Scale
from kfac_backend.loss_hessian import loss_hessian_root


def unfolded(layer, a):
    """The patches (N, R, C·k1·k2) of a convolution's input (N, C, H, W), one group."""
    widths = []
    for axis in (1, 0):
        if layer.padding == "valid":
            widths += [0, 0]
        elif layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            widths += [total // 2, total - total // 2]
        else:
            widths += [layer.padding[axis]] * 2
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(a, widths, mode=mode)
    return F.unfold(
        padded, layer.kernel_size, dilation=layer.dilation, stride=layer.stride
    ).transpose(1, 2)


def plain_factors(model, x, kfac_approx, likelihood="classification", vectors=None):
    """Parameter name -> (B, A) or (B, None) of one batch; without groups."""
    inputs, outputs, handles = {}, {}, []

    def keep(name):
        def hook(layer, args, output):
            inputs[name], outputs[name] = args[0].detach(), output

        return hook

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear | Bias | Scale):
            handles.append(layer.register_forward_hook(keep(name)))
    f = model(x)
    for handle in handles:
        handle.remove()
    vectors = list(loss_hessian_root(f.detach(), likelihood)) if vectors is None else vectors
    names = list(outputs)
    grads = [
        dict(
            zip(names, torch.autograd.grad(f, outputs.values(), v, retain_graph=True), strict=True)
        )
        for v in vectors
    ]
    factors = {}
    for name in names:
        layer = model.get_submodule(name)
        for local, _ in layer.named_parameters(recurse=False):
            B = sum(_gradient_gram(layer, inputs[name], g[name], kfac_approx) for g in grads)
            A = _input_gram(layer, inputs[name], kfac_approx) if local == "weight" else None
            factors[f"{name}.{local}" if name else local] = (B, A)
    return factors


def _input_gram(layer, a, kfac_approx):
    rows = (
        unfolded(layer, a) if isinstance(layer, nn.Conv2d) else a.reshape(len(a), -1, a.shape[-1])
    )
    rows = rows.mean(1) if kfac_approx == "reduce" else rows.flatten(0, 1)
    return rows.T @ rows / len(rows)


def _gradient_gram(layer, a, b, kfac_approx):
    if isinstance(layer, Bias | Scale):
        per_example = (b * a if isinstance(layer, Scale) else b).flatten(1).sum(1)
        return per_example.square().sum().reshape(1, 1)
    if isinstance(layer, nn.Conv2d):
        b = b.flatten(2).transpose(1, 2)
    rows = b.reshape(len(b), -1, b.shape[-1])
    rows = rows.sum(1) if kfac_approx == "reduce" else rows.flatten(0, 1)
    return rows.T @ rows
