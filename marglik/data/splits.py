"""Stratified parts, what is held out, and the pixel statistics."""

from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from marglik.data.images.image_set import ImageSplits
from marglik.data.tensors import TensorSplits

__all__ = [
    "check_fraction",
    "check_seed",
    "hold_out",
    "pixel_statistics",
    "stratified",
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


AnySplits = TypeVar("AnySplits", ImageSplits, TensorSplits)


def hold_out(splits: AnySplits, share: float, seed: int) -> tuple[AnySplits, Tensor]:
    """The same data with a random part of the training examples as its validation set.

    Also returns the positions of those that remain, among all training examples.

    The part is stratified if each example has a class. Mean and standard deviation of images are
    not computed again.

    Args:
        splits: the data, without a validation set.
        share: share of the training examples, in (0, 1).
        seed: seed of the choice.

    Raises:
        ValueError: a share so small or so large that a part would be empty or lack a class.
    """
    y = splits.train.labels if isinstance(splits, ImageSplits) else splits.train[1]
    classes, size, cause = splits.classes or (), round(share * len(y)), f"held_out={share}"
    # Sequences and labels that do not count belong to no class.
    if classes and y.dim() == 1 and bool(((y >= 0) & (y < len(classes))).all()):
        chosen, rest = stratified(y, size, classes, seed, cause)
    else:
        _check_sizes(len(y), size, 1, cause)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        chosen, rest = order[:size].sort().values, order[size:].sort().values
    if isinstance(splits, ImageSplits):
        images = splits.train
        parts = images.select(rest), images.select(chosen)
    else:
        x, _ = splits.train
        parts = (x[rest], y[rest]), (x[chosen], y[chosen])
    return replace(splits, train=parts[0], validation=parts[1]), rest


def stratified(
    labels: Tensor, size: int, classes: tuple[str, ...], seed: int, cause: str
) -> tuple[Tensor, Tensor]:
    """Return the indices of a stratified random choice of ``size`` examples, and of the rest.

    Both are in ascending order, and have the class shares of all examples.

    Args:
        labels: (N,) class indices.
        size: number of examples to choose.
        classes: class names.
        seed: seed of the choice.
        cause: the option that asks for the split, for errors.

    Raises:
        ValueError: if a part would be smaller than the number of classes, or a class has
            fewer than two examples.
    """
    _check_sizes(len(labels), size, len(classes), cause)
    counts = labels.bincount(minlength=len(classes))
    if counts.min() < 2:
        raise ValueError(
            f"{cause}: class {classes[int(counts.argmin())]!r} has {counts.min()} example(s), and "
            "each part needs one. Add some, or remove the class."
        )
    # As scikit-learn's train_test_split, to the index; importing that takes seconds.
    rng, numbers = np.random.RandomState(seed), counts.numpy()
    chosen = _by_share(numbers, size, rng)
    _by_share(numbers - chosen, len(labels) - size, rng)  # the rest, which has no choice but ties
    of_classes = [rng.permutation(np.flatnonzero(labels == k)) for k in range(len(classes))]
    parts = zip(*(np.split(of, [n]) for of, n in zip(of_classes, chosen, strict=True)), strict=True)
    here, there = (torch.from_numpy(np.sort(np.concatenate(part))) for part in parts)
    return here, there


def _by_share(counts: np.ndarray, size: int, rng: np.random.RandomState) -> np.ndarray:
    """How many of each class are chosen: its share, rounded so that the sum is ``size``."""
    exact = counts / counts.sum() * size
    found = np.floor(exact)
    missing = int(size - found.sum())
    remainders = exact - found
    for value in np.unique(remainders)[::-1]:  # the largest first, ties by chance
        (alike,) = np.where(remainders == value)
        more = rng.choice(alike, size=min(len(alike), missing), replace=False) if missing else []
        found[more] += 1
        missing -= len(more)
    return found.astype(int)


def _check_sizes(total: int, size: int, least: int, cause: str) -> None:
    if not least <= size <= total - least:
        raise ValueError(
            f"{cause}: {total} examples would be divided into {size} and {total - size}; both "
            f"parts need at least {least}. Choose another number (0 for none), or take more "
            "examples."
        )


def pixel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of uint8 images (N, C, H, W) per channel, in 0..255.

    Computed in float64 from a histogram with 256 bins, so that the images are never copied to
    floating point. The standard deviation is the population's (divided by N H W).
    """
    # Sums of counts are exact, where a float32 mean of 150 million pixels is not.
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack(
        [channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]
    )
    shares = counts / counts.sum(1, keepdim=True).double()  # (C, 256)
    mean = shares @ values
    std = (shares * (values - mean[:, None]).square()).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())
