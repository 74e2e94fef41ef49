"""Data: where it comes from, how it is divided and changed, and how it becomes batches."""

from marglik.data.batches import Batches, ImageBatches, Splits, TensorBatches, crop_and_flip
from marglik.data.images.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from marglik.data.images.image_set import ImageData, ImageSet, ImageSplits
from marglik.data.images.out_of_distribution import ClassSubset, Noise, out_of_distribution_images
from marglik.data.images.sources import CIFAR10, SVHN, Digits, ImageFolder
from marglik.data.tables import TableFile
from marglik.data.tensors import DataSource, TensorFile, TensorSplits

__all__ = [
    "CIFAR10",
    "CORRUPTIONS",
    "SEVERITIES",
    "SVHN",
    "Batches",
    "ClassSubset",
    "DataSource",
    "Digits",
    "ImageBatches",
    "ImageData",
    "ImageFolder",
    "ImageSet",
    "ImageSplits",
    "Noise",
    "Splits",
    "TableFile",
    "TensorBatches",
    "TensorFile",
    "TensorSplits",
    "corrupt",
    "crop_and_flip",
    "out_of_distribution_images",
]
