"""Whether two outcomes of a run are the same up to the order of sums."""

from typing import Any

import torch
from torch.testing import assert_close

__all__ = ["assert_near"]


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
