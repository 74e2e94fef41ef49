"""Out-of-distribution images come in the shape of the data that a network knows."""

from dataclasses import replace

import pytest
import torch
from torchvision.transforms import functional as transforms

from marglik.data import Digits, ImageData, ImageSet, ImageSplits, Noise, out_of_distribution_images


class Given(ImageData):
    """A source of given images."""

    def __init__(self, images, name="given"):
        n, channels = images.shape[:2]
        self.splits = ImageSplits(
            train=ImageSet(images, torch.zeros(n, dtype=torch.int64)),
            validation=None,
            test=ImageSet(images, torch.zeros(n, dtype=torch.int64)),
            classes=("a",),
            mean=(0.0,) * channels,
            std=(1.0,) * channels,
            name=name,
        )

    def load(self):
        return self.splits


def random_images(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


def like(*shape):
    return Given(random_images(2, *shape), "known").load()


def test_images_of_the_right_shape_are_the_test_images_themselves():
    digits = Digits().load()
    images, _, note = out_of_distribution_images(Digits(seed=1), digits)
    assert note is None
    assert torch.equal(images, Digits(seed=1).load().test.images)
    assert not torch.equal(images, digits.test.images)


def test_grey_images_are_resized_one_by_one_and_repeated():
    images, _, note = out_of_distribution_images(Digits(), like(3, 32, 32))
    assert note == "resized from 8x8x1 to 32x32x3"
    digits = Digits().load().test.images
    assert images.shape == (len(digits), 3, 32, 32)
    assert images.dtype == torch.uint8
    for original, result in zip(digits[:20], images[:20], strict=True):
        expected = transforms.resize(original.double(), [32, 32], antialias=True)
        # torchvision resizes uint8 in fixed-point arithmetic, which may round the other way.
        assert (result.double() - expected).abs().max() < 1
        assert torch.equal(result[0], result[1]) and torch.equal(result[0], result[2])


def test_shrinking_averages_over_the_pixels_that_become_one():
    """A checkerboard becomes grey; without antialiasing it would stay black and white."""
    rows = torch.arange(63)
    board = (((rows[:, None] + rows) % 2) * 255).to(torch.uint8).repeat(2, 3, 1, 1)
    images, _, note = out_of_distribution_images(Given(board), like(3, 21, 21))
    assert note == "resized from 63x63x3 to 21x21x3"
    assert (images.double() - 127.5).abs().max() < 20
    aliased = transforms.resize(board, [21, 21], antialias=False)
    assert set(aliased.unique().tolist()) == {0, 255}  # negative control


def test_colours_become_grey_by_their_luma():
    colours = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255] * 3, [0] * 3])
    pixels = colours.to(torch.uint8)[:, :, None, None].expand(-1, -1, 8, 8).contiguous()
    images, _, note = out_of_distribution_images(Given(pixels), like(1, 8, 8))
    assert note == "converted from 8x8x3 to 8x8x1"
    assert images.shape == (5, 1, 8, 8)
    # 255 times .2989, .587, .114, 1, 0; rounded.
    assert images[:, 0, 0, 0].tolist() == [76, 150, 29, 255, 0]
    larger, _, note = out_of_distribution_images(Given(pixels), like(1, 10, 12))
    assert note == "resized from 8x8x3 to 10x12x1"
    assert torch.equal(larger, images[:, :, :1, :1].expand(-1, -1, 10, 12))


def test_equal_numbers_of_channels_are_kept_however_many():
    images, _, note = out_of_distribution_images(Given(random_images(3, 5, 8, 8)), like(5, 4, 6))
    assert images.shape == (3, 5, 4, 6)
    assert note == "resized from 8x8x5 to 4x6x5"


def test_chunks_change_nothing(monkeypatch):
    source = Given(random_images(9, 3, 12, 12))
    whole, *_ = out_of_distribution_images(source, like(1, 8, 8))
    monkeypatch.setattr("marglik.data.image_sets.CHUNK", 2 * 3 * 12 * 12)
    assert torch.equal(out_of_distribution_images(source, like(1, 8, 8))[0], whole)


def test_noise_is_drawn_in_the_shape_and_not_smoothed():
    noise = Noise(num_images=50, channels=3, image_size=32, seed=4)
    images, _, note = out_of_distribution_images(noise, like(1, 40, 24))
    assert note is None
    assert torch.equal(images, noise.draw(1, 40, 24))

    def correlation_of_neighbours(pixels):
        x = pixels.double()
        pairs = torch.stack([x[..., 1:].flatten(), x[..., :-1].flatten()])
        return torch.corrcoef(pairs)[0, 1].item()

    assert abs(correlation_of_neighbours(images)) < 0.03
    # Negative control: what the same pixels would be if they were resized.
    resized, *_ = out_of_distribution_images(Given(noise.load().test.images), like(1, 64, 64))
    assert correlation_of_neighbours(resized) > 0.5


def test_source_without_test_images_is_named():
    source = Given(random_images(2, 3, 8, 8), "nothing")
    source.splits = replace(source.splits, test=source.splits.test.select(torch.arange(0)))
    with pytest.raises(ValueError, match="nothing has no test images: an empty OOD set"):
        out_of_distribution_images(source, like(3, 8, 8))


@pytest.mark.parametrize(("channels", "wanted"), [(4, 3), (3, 2), (1, 2), (2, 1)])
def test_other_numbers_of_channels_are_named(channels, wanted):
    source = Given(random_images(2, channels, 8, 8), "satellite")
    message = f"satellite has images of {channels} channels and known of {wanted}; supported"
    with pytest.raises(ValueError, match=message):
        out_of_distribution_images(source, like(wanted, 8, 8))
