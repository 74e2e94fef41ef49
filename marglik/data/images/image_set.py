"""Labelled images in memory, and the interface of their sources."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from kfac_backend.options import TargetOptions
from marglik.data.source import DataSource

__all__ = [
    "ImageData",
    "ImageSet",
    "ImageSplits",
    "map_in_chunks",
]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images, neither augmented nor normalised.

    Args:
        images: pixels in 0..255, uint8, (N, C, H, W).
        labels: class indices, int64, (N,).

    Raises:
        ValueError: if shapes or dtypes are not these.
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            raise ValueError(
                f"images have dtype {self.images.dtype} and shape {tuple(self.images.shape)}; "
                "an ImageSet holds uint8 pixels of shape (N, C, H, W)."
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels have dtype {self.labels.dtype} and shape {tuple(self.labels.shape)}; "
                f"these {len(self.images)} images need int64 labels of shape "
                f"({len(self.images)},)."
            )

    def __len__(self) -> int:
        return len(self.images)

    def select(self, indices: Tensor) -> "ImageSet":
        """Return the images at the given indices (M,), in that order."""
        return ImageSet(self.images[indices], self.labels[indices])

    def to(self, device: torch.device | str) -> "ImageSet":
        """Return the images on a device, without a copy if they are there already."""
        return ImageSet(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class ImageSplits:
    """A data set of images, divided into splits.

    Args:
        train: images to train on.
        validation: images for validation, disjoint from the training images, or None.
        test: images of the data's own test set; nothing is chosen by them.
        classes: class names; label k stands for ``classes[k]``.
        mean: mean of the training pixels per channel, in 0..255.
        std: standard deviation of the training pixels per channel, in 0..255.
        name: name of the data in tables and figures.

    Raises:
        ValueError: if the splits disagree in image shape, a label has no class, or mean and std do
            not fit the channels.
    """

    train: ImageSet
    validation: ImageSet | None
    test: ImageSet
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    targets: ClassVar[TargetOptions] = TargetOptions()
    """All labels count; other data may have labels that do not."""

    def __post_init__(self) -> None:
        check_normalisation(self.mean, self.std, self.image_shape[0])
        for split in ("validation", "test"):
            images: ImageSet | None = getattr(self, split)
            if images is not None and tuple(images.images.shape[1:]) != self.image_shape:
                raise ValueError(
                    f"{self.name}: {split} images have shape {tuple(images.images.shape[1:])}, "
                    f"training images {self.image_shape}; all must have one shape."
                )
        for images in (self.train, self.validation, self.test):
            if images is None or not len(images):
                continue
            low, high = int(images.labels.min()), int(images.labels.max())
            if low < 0 or high >= len(self.classes):
                raise ValueError(
                    f"{self.name}: labels reach from {low} to {high}; with {len(self.classes)} "
                    f"classes they must lie in 0..{len(self.classes) - 1}."
                )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)


class ImageData(DataSource):
    """A source of labelled images, with a test set of its own."""

    @abstractmethod
    def load(self) -> ImageSplits:
        """Return the images; the same arguments always give the same splits."""

    def load_test(self) -> tuple[ImageSet, str]:
        """Return the test images and the name of the data, as for out-of-distribution data.

        Sources that may lack training images override it.
        """
        splits = self.load()
        return splits.test, splits.name


def check_normalisation(mean: tuple[float, ...], std: tuple[float, ...], channels: int) -> None:
    """Raise a ValueError unless mean and std have one entry per channel and std is positive."""
    for argument, values in {"mean": mean, "std": std}.items():
        if len(values) != channels:
            raise ValueError(
                f"{argument}={tuple(values)} has {len(values)} entries; the images have "
                f"{channels} channels, and each needs one."
            )
    if not all(s > 0 for s in std):
        raise ValueError(
            f"std={tuple(std)} is not positive, as happens where all pixels of a channel are "
            "equal; drop that channel, or pass a positive std."
        )


CHUNK = 2**20
"""Most pixel values to process at a time: 4 MiB once a function converts them to float32."""


def map_in_chunks(
    function: Callable[[Tensor], Tensor], images: UInt8[Tensor, "N C H W"]
) -> UInt8[Tensor, "N D I J"]:
    """Return ``function(images)``, computed for a chunk of images at a time.

    For functions that treat each image separately and need much more memory than the uint8 images.
    The size of a chunk depends only on the shape of the images, and chunks are processed in order,
    so that a function that draws random numbers gives the same result each time. The function is
    also called for an empty tensor, so that its result has the right shape.

    Args:
        function: from images (M, C, H, W) to images (M, D, I, J).
        images: the images.
    """
    # At least one image, however large.
    size = max(1, CHUNK // max(1, images[:1].numel()))
    return torch.cat([function(part) for part in images.split(size)])
