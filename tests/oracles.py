"""Brute-force float64 references for curvature blocks and evidences, written from the definitions.

Slow and obvious on purpose: loops over examples n, positions r and loss terms t, no code shared
with the packages under test. Every function that takes a model works on a float64 copy of it, so
the model is left as it was, and all results are float64.

Letters in shapes: N examples, T loss terms per example (r' in the paper), R shared positions,
G groups of a convolution, C outputs, P parameters; d_in and d_out are those of one group.
``likelihood`` is "classification" (cross-entropy), "regression" (½‖y − f‖², unit noise) or
"bernoulli" (binary cross-entropy with logits, summed over C). Nothing is averaged over N.

Source: Eschenhagen et al. 2023, arXiv:2311.00636.
"""

import copy
import itertools
from collections import Counter

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.nn import functional as F


def negative_log_likelihood(f_n: Tensor, y_n: Tensor, likelihood: str) -> Tensor:
    """Loss −log p(y|f) in nats of one loss term, up to a constant that depends on no parameter.

    f_n is (C,); y_n a class index (), or (C,) for regression and bernoulli.
    """
    if likelihood == "classification":
        return F.cross_entropy(f_n, y_n)
    if likelihood == "regression":
        return 0.5 * ((y_n - f_n) ** 2).sum()
    if likelihood == "bernoulli":
        return F.binary_cross_entropy_with_logits(f_n, y_n.to(f_n), reduction="sum")
    raise ValueError(f"likelihood={likelihood!r} is not classification, regression or bernoulli.")


def loss_hessian(f_n: Tensor, likelihood: str) -> Tensor:
    """Hessian Λ (C, C) of the loss of one term with respect to its output f_n (C,).

    Differentiated twice for a fixed label, of which Λ is independent.
    """
    f_n = f_n.detach().double()
    label = torch.tensor(0) if likelihood == "classification" else torch.zeros_like(f_n)
    Lambda = hessian(lambda f: negative_log_likelihood(f, label, likelihood))(f_n)
    return Lambda.contiguous()


def dense_ggn(
    model: nn.Module, x: Tensor, likelihood: str, names: list[str] | None = None
) -> Tensor:
    """Generalized Gauss-Newton matrix Σ_n Σ_t J_ntᵀ Λ_nt J_nt, dense (P, P).

    Args:
        model: returns (N, C), or (N, ..., C) where each position in ``...`` is one loss term.
        x: inputs (N, ...).
        likelihood: see the top of this file.
        names: parameters that span the rows, in this order; default: all trainable ones in the
            order of ``named_parameters()``. All other parameters are constants.
    """
    model, x = _float64(model, x)
    parameters = dict(model.named_parameters())
    if names is None:
        names = [name for name, p in parameters.items() if p.requires_grad]
    chosen = {name: parameters[name].detach() for name in names}
    P = sum(p.numel() for p in chosen.values())
    ggn = torch.zeros(P, P, dtype=torch.float64)
    for n in range(len(x)):
        x_n = x[n : n + 1]

        def output(values: dict[str, Tensor], x_n: Tensor = x_n) -> Tensor:
            return _loss_terms(functional_call(model, values, (x_n,)))  # (T, C)

        f = output(chosen).detach()
        jacobians = jacrev(output)(chosen)
        J = torch.cat([jacobians[name].reshape(*f.shape, -1) for name in names], dim=-1).detach()
        for t in range(len(f)):  # J[t] (C, P)
            ggn += J[t].T @ loss_hessian(f[t], likelihood) @ J[t]
    return ggn


def dense_ggn_blocks(model: nn.Module, x: Tensor, likelihood: str) -> dict[str, Tensor]:
    """Diagonal block of the dense GGN of each trainable parameter, {name: (numel, numel)}."""
    ggn = dense_ggn(model, x, likelihood)
    blocks, start = {}, 0
    for name, p in _trainable(model).items():
        blocks[name] = ggn[start : start + p.numel(), start : start + p.numel()]
        start += p.numel()
    return blocks


def empirical_fisher_blocks(
    model: nn.Module, x: Tensor, y: Tensor, likelihood: str
) -> dict[str, Tensor]:
    """Exact empirical Fisher block Σ_n Σ_t g_nt g_ntᵀ of each trainable parameter.

    g_nt is the gradient of one loss term alone: terms of one example are not summed before the
    outer product.

    Labels y are class indices (N, ...), or (N, ..., C) for regression and bernoulli. Returns
    {name: (numel, numel)}.
    """
    model, x = _float64(model, x)
    y = y.double() if y.is_floating_point() else y
    parameters = _trainable(model)
    fisher = {k: torch.zeros(p.numel(), p.numel()).double() for k, p in parameters.items()}
    for n in range(len(x)):
        f = _loss_terms(model(x[n : n + 1]))  # (T, C)
        labels = y[n].reshape(-1) if likelihood == "classification" else y[n].reshape(f.shape)
        for t in range(len(f)):
            loss = negative_log_likelihood(f[t], labels[t], likelihood)
            gradients = torch.autograd.grad(
                loss, list(parameters.values()), retain_graph=True, materialize_grads=True
            )
            for name, g in zip(parameters, gradients, strict=True):
                fisher[name] += torch.outer(g.flatten(), g.flatten())
    return fisher


