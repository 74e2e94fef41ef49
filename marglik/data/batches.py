"""Batches of images, and of the splits of any data."""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor
from torch.nn.functional import pad

from marglik.data.images.image_set import ImageSet, ImageSplits, check_normalisation
from marglik.data.shard import WHOLE, Shard
from marglik.data.tensors import MemoryBatches, SplitName, TensorBatches, TensorSplits

__all__ = [
    "Batches",
    "ImageBatches",
    "Splits",
    "crop_and_flip",
    "split_batches",
]

Augmentation = Literal["none", "crop_flip"]

PADDING = 4
"""Pixels that the random crop adds at each side, as is usual for 32×32 images."""


class ImageBatches(MemoryBatches):
    """Loader of batches: x float32 (B, C, H, W), normalised, and y int64 (B,).

    The uint8 images are stored on the device, where each batch is selected, augmented and
    normalised without a loop over images. No worker processes are needed.

    Args:
        images: the images.
        mean: mean per channel in 0..255.
        std: standard deviation per channel in 0..255.
        batch_size: B; the last batch may be smaller.
        shuffle: whether each iteration takes the images in a new order.
        augment: "crop_flip" for random crops of the image padded by 4 zero pixels, and random
            horizontal flips, new in each iteration; "none" for the images as they are.
        device: where the batches are made.
        seed: seed of shuffling and augmentation.
        channels_last: whether x is laid out in memory as (B, H, W, C), which is faster for
            convolutions on most devices.
        shard: the part of each batch that is yielded.

    Raises:
        ValueError: if there are no images, ``batch_size`` is below 1, ``augment`` is unknown, or
            mean and std do not fit.
    """

    def __init__(
        self,
        images: ImageSet,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        *,
        shuffle: bool = False,
        augment: Augmentation = "none",
        device: torch.device | str = "cpu",
        seed: int = 0,
        channels_last: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__(len(images), batch_size, shuffle, seed, shard)
        if not len(images):
            raise ValueError("The image set is empty, so there are no batches; load some images.")
        if augment not in get_args(Augmentation):
            raise ValueError(
                f"augment={augment!r} is unknown; choose one of {get_args(Augmentation)}."
            )
        check_normalisation(tuple(mean), tuple(std), images.images.shape[1])
        self.dataset = images.to(device)
        self.augment: Augmentation = augment
        self._mean = torch.tensor(mean, dtype=torch.float32, device=device)[:, None, None]
        self._std = torch.tensor(std, dtype=torch.float32, device=device)[:, None, None]
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Drawn here, since the body of a generator function would run only at the first batch.
        n, device = len(self.dataset), self.dataset.images.device
        parts = self._parts(device)
        distortions = self._draw_distortions(n) if self.augment == "crop_flip" else ()
        return self._batches(parts, tuple(d.to(device) for d in distortions))

    def _draw_distortions(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Uniform offsets top and left in 0..8, and flips with probability one half; each (n,)."""
        top, left = torch.randint(2 * PADDING + 1, (2, n), generator=self.generator)
        flip = torch.randint(2, (n,), generator=self.generator).bool()
        return top, left, flip

    def _batches(
        self, parts: list[Tensor], distortions: tuple[Tensor, ...]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        places = self.shard.batches(len(self.dataset), self.batch_size)
        for part, place in zip(parts, places, strict=True):
            images = self.dataset.images[part]  # (B, C, H, W)
            if distortions:
                top, left, flip = (d[place] for d in distortions)
                images = crop_and_flip(images, top, left, flip, PADDING)
            # Floating point only now: the data set stays at a byte a pixel.
            x = images.to(torch.float32, memory_format=self._memory_format)
            yield x.sub_(self._mean).div_(self._std), self.dataset.labels[part]


def crop_and_flip(
    images: UInt8[Tensor, "B C H W"],
    top: Int64[Tensor, " B"],
    left: Int64[Tensor, " B"],
    flip: Bool[Tensor, " B"],
    padding: int = 4,
) -> UInt8[Tensor, "B C H W"]:
    """Return windows of the zero-padded images, mirrored left to right where ``flip`` is True.

    Image b is row ``top[b]`` to ``top[b] + H``, column ``left[b]`` to ``left[b] + W`` of the image
    with ``padding`` zeros at each side: torchvision's RandomCrop, then RandomHorizontalFlip, with
    given random numbers. Offsets equal to ``padding`` give the image itself.

    Args:
        images: the images, not normalised, so that the padding is black.
        top: first rows, in 0..2 padding.
        left: first columns, in 0..2 padding.
        flip: whether to mirror.
        padding: number of zeros at each side.
    """
    _, channels, height, width = images.shape
    # The window's rows and columns in the padded image; a mirrored one is read backwards.
    rows = top[:, None] + torch.arange(height, device=images.device)  # (B, H)
    columns = torch.arange(width, device=images.device).expand(len(images), width)
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - columns, columns)  # (B, W)
    padded = pad(images, (padding,) * 4)  # (B, C, H + 2 padding, W + 2 padding)
    # One gather over flat pixels is five times faster than indexing rows and columns (CPU).
    pixels = rows[:, :, None] * padded.shape[3] + columns[:, None, :]  # (B, H, W)
    pixels = pixels.flatten(1)[:, None].expand(-1, channels, -1)  # (B, C, H W)
    return padded.flatten(2).gather(2, pixels).unflatten(2, (height, width))


Splits = ImageSplits | TensorSplits
"""What a `DataSource` loads."""
Batches = ImageBatches | TensorBatches


def split_batches(
    splits: Splits,
    split: SplitName,
    batch_size: int,
    *,
    shuffle: bool = False,
    augment: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    channels_last: bool = False,
    shard: Shard = WHOLE,
) -> Batches:
    """Return a loader of a split; images normalised, and cropped and flipped if asked for.

    ``shard`` is the part of each batch that it yields.

    Raises:
        ValueError: if there is no such split, or augmentation or a memory format for data that are
            no images.
    """
    if isinstance(splits, TensorSplits):
        if augment:
            raise ValueError(f"{splits.name} holds no images; augmentation is for images.")
        if channels_last:
            raise ValueError(f"{splits.name} holds no images; channels_last is for images.")
        return splits.batches(
            split, batch_size, shuffle=shuffle, seed=seed, device=device, shard=shard
        )
    images = getattr(splits, split)
    if images is None:
        raise ValueError(
            f"{splits.name} has no {split} images; split some off, for example with "
            "--data.validation 0.1."
        )
    return ImageBatches(
        images,
        splits.mean,
        splits.std,
        batch_size,
        shuffle=shuffle,
        augment="crop_flip" if augment else "none",
        device=device,
        seed=seed,
        channels_last=channels_last,
        shard=shard,
    )
