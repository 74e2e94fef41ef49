"""Images of noise: uniform, repeatable, of one class."""

import pytest
import torch

from marglik.data import ImageBatches, Noise
from tests.marglik.data.image_helpers import assert_same


def test_noise_is_uniform_over_the_bytes():
    splits = Noise(num_images=500).load()
    assert splits.image_shape == (3, 32, 32)
    assert (splits.classes, splits.name, splits.validation) == (("noise",), "noise", None)
    assert_same(splits.train, splits.test)
    assert splits.test.labels.tolist() == [0] * 500
    counts = splits.test.images.flatten().bincount(minlength=256).double()
    expected = splits.test.images.numel() / 256
    # Chi-squared with 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert ((counts - expected).square() / expected).sum().item() == pytest.approx(255, abs=90)
    assert len(splits.test.images.flatten(1).unique(dim=0)) == 500


def test_stated_statistics_normalise_the_noise():
    splits = Noise(num_images=300, channels=2).load()
    x = torch.cat([x for x, _ in ImageBatches(splits.test, splits.mean, splits.std, 64)])
    assert x.mean((0, 2, 3)).tolist() == pytest.approx([0, 0], abs=0.01)
    assert x.std((0, 2, 3)).tolist() == pytest.approx([1, 1], abs=0.01)


def test_arguments_give_number_shape_and_seed():
    first = Noise(num_images=7, channels=1, image_size=8, seed=1)
    assert first.load().test.images.shape == (7, 1, 8, 8)
    assert_same(first.load().test, Noise(7, 1, 8, seed=1).load().test)
    assert not torch.equal(first.load().test.images, Noise(7, 1, 8).load().test.images)
    assert first.draw(3, 4, 5).shape == (7, 3, 4, 5)
    assert torch.equal(first.draw(1, 8, 8), first.load().test.images)


def test_random_state_is_left_as_it_was():
    state = torch.get_rng_state()
    Noise(num_images=2).load()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("num_images", 0), ("channels", -1), ("image_size", 0), ("seed", -1), ("seed", 2**32)],
)
def test_impossible_arguments_are_named(argument, value):
    with pytest.raises(ValueError, match=f"{argument}={value}: must"):
        Noise(**{argument: value})
