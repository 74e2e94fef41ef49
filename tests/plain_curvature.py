"""The formulas on a whole model, as plainly as can be: unfolded patches, kept activations.

The oracle of the fast pass where brute force is too large. Shares `kfac_backend.formulas` and the
loss Hessian's root with it, which `test_formulas.py` and `test_loss_hessian.py` check by loops.
"""

import torch
import torch.nn.functional as F
from torch import nn

from kfac_backend.formulas import layer_factors
from kfac_backend.layers import Bias, Scale
from kfac_backend.loss.hessian import loss_hessian_root


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
        prefix = f"{name}." if name else ""
        b = torch.stack([g[name] for g in grads])
        if isinstance(layer, Bias | Scale):
            (local,) = (local for local, _ in layer.named_parameters())
            terms = b * inputs[name] if isinstance(layer, Scale) else b
            factors[prefix + local] = terms.flatten(2).sum(2).square().sum().reshape(1, 1), None
            continue
        B, A = layer_factors(*_as_rows(layer, inputs[name], b), kfac_approx)
        factors[f"{prefix}weight"] = B, A
        if layer.bias is not None:
            factors[f"{prefix}bias"] = B, None
    return factors


def _as_rows(layer, a, b):
    """Inputs (N, R, d_in) and gradients (V, N, R, d_out)."""
    if isinstance(layer, nn.Conv2d):
        return unfolded(layer, a), b.flatten(3).transpose(2, 3)
    return a.reshape(len(a), -1, a.shape[-1]), b.reshape(*b.shape[:2], -1, b.shape[-1])
