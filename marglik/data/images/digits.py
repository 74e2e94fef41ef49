"""scikit-learn's handwritten digits: real data without a download."""

import torch

from marglik.data.images.image_set import ImageData, ImageSet, ImageSplits
from marglik.data.splits import (
    check_fraction,
    check_seed,
    pixel_statistics,
    split_off,
    split_off_validation,
)

__all__ = ["Digits"]


class Digits(ImageData):
    """The 1,797 handwritten digits of 8×8 pixels that come with scikit-learn.

    Pixels are scaled from 0..16 to 0..255 and rounded. The data has no test set, so a stratified
    part becomes the test set.

    Args:
        test_fraction: share of all images that become the test set, in (0, 1).
        validation: share of the training images that become the validation set, in [0, 1).
        seed: seed of both splits.

    Raises:
        ValueError: if a fraction or the seed is out of range.
    """

    def __init__(self, test_fraction: float = 0.2, validation: float = 0.0, seed: int = 0) -> None:
        check_fraction("test_fraction", test_fraction, zero=False)
        check_fraction("validation", validation)
        check_seed(seed)
        self.test_fraction = test_fraction
        self.validation = validation
        self.seed = seed

    def load(self) -> ImageSplits:
        """Return the digits; raises a ValueError if a part would be too small."""
        from sklearn.datasets import load_digits  # it takes a second

        digits = load_digits()
        pixels = torch.from_numpy(digits.images)  # pyright: ignore[reportAttributeAccessIssue]
        labels = torch.from_numpy(digits.target)  # pyright: ignore[reportAttributeAccessIssue]
        images = ImageSet((pixels * 255 / 16).round().to(torch.uint8)[:, None], labels.long())
        classes = tuple(str(digit) for digit in range(10))
        size = round(self.test_fraction * len(images))
        if not len(classes) <= size <= len(images) - len(classes):
            raise ValueError(
                f"test_fraction={self.test_fraction}: {len(images)} digits would be divided into "
                f"{len(images) - size} and {size}; both parts need ten. Choose another fraction."
            )
        cause = f"test_fraction={self.test_fraction}"
        test, train = split_off(images, size, classes, self.seed, cause)
        train, validation = split_off_validation(train, self.validation, classes, self.seed)
        mean, std = pixel_statistics(train.images)
        return ImageSplits(train, validation, test, classes, mean, std, "digits")
