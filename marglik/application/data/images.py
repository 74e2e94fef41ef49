"""Image data: digits of scikit-learn, CIFAR-10 and SVHN of torchvision, folders, class subsets."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kfac_backend.extras import extra
from kfac_backend.options import check_fraction
from marglik.application.data.splits import (
    DataSource,
    Splits,
    divided,
    hold_out,
    pixel_statistics,
    stratified,
    take,
)
from marglik.data.batches import Pair

Part = tuple[Pair, tuple[str, ...]]
"""All images of a part with their labels, and the class names."""


@dataclass(eq=False)
class Digits(DataSource):
    """The 1,797 handwritten digits of 8×8 pixels that come with scikit-learn.

    Pixels are scaled from 0..16 to 0..255 and rounded. The data has no test set, so a stratified
    part becomes the test set.

    Args:
        test_fraction: share of all images that become the test set, in (0, 1).
        validation: share of the training images that become the validation set, in [0, 1).
        wrong_labels: share of the training and validation labels that are replaced by another
            random class, in [0, 1). The test labels are unchanged.
        seed: seed of the splits and of the wrong labels.

    Raises:
        ValueError: a fraction is out of range.
    """

    test_fraction: float = 0.2
    validation: float = 0.0
    wrong_labels: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fraction("test_fraction", self.test_fraction, zero=False)
        check_fraction("validation", self.validation)
        check_fraction("wrong_labels", self.wrong_labels)

    def load(self) -> Splits:
        """Return the digits, or raise a ValueError if a part would be too small."""
        splits = divided(self.load_undivided(), self.test_fraction, self.validation, self.seed)
        mean, std = pixel_statistics(splits.train[0])
        generator = torch.Generator().manual_seed(self.seed)
        parts = {"train": splits.train, "validation": splits.validation}
        changed = {
            name: (part[0], with_wrong_labels(part[1], self.wrong_labels, 10, generator))
            for name, part in parts.items()
            if part is not None
        }
        return replace(splits, mean=mean, std=std, **changed)

    def load_undivided(self) -> Splits:
        """Return all digits as test data."""
        with extra("statistics"):
            from sklearn.datasets import load_digits  # imported here: it takes a second

        pixels, labels = map(torch.from_numpy, load_digits(return_X_y=True))
        whole = (pixels * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8), labels.long()
        classes = tuple(str(digit) for digit in range(10))
        mean, std = pixel_statistics(whole[0])
        return Splits(whole, None, whole, "digits", classes, mean=mean, std=std)


def with_wrong_labels(
    labels: Tensor, share: float, num_classes: int, generator: torch.Generator
) -> Tensor:
    """Return a copy of labels (N,) in which round(share · N) have another random class."""
    labels, number = labels.clone(), round(share * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:number]
    shift = torch.randint(1, num_classes, (number,), generator=generator)
    labels[chosen] = (labels[chosen] + shift) % num_classes
    return labels


@dataclass(eq=False, kw_only=True)
class TwoPartData(DataSource):
    """A data set with training and test images, or a random subset of these images.

    A subclass has a ``name`` for tables and figures, and reads each part.

    Args:
        validation: share of the training images that become the validation set, in [0, 1).
        max_train: number of training images to use, including validation; all if not given.
        max_test: number of test images to use; all if not given.
        seed: seed of the subsets and of the validation split.

    Raises:
        ValueError: the fraction is out of range.
    """

    validation: float = 0.0
    max_train: int | None = None
    max_test: int | None = None
    seed: int = 0
    name = ""
    scale: ClassVar[tuple[tuple[float, ...], tuple[float, ...]] | None] = None
    """Mean and standard deviation per channel; None computes them from the training images."""

    def __post_init__(self) -> None:
        check_fraction("validation", self.validation)

    @abstractmethod
    def read(self, part: str) -> Part:
        """Return all images of the part "train" or "test"."""

    def load(self) -> Splits:
        """Return the images.

        Raises:
            FileNotFoundError: the images do not exist.
            ValueError: the images cannot be read or do not fit together, or a part would be too
                small.
        """
        train, classes = self.read("train")
        test, test_classes = self.read("test")
        if differing := set(classes) ^ set(test_classes):
            raise ValueError(
                f"{self.name}: class {min(differing)!r} is in only one of train/ and test/. Both "
                "need the same classes. To use the test images as out-of-distribution data, pass "
                "them as --ood."
            )
        # If a part has three channels, convert greyscale images of the other part to three.
        channels = max(pixels.shape[1] for pixels, _ in (train, test))
        train, test = ((x.expand(-1, channels, -1, -1), y) for x, y in (train, test))
        # Choose the subset first, so that validation images come from the subset.
        train, indices = self._part(train, "max_train", classes)
        test, _ = self._part(test, "max_test", classes)
        splits = Splits(train, None, test, self.name, classes, train_indices=indices)
        if self.validation:
            splits = hold_out(splits, self.validation, self.seed, "validation")
        mean, std = self.scale or pixel_statistics(splits.train[0])
        return replace(splits, mean=mean, std=std)

    def load_test(self) -> tuple[Pair, str]:
        """Return the test images and the name of the data. Training images may be missing."""
        test, classes = self.read("test")
        return self._part(test, "max_test", classes)[0], self.name

    def _part(self, images: Pair, option: str, classes: tuple[str, ...]) -> tuple[Pair, Tensor]:
        """Return a stratified subset of the size of an option, and the indices of its images."""
        size, labels = getattr(self, option), images[1]
        if size in (None, len(labels)):
            return images, torch.arange(len(labels))
        chosen, _ = stratified(labels, size, classes, self.seed, f"{option}={size}")
        return take(images, chosen), chosen


@dataclass(eq=False)
class TorchvisionData(TwoPartData):
    """A data set that torchvision downloads, checks and reads; other arguments as `TwoPartData`.

    Args:
        root: folder with the files, to which missing files are downloaded.
        download: whether to download the data if it is missing.
    """

    root: str | Path = "data"
    download: bool = True

    def read(self, part: str) -> Part:
        """Return all images of the part, or raise a FileNotFoundError if they are missing."""
        with extra("images"):
            from torchvision import datasets  # importing torchvision takes a second

        try:
            return self._torchvisions(datasets, part)
        except (OSError, RuntimeError) as error:  # no network; files missing or damaged
            reason = str(error).partition("\n")[0].rstrip(".")
            raise FileNotFoundError(
                f"{self.name} is not in root='{self.root}', and the download failed ({reason}). "
                f"Copy the files that torchvision.datasets.{type(self).__name__} downloads to this "
                "folder, or use an ImageFolder."
            ) from error

    @abstractmethod
    def _torchvisions(self, datasets: Any, part: str) -> Part:
        """Return the part as torchvision reads it; may raise the errors of torchvision."""


# The usual numbers; also used by Daxberger et al. 2021 and the K-FAC paper.
MEAN = (125.3, 123.0, 113.9)
STD = (63.0, 62.1, 66.7)


class CIFAR10(TorchvisionData):
    """CIFAR-10: 50,000 training and 10,000 test images of 32×32 pixels, ten classes; 170 MB.

    torchvision reads the folder ``cifar-10-batches-py`` in ``root`` and checks the MD5 sums. Images
    are normalised by mean 125.3, 123.0, 113.9 and standard deviation 63.0, 62.1, 66.7. Arguments
    and errors: see `TorchvisionData`. Source: Krizhevsky 2009, "Learning Multiple Layers of
    Features from Tiny Images".
    """

    name = "CIFAR-10"
    scale = MEAN, STD

    def _torchvisions(self, datasets: Any, part: str) -> Part:
        data = datasets.CIFAR10(self.root, train=part == "train", download=self.download)
        pixels = torch.from_numpy(data.data)  # (N, H, W, C)
        images = pixels.permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets)
        return images, tuple(data.classes)


class SVHN(TorchvisionData):
    """SVHN: 73,257 training and 26,032 test images of 32×32 pixels, the ten digits; 246 MB.

    These are the cropped digits without the extra set. torchvision reads ``train_32x32.mat`` and
    ``test_32x32.mat`` in ``root``, and checks the MD5 sums. Label k is digit k (zero has label 10
    in the files). Images are normalised by the mean and standard deviation of the training pixels.
    Arguments and errors: see `TorchvisionData`. Source: Netzer et al. 2011, "Reading Digits in
    Natural Images with Unsupervised Feature Learning".
    """

    name = "SVHN"

    def _torchvisions(self, datasets: Any, part: str) -> Part:
        data = datasets.SVHN(self.root, split=part, download=self.download)
        pixels = torch.from_numpy(data.data)  # (N, C, H, W), a view of the content of the file
        images = pixels.contiguous(), torch.from_numpy(data.labels)
        return images, tuple(str(digit) for digit in range(10))


@dataclass(eq=False)
class ImageFolder(TwoPartData):
    """Images in a folder, arranged as ``train/CLASS/IMAGE`` and ``test/CLASS/IMAGE``.

    torchvision's ``ImageFolder`` lists the files. All images must have the same size. They are
    decoded to RGB, or to one channel if all images of a part are greyscale. Out-of-distribution
    data needs only test/. See `TwoPartData` for other arguments.

    Args:
        path: the folder that contains train/ and test/.
        name: name of the data in tables and figures; the name of the folder if not given.
    """

    path: str | Path
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = Path(self.path).expanduser()
        self.name = self.name or self.path.resolve().name

    def read(self, part: str) -> Part:
        """Return all images of the part."""
        with extra("images"):
            from torchvision import datasets

        folder = Path(self.path) / part
        if not folder.is_dir():
            raise FileNotFoundError(
                f"'{folder}' is not a folder. Arrange the images as train/CLASS/IMAGE and "
                "test/CLASS/IMAGE, and pass the folder that contains train/ and test/. If it is "
                "an archive, unpack it first."
            )
        # Skip files with a leading dot, which operating systems and editors create.
        listed = datasets.ImageFolder(
            folder,
            is_valid_file=lambda path: (
                datasets.folder.is_image_file(path) and not Path(path).name.startswith(".")
            ),
        )
        files = {str(Path(path).relative_to(self.path)): path for path, _ in listed.samples}
        return (decode_images(files), torch.tensor(listed.targets)), tuple(listed.classes)


class ClassSubset(DataSource):
    """The images of some classes of another source. Label k is the k-th class in ``classes``.

    The mean and the standard deviation are computed from all classes of the source, so that images
    of other classes can have the same normalisation.

    Args:
        data: the source.
        classes: names of the classes to keep. A number stands for the name with the same digits.

    Raises:
        ValueError: ``classes`` is empty, has a name twice, or is a string instead of a list.
    """

    def __init__(self, data: DataSource, classes: Sequence[str | int]) -> None:
        names = tuple(str(name) for name in classes)  # YAML reads the name 1 as a number
        if isinstance(classes, str) or not names or len(set(names)) < len(names):
            raise ValueError(
                f"classes={classes!r} is not a list of different names. Pass each name once."
            )
        self.data = data
        self.classes = names

    def load(self) -> Splits:
        """Return the images of these classes, or raise a ValueError if the source lacks one."""
        return self._of_classes(self.data.load())

    def load_undivided(self) -> Splits | None:
        """Return all images of these classes as test data, if the source is split at random."""
        whole = self.data.load_undivided()
        return whole and self._of_classes(whole)

    def _of_classes(self, splits: Splits) -> Splits:
        names = splits.classes or ()
        if unknown := [name for name in self.classes if name not in names]:
            raise ValueError(
                f"{splits.name} has no class {unknown}. Its classes are {list(names)}."
            )
        # The label of each class of the source here; -1 for other classes.
        label = torch.full((len(names),), -1)
        label[[names.index(name) for name in self.classes]] = torch.arange(len(self.classes))

        def some(part: Pair) -> Pair:
            own = label[part[1].long()]
            return take(part, own >= 0)[0], own[own >= 0]

        return replace(
            splits,
            train=some(splits.train),
            validation=splits.validation and some(splits.validation),
            test=some(splits.test),
            classes=self.classes,
            name=f"{splits.name} ({', '.join(self.classes)})",
            train_indices=splits.indices_in_source[label[splits.train[1].long()] >= 0],
        )


FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Supported formats. Without this list, Pillow would try forty more for any file name, and run a
program for PostScript."""


