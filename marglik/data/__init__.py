"""Data: where it comes from, how it is divided and changed, and how it becomes batches."""

from marglik.data.batches import Batches, ImageBatches, Splits, crop_and_flip
from marglik.data.dart import DART
from marglik.data.images.cifar10_and_svhn import CIFAR10, SVHN
from marglik.data.images.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from marglik.data.images.digits import Digits
from marglik.data.images.folder import ImageFolder
from marglik.data.images.image_set import ImageData, ImageSet, ImageSplits
from marglik.data.images.out_of_distribution import ClassSubset, Noise, out_of_distribution_images
from marglik.data.nci1 import NCI1
from marglik.data.source import DataSource
from marglik.data.tensors import TensorBatches, TensorFile, TensorSplits
from marglik.data.uci import UCI

__all__ = [
    "CIFAR10",
    "CORRUPTIONS",
    "DART",
    "NCI1",
    "SEVERITIES",
    "SVHN",
    "UCI",
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
    "TensorBatches",
    "TensorFile",
    "TensorSplits",
    "corrupt",
    "crop_and_flip",
    "out_of_distribution_images",
]
