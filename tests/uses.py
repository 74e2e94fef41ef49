"""The linear uses of any model's weights, by brute force: no hook, no rule, no batch.

Each example runs alone. The functions of torch that multiply with a weight are exchanged for ones
that note their inputs and add a zero to their outputs, by which the model's outputs are
differentiated. So modules and functional uses are seen alike, and nothing is shared with the
package, which sees modules by hooks and the rest by a mode of torch's.

Keys that ``key_padding_mask`` masks out are no positions of the key and value projections; tokens
that are ``padding_idx`` are none of an embedding. Other padding is left out of the example that
runs. Fused kernels (recurrent layers) multiply unseen: a reference runs in the model's place.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles import Use, UsesByKey, kfac_blocks_from_uses, loss_hessians

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = [f"conv_transpose{d}d" for d in (1, 2, 3)]
KEYS = ("k_proj_weight", "v_proj_weight")


class Noted(NamedTuple):
    """A parameter, or a group of it, in one linear operation of one example."""

    key: tuple[str, int]
    a: Tensor  # (R, d_in)
    zero: Tensor  # what was added to the operation's output
    rows: Callable[[Tensor], Tensor]  # (T·C, *output) -> (T·C, R, d_out)
    input_first: bool = False
    is_bias: bool = False
    is_stacked: bool = False  # one of several matrices, or biases, in one parameter


def uses_of(
    runs: Iterable[Callable[[], Tensor]],
    parameters: Mapping[str, Tensor],
    ragged: Sequence[str] = (),
) -> tuple[UsesByKey, list[Tensor]]:
    """All linear uses of the parameters, and the outputs (T, C) of each example.

    Args:
        runs: for each example, what runs it alone and returns its outputs (..., C).
        parameters: those of the model, by name.
        ragged: the layers of which reduce scales by 1/√R_n; stacked weights are such, too.
    """
    found: list[dict[Any, list[tuple[Tensor, Tensor]]]] = []
    outputs = []
    for run in runs:
        with watched(parameters) as noted:
            f = run()
        f = f.reshape(-1, f.shape[-1])  # (T, C)
        outputs.append(f.detach())
        by_value = [
            torch.autograd.grad(
                v, [use.zero for use in noted], retain_graph=True, allow_unused=True
            )
            for v in f.flatten()
            if noted
        ]
        jacobians = [_stacked(of_use) for of_use in zip(*by_value, strict=True)]
        reached = {use.key for use, b in zip(noted, jacobians, strict=True) if b is not None}
        by_key: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for use, b in zip(noted, jacobians, strict=True):
            if b is None and use.key in reached:
                continue  # a constant: nothing is derived through it
            b = torch.zeros(len(by_value), *use.zero.shape).double() if b is None else b
            b = use.rows(b).unflatten(0, f.shape).transpose(1, 2)  # (T, R, C, d_out)
            kind = use.key, use.input_first, use.is_bias, use.is_stacked
            by_key.setdefault(kind, []).append((use.a, b))
        found.append(by_key)
    shapes = {kind: of[0] for by_key in found for kind, of in by_key.items()}
    for ((name, _), *rest), of in list(shapes.items()):
        if rest[-1]:  # matrices that no example reaches have no position
            shapes = {((name, g), *rest): of for g in range(len(parameters[name]))} | shapes
    uses: UsesByKey = {}
    for kind, (some_a, some_b) in sorted(shapes.items(), key=lambda item: item[0]):
        (name, _), input_first, is_bias, is_stacked = kind
        scaled = not is_bias and (is_stacked or name.startswith(tuple(ragged)))
        use = Use([], [], scaled, input_first, is_bias)
        for by_key, f in zip(found, outputs, strict=True):
            none = some_a[:0], some_b.new_zeros(len(f), 0, *some_b.shape[2:])
            a, b = zip(*by_key.get(kind, [none]), strict=True)
            use.a.append(torch.cat(a))
            use.b.append(torch.cat(b, 1))
        uses.setdefault(kind[0], []).append(use)
    return uses, outputs


def _stacked(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The Jacobian (T·C, *output) of one operation's output; None if nothing depends on it."""
    some = next((g for g in gradients if g is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if g is None else g for g in gradients])


