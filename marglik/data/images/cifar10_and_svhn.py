"""Data sets that torchvision downloads: CIFAR-10 and SVHN."""

from abc import abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from marglik.data.images.image_set import ImageData, ImageSet, ImageSplits
from marglik.data.splits import (
    check_fraction,
    check_seed,
    pixel_statistics,
    split_off_validation,
    subset,
)

__all__ = [
    "CIFAR10",
    "SVHN",
    "TorchvisionData",
]


class TorchvisionData(ImageData):
    """A data set with training and test images that torchvision downloads, checks and reads.

    A subclass has a ``name``, reads both parts, and says how to get the files without a download.

    Args:
        root: folder that has the files, or to which they are downloaded.
        download: whether to download the data if it is not there.
        validation: share of the training images that become the validation set, in [0, 1).
        max_train: number of training images to use, including validation; all if not given.
        max_test: number of test images to use; all if not given.
        seed: seed of the subsets and of the validation split.

    Raises:
        ValueError: if the fraction or the seed is out of range.
    """

    name: str
    """Name of the data in tables and figures."""

    def __init__(
        self,
        root: str | Path = "data",
        download: bool = True,
        validation: float = 0.0,
        max_train: int | None = None,
        max_test: int | None = None,
        seed: int = 0,
    ) -> None:
        check_fraction("validation", validation)
        check_seed(seed)
        self.root = Path(root).expanduser()
        self.download = download
        self.validation = validation
        self.max_train = max_train
        self.max_test = max_test
        self.seed = seed

    def load(self) -> ImageSplits:
        """Return the images.

        Raises:
            FileNotFoundError: if they are not in ``root`` and cannot be downloaded.
            ValueError: if a part would be too small or too large.
        """
        train, classes = self._read_or_explain(train=True)
        test, _ = self._read_or_explain(train=False)
        train = subset(train, self.max_train, classes, self.seed, "max_train")
        test = subset(test, self.max_test, classes, self.seed, "max_test")
        train, validation = split_off_validation(train, self.validation, classes, self.seed)
        mean, std = self._statistics(train.images)
        return ImageSplits(train, validation, test, classes, mean, std, self.name)

    def _read_or_explain(self, train: bool) -> tuple[ImageSet, tuple[str, ...]]:
        try:
            return self._read(train)
        except (OSError, RuntimeError) as error:  # no network; files missing or damaged
            reason = str(error).partition("\n")[0].rstrip(".")
            tried = "could not be downloaded" if self.download else "download=False was given"
            raise FileNotFoundError(
                f"{self.name} is not in root='{self.root}', and {tried} ({reason}). "
                f"{self._by_hand(train)}, or use ImageFolder with an archive of the images."
            ) from error

    @abstractmethod
    def _read(self, train: bool) -> tuple[ImageSet, tuple[str, ...]]:
        """All images of a part, and the class names; torchvision's errors are passed on."""

    @abstractmethod
    def _by_hand(self, train: bool) -> str:
        """What a user can do without a download: a sentence without its full stop."""

    def _statistics(self, images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation per channel, by default those of the training images."""
        return pixel_statistics(images)


# The usual numbers, as in Daxberger et al. 2021 and the K-FAC paper.
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
