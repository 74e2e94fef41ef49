"""Brute-force float64 references for curvature blocks, written from the definitions.

Slow and obvious on purpose: loops over examples n, positions r and loss terms t, no code shared
with the packages under test. Every function that takes a model works on a float64 copy of it, so
the model is left as it was, and all results are float64. `tests/uses.py` finds where any model uses
its weights.

A *use* is where a weight W meets vectors a_nr and makes outputs W a_nr, be it in a linear layer, in
attention, in a convolution, in an embedding or in two layers that share W.

Letters in shapes: N examples, T loss terms per example (r' in the paper), R_n positions of example
n, C outputs, P parameters; d_in and d_out are those of one group. ``likelihood`` is
"classification" (cross-entropy), `NOISY` (labels of which 30 % were drawn at random), "regression"
(½‖y − f‖², unit noise) or "bernoulli" (binary cross-entropy with logits, summed over C). Nothing is
averaged over N.

Source: Eschenhagen et al. 2023, arXiv:2311.00636.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NOISY = "noisy_classification(noise=0.3)"


def negative_log_likelihood(f_n: Tensor, y_n: Tensor, likelihood: str) -> Tensor:
    """Loss −log p(y|f) in nats of one loss term, up to a constant that depends on no parameter.

    f_n is (C,); y_n a class index (), or (C,) for regression and bernoulli.
    """
    if likelihood == "classification":
        return F.cross_entropy(f_n, y_n)
    if likelihood == NOISY:
        return -(0.7 * torch.softmax(f_n, 0)[y_n] + 0.3 / len(f_n)).log()
    if likelihood == "regression":
        return 0.5 * ((y_n - f_n) ** 2).sum()
    if likelihood == "bernoulli":
        return F.binary_cross_entropy_with_logits(f_n, y_n.to(f_n), reduction="sum")
    raise ValueError(f"likelihood={likelihood!r} is not classification, regression or bernoulli.")


def loss_hessian(f_n: Tensor, likelihood: str) -> Tensor:
    """Hessian Λ (C, C) of the loss of one term with respect to its output f_n (C,).

    Differentiated twice for a fixed label, of which Λ is independent; with label noise its mean
    over labels, the Fisher information.
    """
    f_n = f_n.detach().double()
    if likelihood == NOISY:
        losses = [
            lambda f, c=c: negative_log_likelihood(f, torch.tensor(c), likelihood)
            for c in range(len(f_n))
        ]
        return sum(torch.exp(-loss(f_n)) * hessian(loss)(f_n) for loss in losses)
    label = torch.tensor(0) if likelihood == "classification" else torch.zeros_like(f_n)
    Lambda = hessian(lambda f: negative_log_likelihood(f, label, likelihood))(f_n)
    return Lambda.contiguous()


def loss_hessians(
    outputs: Sequence[Tensor], likelihood: str, ignored: Iterable[Tensor] | None = None
) -> list[list[Tensor]]:
    """Hessians Λ_nt (C, C) of all loss terms of all examples; zero for those that are ignored.

    Args:
        outputs: one (C,) or (..., C) for each example.
        likelihood: see the top of this file.
        ignored: one bool () or (...) for each example.
    """
    hessians = [
        [loss_hessian(f_nt, likelihood) for f_nt in f_n.reshape(-1, f_n.shape[-1])]
        for f_n in outputs
    ]
    if ignored is not None:
        for hessians_n, ignored_n in zip(hessians, ignored, strict=True):
            for t, is_ignored in enumerate(ignored_n.flatten().tolist()):
                hessians_n[t] = hessians_n[t] * (not is_ignored)
    return hessians


# --- the generalized Gauss-Newton matrix and the empirical Fisher ---


def dense_ggn_of(
    f: Callable[[dict[str, Tensor]], Tensor],
    parameters: dict[str, Tensor],
    likelihood: str,
    ignored: Tensor | None = None,
    packed: bool = False,
) -> Tensor:
    """Generalized Gauss-Newton matrix Σ_n Σ_t J_ntᵀ Λ_nt J_nt of any function, dense (P, P).

    Args:
        f: the model's output (N, C) or (N, ..., C) as a function of all parameters; each position
            in ``...`` is one loss term.
        parameters: where to differentiate; their order is that of the rows.
        likelihood: see the top of this file.
        ignored: (N, ...) of bool; the loss terms that are left out.
        packed: whether f packs sequences.
    """
    parameters = {name: p.detach().double() for name, p in parameters.items()}
    with sdpa_kernel(SDPBackend.MATH):  # the only one that can be differentiated by vmap
        outputs = f(parameters).detach()
        jacobians = jacobian_of(f, parameters, packed)
    N, C = len(outputs), outputs.shape[-1]
    P = sum(p.numel() for p in parameters.values())
    J = torch.cat([jacobians[k].reshape(*outputs.shape, -1) for k in parameters], dim=-1)
    J = J.detach().reshape(N, -1, C, P)
    hessians = loss_hessians(list(outputs), likelihood, ignored)
    ggn = torch.zeros(P, P, dtype=torch.float64)
    for n in range(N):
        for t, Lambda in enumerate(hessians[n]):
            ggn += J[n, t].T @ Lambda @ J[n, t]
    return ggn


def jacobian_of(
    f: Callable[[dict[str, Tensor]], Tensor], parameters: dict[str, Tensor], packed: bool = False
) -> dict[str, Tensor]:
    """The Jacobian of f in each parameter; ``packed`` if f packs sequences."""
    if not packed:
        return jacrev(f)(parameters)
    # The kernels for packed sequences are closed to torch.func.
    found = torch.autograd.functional.jacobian(
        lambda *values: f(dict(zip(parameters, values, strict=True))), tuple(parameters.values())
    )
    return dict(zip(parameters, found, strict=True))


def packs(model: nn.Module) -> bool:
    """Whether a model may pack sequences, since it has recurrent layers."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def ggn_blocks(
    model: nn.Module,
    call: Callable[[Callable[..., Tensor]], Tensor],
    likelihood: str,
    ignored: Tensor | None = None,
) -> dict[str, Tensor]:
    """Diagonal block of the dense GGN of each trainable parameter, {name: (numel, numel)}.

    Tied parameters appear once, under their first name, and move together.

    Args:
        model: stays as it is; a float64 copy runs.
        call: calls the function that it is given, which stands for the model, with inputs of its
            own and returns (N, ..., C): ``lambda run: run(tokens, mask=mask)``.
        likelihood: see the top of this file.
        ignored: (N, ...) of bool; the loss terms that are left out.
    """
    model = copy.deepcopy(model).double()
    parameters = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}

    def f(values: dict[str, Tensor]) -> Tensor:
        return call(lambda *args, **kw: functional_call(model, values, args, kw, tie_weights=True))

    ggn = dense_ggn_of(f, parameters, likelihood, ignored, packs(model))
    return _diagonal_blocks(ggn, parameters)


