"""Split products with matrices that are stacked in one parameter into one product each.

An array (E, d_in, d_out) of experts' weights is E linear layers. Operations on the whole array are
rewritten, so that each expert's weight w[e] has its own operation with the examples, which
`operations` follows as a layer's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kfac_backend.layers.rows import current_rows, examples_of_rows

MATMULS = {torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__}
GROUPED = getattr(torch, "_grouped_mm", None)  # F.grouped_mm calls it


def by_matrix(
    func: Callable[..., Any], args: tuple[Any, ...], is_stack: Callable[[Any], bool]
) -> Callable[..., Tensor] | None:
    """Return the function applied matrix by matrix, if one of two arguments is a stack, or None."""
    if func not in {*MATMULS, GROUPED, torch.einsum}:
        return None  # do not read the memory, which FSDP may have freed in one of its hooks
    operands = args[1:] if func is torch.einsum else args
    if len(operands) != 2 or is_stack(operands[0]) == is_stack(operands[1]):
        return None
    second = is_stack(operands[1])
    if func in MATMULS:
        return _product if second else lambda w, x: _product(x.mT, w.mT).mT
    if func is GROUPED and second and operands[0].dim() == 2:
        return _grouped
    return _einsum(args[0], second) if func is torch.einsum else None


def _of_each(x: Tensor, w: Tensor) -> Tensor:
    """Compute (E, ..., M, d_in) @ w[e], with a separate product for each matrix."""
    products = []
    for e in range(len(w)):
        with _declared_rows(x.shape[:-1], e):
            products.append(x[e] @ w[e])
    return torch.stack(products)


def _product(x: Tensor, w: Tensor) -> Tensor:
    """Compute x @ w of x (..., E or 1, M, d_in) or (M, d_in)."""
    x = x.expand(*x.shape[:-3], len(w), *x.shape[-2:])
    return _of_each(x.movedim(-3, 0), w).movedim(0, -3)


def _grouped(x: Tensor, w: Tensor, *, offs: Tensor, **options: None) -> Tensor:
    """Multiply rows (M, d_in) by the matrix of their group; group e ends before row ``offs[e]``."""
    ends = offs.tolist()
    products = []
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        with _declared_rows(x.shape[:1], slice(start, end)):
            products.append(x[start:end] @ w[e])
    return torch.cat([*products, x.new_zeros(len(x) - ends[-1], w.shape[-1])])


def _declared_rows(axes: tuple[int, ...], part: int | slice) -> AbstractContextManager[None]:
    """Declare the examples of one matrix's rows, if the model declared them for all rows."""
    rows = current_rows()
    if rows is None or rows.axes != axes:
        return nullcontext()
    return examples_of_rows(rows.as_given[part], rows.num_examples, by_roots=rows.by_roots)


def _einsum(equation: str, second: bool) -> Callable[..., Tensor] | None:
    """Rewrite an einsum of a stack and another tensor; None if it is more than matrix products."""
    inputs, _, out = equation.replace(" ", "").partition("->")
    of_x, _, of_w = inputs.partition(",")
    of_x, of_w = (of_x, of_w) if second else (of_w, of_x)
    e, first, last = (of_w + "   ")[:3]
    transposed = first in out  # (E, d_out, d_in)
    i, o = (last, first) if transposed else (first, last)
    rest = of_x.replace(e, "").replace(i, "")
    fits = len(of_w) == 3 and i in of_x and i not in out and o not in of_x
    if not (fits and "." not in equation and sorted(out) == sorted(rest + e + o)):
        return None

    def of_matrices(equation: str, *operands: Tensor) -> Tensor:
        x, w = operands if second else operands[::-1]
        w = w.mT if transposed else w
        x = x.expand(len(w), *x.shape) if e not in of_x else x.movedim(of_x.index(e), 0)
        # (E, *rest, d_in); the last axis may be among the rest
        x = x.movedim(1 + of_x.replace(e, "").index(i), -1)
        y = _of_each(x, w)
        return y.permute([(e + rest + o).index(letter) for letter in out])

    return of_matrices
