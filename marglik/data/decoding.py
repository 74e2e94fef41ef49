"""Image files to uint8 arrays of one size."""

import logging
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from tqdm.auto import tqdm

from marglik.data.image_files import SPLITS, ImageFile, Layout
from marglik.data.image_sets import ImageSet

__all__ = ["decode_image", "decode_splits"]

_logger = logging.getLogger(__name__)

GREYSCALE = frozenset({"1", "L", "LA"})
DEEP = ("I", "F")  # and "I;16" and so on; Pillow would clip these to 0..255 instead of scaling


def decode_splits(layout: Layout, name: str) -> tuple[ImageSet, ImageSet]:
    """Return all training and all test images: RGB, or one channel if every image is greyscale.

    Args:
        layout: the files, inside the context that yielded them.
        name: shown beside the progress bar.

    Raises:
        ValueError: if an image cannot be decoded, is of another size than the first training
            image, or has more than 8 bits per channel.
    """
    labels = {s: torch.empty(layout.count(s), dtype=torch.int64) for s in SPLITS}
    pixels: dict[str, np.ndarray] = {}
    first: ImageFile | None = None
    size, greyscale = (0, 0), True
    _logger.info("decoding %s: %d images", name, len(layout.files))
    for file in tqdm(layout.files, desc=f"Decoding {name}", unit="image", disable=None):
        image, is_grey = decode_image(file)
        if first is None:
            first, size = file, image.shape[:2]
            pixels = {s: np.empty((layout.count(s), 3, *size), dtype=np.uint8) for s in SPLITS}
        if image.shape[:2] != size:
            raise ValueError(
                f"Image '{file.path}' has {image.shape[1]}×{image.shape[0]} pixels, but "
                f"'{first.path}' has {size[1]}×{size[0]}. All images must have one size: resize "
                "them beforehand."
            )
        pixels[file.split][file.index] = image.transpose(2, 0, 1)
        labels[file.split][file.index] = file.label
        greyscale = greyscale and is_grey
    channels = 1 if greyscale else 3  # a greyscale image has three equal channels as RGB
    train, test = (
        ImageSet(torch.from_numpy(pixels[s])[:, :channels].contiguous(), labels[s]) for s in SPLITS
    )
    return train, test


def decode_image(file: ImageFile) -> tuple[np.ndarray, bool]:
    """Return the RGB pixels (H, W, 3), uint8, and whether the file is greyscale.

    Raises:
        ValueError: if the file cannot be decoded, or has more than 8 bits per channel.
    """
    data = file.read()
    try:
        with Image.open(BytesIO(data)) as image:
            mode = image.mode
            pixels = None if mode.startswith(DEEP) else np.asarray(image.convert("RGB"))
    except Exception as error:  # Pillow's decoders raise about anything on damaged files
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"Image '{file.path}' cannot be decoded ({reason}). Replace it, or remove it."
        ) from error
    if pixels is None:
        raise ValueError(
            f"Image '{file.path}' has more than 8 bits per channel (mode {mode}). Save it with 8 "
            "bits, so that its values are scaled as you intend."
        )
    return pixels, mode in GREYSCALE