def blocks_of_uses(
    model: nn.Module,
    runs: Iterable[Callable[[], Tensor]],
    likelihood: str,
    approx: str,
    ignored: Iterable[Tensor] | None = None,
    scaling: str = "positions",
) -> dict[str, Tensor]:
    """Dense K-FAC blocks of all linear uses; ``model.ragged`` as in `uses_of`, if there is one."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    uses, outputs = uses_of(runs, parameters, getattr(model, "ragged", ()))
    hessians = loss_hessians(outputs, likelihood, ignored)
    return kfac_blocks_from_uses(uses, hessians, approx, scaling)


def kfac_blocks(
    model: nn.Module, x: Tensor, likelihood: str, approx: str, scaling: str = "positions"
) -> dict[str, Tensor]:
    """The same of a float64 copy that is called with inputs x (N, ...), of what is trainable."""
    model, x = copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x
    blocks = blocks_of_uses(
        model,
        [partial(model, one.clone()) for one in x.split(1)],
        likelihood,
        approx,
        scaling=scaling,
    )
    return {name: blocks[name] for name, _ in model.named_parameters() if name in blocks}


@contextmanager
def watched(parameters: Mapping[str, Tensor], detach: bool = False) -> Iterator[list[Noted]]:
    """Torch's functions exchanged for ones that note the uses of these parameters.

    With ``detach`` the weights are constants there: what has a gradient still acts elsewhere.
    """
    names = {id(p): name for name, p in parameters.items()}
    noted: list[Noted] = []
    counted: list[Tensor | None] = [None]  # the keys of the present attention that are no padding

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

    def groups_of(tensor: Tensor) -> list[tuple[tuple[str, int], slice]]:
        """The groups that a weight or bias is, or has, and the features of its output of each."""
        name = name_of(tensor)
        if name is None:
            return []
        whole, size, first = parameters[name], len(tensor), 0
        if "in_proj" in name:  # of queries, keys and values
            size = len(whole) // 3
            first = tensor.storage_offset() * len(tensor) // tensor.numel() // size
        elif whole.dim() > tensor.dim():  # one of those that are stacked
            first = tensor.storage_offset() // tensor.numel()
        return [
            ((name, first + g), slice(g * size, (g + 1) * size)) for g in range(len(tensor) // size)
        ]

    def counted_of(key: tuple[str, int]) -> Any:
        """The positions of a map that count: of keys and values, those that no mask hides."""
        of_keys = key[1] > 0 if "in_proj" in key[0] else key[0].endswith(KEYS)
        return counted[0] if of_keys and counted[0] is not None else slice(None)

    def note_bias(bias: Any, zero: Tensor, features: int) -> None:
        ones = torch.ones(zero.numel() // zero.shape[features], 1, dtype=torch.float64)
        axis = features if features < 0 else features + 1
        for key, some in groups_of(bias):
            kept = counted_of(key)
            rows = lambda b, some=some, kept=kept: _rows(  # noqa: E731
                b.movedim(axis, -1)[..., some]
            )[:, kept]
            is_stacked = parameters[key[0]].dim() == 2
            noted.append(Noted(key, ones[kept], zero, rows, False, True, is_stacked))

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output, zero = perturbed(true_linear(x, constant(weight), constant(bias)))
        a = x.detach().reshape(-1, x.shape[-1]).double()
        for key, some in groups_of(weight):
            kept = counted_of(key)
            rows = lambda b, some=some, kept=kept: _rows(b[..., some])[:, kept]  # noqa: E731
            is_turned = weight._base is not None and weight.stride(-1) != 1
            is_stacked = parameters[key[0]].dim() == 3
            noted.append(Noted(key, a[kept], zero, rows, is_turned, False, is_stacked))
        note_bias(bias, zero, -1)
        return output

    def attention(*arguments: Any, **keywords: Any) -> Any:
        mask = keywords.get("key_padding_mask")
        if mask is not None:
            counted[0] = (~mask if mask.dtype == torch.bool else mask > -math.inf).flatten()
        found = true_attention(*arguments, **keywords)
        counted[0] = None
        return found

    def addmm(bias: Tensor, x: Tensor, weight: Tensor, **rest: Any) -> Tensor:
        output, zero = perturbed(true_addmm(constant(bias), x, constant(weight), **rest))
        if (name := name_of(weight)) is not None:
            noted.append(Noted((name, 0), x.detach(), zero, lambda b: b, True))
        note_bias(bias, zero, -1)
        return output

    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        name, base = name_of(weight), weight._base
        if name is None or base is None or weight.dim() != 2 or weight.shape != base.mT.shape:
            return true_matmul(x, weight)
        output, zero = perturbed(true_matmul(x, constant(weight)))
        noted.append(Noted((name, 0), x.detach().reshape(-1, x.shape[-1]), zero, _rows))
        return output

    def bilinear(u: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output, zero = perturbed(true_bilinear(u, v, constant(weight), constant(bias)))
        a = torch.einsum("ri,rj->rij", u.detach().flatten(0, -2), v.detach().flatten(0, -2))
        if (name := name_of(weight)) is not None:
            noted.append(Noted((name, 0), a.flatten(1).double(), zero, _rows))
        note_bias(bias, zero, -1)
        return output

    def embedding(
        tokens: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **kw: Any
    ) -> Tensor:
        output, zero = perturbed(true_embedding(tokens, constant(weight), padding_idx, *rest, **kw))
        if (name := name_of(weight)) is not None:
            flat = tokens.flatten()
            kept = torch.ones_like(flat, dtype=torch.bool)
            if padding_idx is not None and padding_idx >= 0:
                kept = flat != padding_idx
            a = F.one_hot(flat[kept], len(weight)).double()
            noted.append(Noted((name, 0), a, zero, lambda b: _rows(b)[:, kept], True))
        return output

    def convolution(true: Any) -> Any:
        def conv(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
            output, zero = perturbed(
                true(x, constant(weight), constant(bias), stride, padding, dilation, groups)
            )
            if (name := name_of(weight)) is not None:
                patches = _patches(x.detach(), weight, stride, padding, dilation)  # (M, R, C·K)
                patches = patches.flatten(0, 1).chunk(groups, -1)
                for g, of_outputs in enumerate(torch.arange(len(weight)).chunk(groups)):
                    rows = lambda b, some=of_outputs: _rows(b[:, :, some].movedim(2, -1))  # noqa: E731
                    noted.append(Noted((name, g), patches[g], zero, rows))
            note_bias(bias, zero, 1)
            return output

        return conv

    def transposed(true: Any) -> Any:
        def conv(x, weight, bias=None, stride=1, padding=0, more=0, groups=1, dilation=1):
            output, zero = perturbed(
                true(x, constant(weight), constant(bias), stride, padding, more, groups, dilation)
            )
            if (name := name_of(weight)) is not None:
                of_inputs = x.detach().movedim(1, -1).flatten(0, -2).chunk(groups, -1)  # (R, C_in)
                channels = torch.arange(zero.shape[1]).chunk(groups)
                for g, some in enumerate(channels):

                    def rows(b: Tensor, some: Tensor = some) -> Tensor:
                        b = b[:, :, some].flatten(0, 1)  # patches of outputs that a pixel writes to
                        b = _patches(b, weight, stride, padding, dilation, x.shape[2:])
                        return b.unflatten(0, (-1, len(x))).flatten(1, 2)

                    noted.append(Noted((name, g), of_inputs[g], zero, rows, True))
            note_bias(bias, zero, 1)
            return output

        return conv

    true_linear, true_addmm, true_embedding = F.linear, torch.addmm, F.embedding
    true_bilinear = F.bilinear
    true_matmul, true_attention = Tensor.__matmul__, F.multi_head_attention_forward
    places = [
        (F, "linear", linear),
        (F, "multi_head_attention_forward", attention),
        (Tensor, "__matmul__", matmul),  # with a transpose
        (torch, "addmm", addmm),
        (F, "bilinear", bilinear),
        (F, "embedding", embedding),
        *((F, f"conv{d}d", convolution(getattr(F, f"conv{d}d"))) for d in (1, 2, 3)),
        *((F, name, transposed(getattr(F, name))) for name in TRANSPOSED),
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


def _rows(b: Tensor) -> Tensor:
    """(T·C, ..., d) as (T·C, R, d)."""
    return b.reshape(len(b), -1, b.shape[-1])


def _patches(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, size: Any = None
) -> Tensor:
    """Patches (M, R, C·K) of images x (M, C, ...), by a convolution with one-hot kernels.

    That is for any stride, padding and dilation; of the first pixels of a size, if it is given.
    """
    kernel = weight.shape[2:]
    K, (M, C) = kernel.numel(), x.shape[:2]
    one_hot = torch.eye(K, dtype=x.dtype).reshape(K, 1, *kernel)
    alone = x.reshape(M * C, 1, *x.shape[2:])
    found = CONVOLUTIONS[len(kernel)](alone, one_hot, None, stride, padding, dilation)
    for axis, n in enumerate(size or ()):
        found = found.narrow(2 + axis, 0, n)
    return found.reshape(M, C * K, -1).mT
