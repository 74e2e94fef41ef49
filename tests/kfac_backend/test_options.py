"""Errors show a number as it was given."""

import pytest
import torch

from kfac_backend.options import check_positive


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-3, "-3"),
        (0, "0"),
        (-0.1, "-0.1"),
        (float("inf"), "inf"),
        (torch.tensor([1.0, -0.5]), "-0.5"),
        (torch.tensor([2, -3]), "-3.0"),
    ],
)
def test_what_is_not_positive_is_shown(value, shown):
    with pytest.raises(ValueError) as raised:
        check_positive("samples", value)
    needed = "positive and finite" if shown == "inf" else "positive"
    assert str(raised.value) == f"samples must be {needed}, not {shown}."


@pytest.mark.parametrize("value", [1, 1e-60, True, torch.tensor([1, 2]), [0.5, 1e-60]])
def test_positive_numbers_of_any_size(value):
    check_positive("samples", value)  # 1e-60 is 0 in float32
