"""Some of the classes of another source of images."""

from collections.abc import Sequence

import torch

from marglik.data.image_sets import ImageData, ImageSet, ImageSplits

__all__ = ["ClassSubset"]


class ClassSubset(ImageData):
    """The images of some classes of another source, numbered in the order in which they are named.

    Mean and standard deviation stay those of the whole data, so that classes left out can be
    shown to a network as they would have been.

    Args:
        data: the source.
        classes: names of the classes to keep; class k is the k-th of them. Numbers stand for the
            names that are written like them.

    Raises:
        ValueError: if no class is named, one of them twice, or one string given for a list.
    """

    def __init__(self, data: ImageData, classes: Sequence[str | int]) -> None:
        if isinstance(classes, str):
            raise ValueError(f"classes={classes!r} is one string; pass a list, [{classes!r}].")
        names = tuple(str(name) for name in classes)  # YAML takes the name 1 for a number
        if not names:
            raise ValueError("classes=[] keeps no image at all; name at least one class.")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"classes={list(names)} names {_quoted(twice)} more than once; name each once."
            )
        self.data = data
        self.classes = names

    def load(self) -> ImageSplits:
        """Return the images of these classes.

        Raises:
            ValueError: if the source has no class of that name.
        """
        splits = self.data.load()
        unknown = [name for name in self.classes if name not in splits.classes]
        if unknown:
            raise ValueError(
                f"{splits.name} has no class {_quoted(unknown)}; its classes are "
                f"{_quoted(splits.classes)}."
            )
        kept = [splits.classes.index(name) for name in self.classes]
        return ImageSplits(
            train=_select(splits.train, kept),
            validation=None if splits.validation is None else _select(splits.validation, kept),
            test=_select(splits.test, kept),
            classes=self.classes,
            mean=splits.mean,
            std=splits.std,
            name=f"{splits.name} ({', '.join(self.classes)})",
        )


def _select(images: ImageSet, kept: list[int]) -> ImageSet:
    """The images whose label is in ``kept``, in their order; the new label is the position."""
    old = torch.tensor(kept, device=images.labels.device)
    is_class = images.labels[:, None] == old  # (N, classes)
    chosen = is_class.any(1)
    return ImageSet(images.images[chosen], is_class[chosen].int().argmax(1))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
