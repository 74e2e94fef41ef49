"""Images of nothing: uniform random pixels."""

import torch
from jaxtyping import UInt8
from torch import Tensor

from marglik.data.image_sets import ImageData, ImageSet, ImageSplits
from marglik.data.splits import check_seed

__all__ = ["NAME", "Noise"]

NAME = "noise"
MEAN = 127.5
STD = ((256**2 - 1) / 12) ** 0.5  # of the uniform distribution over 0, 1, ..., 255


class Noise(ImageData):
    """Images whose pixels are independent and uniform over 0..255; one class, "noise".

    The easiest out-of-distribution data. There is nothing to be learned from it, so training and
    test images are the same ones. Mean and standard deviation are the distribution's own.

    Args:
        num_images: number of images.
        channels: channels of each image.
        image_size: height and width of each image.
        seed: same seed, same images.

    Raises:
        ValueError: if a number is below 1, or the seed is out of range.
    """

    def __init__(
        self, num_images: int = 1000, channels: int = 3, image_size: int = 32, seed: int = 0
    ) -> None:
        for argument, value in (
            ("num_images", num_images),
            ("channels", channels),
            ("image_size", image_size),
        ):
            if value < 1:
                raise ValueError(f"{argument}={value}: must be at least 1.")
        check_seed(seed)
        self.num_images = num_images
        self.channels = channels
        self.image_size = image_size
        self.seed = seed

    def load(self) -> ImageSplits:
        """Return the images."""
        images = ImageSet(
            self.draw(self.channels, self.image_size, self.image_size),
            torch.zeros(self.num_images, dtype=torch.int64),
        )
        mean, std = (MEAN,) * self.channels, (STD,) * self.channels
        return ImageSplits(images, None, images, (NAME,), mean, std, NAME)

    def draw(self, channels: int, height: int, width: int) -> UInt8[Tensor, "N C H W"]:
        """Return ``num_images`` images of another shape, of the same seed."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_images, channels, height, width)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
