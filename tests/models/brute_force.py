"""What every block of any model should be, by brute force: no hook, no rule, no batch.

Each example runs alone. The functions of torch that multiply with a weight are exchanged for ones
that note their inputs and add a zero to their outputs, by which the model's outputs are
differentiated. So modules and functional uses are seen alike, and nothing is shared with the
package, which sees modules by hooks and the rest by a mode of torch's.

A parameter that is only used in that way, as it is, has a block by K-FAC's definition
(`tests.oracles.kfac_from_uses`). Any other has the block of the GGN.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles import Use, kfac_from_uses, loss_hessians, nearest_kronecker

__all__ = ["Reference", "reference"]


class Reference(NamedTuple):
    """What a model's blocks should be."""

    products: dict[str, list[tuple[Tensor, Tensor]]]
    """Parameter -> the two factors of each of its groups, for linear uses alone."""
    gradients: dict[str, Tensor]
    """Parameter -> (K, P): the GGN's block is the sum of the outer products of the rows."""


class _Noted(NamedTuple):
    name: str
    group: int
    a: Tensor  # (R, d_in)
    output: Tensor  # what was added to the operation's output
    rows: Callable[[Tensor], Tensor]  # (T, *output) -> (T, R, d_out)
    input_first: bool
    is_bias: bool
    ragged: bool = False