def dense_ggn_blocks(model: nn.Module, x: Tensor, likelihood: str) -> dict[str, Tensor]:
    """`ggn_blocks` of a model that is called with inputs x (N, ...)."""
    x = x.double() if x.is_floating_point() else x
    return ggn_blocks(model, lambda run: run(x.clone()), likelihood)  # it may work in place


def _diagonal_blocks(ggn: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a matrix whose rows are all entries of the parameters, one after the other."""
    sizes = [p.numel() for p in parameters.values()]
    rows = [block.split(sizes, dim=1)[i] for i, block in enumerate(ggn.split(sizes))]
    return dict(zip(parameters, rows, strict=True))


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
        labels = y[n].reshape(f.shape if y.is_floating_point() else -1)
        for t in range(len(f)):
            loss = negative_log_likelihood(f[t], labels[t], likelihood)
            gradients = torch.autograd.grad(
                loss, list(parameters.values()), retain_graph=True, materialize_grads=True
            )
            for name, g in zip(parameters, gradients, strict=True):
                fisher[name] += torch.outer(g.flatten(), g.flatten())
    return fisher


# --- K-FAC ---


class Use(NamedTuple):
    """One linear use of a weight: in example n, at position r, it makes W a_nr of a_nr.

    ``a[n]`` (R_n, d_in) are the inputs, ``b[n]`` (T_n, R_n, C, d_out) the Jacobians of the outputs
    of the loss terms with respect to W a_nr. Positions that do not count, such as padding, are left
    out of both. ``ragged``: reduce scales by 1/√R_n, as for nodes and edges of graphs.
    ``input_first``: the weight is stored (d_in, d_out), as an Embedding's, so that its block is
    A ⊗ B. ``is_bias``: the parameter is a bias, whose inputs are ones and whose block is B alone.
    """

    a: list[Tensor]
    b: list[Tensor]
    ragged: bool = False
    input_first: bool = False
    is_bias: bool = False


def kfac_from_uses(
    uses: Sequence[Use],
    hessians: list[list[Tensor]],
    approx: str,
    ragged: bool = False,
    scaling: str = "positions",
) -> tuple[Tensor, Tensor]:
    """Factors B (d_out, d_out) and A (d_in, d_in) of the weight that all uses share.

    The uses are one more sharing axis: position r counts those of all uses one after the other.

    - expand: A = Σ_n Σ_r a aᵀ / Σ_n R_n, B = Σ_n Σ_t Σ_r b Λ_nt bᵀ; with the scaling "examples"
      A = Σ_n Σ_r a aᵀ / N (the paper, below eq. 7 in the appendix).
    - reduce: A = 1/N Σ_n â âᵀ, B = Σ_n Σ_t b̂ Λ_nt b̂ᵀ with â = Σ_r a / R_n and b̂ = Σ_r b, exact
      where linear networks take the mean over positions; if ragged â = Σ_r a / √R_n and
      b̂ = Σ_r b / √R_n, exact where they take Σ_r / √R_n (the paper, appendix on GNNs). Zero where
      R_n = 0; the same product where all R_n are the same.

    Raises:
        ValueError: an unknown mode.
    """
    if approx not in ("expand", "reduce"):
        raise ValueError(f"approx={approx!r} is neither 'expand' nor 'reduce'.")
    N = len(hessians)
    a = [torch.cat([use.a[n] for use in uses]) for n in range(N)]
    b = [torch.cat([use.b[n] for use in uses], dim=1) for n in range(N)]
    counts = [len(a_n) for a_n in a]
    if approx == "reduce":
        for n, R in enumerate(counts):
            scale_a, scale_b = (R**-0.5, R**-0.5) if ragged and R else (1 / max(R, 1), 1.0)
            a[n] = scale_a * a[n].sum(0, keepdim=True)
            b[n] = scale_b * b[n].sum(1, keepdim=True)
    total = N if approx == "reduce" or scaling == "examples" else max(sum(counts), 1)
    A = torch.zeros(a[0].shape[-1], a[0].shape[-1], dtype=torch.float64)
    B = torch.zeros(b[0].shape[-1], b[0].shape[-1], dtype=torch.float64)
    for n in range(N):
        for r in range(len(a[n])):
            A += torch.outer(a[n][r], a[n][r]) / total
            for t, Lambda in enumerate(hessians[n]):
                B += b[n][t, r].T @ Lambda @ b[n][t, r]
    return B, A


def nearest_kronecker(blocks: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Positive semidefinite F (m, m), S (n, n) that minimise ‖F ⊗ S − Σ_i F_i ⊗ S_i‖ (Frobenius).

    From the singular value decomposition of the sum, its entries put in another order, where a
    Kronecker product has rank one. Of unique norm only as a product: ‖F‖ = ‖S‖ here.

    Source: Van Loan and Pitsianis 1993, "Approximation with Kronecker products", cor. 2 and
    thm. 5 (factors of a semidefinite matrix are semidefinite).
    """
    m, n = len(blocks[0][0]), len(blocks[0][1])
    total = torch.zeros(m * n, m * n, dtype=torch.float64)
    for first, second in blocks:
        total += torch.kron(first, second)
    rearranged = total.reshape(m, n, m, n).transpose(1, 2).reshape(m * m, n * n)
    U, sigma, Vh = torch.linalg.svd(rearranged)
    F, S = sigma[0].sqrt() * U[:, 0].reshape(m, m), sigma[0].sqrt() * Vh[0].reshape(n, n)
    return (F, S) if F.trace() >= 0 else (-F, -S)


UsesByKey = dict[tuple[str, int], list[Use]]  # (name of the parameter, group) -> its uses


def kfac_blocks_from_uses(
    uses: UsesByKey, hessians: list[list[Tensor]], approx: str, scaling: str = "positions"
) -> dict[str, Tensor]:
    """Dense K-FAC blocks {name: (numel, numel)}, block-diagonal over the groups of a parameter.

    Uses of one orientation are one more sharing axis; the block of a weight that is used in both
    orientations is the Kronecker product nearest to the sum of the two. The block of a bias is B
    alone, of b that are summed and never scaled: in reduce that is the exact block. With expand's
    scaling "examples" a bias is a weight with the input 1, so that its A is Σ_n R_n / N.
    """
    blocks: dict[str, list[Tensor]] = {}
    for (name, _), uses_of_group in sorted(uses.items(), key=lambda item: item[0][1]):
        products = []
        for input_first in (False, True):
            same = [use for use in uses_of_group if use.input_first is input_first]
            if same:
                ragged = any(use.ragged for use in same)
                B, A = kfac_from_uses(same, hessians, approx, ragged, scaling)
                if same[0].is_bias and (approx, scaling) != ("expand", "examples"):
                    A = torch.ones_like(A)
                products.append((A, B) if input_first else (B, A))
        first, second = products[0] if len(products) == 1 else nearest_kronecker(products)
        blocks.setdefault(name, []).append(torch.kron(first, second))
    return {name: torch.block_diag(*groups) for name, groups in blocks.items()}


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
