"""CIFAR-10 in its original, lossless form."""

from pathlib import Path

import torch

from marglik.data.image_sets import ImageData, ImageSet, ImageSplits
from marglik.data.splits import check_fraction, check_seed, split_off_validation, subset

__all__ = ["CIFAR10"]

# The customary numbers, those of Daxberger et al. 2021 and of the K-FAC paper.
MEAN = (125.3, 123.0, 113.9)
STD = (63.0, 62.1, 66.7)


class CIFAR10(ImageData):
    """CIFAR-10: 50,000 training and 10,000 test images of 32×32 pixels, ten classes.

    Source: Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images", read by
    torchvision, which checks the files' MD5 sums. Normalised by mean 125.3, 123.0, 113.9 and
    standard deviation 63.0, 62.1, 66.7.

    Args:
        root: folder that holds, or will hold, ``cifar-10-batches-py``.
        download: whether to download the data (170 MB) where it is not there.
        validation: share of the training images that become the validation set, in [0, 1).
        max_train: number of training images to take, validation included; all if not given.
        max_test: number of test images to take; all if not given.
        seed: of the subsets and of the validation split.

    Raises:
        ValueError: if the fraction or the seed is out of range.
    """

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
        train, classes = self._read(train=True)
        test, _ = self._read(train=False)
        train = subset(train, self.max_train, classes, self.seed, "max_train")
        test = subset(test, self.max_test, classes, self.seed, "max_test")
        train, validation = split_off_validation(train, self.validation, classes, self.seed)
        return ImageSplits(train, validation, test, classes, MEAN, STD, "CIFAR-10")

    def _read(self, train: bool) -> tuple[ImageSet, tuple[str, ...]]:
        from torchvision import datasets  # importing torchvision takes a second

        try:
            data = datasets.CIFAR10(self.root, train=train, download=self.download)
        except (OSError, RuntimeError) as error:  # no network; files missing or damaged
            reason = str(error).partition("\n")[0].rstrip(".")
            tried = "could not be downloaded" if self.download else "download=False was given"
            raise FileNotFoundError(
                f"CIFAR-10 is not in root='{self.root}', and {tried} ({reason}). Unpack "
                f"{datasets.CIFAR10.url} there, so that '{self.root / 'cifar-10-batches-py'}' "
                "exists, or use ImageFolder with an archive of the images."
            ) from error
        pixels = torch.from_numpy(data.data)  # (N, H, W, C)
        images = ImageSet(pixels.permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets))
        return images, tuple(data.classes)
