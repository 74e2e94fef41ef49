"""Stratified subsets, the validation split, and the pixel statistics."""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from marglik.data.images.image_set import ImageSet, ImageSplits
from marglik.data.tensors import TensorSplits

__all__ = [
    "check_fraction",
    "check_seed",
    "hold_out",
    "pixel_statistics",
    "split_off",
    "split_off_validation",
    "stratified",
    "subset",
]


def check_fraction(argument: str, value: float, *, zero: bool = True) -> None:
    """Raise a ValueError unless the fraction lies in [0, 1), or in (0, 1) if zero is False."""
    if not (0 <= value < 1 if zero else 0 < value < 1):
        allowed = "in [0, 1), 0 for none" if zero else "between 0 and 1, both excluded"
        raise ValueError(f"{argument}={value}: must be a fraction {allowed}.")


def check_seed(seed: int) -> None:
    """Raise a ValueError unless scikit-learn accepts the seed."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: must lie in 0..{2**32 - 1}.")


def subset(
    images: ImageSet, size: int | None, classes: tuple[str, ...], seed: int, argument: str
) -> ImageSet:
    """Return a stratified random subset of ``size`` images, or all images if ``size`` is None.

    Args:
        images: the images to choose from; the chosen ones keep their order.
        size: number of images.
        classes: class names.
        seed: seed of the choice.
        argument: the user's name of ``size``, for errors.

    Raises:
        ValueError: if ``size`` is below the number of classes or above the number of images, or so
            small that a rare class would get no image.
    """
    if size is None:
        return images
    if size > len(images):
        raise ValueError(
            f"{argument}={size}: there are only {len(images)} images; lower it, or leave it out "
            "for all images."
        )
    if size < len(classes):
        raise ValueError(
            f"{argument}={size}: there are {len(classes)} classes, and each needs an image; "
            f"raise it to at least {len(classes)}."
        )
    if size == len(images):
        return images
    chosen, _ = split_off(images, size, classes, seed, f"{argument}={size}")
    for label, name in enumerate(classes):
        if not (chosen.labels == label).any():
            raise ValueError(
                f"{argument}={size}: class {name!r} is so rare that it would get no image; raise "
                f"{argument}."
            )
    return chosen


def split_off_validation(
    train: ImageSet,
    fraction: float,
    classes: tuple[str, ...],
    seed: int,
    argument: str = "validation",
) -> tuple[ImageSet, ImageSet | None]:
    """Split off a stratified validation set; returns the rest and it, or None if the fraction is 0.

    ``argument`` is the user's name of the fraction, for errors.

    Raises:
        ValueError: if either part would be smaller than the number of classes, or a class would be
            left without a training image.
    """
    if fraction == 0:
        return train, None
    size = round(fraction * len(train))
    if not len(classes) <= size <= len(train) - len(classes):
        raise ValueError(
            f"{argument}={fraction}: {len(train)} training images would be divided into "
            f"{len(train) - size} and {size}; both parts need an image of each of "
            f"{len(classes)} classes. Choose another fraction, or take more images."
        )
    validation, rest = split_off(train, size, classes, seed, f"{argument}={fraction}")
    for label, name in enumerate(classes):
        if not (rest.labels == label).any():
            raise ValueError(
                f"{argument}={fraction}: class {name!r} is so rare that no training image of it "
                "would be left; choose a smaller fraction."
            )
    return rest, validation


AnySplits = TypeVar("AnySplits", ImageSplits, TensorSplits)


def hold_out(splits: AnySplits, share: float, seed: int) -> AnySplits:
    """The same data with a random part of the training examples as its validation set.

    The part is stratified if each example has a class. Mean and standard deviation of images are
    not computed again.

    Args:
        splits: the data, without a validation set.
        share: share of the training examples, in (0, 1).
        seed: seed of the choice.

    Raises:
        ValueError: a share so small or so large that a part would be empty or lack a class.
    """
    try:
        return _divided(splits, share, seed)
    except ValueError as error:
        raise ValueError(
            f"{error} With held_out 0 nothing is held out, and the predictive is not calibrated."
        ) from error


def _divided(splits: AnySplits, share: float, seed: int) -> AnySplits:
    if isinstance(splits, ImageSplits):
        train, validation = split_off_validation(
            splits.train, share, splits.classes, seed, "held_out"
        )
        return replace(splits, train=train, validation=validation)
    x, y = splits.train
    size = round(share * len(y))
    # Sequences and labels that do not count belong to no class.
    C = len(splits.classes or ())
    stratifies = C > 0 and y.dim() == 1 and bool(((y >= 0) & (y < C)).all())
    least = C if stratifies else 1
    if not least <= size <= len(y) - least:
        raise ValueError(
            f"held_out={share}: {len(y)} training examples would be divided into {len(y) - size} "
            f"and {size}; both parts need at least {least}. Choose another share."
        )
    if stratifies:
        assert splits.classes is not None
        held, rest = stratified(y, size, splits.classes, seed, f"held_out={share}", "example")
    else:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        held, rest = (part.sort().values for part in (order[:size], order[size:]))
    return replace(splits, train=(x[rest], y[rest]), validation=(x[held], y[held]))


def split_off(
    images: ImageSet, size: int, classes: tuple[str, ...], seed: int, cause: str
) -> tuple[ImageSet, ImageSet]:
    """Return a stratified random choice of ``size`` images, and the rest, both in order."""
    chosen, rest = stratified(images.labels, size, classes, seed, cause, "image")
    return images.select(chosen), images.select(rest)


def stratified(
    labels: Tensor, size: int, classes: tuple[str, ...], seed: int, cause: str, example: str
) -> tuple[Tensor, Tensor]:
    """Return the indices of a stratified random choice of ``size`` examples, and of the rest.

    Both are in ascending order, and have the class shares of all examples.

    Args:
        labels: (N,) class indices.
        size: number of examples to choose.
        classes: class names.
        seed: seed of the choice.
        cause: the option that asks for the split, for errors.
        example: what an example is called, for errors.

    Raises:
        ValueError: if a class has fewer than two examples.
    """
    # Here, since importing scikit-learn takes a second.
    from sklearn.model_selection import train_test_split

    counts = labels.bincount(minlength=len(classes))
    if counts.min() < 2:
        rare = int(counts.argmin())
        raise ValueError(
            f"{cause}: class {classes[rare]!r} has {counts[rare]} {example}(s), and a stratified "
            f"split needs two; add {example}s of it, remove the class, or leave the split out."
        )
    chosen, rest = train_test_split(
        torch.arange(len(labels)).numpy(),
        train_size=size,
        stratify=labels.numpy(),
        random_state=seed,
    )
    chosen, rest = (torch.from_numpy(part).sort().values for part in (chosen, rest))
    return chosen, rest


def pixel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of uint8 images (N, C, H, W) per channel, in 0..255.

    Computed in float64 from a histogram with 256 bins, so that the images are never copied to
    floating point. The standard deviation is the population's (divided by N H W).
    """
    values = torch.arange(256, dtype=torch.float64)
    mean, std = [], []
    for channel in range(images.shape[1]):
        pixels = images[:, channel].flatten()
        share = pixels.bincount(minlength=256).double() / pixels.numel()
        m = (share * values).sum()
        mean.append(m.item())
        std.append((share * (values - m).square()).sum().sqrt().item())
    return tuple(mean), tuple(std)
