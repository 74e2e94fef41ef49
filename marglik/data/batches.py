"""Batches of examples in memory: images, tensors or graphs, and a rank's part of each."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import StackDataset

from kfac_backend.options import check_positive
from kfac_backend.ranks import Ranks
from marglik.graphs import Graphs

Inputs = Tensor | Graphs
"""N examples: a tensor (N, ...), or N graphs."""
Pair = tuple[Any, Tensor]
"""`Inputs` x and targets y, examples first."""
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, in 0..255."""

PADDING = 4
"""Pixels that the random crop adds at each side, as is usual for 32×32 images."""


class Batches:
    """Loader of batches (x, y), selected from inputs and targets in the device's memory.

    A DataLoader would collate each batch from single examples. This class selects a whole batch,
    and augments and normalises images without a loop over examples.

    All random numbers come from ``generator``, the loader's own CPU generator, so a seed gives the
    same batches on every device. Each iteration draws them at its start, so the next iteration does
    not depend on how far this one was read. Two iterations differ, and the same seed gives the same
    sequence of iterations. ``generator.get_state()`` and ``set_state()`` save and restore it.

    Args:
        x: inputs, a tensor (N, ...) or N graphs.
        y: targets, (N, ...).
        batch_size: B; the last batch may be smaller.
        shuffle: whether each iteration has a new random order.
        seed: seed of the generator.
        device: device of the examples and batches.
        ranks: ranks that share each batch. The loader yields this rank's contiguous part, which is
            empty if the batch has fewer examples than there are ranks. All ranks draw the same
            order, so their parts together are the batch of one process.
        normalisation: normalisation of images, whose uint8 pixels (B, C, H, W) become float32,
            minus the mean and divided by the standard deviation. None yields x unchanged.
        augment: whether to crop images at random, padded by 4 zero pixels, and to flip them at
            random, in each iteration.
        channels_last: whether images are stored in memory as (B, H, W, C), which is faster for
            convolutions on most devices.

    Raises:
        ValueError: ``batch_size`` is below 1.
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
        ranks: Ranks = Ranks(None),  # noqa: B008
        normalisation: Normalisation | None = None,
        augment: bool = False,
        channels_last: bool = False,
    ) -> None:
        check_positive("batch_size", batch_size)
        self._x, self._y = x.to(device), y.to(device)
        self.dataset: StackDataset[Any] = StackDataset(self._x, self._y)  # pyright: ignore[reportArgumentType]
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[Tensor] = []
        """The indices of each batch in the latest iteration."""
        self._slices = []
        rank, number = ranks.rank, ranks.size
        for start in range(0, len(y), batch_size):
            size = min(batch_size, len(y) - start)
            first, last = (size * i // number for i in (rank, rank + 1))
            self._slices.append(slice(start + first, start + last))
        self._augment, self._ranks = augment, ranks
        self._scale = None
        if normalisation is not None:
            mean, std = torch.tensor(normalisation, device=device)[:, :, None, None]  # (2, C, 1, 1)
            self._scale = mean, std
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format

    @property
    def num_examples(self) -> int:
        """Number of examples in one iteration."""
        return sum(part.stop - part.start for part in self._slices)

    def __len__(self) -> int:
        """Return the number of batches in one iteration."""
        return len(self._slices)

    def __iter__(self) -> Iterator[Pair]:
        # Draw here, because the body of a generator function runs only at the first batch. Draw for
        # all examples, also if a rank yields a part, so that all ranks draw the same numbers.
        n, device = len(self._y), self._y.device
        order = torch.randperm(n, generator=self.generator) if self.shuffle else torch.arange(n)
        order = order.to(device)
        self.order = [order[part] for part in self._slices]
        distortions = self._draw_distortions() if self._augment else ()
        distortions = tuple(d.to(device) for d in distortions)
        return self._selected(self.order, self._slices, distortions)

    def sample(self, number: int, batch_size: int, generator: torch.Generator) -> Iterator[Pair]:
        """Return this rank's part of ``number`` random examples, in batches of at most that size.

        All random numbers come from ``generator``, which must be in the same state on all ranks.
        """
        own = self.generator
        self.generator = generator
        shard = slice(self._ranks.rank, None, self._ranks.size)
        try:
            order = torch.randperm(len(self._y), generator=generator)[:number]
            order = order[shard].to(self._y.device)
            places = range(0, len(order), batch_size)
            parts = [order[i : i + batch_size] for i in places]
            distortions = self._draw_distortions() if self._augment else ()
        finally:
            self.generator = own
        moved = tuple(d[shard].to(order.device) for d in distortions)
        slices = [slice(i, i + len(part)) for i, part in zip(places, parts, strict=True)]
        return self._selected(parts, slices, moved)

    def _draw_distortions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return uniform offsets top and left in 0..8, and flips with probability ½; each (N,)."""
        n = len(self._y)
        top, left = torch.randint(2 * PADDING + 1, (2, n), generator=self.generator)
        flip = torch.randint(2, (n,), generator=self.generator).bool()
        return top, left, flip

    def _selected(
        self, parts: list[Tensor], places: list[slice], distortions: tuple[Tensor, ...]
    ) -> Iterator[Pair]:
        for part, place in zip(parts, places, strict=True):
            x: Any = self._x[part]
            if distortions:
                top, left, flip = (d[place] for d in distortions)
                x = crop_and_flip(x, top, left, flip, PADDING)
            if self._scale is not None:
                # Convert to floating point here, so that the data set needs one byte per pixel.
                mean, std = self._scale
                x = x.to(torch.float32, memory_format=self._memory_format).sub_(mean).div_(std)
            yield x, self._y[part]


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