def decode_images(files: Mapping[str, str | IO[bytes]]) -> Tensor:
    """Return images (N, C, H, W), uint8, with three channels, or one if all are greyscale.

    Args:
        files: name in errors -> path or content.

    Raises:
        ValueError: an image cannot be decoded, exceeds Pillow's limit, differs in size from the
            first image, or has more than 8 bits per channel.
    """
    with extra("images"):
        from PIL import Image
        from torchvision.transforms.v2.functional import pil_to_tensor

    images, modes = [], set()
    for name, file in tqdm(files.items(), unit="image", disable=None):
        try:
            with Image.open(file, formats=FORMATS) as image:
                mode, pixels = image.mode, pil_to_tensor(image.convert("RGB"))
        except Exception as error:  # Pillow's decoders raise almost any exception
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"Image '{name}' cannot be decoded ({reason}). Replace or remove it."
            ) from error
        if mode.startswith(("I", "F")):  # Pillow clips "I;16" instead of scaling it
            raise ValueError(
                f"Image '{name}' has more than 8 bits per channel (mode {mode}). Scale and convert "
                "it to 8 bits."
            )
        (H, W), (H_1, W_1) = pixels.shape[1:], (images or [pixels])[0].shape[1:]
        if (H, W) != (H_1, W_1):
            raise ValueError(
                f"Image '{name}' has {W}×{H} pixels, but '{next(iter(files))}' has {W_1}×{H_1}. "
                "Resize all images to one size."
            )
        modes.add(mode)
        images.append(pixels)
    channels = 1 if modes <= {"1", "L", "LA"} else 3  # greyscale has three equal channels as RGB
    return torch.stack([pixels[:channels] for pixels in images])
