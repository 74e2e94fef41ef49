"""Images that a network was not trained on: noise, held-out classes, other data sets."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

from kfac_backend.extras import extra
from marglik.data.images.image_set import ImageData, ImageSet, ImageSplits
from marglik.sizes import check_sizes

__all__ = ["ClassSubset", "Noise", "OutOfDistributionImages", "out_of_distribution_images"]

NAME = "noise"
MEAN = 127.5
STD = ((256**2 - 1) / 12) ** 0.5  # of the uniform distribution over 0, 1, ..., 255


class Noise(ImageData):
    """Images whose pixels are independent and uniform over 0..255; one class, "noise".

    This is the easiest out-of-distribution data. Since there is nothing to learn from it, training
    and test images are the same. Mean and standard deviation are those of the distribution.

    Args:
        num_images: number of images.
        channels: channels of each image.
        image_size: height and width of each image.
        seed: seed of the pixels.

    Raises:
        ValueError: if a number is below 1.
    """

    def __init__(
        self, num_images: int = 1000, channels: int = 3, image_size: int = 32, seed: int = 0
    ) -> None:
        check_sizes(num_images=num_images, channels=channels, image_size=image_size)
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
        """Return ``num_images`` images of any shape, from the same seed."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_images, channels, height, width)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


class ClassSubset(ImageData):
    """The images of some classes of another source; label k is the k-th class in ``classes``.

    Mean and standard deviation remain those of the whole data, so that images of the other classes
    can be given to the network in the same normalisation.

    Args:
        data: the source.
        classes: names of the classes to keep. A number stands for the name that is written like it.

    Raises:
        ValueError: if no class is named, a class is named twice, or a string is given instead of a
            list.
    """

    def __init__(self, data: ImageData, classes: Sequence[str | int]) -> None:
        names = tuple(str(name) for name in classes)  # YAML reads the name 1 as a number
        if isinstance(classes, str) or not names or len(set(names)) < len(names):
            raise ValueError(f"classes={classes!r}: pass a list of names, each of them once.")
        self.data = data
        self.classes = names

    def load(self) -> ImageSplits:
        """Return the images of these classes; raises a ValueError if the source lacks one."""
        splits = self.data.load()
        if unknown := [name for name in self.classes if name not in splits.classes]:
            raise ValueError(f"{splits.name} has no class {unknown}, but {list(splits.classes)}.")
        kept = torch.tensor([splits.classes.index(name) for name in self.classes])

        def some(images: ImageSet) -> ImageSet:
            # Which of the kept classes each image has; at most one.
            is_class = images.labels[:, None] == kept  # (N, classes)
            chosen = is_class.any(1)
            return ImageSet(images.images[chosen], is_class[chosen].int().argmax(1))

        return replace(
            splits,
            train=some(splits.train),
            validation=None if splits.validation is None else some(splits.validation),
            test=some(splits.test),
            classes=self.classes,
            name=f"{splits.name} ({', '.join(self.classes)})",
        )


class OutOfDistributionImages(NamedTuple):
    """Images of another source."""

    images: Tensor
    """Uint8, (N, C, H, W), not normalised."""
    name: str
    """Name of their source."""
    note: str | None
    """How they were changed, such as "resized from 28x28x1 to 32x32x3", or None."""


def out_of_distribution_images(source: ImageData, like: ImageSplits) -> OutOfDistributionImages:
    """Return the test images of a source in the shape of other data.

    Images of another size are resized by torchvision (bilinear, with antialiasing, stretched where
    the proportions differ). Greyscale images become RGB by repetition, and RGB images greyscale by
    torchvision's weights (Rec. 601). `Noise` is drawn in the required shape, because resizing would
    smooth it.

    Args:
        source: the source of the test images.
        like: the data that the network was trained on.

    Raises:
        ValueError: if the source has no test images, or a number of channels that cannot be made
            into that of ``like``.
    """
    # Resized, noise would be smooth, and easy to tell from noise.
    if isinstance(source, Noise):
        return OutOfDistributionImages(source.draw(*like.image_shape), NAME, None)
    test, name = source.load_test()
    if not len(test):
        raise ValueError(
            f"{name} has no test images, so the OOD set is empty. Choose another source, or use "
            "more images of this one."
        )
    shape, wanted = tuple(test.images.shape[1:]), like.image_shape
    if shape == wanted:
        return OutOfDistributionImages(test.images, name, None)
    if shape[0] != wanted[0] and {shape[0], wanted[0]} != {1, 3}:
        raise ValueError(
            f"{name} has images of {shape[0]} channels and {like.name} of {wanted[0]}; "
            "supported are equal numbers, greyscale to RGB (1 to 3) and RGB to greyscale (3 to 1). "
            "Choose another source, or convert its images beforehand."
        )
    # In parts, as floating point takes four times as much memory.
    images = torch.cat([_reshaped(part, wanted) for part in test.images.split(256)])
    change = "converted" if shape[1:] == wanted[1:] else "resized"
    before, after = (f"{height}x{width}x{channels}" for channels, height, width in (shape, wanted))
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
