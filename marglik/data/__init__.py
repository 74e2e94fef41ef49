"""Image data: where it comes from, how it is divided, and how it becomes batches."""

from marglik.data.batches import ImageBatches, crop_and_flip
from marglik.data.cifar10 import CIFAR10
from marglik.data.digits import Digits
from marglik.data.image_folder import ImageFolder
from marglik.data.image_sets import ImageData, ImageSet, ImageSplits

__all__ = [
    "CIFAR10",
    "Digits",
    "ImageBatches",
    "ImageData",
    "ImageFolder",
    "ImageSet",
    "ImageSplits",
    "crop_and_flip",
]
