"""Data: sources, splits, changes and batches."""

from marglik.data.batches import Batches, crop_and_flip
from marglik.data.files import TensorFile
from marglik.data.images import CIFAR10, SVHN, ClassSubset, Digits, ImageFolder
from marglik.data.out_of_distribution import Noise, out_of_distribution_images
from marglik.data.splits import DataSource, Splits
from marglik.data.tables import TableFile

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
