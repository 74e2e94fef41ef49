"""Whether two states of a run are the same to the bit."""

from typing import Any

import torch

__all__ = ["same"]


def same(a: Any, b: Any) -> bool:
    """Whether two states are of the same types and values, to the bit."""
    if isinstance(a, torch.Tensor):
        equal = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return equal and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
    if isinstance(a, dict):  # the order of keys counts, and True is not 1
        keys = isinstance(b, dict) and [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)  # -0.0 is not 0.0
