"""Batches of any data's splits."""

import torch

from marglik.data.batches import ImageBatches
from marglik.data.image_sets import ImageSplits
from marglik.data.tensor_splits import SplitName, TensorBatches, TensorSplits

__all__ = ["split_batches"]


def split_batches(
    splits: ImageSplits | TensorSplits,
    split: SplitName,
    batch_size: int,
    *,
    shuffle: bool = False,
    augment: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    channels_last: bool = False,
) -> ImageBatches | TensorBatches:
    """Return a loader of a split; images normalised, and cropped and flipped if asked for.

    Only images have a memory format to choose.

    Raises:
        ValueError: if there is no such split, or augmentation for data that are no images.
    """
    if isinstance(splits, TensorSplits):
        if augment:
            raise ValueError(f"{splits.name} holds no images; augmentation is for images.")
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
