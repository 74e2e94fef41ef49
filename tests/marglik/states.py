"""Whether two states or outcomes of a run are the same, to the bit or up to the order of sums."""

from typing import Any

import torch
from torch.testing import assert_close

from kfac_backend import KroneckerFactors

__all__ = ["assert_near", "same"]


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
    if isinstance(a, KroneckerFactors):
        return isinstance(b, KroneckerFactors) and same(a.state_dict(), b.state_dict())
    return type(a) is type(b) and repr(a) == repr(b)  # -0.0 is not 0.0


def assert_near(a: Any, b: Any, tolerance: float = 1e-9, where: str = "") -> None:
    """Compare numbers in nested dicts and sequences; all else must be equal.

    Numbers of eigenvalues that were clipped at zero are left out: these are rounding alone.
    """
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            if key != "clipped_eigenvalues":
                assert_near(a[key], b[key], tolerance, f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_near(x, y, tolerance, f"{where}/{i}")
    elif isinstance(a, (float, torch.Tensor)):
        assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda said: f"{where}: {said}")
    else:
        assert a == b, where
