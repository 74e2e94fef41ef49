"""Labelled images in memory, and the interface of their sources."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kfac_backend.options import TargetOptions
from marglik.data.tensors import DataSource

__all__ = ["ImageData", "ImageSet", "ImageSplits", "check_normalisation"]


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
        is_pixels = self.images.dtype == torch.uint8 and self.images.dim() == 4
        is_labels = self.labels.dtype == torch.int64
        if not is_pixels or not is_labels or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"images of {self.images.dtype} and shape {tuple(self.images.shape)}, labels of "
                f"{self.labels.dtype} and shape {tuple(self.labels.shape)}: an ImageSet holds "
                "uint8 pixels (N, C, H, W) and int64 labels (N,)."
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
        for images in (self.train, self.validation, self.test):
            if images is None or not len(images):
                continue
            if tuple(images.images.shape[1:]) != self.image_shape:
                raise ValueError(
                    f"{self.name}: images of shapes {self.image_shape} and "
                    f"{tuple(images.images.shape[1:])}; all splits must have one shape."
                )
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
    if not len(mean) == len(std) == channels or not all(s > 0 for s in std):
        raise ValueError(
            f"mean={tuple(mean)}, std={tuple(std)}: each of the {channels} channels needs a mean "
            "and a positive std. Where all pixels of a channel are equal, drop it."
        )
