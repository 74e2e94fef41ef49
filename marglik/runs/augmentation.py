"""`marglik train --augmentation learned`: the network that learns ranges, and what they came to."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from marglik.augmentation import Affine, Color, Flip, LearnedAugmentation
from marglik.augmentation.learned import START
from marglik.data import ImageSplits, Splits
from marglik.prediction.evaluation import data_uri
from marglik.storage.provenance import Provenance

__all__ = ["augmentation_results", "with_learned_augmentation"]

SHOWN = 3
"""Number of training images that the results show as the augmentation changes them."""
LARGEST_PICTURE = 48
"""Height and width (pixels) of their pictures at most: a few kilobytes each."""


def with_learned_augmentation(
    model: nn.Module, splits: ImageSplits, provenance: Provenance
) -> tuple[LearnedAugmentation, Provenance]:
    """The network in a `LearnedAugmentation` for images, and how both are built again.

    All images are moved, turned, scaled and sheared, those with colours also recoloured and
    mirrored.
    """
    has_colours = splits.train.images.shape[1] == 3
    kinds = [Affine, Color, Flip] if has_colours else [Affine]
    spec = provenance.model
    if spec is not None:
        of_kinds = [{"class_path": f"marglik.augmentation.{kind.__name__}"} for kind in kinds]
        spec = {
            "class_path": "marglik.augmentation.LearnedAugmentation",
            "init_args": {"model": spec, "transforms": of_kinds},
        }
    learned = LearnedAugmentation(model, [kind() for kind in kinds])
    return learned.to(next(model.parameters()).device), replace(provenance, model=spec)


@torch.no_grad()
def augmentation_results(model: nn.Module, splits: Splits) -> dict[str, Any]:
    """The learned ranges, and some training images as the network sees them; {} without any."""
    if not isinstance(model, LearnedAugmentation) or not isinstance(splits, ImageSplits):
        return {}
    ranges = {
        name: {"initial": START * largest, "learned": value, "largest": largest}
        for name, value, largest in zip(
            model.names, model.ranges.tolist(), model.largest.tolist(), strict=True
        )
    }
    images = splits.train.images[:SHOWN].cpu()
    mean, std = (torch.tensor(of).view(-1, 1, 1) for of in (splits.mean, splits.std))
    copies = model.transformed(((images - mean) / std).to(model.ranges.device)).cpu()
    copies = (copies * std + mean).round().clamp(0, 255).to(torch.uint8)
    rows = [
        [data_uri(picture, LARGEST_PICTURE) for picture in (image, *of_image)]
        for image, of_image in zip(images, copies, strict=True)
    ]
    return {"augmentation": {"ranges": ranges, "copies": model.copies, "examples": rows}}