def layer_jacobians(model: nn.Module, layer_name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs of one layer, and Jacobians of the model's outputs with respect to its outputs.

    The model runs on one example at a time; a zero perturbation added to the layer's output is
    what the outputs are differentiated by.

    Returns:
        a (N, *layer input of one example) and b (N, T, C, *layer output of one example). The
        batch axis of length one is dropped; a layer that sees more rows than one per example
        (say tokens folded into the batch) keeps them as a leading axis.

    Raises:
        ValueError: if the layer is not called exactly once per forward pass.
    """
    model, x = _float64(model, x)
    layer = model.get_submodule(layer_name)
    a, b = [], []
    for n in range(len(x)):
        seen: list[tuple[Tensor, Tensor]] = []

        def record(module, args, result, seen=seen) -> None:
            seen.append((args[0].detach().clone(), result.detach().clone()))

        handle = layer.register_forward_hook(record)
        model(x[n : n + 1])
        handle.remove()
        if len(seen) != 1:
            raise ValueError(
                f"Layer {layer_name!r} was called {len(seen)} times in one forward pass; "
                "the oracle handles exactly one call (no reuse, no functional shortcut)."
            )
        layer_input, layer_output = seen[0]

        def outputs(perturbation: Tensor, x_n: Tensor = x[n : n + 1]) -> Tensor:
            handle = layer.register_forward_hook(lambda module, args, out: out + perturbation)
            f = model(x_n)
            handle.remove()
            return _loss_terms(f)  # (T, C)

        jacobian = torch.autograd.functional.jacobian(outputs, torch.zeros_like(layer_output))
        a.append(layer_input.squeeze(0))
        b.append(jacobian.squeeze(2))
    return torch.stack(a), torch.stack(b)


def positions(layer: nn.Module, a_n: Tensor, b_n: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors a_nr and b_nr of one example, such that layer output_gr = W_g a_gr + bias_g.

    That equation is checked against the layer itself on every call.

    Args:
        layer: Linear (every axis but the last is shared) or Conv2d (shared: images of the example,
            usually one, then rows, then columns of the output).
        a_n: the layer's input for one example, a row of what ``layer_jacobians`` returns.
        b_n: its Jacobian (T, C, *layer output).

    Returns:
        a_nr (G, R, d_in), columns ordered as those of ``weight.flatten(1)``, and b_nr
        (G, T, R, C, d_out).
    """
    layer, a_n = copy.deepcopy(layer).double(), a_n.detach().double()
    if isinstance(layer, nn.Linear):
        T, C = b_n.shape[:2]
        a = a_n.reshape(1, -1, layer.in_features)
        b = b_n.reshape(T, C, -1, layer.out_features).transpose(1, 2).unsqueeze(0)
        out = layer(a)
    elif isinstance(layer, nn.Conv2d):
        a, b, out = _conv_positions(layer, a_n, b_n)
    else:
        raise NotImplementedError(f"The oracle knows Linear and Conv2d, not {type(layer)}.")
    weight = layer.weight.reshape(len(a), -1, a.shape[-1])  # (G, d_out, d_in)
    bias = 0.0 if layer.bias is None else layer.bias.reshape(len(a), 1, -1)
    torch.testing.assert_close(torch.einsum("goi,gri->gro", weight, a) + bias, out)
    return a, b


def kfac_factors(
    model: nn.Module, x: Tensor, likelihood: str, approx: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Factors (B, A) of K-FAC-expand or -reduce of the weights and biases of Linear and Conv2d.

    expand: A = 1/(N R) Σ_n Σ_r a aᵀ, B = Σ_n Σ_t Σ_r b Λ_nt bᵀ. reduce: the same with a replaced
    by its mean over r, b by its sum over r, and R by one. In reduce with T > 1 loss terms, the sum
    over r is taken for each t apart (the b of different t never mix, as their Λ do not).

    Returns:
        {parameter name: (B (G, d_out, d_out), A (G, d_in, d_in))} of the trainable ones. For a
        bias G = 1, B is over all output channels, and A is the (1, 1) of a constant input one.

    Raises:
        ValueError: for a layer called more or less than once, and for tied parameters.
    """
    if approx not in ("expand", "reduce"):
        raise ValueError(f"approx={approx!r} is neither 'expand' nor 'reduce'.")
    model, x = _float64(model, x)
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    if any(count > 1 for count in owners.values()):
        raise ValueError("Two modules share one parameter; the K-FAC oracle knows no tied weights.")
    with torch.no_grad():
        f = [_loss_terms(model(x[n : n + 1])) for n in range(len(x))]
    hessians = [[loss_hessian(f_nt, likelihood) for f_nt in f_n] for f_n in f]
    factors = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        trainable = _trainable(layer)
        if not trainable:
            continue
        a, b = layer_jacobians(model, name, x)
        vectors = [positions(layer, a_n, b_n) for a_n, b_n in zip(a, b, strict=True)]
        prefix = f"{name}." if name else ""
        if "weight" in trainable:
            factors[f"{prefix}weight"] = _layer_factors(vectors, hessians, approx)
        if "bias" in trainable:  # a layer of one group that sees the input one everywhere
            ones = [
                (torch.ones(1, a_nr.shape[1], 1).double(), torch.cat(list(b_nr), -1).unsqueeze(0))
                for a_nr, b_nr in vectors
            ]
            factors[f"{prefix}bias"] = _layer_factors(ones, hessians, approx)
    return factors


def kfac_blocks(model: nn.Module, x: Tensor, likelihood: str, approx: str) -> dict[str, Tensor]:
    """Dense K-FAC approximation {parameter name: (numel, numel)} of the GGN's diagonal blocks.

    Block-diagonal over groups of B_g ⊗ A_g for a weight, B for a bias. See ``kfac_factors``.
    """
    return {
        name: torch.block_diag(*[torch.kron(B_g, A_g) for B_g, A_g in zip(B, A, strict=True)])
        for name, (B, A) in kfac_factors(model, x, likelihood, approx).items()
    }


def _float64(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Float64 copies of the model and of its inputs; integer inputs (tokens) stay integers."""
    x = x.detach().clone()  # an in-place first layer must not reach the caller's tensor
    return copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in the order of ``named_parameters()``."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _loss_terms(output: Tensor) -> Tensor:
    """Output of one example as (T, C), one row per loss term."""
    return output.reshape(-1, output.shape[-1])


def _conv_positions(layer: nn.Conv2d, a_n: Tensor, b_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Patches (G, R, d_in), Jacobians (G, T, R, C, d_out), outputs (G, R, d_out), one by one."""
    G, (K1, K2) = layer.groups, layer.kernel_size
    (s1, s2), (d1, d2) = layer.stride, layer.dilation
    c_in, c_out = layer.in_channels // G, layer.out_channels // G  # channels of one group
    images = a_n.reshape(-1, *a_n.shape[-3:])
    output = layer(images)  # (images, channels, rows, columns)
    b_images = b_n.reshape(*b_n.shape[:2], *output.shape)
    padded = _padded(layer, images).tolist()
    M, _, rows, columns = output.shape
    a, b, out = [], [], []
    for g, m, i, j in itertools.product(range(G), range(M), range(rows), range(columns)):
        patch = [
            padded[m][g * c_in + c][i * s1 + k1 * d1][j * s2 + k2 * d2]
            for c in range(c_in)
            for k1 in range(K1)
            for k2 in range(K2)
        ]
        channels = slice(g * c_out, (g + 1) * c_out)
        a.append(torch.tensor(patch, dtype=torch.float64))
        b.append(b_images[:, :, m, channels, i, j])  # (T, C, d_out)
        out.append(output[m, channels, i, j])
    b_nr = torch.stack(b).reshape(G, -1, *b[0].shape).transpose(1, 2)
    return torch.stack(a).reshape(G, -1, len(a[0])), b_nr, torch.stack(out).reshape(G, -1, c_out)


def _padded(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """Images with the layer's padding around them; 'same' puts the odd one to the right."""
    pads = []
    for axis in (1, 0):  # F.pad takes the last axis first
        if layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            pads += [total // 2, total - total // 2]
        elif layer.padding == "valid":
            pads += [0, 0]
        else:
            pads += [layer.padding[axis]] * 2
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(images, pads, mode=mode)


def _layer_factors(
    vectors: list[tuple[Tensor, Tensor]], hessians: list[list[Tensor]], approx: str
) -> tuple[Tensor, Tensor]:
    """B (G, d_out, d_out) and A (G, d_in, d_in) from the vectors and loss Hessians of examples."""
    if approx == "reduce":
        vectors = [(a.mean(1, keepdim=True), b.sum(2, keepdim=True)) for a, b in vectors]
    N, (G, R, d_in), d_out = len(vectors), vectors[0][0].shape, vectors[0][1].shape[-1]
    A = torch.zeros(G, d_in, d_in, dtype=torch.float64)
    B = torch.zeros(G, d_out, d_out, dtype=torch.float64)
    for g in range(G):
        for (a, b), hessians_n in zip(vectors, hessians, strict=True):
            for r in range(R):
                A[g] += torch.outer(a[g, r], a[g, r]) / (N * R)
                for t, Lambda in enumerate(hessians_n):  # b[g, t, r] (C, d_out)
                    B[g] += b[g, t, r].T @ Lambda @ b[g, t, r]
    return B, A
