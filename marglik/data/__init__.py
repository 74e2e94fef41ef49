"""Data: sources, splits, changes and batches.

`Batches` is part of the library. The other names come from `marglik.application.data`, which is
imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from marglik.data.batches import Batches, crop_and_flip

if TYPE_CHECKING:
    from marglik.application.data import CIFAR10 as CIFAR10
    from marglik.application.data import SVHN as SVHN
    from marglik.application.data import ClassSubset as ClassSubset
    from marglik.application.data import DataSource as DataSource
    from marglik.application.data import Digits as Digits
    from marglik.application.data import ImageFolder as ImageFolder
    from marglik.application.data import Noise as Noise
    from marglik.application.data import Splits as Splits
    from marglik.application.data import TableFile as TableFile
    from marglik.application.data import TensorFile as TensorFile
    from marglik.application.data import out_of_distribution_images as out_of_distribution_images

__all__ = [
    "CIFAR10",
    "SVHN",
    "Batches",
    "ClassSubset",
    "DataSource",
    "Digits",
    "ImageFolder",
    "Noise",
    "Splits",
    "TableFile",
    "TensorFile",
    "crop_and_flip",
    "out_of_distribution_images",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'marglik.data' has no attribute '{name}'")
    return getattr(import_module("marglik.application.data"), name)
