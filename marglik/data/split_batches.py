"""Batches of any data's splits."""

import torch

from marglik.data.batches import ImageBatches
from marglik.data.image_sets import ImageSplits
from marglik.data.tensor_splits import SplitName, TensorBatches, TensorSplits

__all__ = ["Batches", "Splits", "split_batches"]

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
) -> Batches:
    """Return a loader of a split; images normalised, and cropped and flipped if asked for.

    Raises:
        ValueError: if there is no such split, or augmentation or a memory format for data that are
            no images.
    """
    if isinstance(splits, TensorSplits):
        if augment:
            raise ValueError(f"{splits.name} holds no images; augmentation is for images.")
        if channels_last:
            raise ValueError(f"{splits.name} holds no images; channels_last is for images.")
        return splits.batches(split, batch_size, shuffle=shuffle, seed=seed, device=device)
    images = getattr(splits, split)
    if images is None:
        raise ValueError(
            f"{splits.name} has no {split} images; keep some back, for example "
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
    )
