"""Data: where it comes from, how it is divided and changed, and how it becomes batches."""

from marglik.data.batches import ImageBatches, crop_and_flip
from marglik.data.cifar10 import CIFAR10
from marglik.data.class_subset import ClassSubset
from marglik.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from marglik.data.dart import DART
from marglik.data.digits import Digits
from marglik.data.image_folder import ImageFolder
from marglik.data.image_sets import ImageData, ImageSet, ImageSplits
from marglik.data.nci1 import NCI1
from marglik.data.noise import Noise
from marglik.data.out_of_distribution import out_of_distribution_images
from marglik.data.source import DataSource
from marglik.data.split_batches import Batches, Splits
from marglik.data.svhn import SVHN
from marglik.data.tensor_file import TensorFile
from marglik.data.tensor_splits import TensorBatches, TensorSplits

__all__ = [
    "CIFAR10",
    "CORRUPTIONS",
    "DART",
    "NCI1",
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
    "TensorBatches",
    "TensorFile",
    "TensorSplits",
    "corrupt",
    "crop_and_flip",
    "out_of_distribution_images",
]
