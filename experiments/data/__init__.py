"""Data sets of the experiments: archives in one folder, and the choice of CIFAR-10's images."""

import os
from pathlib import Path
from typing import Any

from marglik.application.data.splits import DataSource

VARIABLE = "MARGLIK_DATA"
"""Environment variable with the folder of the archives; ../shared/data if it is not set."""


def data_file(name: str) -> Path:
    """Where a file of data is expected."""
    return Path(os.environ.get(VARIABLE, "../shared/data"), name)


def archive() -> Path:
    """The archive of CIFAR-10's re-encoded images."""
    return data_file("cifar10-jpeg.tar.gz")


def specification(**options: Any) -> dict[str, Any]:
    """How to load CIFAR-10's images, ``{"class_path": ..., "init_args": ...}``.

    The archive of lossily re-encoded ones, labelled "CIFAR-10 (JPEG)", if it is on this machine,
    else the original, which torchvision downloads into data/.

    Args:
        options: max_train, max_test, validation, seed.
    """
    if not archive().exists():
        return {"class_path": "marglik.data.CIFAR10", "init_args": options}
    arguments = {"path": str(archive()), "name": "CIFAR-10 (JPEG)", **options}
    return {"class_path": "experiments.data.image_archive.CIFAR10Archive", "init_args": arguments}


def images(**options: Any) -> DataSource:
    """The source of the images; options are those of `specification`."""
    from marglik.specification import build_from_spec  # imported here, since it takes seconds

    return build_from_spec(DataSource, specification(**options), named=None)
