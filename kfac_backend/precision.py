"""Set the precision of float32 products: full, or TF32 or bfloat16 in backward passes.

TF32 keeps ten bits of mantissa and bfloat16 seven. This is too few for a Gram matrix, whose small
eigenvalues are differences of large numbers. It suffices for a backward pass, whose errors average
out.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

BackwardPrecision = Literal["float32", "tf32", "bf16"]
SUPPORTED = {"cpu": ("float32", "bf16"), "cuda": ("float32", "tf32")}
"""Precisions of backward passes by the device's type; other devices support float32."""


def at_least_float32(x: Tensor) -> Tensor:
    """Return the tensor at least in float32, because sums in half precision lose too much."""
    return x if x.dtype == torch.float64 else x.float()


def backward_arithmetic(precision: BackwardPrecision) -> AbstractContextManager[None]:
    """Return a context that multiplies float32 in the backward passes' precision."""
    if precision == "float32":
        return nullcontext()
    cpu, gpu = ("bf16", "ieee") if precision == "bf16" else ("ieee", "tf32")
    return _products_in(cpu, cpu, gpu, gpu)


def arithmetic_of_sums(
    device: torch.device, precision: BackwardPrecision, in_training: bool
) -> AbstractContextManager[object]:
    """Return the context of a sink's work: float32 in full precision, without autocast.

    In a training's own forward and backward pass it also disables gradients. ``precision`` is the
    precision of the backward passes.
    """
    is_full = not in_training and precision == "float32"
    if is_full and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # the pass as a whole has full precision
    stack = ExitStack()
    if in_training:
        stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(device.type, enabled=False))
    stack.enter_context(full_float32())
    return stack


@cache
def _backends() -> list[Any]:
    # Testing for a GPU takes a millisecond, more than a small layer's whole pass.
    mkldnn: Any = torch.backends.mkldnn  # its stubs, and cuDNN's, lack single operators
    cudnn: Any = torch.backends.cudnn
    cpu = [mkldnn.conv, mkldnn.matmul]
    return [*cpu, cudnn.conv, torch.backends.cuda.matmul] if torch.cuda.is_available() else cpu


@contextmanager
def _products_in(*precisions: str) -> Iterator[None]:
    """Context in which the backends have these precisions; without a GPU two are ignored."""
    before = [backend.fp32_precision for backend in _backends()]
    try:
        for backend, precision in zip(_backends(), precisions, strict=False):
            backend.fp32_precision = precision
        yield
    finally:
        for backend, precision in zip(_backends(), before, strict=True):
            backend.fp32_precision = precision


full_float32 = partial(_products_in, "ieee", "ieee", "ieee", "ieee")
"""Context that multiplies float32 in full precision, for any user setting."""
