"""Images of another source, in the shape that a network was trained on."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from marglik.data.chunks import map_in_chunks
from marglik.data.image_sets import ImageData, ImageSplits
from marglik.data.noise import NAME, Noise

__all__ = ["ForeignImages", "out_of_distribution_images"]

Shape = tuple[int, int, int]


class ForeignImages(NamedTuple):
    """Images of another source."""

    images: Tensor
    """Uint8, (N, C, H, W), not normalised."""
    name: str
    """Of their source."""
    note: str | None
    """What was done to them, such as "resized from 28x28x1 to 32x32x3", or None."""


def out_of_distribution_images(source: ImageData, like: ImageSplits) -> ForeignImages:
    """Return the test images of a source in the shape of other data.

    Images of another size are resized by torchvision (bilinear, with antialiasing, stretched where
    the proportions differ), greyscale ones become RGB by repetition, and RGB ones greyscale by
    torchvision's weights (Rec. 601). `Noise` is drawn in the shape that is asked for, because
    resizing would smooth it.

    Args:
        source: whose test images to take.
        like: the data that the network was trained on.

    Raises:
        ValueError: if the source has no test images, or a number of channels that cannot be made
            into that of ``like``.
    """
    if isinstance(source, Noise):
        return ForeignImages(source.draw(*like.image_shape), NAME, None)
    splits = source.load()
    if not len(splits.test):
        raise ValueError(
            f"{splits.name} has no test images: an empty OOD set. Choose another source, or take "
            "more images of this one."
        )
    shape, wanted = splits.image_shape, like.image_shape
    if shape == wanted:
        return ForeignImages(splits.test.images, splits.name, None)
    if shape[0] != wanted[0] and {shape[0], wanted[0]} != {1, 3}:
        raise ValueError(
            f"{splits.name} has images of {shape[0]} channels and {like.name} of {wanted[0]}; "
            "supported are equal numbers, greyscale to RGB (1 to 3) and RGB to greyscale (3 to 1). "
            "Choose another source, or convert its images beforehand."
        )
    change = "converted" if shape[1:] == wanted[1:] else "resized"
    images = map_in_chunks(partial(_reshaped, wanted), splits.test.images)
    note = f"{change} from {_written(shape)} to {_written(wanted)}"
    return ForeignImages(images, splits.name, note)


def _reshaped(shape: Shape, images: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional  # importing torchvision takes a second

    channels, *size = shape
    if images.shape[1] == 3 and channels == 1:
        # In float32, because torchvision would truncate integers: white would not stay white.
        images = functional.rgb_to_grayscale(images.float()).round().to(images.dtype)
    images = functional.resize(images, size, antialias=True)
    return images.expand(-1, channels, -1, -1)


def _written(shape: Shape) -> str:
    channels, height, width = shape
    return f"{height}x{width}x{channels}"
