"""Data: where it comes from, how it is divided and changed, and how it becomes batches."""

from marglik.data.batches import ImageBatches, crop_and_flip
from marglik.data.cifar10 import CIFAR10
from marglik.data.class_subset import ClassSubset
from marglik.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from marglik.data.digits import Digits
from marglik.data.image_folder import ImageFolder
from marglik.data.image_sets import ImageData, ImageSet, ImageSplits
from marglik.data.noise import Noise
from marglik.data.out_of_distribution import out_of_distribution_images
from marglik.data.svhn import SVHN
from marglik.data.tensor_file import TensorFile
from marglik.data.tensor_splits import TensorSplits

__all__ = [
    "CIFAR10",
    "CORRUPTIONS",
    "SEVERITIES",
    "SVHN",
    "ClassSubset",
    "Digits",
    "ImageBatches",
    "ImageData",
    "ImageFolder",
    "ImageSet",
    "ImageSplits",
    "Noise",
    "TensorFile",
    "TensorSplits",
    "corrupt",
    "crop_and_flip",
    "out_of_distribution_images",
]
