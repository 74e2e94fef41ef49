"""How exactly float32 is multiplied: in full, or for backward passes in TF32 or bfloat16.

TF32 keeps ten bits of mantissa and bfloat16 seven, too few for a Gram matrix, whose small
eigenvalues are differences of large numbers. A backward pass bears it: its errors average out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kfac_backend.options import BackwardPrecision, check_option

__all__ = ["backward_arithmetic", "check_precision", "full_float32"]


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 in full, whatever the user has set, and restore what was there."""
    with _fp32_precision("ieee", "ieee"):
        yield


@contextmanager
def backward_arithmetic(precision: BackwardPrecision) -> Iterator[None]:
    """Multiply float32 in the backward passes' precision for a while."""
    if precision == "float32":
        yield
        return
    gpu = "tf32" if precision == "tf32" else "ieee"
    with _fp32_precision("bf16" if precision == "bf16" else "ieee", gpu):
        yield


def check_precision(precision: BackwardPrecision, device: torch.device) -> None:
    """Raise a ValueError unless the device has the precision."""
    check_option("backward_precision", precision, BackwardPrecision)
    supported = {"cpu": ("float32", "bf16"), "cuda": ("float32", "tf32")}
    known = supported.get(device.type, ("float32",))
    if precision not in known:
        raise ValueError(
            f"backward_precision={precision!r} does nothing on device {device.type!r}; choose one "
            f"of {', '.join(map(repr, known))}."
        )


@contextmanager
def _fp32_precision(cpu: str, gpu: str) -> Iterator[None]:
    mkldnn: Any = torch.backends.mkldnn  # its stubs, and cuDNN's, lack single operators
    cudnn: Any = torch.backends.cudnn
    wanted = [(mkldnn.conv, cpu), (mkldnn.matmul, cpu)]
    if torch.cuda.is_available():
        wanted += [(cudnn.conv, gpu), (torch.backends.cuda.matmul, gpu)]
    before = [(backend, backend.fp32_precision) for backend, _ in wanted]
    try:
        for backend, precision in wanted:
            backend.fp32_precision = precision
        yield
    finally:
        for backend, precision in before:
            backend.fp32_precision = precision
