"""Image data sets in a folder or an archive."""

from collections.abc import Sequence
from pathlib import Path

from marglik.data.images.decoding import Decoded, cache_file, decode_splits, read_cache, write_cache
from marglik.data.images.files import SPLITS, open_layout
from marglik.data.images.image_set import ImageData, ImageSet, ImageSplits
from marglik.data.splits import (
    check_fraction,
    check_seed,
    pixel_statistics,
    split_off_validation,
    subset,
)

__all__ = ["ImageFolder"]


class ImageFolder(ImageData):
    """Images arranged as ``train/CLASS/IMAGE`` and ``test/CLASS/IMAGE``.

    They are read from a folder, or from a tar archive without unpacking it to disk; one folder
    above train/ and test/ is allowed. All images must have the same size. They are decoded to RGB
    (to one channel if all are greyscale) once, and then read from a cache in
    ``$XDG_CACHE_HOME/marglik`` or ``~/.cache/marglik``. Out-of-distribution data needs only test/.

    Args:
        path: the folder, or the .tar, .tar.gz or .tgz archive.
        validation: share of the training images that become the validation set, in [0, 1).
        max_train: number of training images to use, including validation; all if not given.
        max_test: number of test images to use; all if not given.
        seed: seed of the subsets and of the validation split.
        mean: mean per channel in 0..255; that of the training images if not given.
        std: standard deviation per channel in 0..255; that of the training images if not given.
        name: name of the data in tables and figures; the file's name if not given.
        cache: whether to keep the decoded images, three bytes per pixel.

    Raises:
        ValueError: if the fraction or the seed is out of range.
    """

    def __init__(
        self,
        path: str | Path,
        validation: float = 0.0,
        max_train: int | None = None,
        max_test: int | None = None,
        seed: int = 0,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        name: str | None = None,
        cache: bool = True,
    ) -> None:
        check_fraction("validation", validation)
        check_seed(seed)
        self.path = Path(path).expanduser()
        self.validation = validation
        self.max_train = max_train
        self.max_test = max_test
        self.seed = seed
        self.mean = None if mean is None else tuple(mean)
        self.std = None if std is None else tuple(std)
        self.name = name or _stem(self.path)
        self.cache = cache

    def load(self) -> ImageSplits:
        """Return the images.

        Raises:
            FileNotFoundError: if there is nothing at ``path``.
            ValueError: if the archive is damaged, files are not arranged as above, an image cannot
                be decoded or differs in size, or a part would be too small or too large.
        """
        train, test, classes = self._decoded()
        train = subset(train, self.max_train, classes, self.seed, "max_train")
        test = subset(test, self.max_test, classes, self.seed, "max_test")
        train, validation = split_off_validation(train, self.validation, classes, self.seed)
        mean, std = pixel_statistics(train.images)
        mean = mean if self.mean is None else self.mean
        std = std if self.std is None else self.std
        return ImageSplits(train, validation, test, classes, mean, std, self.name)

    def load_test(self) -> tuple[ImageSet, str]:
        """Return the test images and the name of the data; training images may be missing.

        Raises:
            FileNotFoundError, ValueError: see `load`.
        """
        _, test, classes = self._decoded(needed=("test",))
        return subset(test, self.max_test, classes, self.seed, "max_test"), self.name

    def _decoded(self, needed: Sequence[str] = SPLITS) -> Decoded:
        """All images, from the cache or from the files."""
        file = cache_file(self.path) if self.cache and self.path.exists() else None
        # A cache without training images (of a source that had none) does not do if they are
        # needed; `open_layout` then raises the error about them.
        if file is not None and (cached := read_cache(file)) is not None:
            if len(cached[0]) or "train" not in needed:
                return cached
        with open_layout(self.path, needed) as layout:
            train, test = decode_splits(layout, self.name)
        decoded = train, test, layout.classes
        if file is not None:
            write_cache(file, decoded)
        return decoded


def _stem(path: Path) -> str:
    """The last part of a path without .tar, .tar.gz, .tgz and the like; folders keep dots."""
    name = path.resolve().name
    return name if path.is_dir() else name.removesuffix(path.suffix).removesuffix(".tar")
