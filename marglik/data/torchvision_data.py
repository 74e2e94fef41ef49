"""What the data sets that torchvision reads have in common."""

from abc import abstractmethod
from pathlib import Path

from torch import Tensor

from marglik.data.image_sets import ImageData, ImageSet, ImageSplits
from marglik.data.splits import (
    check_fraction,
    check_seed,
    pixel_statistics,
    split_off_validation,
    subset,
)

__all__ = ["TorchvisionData"]


class TorchvisionData(ImageData):
    """A data set with training and test images that torchvision downloads, checks and reads.

    A subclass has a ``name``, reads both parts and says how else the files can be had.

    Args:
        root: folder that holds, or will hold, the files.
        download: whether to download the data where it is not there.
        validation: share of the training images that become the validation set, in [0, 1).
        max_train: number of training images to take, validation included; all if not given.
        max_test: number of test images to take; all if not given.
        seed: of the subsets and of the validation split.

    Raises:
        ValueError: if the fraction or the seed is out of range.
    """

    name: str
    """What tables and figures call the data."""

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
        """All images of a part, and the class names; torchvision's own errors where it fails."""

    @abstractmethod
    def _by_hand(self, train: bool) -> str:
        """What to do where there is no download: a sentence without its full stop."""

    def _statistics(self, images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation per channel, by default those of the training images."""
        return pixel_statistics(images)
