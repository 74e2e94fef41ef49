"""Full float32 on GPUs: TF32 keeps only ten bits of mantissa, too few for a Gram matrix."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["full_float32"]


@contextmanager
def full_float32() -> Iterator[None]:
    """Turn TF32 off in matrix products and cuDNN's convolutions, and restore what was there."""
    if not torch.cuda.is_available():
        yield
        return
    cudnn: Any = torch.backends.cudnn  # its stubs lack the precision of single operators
    backends = (torch.backends.cuda.matmul, cudnn.conv)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
