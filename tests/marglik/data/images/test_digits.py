"""The built-in digits: contents, statistics, split."""

import numpy as np
import pytest
import torch

from marglik.data import Digits
from tests.marglik.data.image_helpers import assert_same, splits_of


def test_digits_are_scikit_learns_scaled_to_bytes():
    from sklearn.datasets import load_digits

    splits = Digits(validation=0.25).load()
    assert splits.image_shape == (1, 8, 8)
    assert splits.name == "digits"
    assert (len(splits.test), len(splits.validation)) == (359, 360)
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 1797
    expected = (load_digits().images * 255 / 16).round().astype(np.uint8)
    assert expected.max() == 255
    found = sorted(i.numpy().tobytes() for s in splits_of(splits) for i in s.images)
    assert found == sorted(image.tobytes() for image in expected)


def test_digits_statistics_are_those_of_the_training_pixels_alone():
    splits = Digits(validation=0.3).load()
    pixels = splits.train.images.double()
    assert splits.mean == pytest.approx([pixels.mean().item()])
    assert splits.std == pytest.approx([pixels.std(correction=0).item()])
    everything = torch.cat([s.images for s in splits_of(splits)]).double()
    assert splits.mean != pytest.approx([everything.mean().item()], rel=1e-6)


def test_digits_seed_decides_the_split():
    first, same, other = Digits().load(), Digits(seed=0).load(), Digits(seed=1).load()
    assert_same(first.train, same.train)
    assert_same(first.test, same.test)
    assert not torch.equal(first.test.images, other.test.images)
    assert first.validation is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"test_fraction": 0}, "test_fraction=0"), ({"seed": -1}, "seed=-1")],
)
def test_impossible_arguments_are_named_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        Digits(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"test_fraction": 0.001}, "test_fraction=0.001: .* into 1795 and 2"),
        ({"validation": 0.999}, "validation=0.999: .* each of 10 classes"),
    ],
)
def test_impossible_splits_are_named(arguments, message):
    digits = Digits(**arguments)
    with pytest.raises(ValueError, match=message):
        digits.load()
