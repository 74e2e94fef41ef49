"""Factors by the formulas that loops prove: the oracle where a network is too large for loops."""

from contextlib import ExitStack

import torch
from torch import nn

from kfac_backend.expand_and_reduce import layer_factors
from kfac_backend.layers import Bias, Scale
from kfac_backend.likelihoods import likelihood_of


def by_the_formulas(model, x, mode):
    """Parameter name -> (B, A) or (B, None) of one batch: kept activations, unfolded patches."""
    inputs, outputs = {}, {}

    def keep(layer, args, output):
        inputs[layer], outputs[layer] = args[0].detach(), output

    with ExitStack() as hooks:
        for layer in model.modules():
            if not list(layer.children()):
                hooks.callback(layer.register_forward_hook(keep).remove)
        f = model(x)
    names = {p: name for name, p in model.named_parameters()}
    layers = [layer for layer in outputs if list(layer.parameters())]
    grads = [
        torch.autograd.grad(f, [outputs[layer] for layer in layers], v, retain_graph=True)
        for v in likelihood_of("classification").root(f.detach(), None)
    ]
    factors = {}
    for layer, *b in zip(layers, *grads, strict=True):
        a, b = inputs[layer], torch.stack(b)  # (V, N, ...)
        if isinstance(layer, Bias | Scale):
            (p,) = layer.parameters()
            of_example = (b * a if isinstance(layer, Scale) else b).flatten(2).sum(2)
            factors[names[p]] = of_example.square().sum().reshape(1, 1), None
            continue
        if isinstance(layer, nn.Conv2d):
            options = {"padding": layer.padding, "stride": layer.stride}
            a = nn.functional.unfold(a, layer.kernel_size, **options).mT  # (N, R, d_in)
            b = b.flatten(3).mT
        else:
            a, b = a[:, None], b[:, :, None]
        B, A = layer_factors(a, b, mode)
        factors[names[layer.weight]] = B, A
        if layer.bias is not None:
            factors[names[layer.bias]] = B, None
    return factors
