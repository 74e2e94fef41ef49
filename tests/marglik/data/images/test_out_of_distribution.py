"""Out-of-distribution images: noise, and images in the shape of the data that a network knows."""

from dataclasses import replace

import pytest
import torch
from torchvision.transforms import functional as transforms

from marglik.data import (
    Digits,
    ImageData,
    ImageFolder,
    ImageSet,
    ImageSplits,
    Noise,
    out_of_distribution_images,
)
from tests.marglik.data.image_helpers import (
    assert_same,
    decoded_by_pil,
    image_files,
    without,
    write_folder,
)


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
    with pytest.raises(ValueError, match="nothing has no test images, so the OOD set is empty"):
        out_of_distribution_images(source, like(3, 8, 8))


def test_a_folder_of_test_images_alone(tmp_path):
    files = without(image_files(), "train/")
    folder = ImageFolder(write_folder(tmp_path / "pets", files), max_test=6, name="elsewhere")
    images, name, note = out_of_distribution_images(folder, like(3, 6, 5))
    assert {i.numpy().tobytes() for i in images} < {
        i.numpy().tobytes() for i in decoded_by_pil(files, "test")[0]
    }
    assert (len(images), name, note) == (6, "elsewhere", None)
    with pytest.raises(FileNotFoundError, match="train' is not a folder"):
        folder.load()


@pytest.mark.parametrize(("channels", "wanted"), [(4, 3), (3, 2), (1, 2), (2, 1)])
def test_other_numbers_of_channels_are_named(channels, wanted):
    source = Given(random_images(2, channels, 8, 8), "satellite")
    message = f"satellite has images of {channels} channels and known of {wanted}; supported"
    with pytest.raises(ValueError, match=message):
        out_of_distribution_images(source, like(wanted, 8, 8))


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


def test_arguments_give_number_shape_and_seed():
    first = Noise(num_images=7, channels=1, image_size=8, seed=1)
    assert first.load().test.images.shape == (7, 1, 8, 8)
    assert_same(first.load().test, Noise(7, 1, 8, seed=1).load().test)
    assert not torch.equal(first.load().test.images, Noise(7, 1, 8).load().test.images)
    assert first.draw(3, 4, 5).shape == (7, 3, 4, 5)
    assert torch.equal(first.draw(1, 8, 8), first.load().test.images)
