"""Where the experiments find their data: files in one folder, CIFAR-10 re-encoded or original."""

import os
from pathlib import Path
from typing import Any, Literal

from marglik.data.source import VARIABLE

__all__ = ["Source", "archive", "data_file", "default_source", "images"]

Source = Literal["jpeg", "original"]
"""jpeg: an archive of lossily re-encoded images, labelled "CIFAR-10 (JPEG)"; original: CIFAR-10,
which torchvision downloads into data/."""


def data_file(name: str) -> Path:
    """A file of data, in ``MARGLIK_DATA`` or else in ../shared/data."""
    return Path(os.environ.get(VARIABLE, "../shared/data")) / name


def archive() -> Path:
    """The archive of CIFAR-10's re-encoded images."""
    return data_file("cifar10-jpeg.tar.gz")


def default_source() -> Source:
    """The archive if it is on this machine, else the original."""
    return "jpeg" if archive().exists() else "original"


def images(source: Source, **options: Any) -> dict[str, Any]:
    """The specification that loads the images, ``{"class_path": ..., "init_args": ...}``.

    Args:
        source: which images.
        options: max_train, max_test, validation.
    """
    if source == "original":
        return {"class_path": "marglik.data.CIFAR10", "init_args": options}
    # Normalised as the original is.
    fixed = {"mean": [125.3, 123.0, 113.9], "std": [63.0, 62.1, 66.7], "name": "CIFAR-10 (JPEG)"}
    arguments = {"path": str(archive()), **fixed, **options}
    return {"class_path": "marglik.data.ImageFolder", "init_args": arguments}
