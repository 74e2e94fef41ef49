"""Image files decoded into uint8 arrays, which are cached together with a checksum."""

import json
import logging
import os
import warnings
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from kfac_backend.files import parse_json, sha256, sha256_of_tensors, write_tensors
from marglik.data.images.files import SPLITS, ImageFile, Layout, files_below
from marglik.data.images.image_set import ImageSet

__all__ = [
    "Decoded",
    "cache_file",
    "decode_image",
    "decode_splits",
    "read_cache",
    "write_cache",
]

_logger = logging.getLogger(__name__)

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats of the supported suffixes. Pillow would try forty more, whatever a file is called,
and run another program for PostScript."""
GREYSCALE = frozenset({"1", "L", "LA"})
# Beginnings of modes with more than 8 bits ("I;16" and so on), which Pillow would clip to 0..255
# instead of scaling them.
DEEP = ("I", "F")


def decode_splits(layout: Layout, name: str) -> tuple[ImageSet, ImageSet]:
    """Return all training and all test images: RGB, or one channel if every image is greyscale.

    Args:
        layout: the files, inside the context that yielded them.
        name: name of the data for the progress bar.

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
            _check_memory(layout, name, size)
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
        with warnings.catch_warnings():
            # Pillow warns at its limit, and raises an error only at twice as many pixels.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(data), formats=FORMATS)
        with image:
            mode = image.mode
            pixels = None if mode.startswith(DEEP) else np.asarray(image.convert("RGB"))
    except Exception as error:  # on damaged files Pillow's decoders raise almost any exception
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"Image '{file.path}' cannot be decoded ({reason}). Replace or remove it."
        ) from error
    if pixels is None:
        raise ValueError(
            f"Image '{file.path}' has more than 8 bits per channel (mode {mode}). Save it with 8 "
            "bits, so that its values are scaled as you intend."
        )
    return pixels, mode in GREYSCALE


def _check_memory(layout: Layout, name: str, size: tuple[int, int]) -> None:
    """Raise a ValueError if the decoded images are larger than this machine's memory."""
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on this system
        return
    needed = 3 * size[0] * size[1] * len(layout.files)
    if needed > there:
        raise ValueError(
            f"'{name}': {len(layout.files):,} images of {size[1]}×{size[0]} pixels need "
            f"{needed / 2**30:,.1f} GiB of memory, this machine has {there / 2**30:,.1f}. "
            "Make them smaller, or use fewer."
        )


FORMAT_VERSION = 1  # raise it whenever the same files would be decoded to something else

Decoded = tuple[ImageSet, ImageSet, tuple[str, ...]]
"""Training images, test images, class names."""


def cache_file(source: Path) -> Path:
    """Return the path of the cache for the decoded images of a folder or archive.

    Its name is the SHA-256 sum of the resolved path, the sizes and modification times (of the
    archive, or of every file in the folder) and the format version, so that a source that has
    changed never finds an old cache. The folder is ``$XDG_CACHE_HOME/marglik``, or
    ``~/.cache/marglik``; it can be deleted at any time.
    """
    resolved = source.resolve()
    if resolved.is_dir():
        state: list = sorted(
            [(parent / name).relative_to(resolved).as_posix(), *_size_and_time(parent, name)]
            for parent, _, names in files_below(resolved)
            for name in names
        )
    else:
        state = list(_size_and_time(resolved))
    key = json.dumps([str(resolved), state, FORMAT_VERSION]).encode()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "marglik", f"{sha256(key)}.safetensors")


def read_cache(file: Path) -> Decoded | None:
    """Return the cached images; None if there are none, or with a warning if they are damaged.

    Nothing is unpickled.
    """
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as tensors:
            metadata = tensors.metadata() or {}
            classes = parse_json(metadata["classes"])
            train, test = (
                ImageSet(tensors.get_tensor(f"{s}_images"), tensors.get_tensor(f"{s}_labels"))
                for s in SPLITS
            )
        if metadata.get("sha256") != _sum(train, test, tuple(classes)):
            raise ValueError("its content does not have the sum that it was written with")
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        warnings.warn(
            f"The cache '{file}' is damaged ({str(error).partition(chr(10))[0]}); the images are "
            "decoded again.",
            stacklevel=2,
        )
        return None
    return train, test, tuple(classes)


def write_cache(file: Path, decoded: Decoded) -> None:
    """Write the cache atomically, so that no process ever reads half of it.

    If it cannot be written (on a read-only or full disk), there is only a warning: the images must
    then be decoded again each time.
    """
    train, test, classes = decoded
    tensors = {}
    for split, images in zip(SPLITS, (train, test), strict=True):
        tensors[f"{split}_images"] = images.images
        tensors[f"{split}_labels"] = images.labels
    try:
        metadata = {"classes": json.dumps(classes), "sha256": _sum(train, test, classes)}
        write_tensors(file, tensors, metadata)
    except OSError as error:
        warnings.warn(
            f"The decoded images could not be cached ({error}); they will be decoded again next "
            "time. Set XDG_CACHE_HOME to a folder with room, or pass cache=False.",
            stacklevel=2,
        )


def _sum(train: ImageSet, test: ImageSet, classes: tuple[str, ...]) -> str:
    """The SHA-256 sum of the whole content of the cache."""
    tensors = (train.images, train.labels, test.images, test.labels)
    return sha256(json.dumps([sha256_of_tensors(tensors), *classes]).encode())


def _size_and_time(*path: str | Path) -> tuple[int, int]:
    stat = Path(*path).stat()
    return stat.st_size, stat.st_mtime_ns
