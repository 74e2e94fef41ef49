"""CIFAR-10 in its original, lossless form."""

import torch
from torch import Tensor

from marglik.data.image_sets import ImageSet
from marglik.data.torchvision_data import TorchvisionData

__all__ = ["CIFAR10"]

# The customary numbers, those of Daxberger et al. 2021 and of the K-FAC paper.
MEAN = (125.3, 123.0, 113.9)
STD = (63.0, 62.1, 66.7)


class CIFAR10(TorchvisionData):
    """CIFAR-10: 50,000 training and 10,000 test images of 32×32 pixels, ten classes; 170 MB.

    Source: Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images", read from
    ``cifar-10-batches-py`` in ``root`` by torchvision, which checks the files' MD5 sums. Normalised
    by mean 125.3, 123.0, 113.9 and standard deviation 63.0, 62.1, 66.7. Arguments and errors are
    those of `TorchvisionData`.
    """

    name = "CIFAR-10"

    def _read(self, train: bool) -> tuple[ImageSet, tuple[str, ...]]:
        from torchvision import datasets  # importing torchvision takes a second

        data = datasets.CIFAR10(self.root, train=train, download=self.download)
        pixels = torch.from_numpy(data.data)  # (N, H, W, C)
        images = ImageSet(pixels.permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets))
        return images, tuple(data.classes)

    def _by_hand(self, train: bool) -> str:
        from torchvision import datasets

        folder = self.root / datasets.CIFAR10.base_folder
        return f"Unpack {datasets.CIFAR10.url} there, so that '{folder}' exists"

    def _statistics(self, images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return MEAN, STD
