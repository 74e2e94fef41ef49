"""The arithmetic of float32 products: full precision, or TF32 or bfloat16 in backward passes.

TF32 keeps ten bits of mantissa and bfloat16 seven, too few for a Gram matrix, whose small
eigenvalues are differences of large numbers. A backward pass bears it: its errors average out.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
BackwardPrecision = Literal["auto", "float32", "tf32", "bf16"]

FASTER: dict[str, BackwardPrecision] = {"cuda": "tf32"}
"""The precision that backward_precision="auto" tries, by device. On a CPU bf16 makes errors of 3e-3
(B of WRN-16-4), and is faster on few processors."""
LARGEST_ERROR = 1e-3
"""‖B − B_float32‖ / ‖B_float32‖ (Frobenius) of any factor up to which "auto" takes it."""
LONG_PASS = 2048
"""Examples of a pass before "auto" tries it, which costs two small batches."""
TRIED_EXAMPLES = 32
"""Examples on which it is tried."""


@contextmanager
def temporary_setting(
    read: Callable[[], T], write: Callable[[T], object], value: T
) -> Iterator[None]:
    """A context in which a setting of the process has the value."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32, unless it is in float64: sums in half precision lose too much."""
    return x if x.dtype == torch.float64 else x.float()


def backward_arithmetic(precision: BackwardPrecision) -> AbstractContextManager[None]:
    """Multiply float32 in the backward passes' precision; with "auto" in full."""
    if precision in ("auto", "float32"):
        return nullcontext()
    cpu, gpu = ("bf16", "ieee") if precision == "bf16" else ("ieee", "tf32")
    return temporary_setting(_read, _write, [cpu, cpu, gpu, gpu])


def exact_arithmetic(precision: BackwardPrecision) -> AbstractContextManager[None]:
    """Multiply float32 in full precision inside `backward_arithmetic`: for Gram matrices."""
    # The pass as a whole holds full precision. Reading and writing the settings again for each
    # layer's gradient is needed only inside of another precision.
    return nullcontext() if precision in ("auto", "float32") else full_float32()


def check_precision(precision: BackwardPrecision, device: torch.device) -> None:
    """Raise a ValueError unless the device supports the precision."""
    supported = {"cpu": ("auto", "float32", "bf16"), "cuda": ("auto", "float32", "tf32")}
    available = supported.get(device.type, ("auto", "float32"))
    if precision not in available:
        raise ValueError(
            f"backward_precision={precision!r} does nothing on device {device.type!r}; choose one "
            f"of {', '.join(map(repr, available))}."
        )


@cache
def _backends() -> list[Any]:
    # Asking for a GPU takes a millisecond, more than a small layer's whole pass.
    mkldnn: Any = torch.backends.mkldnn  # its stubs, and cuDNN's, lack single operators
    cudnn: Any = torch.backends.cudnn
    cpu = [mkldnn.conv, mkldnn.matmul]
    return [*cpu, cudnn.conv, torch.backends.cuda.matmul] if torch.cuda.is_available() else cpu


def _read() -> list[str]:
    return [backend.fp32_precision for backend in _backends()]


def _write(precisions: list[str]) -> None:
    """Set the backends' precisions; without a GPU, the last two are left over."""
    for backend, precision in zip(_backends(), precisions, strict=False):
        backend.fp32_precision = precision


def full_float32() -> AbstractContextManager[None]:
    """A context that multiplies float32 in full precision, whatever the user has set."""
    return temporary_setting(_read, _write, ["ieee"] * 4)
