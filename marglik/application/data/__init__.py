"""Data sets of the command: sources, their files and their splits."""

from marglik.application.data.files import TensorFile
from marglik.application.data.images import CIFAR10, SVHN, ClassSubset, Digits, ImageFolder
from marglik.application.data.out_of_distribution import Noise, out_of_distribution_images
from marglik.application.data.splits import DataSource, Splits
from marglik.application.data.tables import TableFile

__all__ = [
    "CIFAR10",
    "SVHN",
    "ClassSubset",
    "DataSource",
    "Digits",
    "ImageFolder",
    "Noise",
    "Splits",
    "TableFile",
    "TensorFile",
    "out_of_distribution_images",
]
