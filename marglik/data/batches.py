"""Batches of examples in memory: images, tensors or graphs, and a rank's part of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from marglik.data.images.image_set import ImageSet, ImageSplits
from marglik.data.tensors import Inputs, Pair, SplitName, TensorSplits
from marglik.sizes import check_sizes

__all__ = [
    "WHOLE",
    "Batches",
    "ImageBatches",
    "Shard",
    "Splits",
    "TensorBatches",
    "crop_and_flip",
    "split_batches",
]

Augmentation = Literal["none", "crop_flip"]

PADDING = 4
"""Pixels that the random crop adds at each side, as is usual for 32×32 images."""


@dataclass(frozen=True)
class Shard:
    """The contiguous part of each batch that a rank has; sizes of parts differ by one at most.

    All ranks draw the same order of all examples, so that their parts together are the batch that
    one process would have. Parts are empty if a batch has fewer examples than there are ranks.
    """

    rank: int = 0
    ranks: int = 1

    def batches(self, num_examples: int, batch_size: int) -> list[slice]:
        """This rank's part of each batch, in order."""
        parts = []
        for start in range(0, num_examples, batch_size):
            size = min(batch_size, num_examples - start)
            first, last = (size * i // self.ranks for i in (self.rank, self.rank + 1))
            parts.append(slice(start + first, start + last))
        return parts


WHOLE = Shard()
"""The whole of each batch, for a single process."""


class MemoryBatches:
    """What loaders of examples in memory have in common: their order, and a rank's part of it.

    All random numbers come from ``generator``, a CPU generator of the loader's own, so that a seed
    gives the same batches on every device. Each iteration draws them at its start, so that the next
    one does not depend on how far it was read. Two iterations differ, and the same seed gives the
    same sequence of iterations. ``generator.get_state()`` and ``set_state()`` save and restore it.

    Args:
        num_examples: N, the number of all examples.
        batch_size: B; the last batch may be smaller.
        shuffle: whether each iteration takes the examples in a new order.
        seed: seed of the generator.
        shard: the part of each batch that is yielded; if it is empty, a batch without examples.

    Raises:
        ValueError: if ``batch_size`` is below 1.
    """

    def __init__(
        self, num_examples: int, batch_size: int, shuffle: bool, seed: int, shard: Shard
    ) -> None:
        check_sizes(batch_size=batch_size)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = torch.Generator().manual_seed(seed)
        self._all = num_examples
        self._slices = shard.batches(num_examples, batch_size)
        self.order: list[Tensor] = []
        """The indices of each batch in the latest iteration."""

    @property
    def num_examples(self) -> int:
        """Number of examples that one iteration yields."""
        return sum(part.stop - part.start for part in self._slices)

    def __len__(self) -> int:
        """Number of batches of one iteration."""
        return len(self._slices)

    def _parts(self, device: torch.device) -> list[Tensor]:
        """The indices of each batch of an iteration; all ranks draw the same order."""
        # Of all examples, also where a rank yields a part: so all ranks draw the same numbers.
        n = self._all
        order = torch.randperm(n, generator=self.generator) if self.shuffle else torch.arange(n)
        order = order.to(device)
        self.order = [order[part] for part in self._slices]
        return self.order


class Examples(Dataset[Pair]):
    """Inputs and targets as a data set with one example per target."""

    def __init__(self, x: Inputs, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: int) -> Pair:
        return self.x[which], self.y[which]


class TensorBatches(MemoryBatches):
    """Loader of batches (x, y), selected from inputs and targets on the device, in their dtypes.

    Args:
        x: inputs, a tensor (N, ...) or N graphs.
        y: targets, (N, ...).
        batch_size: as for `MemoryBatches`, with shuffle, seed and shard.
        device: where the batches are made.
    """

    def __init__(
        self,
        x: Inputs,
        y: Tensor,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__(len(y), batch_size, shuffle, seed, shard)
        self.dataset = Examples(x.to(device), y.to(device))

    def __iter__(self) -> Iterator[Pair]:
        # Not a DataLoader, which would collate each batch from single examples.
        x, y = self.dataset.x, self.dataset.y
        return ((x[part], y[part]) for part in self._parts(y.device))


class ImageBatches(MemoryBatches):
    """Loader of batches: x float32 (B, C, H, W), normalised, and y int64 (B,).

    The uint8 images are stored on the device, where each batch is selected, augmented and
    normalised without a loop over images. No worker processes are needed.

    Args:
        images: the images.
        mean: mean per channel in 0..255.
        std: standard deviation per channel in 0..255.
        batch_size: as for `MemoryBatches`, with shuffle, seed and shard.
        augment: "crop_flip" for random crops of the image padded by 4 zero pixels, and random
            horizontal flips, new in each iteration; "none" for the images as they are.
        device: where the batches are made.
        channels_last: whether x is laid out in memory as (B, H, W, C), which is faster for
            convolutions on most devices.
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
        self.dataset = images.to(device)
        self.augment: Augmentation = augment
        self._mean = torch.tensor(mean, dtype=torch.float32, device=device)[:, None, None]
        self._std = torch.tensor(std, dtype=torch.float32, device=device)[:, None, None]
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Drawn here, since the body of a generator function would run only at the first batch.
        device = self.dataset.images.device
        parts = self._parts(device)
        distortions = self._draw_distortions() if self.augment == "crop_flip" else ()
        return self._batches(parts, tuple(d.to(device) for d in distortions))

    def _draw_distortions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Uniform offsets top and left in 0..8, and flips with probability one half; each (N,)."""
        n = len(self.dataset)
        top, left = torch.randint(2 * PADDING + 1, (2, n), generator=self.generator)
        flip = torch.randint(2, (n,), generator=self.generator).bool()
        return top, left, flip

    def _batches(
        self, parts: list[Tensor], distortions: tuple[Tensor, ...]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for part, place in zip(parts, self._slices, strict=True):
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
    examples = getattr(splits, split)
    if examples is None:
        raise ValueError(
            f"{splits.name} has no {split} examples; split some off, for example with "
            "--data.validation 0.1."
        )
    options: Any = {"shuffle": shuffle, "seed": seed, "device": device, "shard": shard}
    if isinstance(splits, TensorSplits):
        if augment or channels_last:
            raise ValueError(
                f"{splits.name} holds no images; augment and channels_last are for images."
            )
        x, y = examples
        return TensorBatches(x, y, batch_size, **options)
    options |= {"augment": "crop_flip" if augment else "none", "channels_last": channels_last}
    return ImageBatches(examples, splits.mean, splits.std, batch_size, **options)
