"""Out-of-distribution images: noise, and the test images of other data sets."""

from typing import NamedTuple, NoReturn

import torch
from jaxtyping import UInt8
from torch import Tensor

from kfac_backend.extras import extra
from kfac_backend.options import check_positive
from marglik.application.data.splits import DataSource, Splits, tensors_in


class Noise(DataSource):
    """Images whose pixels are independent and uniform over 0..255, in the shape of other data.

    Noise is the easiest out-of-distribution data to detect. A network cannot be trained on it.

    Args:
        num_images: number of images.
        seed: seed of the pixels.

    Raises:
        ValueError: ``num_images`` is below 1.
    """

    def __init__(self, num_images: int = 1000, seed: int = 0) -> None:
        check_positive("num_images", num_images)
        self.num_images = num_images
        self.seed = seed

    def load(self) -> NoReturn:
        """Raise a NotImplementedError, because noise has neither a shape nor classes."""
        raise NotImplementedError("Noise can only be out-of-distribution data. Pass it as --ood.")

    def draw(self, channels: int, height: int, width: int) -> UInt8[Tensor, "N C H W"]:
        """Return ``num_images`` images of any shape, from the same seed."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_images, channels, height, width)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


class OutOfDistributionImages(NamedTuple):
    """Images of another source."""

    images: Tensor
    """Pixels (N, C, H, W), uint8, not normalised."""
    name: str
    """Name of the source."""
    note: str | None
    """Conversion of the images, such as "resized from 28x28x1 to 32x32x3", or None."""


def out_of_distribution_images(source: DataSource, like: Splits) -> OutOfDistributionImages:
    """Return the test images of a source in the shape of other data.

    torchvision resizes images of another size (bilinear, with antialiasing, stretched if the
    proportions differ). Greyscale images become RGB by repetition. RGB images become greyscale by
    the weights of Rec. 601. `Noise` is drawn in the required shape, because resizing would smooth
    it.

    Args:
        source: the source of the test images.
        like: the data that the network was trained on.

    Raises:
        ValueError: the source or ``like`` has no images, or the number of channels cannot be
            converted.
    """
    if not like.are_images:
        raise ValueError(f"{like.name} contains no images, and ood is for images. Omit ood.")
    # Draw noise in this shape, because resized noise would be smooth.
    if isinstance(source, Noise):
        return OutOfDistributionImages(source.draw(*like.image_shape), "noise", None)
    test, name = source.load_test()
    images = tensors_in(test)[0]
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise ValueError(f"{name} contains no images. Out-of-distribution data must be images.")
    shape, target = tuple(images.shape[1:]), like.image_shape
    if shape == target:
        return OutOfDistributionImages(images, name, None)
    if shape[0] != target[0] and {shape[0], target[0]} != {1, 3}:
        raise ValueError(
            f"{name} has images with {shape[0]} channels, and {like.name} with {target[0]}. "
            "Supported are equal numbers, greyscale to RGB (1 to 3) and RGB to greyscale (3 to "
            "1). Choose another source, or convert its images."
        )
    # Convert in parts, because floating point takes four times as much memory.
    images = torch.cat([_reshaped(part, target) for part in images.split(256)])
    change = "converted" if shape[1:] == target[1:] else "resized"
    before, after = (f"{height}x{width}x{channels}" for channels, height, width in (shape, target))
    return OutOfDistributionImages(images, name, f"{change} from {before} to {after}")


def _reshaped(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    with extra("images"):
        from torchvision.transforms.v2 import functional  # importing torchvision takes a second

    channels, *size = shape
    if images.shape[1] == 3 and channels == 1:
        # In float32, because torchvision truncates integers, which would darken white.
        images = functional.rgb_to_grayscale(images.float()).round().to(images.dtype)
    images = functional.resize(images, size, antialias=True)
    return images.expand(-1, channels, -1, -1)
