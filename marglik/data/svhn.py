"""SVHN: house numbers from street views."""

import torch

from marglik.data.image_sets import ImageSet
from marglik.data.torchvision_data import TorchvisionData

__all__ = ["SVHN"]


class SVHN(TorchvisionData):
    """SVHN: 73,257 training and 26,032 test images of 32×32 pixels, the ten digits; 246 MB.

    Source: Netzer et al. 2011, "Reading Digits in Natural Images with Unsupervised Feature
    Learning", the cropped digits without the extra set, read from ``train_32x32.mat`` and
    ``test_32x32.mat`` in ``root`` by torchvision, which checks the files' MD5 sums. Label k is
    digit k (the files call the zero 10). Normalised by the training pixels' own mean and standard
    deviation. Arguments and errors are those of `TorchvisionData`.
    """

    name = "SVHN"

    def _read(self, train: bool) -> tuple[ImageSet, tuple[str, ...]]:
        from torchvision import datasets  # importing torchvision takes a second

        split = "train" if train else "test"
        data = datasets.SVHN(self.root, split=split, download=self.download)
        pixels = torch.from_numpy(data.data)  # (N, C, H, W), a view of what the file holds
        images = ImageSet(pixels.contiguous(), torch.from_numpy(data.labels))
        return images, tuple(str(digit) for digit in range(10))

    def _by_hand(self, train: bool) -> str:
        from torchvision import datasets

        url, file, _ = datasets.SVHN.split_list["train" if train else "test"]
        return f"Fetch {url} as '{self.root / file}'"