def reference(model: nn.Module, x: Any, likelihood: str, approx: str) -> Reference:
    """The blocks by K-FAC's definition and by the GGN's."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    other = _other_ways(model, parameters, x)
    uses: dict[tuple[str, int], dict[int, Use]] = {}
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    outputs = []
    for n in range(_length(x)):
        one = {k: v[n : n + 1] for k, v in x.items()} if isinstance(x, dict) else x[n : n + 1]
        with _watched(parameters) as noted:
            f = _output(model, one)[0]
        outputs.append(f.detach())
        f = f.reshape(-1, f.shape[-1])  # (T, C)
        T, C = f.shape
        leaves = list(parameters.values()) + [use.output for use in noted]
        jacobian: list[list[Tensor]] = [[] for _ in leaves]
        for value in f.flatten():
            grads = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
            for seen, leaf, g in zip(jacobian, leaves, grads, strict=True):
                seen.append(torch.zeros_like(leaf) if g is None else g)
        J = [torch.stack(seen) for seen in jacobian]  # (T·C, ...)
        roots = [_root(Lambda) for Lambda in loss_hessians([f.detach()], likelihood)[0]]
        for name, of_parameter in zip(parameters, J, strict=False):
            by_term = of_parameter.reshape(T, C, -1)
            rows[name] += [roots[t].T @ by_term[t] for t in range(T)]
        of_uses = J[len(parameters) :]
        reached = {(u.name, u.group) for u, b in zip(noted, of_uses, strict=True) if b.any()}
        for k, (use, b) in enumerate(zip(noted, of_uses, strict=True)):
            if use.name in other or ((use.name, use.group) in reached and not b.any()):
                continue  # of another kind, or a constant: nothing is derived through it
            by_use = uses.setdefault((use.name, use.group), {})
            seen_use = by_use.setdefault(k, Use([], [], use.ragged, use.input_first, use.is_bias))
            positions = use.rows(b).reshape(T, C, len(use.a), -1).transpose(1, 2)
            # Examples without this use, as an expert's that was not chosen, have no positions.
            while len(seen_use.a) < n:
                seen_use.a.append(use.a[:0])
                seen_use.b.append(positions[:, :0])
            seen_use.a.append(use.a)
            seen_use.b.append(positions)
    hessians = loss_hessians(outputs, likelihood)
    products: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (name, group), by_use in sorted(uses.items()):
        both = []
        for input_first in (False, True):
            same = [u for u in by_use.values() if u.input_first is input_first]
            if same:
                ragged = same[0].ragged
                B, A = kfac_from_uses(_complete(same, len(hessians)), hessians, approx, ragged)
                A = torch.ones_like(A) if same[0].is_bias else A
                both.append((A, B) if input_first else (B, A))
        product = both[0] if len(both) == 1 else nearest_kronecker(both)
        of_name = products.setdefault(name, [])
        # Experts that no position was routed to have blocks of zeros.
        of_name += [(0 * product[0], 0 * product[1])] * (group - len(of_name))
        of_name.append(product)
    for name, of_name in products.items():
        if parameters[name].dim() == 3 and next(iter(uses[name, len(of_name) - 1].values())).ragged:
            first, second = of_name[0]
            missing = len(parameters[name]) - len(of_name)
            of_name += [(0 * first, 0 * second)] * missing
    gradients = {name: torch.cat(of_name).detach() for name, of_name in rows.items()}
    return Reference(products, gradients)


def _complete(uses: list[Use], N: int) -> list[Use]:
    for use in uses:
        while len(use.a) < N:
            use.a.append(use.a[0][:0])
            use.b.append(use.b[0][:, :0])
    return uses


def _other_ways(model: nn.Module, parameters: dict[str, Tensor], x: Any) -> set[str]:
    """The parameters that also act in another way than by linear uses.

    In these their weights are detached: what still has a gradient acts elsewhere.
    """
    one = {k: v[:1] for k, v in x.items()} if isinstance(x, dict) else x[:1]
    with _watched(parameters, detach=True):
        f = _output(model, one)
    if not f.requires_grad:
        return set()
    u = torch.randn(f.shape, generator=torch.Generator().manual_seed(0), dtype=f.dtype)
    leaves = list(parameters.values())
    grads = torch.autograd.grad((f * u).sum(), leaves, allow_unused=True)
    return {n for n, g in zip(parameters, grads, strict=True) if g is not None and g.any()}


def _output(model: nn.Module, one: Any) -> Tensor:
    f = model(**one) if isinstance(one, dict) else model(one)
    return getattr(f, "logits", f)


def _length(x: Any) -> int:
    return len(next(iter(x.values()))) if isinstance(x, dict) else len(x)


def _root(Lambda: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(Lambda)
    return vectors * values.clamp(min=0).sqrt()


@contextmanager
def _watched(parameters: dict[str, Tensor], detach: bool = False) -> Iterator[list[_Noted]]:
    """Torch's functions exchanged for ones that note the uses of these parameters."""
    names = {id(p): name for name, p in parameters.items()}
    noted: list[_Noted] = []

    def name_of(tensor: Any) -> str | None:
        if not isinstance(tensor, Tensor):
            return None
        if id(tensor) in names:
            return names[id(tensor)]
        base = tensor._base  # a transpose, a part of packed projections, or an expert
        return names.get(id(base)) if base is not None and base.dim() >= tensor.dim() else None

    def constant(tensor: Any) -> Any:
        return tensor.detach() if detach and name_of(tensor) is not None else tensor

    def perturbed(output: Tensor) -> tuple[Tensor, Tensor]:
        zero = torch.zeros_like(output).requires_grad_()
        return output + zero, zero

    def note_bias(bias: Any, zero: Tensor, features: int) -> None:
        name = name_of(bias)
        if name is not None:
            ones = torch.ones(zero.numel() // zero.shape[features], 1, dtype=torch.float64)
            axis = features if features < 0 else features + 1
            parts = (
                3 if name.endswith("in_proj_bias") and bias.shape == parameters[name].shape else 1
            )
            for part, some in enumerate(torch.arange(len(bias)).chunk(parts)):
                group = part if parts > 1 else bias.storage_offset() // len(bias)
                rows = lambda b, some=some: b.movedim(axis, -1).flatten(1, -2)[..., some]  # noqa: E731
                noted.append(_Noted(name, group, ones, zero, rows, False, True))

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output, zero = perturbed(true_linear(x, constant(weight), constant(bias)))
        name = name_of(weight)
        if name is not None:
            parts = (
                3 if name.endswith("in_proj_weight") and len(weight) == len(parameters[name]) else 1
            )
            a = x.detach().reshape(-1, x.shape[-1]).double()
            for part in range(parts):
                size = len(weight) // parts
                some = slice(part * size, (part + 1) * size)
                group, expert = part, parameters[name].dim() == 3
                if parts == 1 and (name.endswith("in_proj_weight") or expert):
                    group = weight.storage_offset() // weight.numel()
                rows = lambda b, some=some: b[..., some].flatten(1, -2)  # noqa: E731
                noted.append(_Noted(name, group, a, zero, rows, False, False, expert))
        note_bias(bias, zero, -1)
        return output

    def addmm(bias: Tensor, x: Tensor, weight: Tensor, **rest: Any) -> Tensor:
        output, zero = perturbed(true_addmm(constant(bias), x, constant(weight), **rest))
        name = name_of(weight)
        if name is not None:
            noted.append(_Noted(name, 0, x.detach(), zero, lambda b: b, True, False))
        note_bias(bias, zero, -1)
        return output

    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        name, base = name_of(weight), weight._base
        if name is None or base is None or weight.dim() != 2 or weight.shape != base.mT.shape:
            return true_matmul(x, weight)
        output, zero = perturbed(true_matmul(x, constant(weight)))
        a = x.detach().reshape(-1, x.shape[-1])
        noted.append(_Noted(name, 0, a, zero, lambda b: b.flatten(1, -2), False, False))
        return output

    def embedding(
        tokens: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **kw: Any
    ) -> Tensor:
        output, zero = perturbed(true_embedding(tokens, constant(weight), padding_idx, *rest, **kw))
        name = name_of(weight)
        if name is not None:
            flat = tokens.flatten()
            counted = torch.ones_like(flat, dtype=torch.bool)
            if padding_idx is not None and padding_idx >= 0:
                counted = flat != padding_idx
            a = F.one_hot(flat[counted], len(weight)).double()
            noted.append(
                _Noted(name, 0, a, zero, lambda b: b.flatten(1, -2)[:, counted], True, False)
            )
        return output

    def convolution(true: Any, dimensions: int) -> Any:
        def conv(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            dilation: Any = 1,
            groups: int = 1,
        ) -> Tensor:
            output, zero = perturbed(
                true(x, constant(weight), constant(bias), stride, padding, dilation, groups)
            )
            name = name_of(weight)
            if name is not None:
                _note_convolution(
                    noted, name, x.detach(), weight, zero, (stride, padding, dilation), groups
                )
            note_bias(bias, zero, 1)
            return output

        return conv

    def transposed(
        x: Tensor,
        weight: Tensor,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        more: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        output, zero = perturbed(
            true_transposed(
                x, constant(weight), constant(bias), stride, padding, more, groups, dilation
            )
        )
        name = name_of(weight)
        if name is not None:
            assert groups == 1
            a = x.detach().flatten(2).transpose(1, 2).flatten(0, 1)  # (R, C_in)

            def rows(b: Tensor) -> Tensor:
                return (
                    F.unfold(b.flatten(0, 1), weight.shape[2:], dilation, padding, stride)
                    .unflatten(0, b.shape[:2])
                    .movedim(-1, 2)
                    .flatten(1, 2)
                )

            noted.append(_Noted(name, 0, a, zero, rows, True, False))
        note_bias(bias, zero, 1)
        return output

    true_matmul = Tensor.__matmul__
    true_linear, true_addmm, true_embedding = F.linear, torch.addmm, F.embedding
    true_transposed = F.conv_transpose2d
    places = [
        (F, "linear", linear),
        (Tensor, "__matmul__", matmul),  # with a transpose
        (torch, "addmm", addmm),
        (F, "embedding", embedding),
        (F, "conv1d", convolution(F.conv1d, 1)),
        (F, "conv2d", convolution(F.conv2d, 2)),
        (F, "conv_transpose2d", transposed),
    ]
    before = [(home, key, getattr(home, key)) for home, key, _ in places]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    for home, key, new in places:
        setattr(home, key, new)
    try:
        yield noted
    finally:
        for home, key, old in before:
            setattr(home, key, old)
        torch.backends.mha.set_fastpath_enabled(fast)


def _note_convolution(
    noted: list[_Noted],
    name: str,
    x: Tensor,
    weight: Tensor,
    zero: Tensor,
    geometry: tuple,
    groups: int,
) -> None:
    """Patches by a convolution with one-hot kernels, for any stride, padding and dilation."""
    stride, padding, dilation = geometry
    kernel = weight.shape[2:]
    K = kernel.numel()
    one_hot = torch.eye(K, dtype=x.dtype).reshape(K, 1, *kernel)
    conv = _TRUE[len(kernel)]
    M, C = x.shape[:2]
    alone = x.reshape(M * C, 1, *x.shape[2:])
    seen = conv(alone, one_hot, None, stride, padding, dilation)  # (M·C, K, *out)
    patches = seen.reshape(M, C * K, -1).transpose(1, 2).flatten(0, 1)  # (M·R, C·K)
    d_in, d_out = C * K // groups, len(weight) // groups
    for g in range(groups):
        inputs, outputs = slice(g * d_in, (g + 1) * d_in), slice(g * d_out, (g + 1) * d_out)
        rows = lambda b, outputs=outputs: b[:, :, outputs].flatten(3).transpose(2, 3).flatten(1, 2)  # noqa: E731
        noted.append(_Noted(name, g, patches[:, inputs], zero, rows, False, False))


_TRUE = {1: F.conv1d, 2: F.conv2d}
