"""The packages' numbers are those that were frozen, to rounding."""

import json

import pytest
import torch

from tests.golden_models import FROZEN, each, numbers

SLOW = ("gpt", "wide resnet")


@pytest.mark.parametrize(
    "name, mode",
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in SLOW)) for case in each()],
)
def test_numbers_are_those_that_were_frozen(name, mode):
    frozen = json.loads(FROZEN.read_text())[f"{name}, {mode}"]
    found = numbers(name, mode)
    assert found.keys() == frozen.keys()
    for key, values in found.items():
        torch.testing.assert_close(
            values, frozen[key], rtol=1e-9, atol=1e-11, msg=f"{key}: {values}"
        )
