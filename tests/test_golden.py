"""The packages' numbers are those that were frozen, to rounding."""

import json

import pytest
import torch

from tests.golden_models import FROZEN, each, numbers
from tests.random_numbers import normal

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


def test_numbers_are_the_same_in_any_basis_of_a_null_space(monkeypatch):
    """Another LAPACK takes other vectors there."""
    eigh = torch.linalg.eigh

    def rotated(matrix):
        values, Q = eigh(matrix)
        d = Q.shape[-1]
        bases = []
        for of_one, vectors in zip(values.view(-1, d), Q.view(-1, d, d), strict=True):
            null = of_one < 1e-9 * of_one.max()
            R, _ = torch.linalg.qr(normal(int(null.sum()), int(null.sum())))
            bases.append(torch.cat([vectors[:, null] @ R, vectors[:, ~null]], -1))
        return values, torch.stack(bases).view_as(Q)

    monkeypatch.setattr(torch.linalg, "eigh", rotated)
    for case in (("group norm", "reduce"), ("attention", "reduce")):
        test_numbers_are_those_that_were_frozen(*case)
