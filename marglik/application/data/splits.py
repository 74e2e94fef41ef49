"""Data in memory, split into training, validation and test data, and functions that split it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kfac_backend.extras import extra
from kfac_backend.options import TargetOptions
from marglik.application.data.encoding import TableEncoding
from marglik.data.batches import Batches, Inputs, Pair
from marglik.graphs import Graphs

SplitName = Literal["train", "validation", "test"]


class DataSource(ABC):
    """A source of data with its own test set."""

    @abstractmethod
    def load(self) -> "Splits":
        """Return the data. The same arguments always give the same data."""

    def load_undivided(self) -> "Splits | None":
        """Return all examples as test data if the source is split at random, otherwise None."""
        return None

    def encoded_as(self, record: dict[str, Any]) -> "DataSource":
        """Return the source with the encoding of recorded data; only tables have an encoding."""
        return self

    def load_test(self) -> tuple[Pair, str]:
        """Return the test examples and the name of the data, for out-of-distribution data.

        Sources whose training examples may be missing override it.
        """
        splits = self.load()
        return splits.test, splits.name


@dataclass(frozen=True, eq=False)
class Splits:
    """A data set of any kind, split into parts: images, sequences, graphs, rows of a table.

    Args:
        train: inputs x (N, ...), or N graphs, and targets y (N, ...) of the training data. Images
            are uint8 pixels (N, C, H, W), neither augmented nor normalised.
        validation: inputs and targets of the validation data, disjoint from the training data; or
            None.
        test: inputs and targets of the test data, which determines no choice.
        name: name of the data in tables and figures.
        classes: class names; label k stands for ``classes[k]``. None if targets are not class
            labels, or the number of classes is unknown.
        ignore_index: label of targets that do not count, such as padding; None if all count.
        table: encoding of the rows of a table; None for other data.
        target_scale: mean and standard deviation by which targets of a table are standardised.
        mean: mean of the training pixels per channel, in 0..255, by which images are normalised.
            None for other data.
        std: standard deviation of the training pixels per channel, in 0..255.
        train_indices: indices (N,) of the training examples in the source, from 0: rows of a file,
            or images in the order of a data set. None if the source has no other examples, and they
            are in its order.

    Raises:
        ValueError: a split has no examples, different numbers of inputs and targets, or values that
            are not finite; the splits differ in the shape or dtype of an example; a label has no
            class; or images and their mean and std do not fit together.
    """

    train: Pair
    validation: Pair | None
    test: Pair
    name: str
    classes: tuple[str, ...] | None = None
    ignore_index: int | None = None
    table: TableEncoding | None = None
    target_scale: tuple[float, float] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    train_indices: Tensor | None = None

    def __post_init__(self) -> None:
        for split, pair in self.parts.items():
            if pair is None:
                continue
            x, y = pair
            if len(x) != len(y):
                raise ValueError(
                    f"{self.name}: x_{split} has {len(x)} examples, but y_{split} has {len(y)}. "
                    "Each input needs one target."
                )
            for letter, values, trained_on in zip("xy", pair, self.train, strict=True):
                check_values(f"{self.name}: {letter}_{split}", values)
                # One network must accept the examples of all splits.
                if described(values) != described(trained_on):
                    raise ValueError(
                        f"{self.name}: {letter}_{split} has examples of {described(values)}, but "
                        f"{letter}_train has {described(trained_on)}. All splits need the same "
                        "kind of examples."
                    )
            if self.classes is not None:
                self._check_labels(f"y_{split}", y, len(self.classes))
        if self.train_indices is not None and len(self.train_indices) != len(self.train[1]):
            raise ValueError(
                f"{self.name}: {len(self.train_indices)} train_indices for {len(self.train[1])} "
                "training examples. Pass one index for each example, or train_indices=None."
            )
        if self.are_images:
            self._check_images()

    @property
    def parts(self) -> dict[str, Pair | None]:
        """Name of a split -> its inputs and targets; None for no validation data."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @property
    def are_images(self) -> bool:
        """Whether the inputs are images, which have a mean and a standard deviation."""
        return self.mean is not None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of every image."""
        _, channels, height, width = tensors_in(self.train)[0].shape
        return channels, height, width

    @property
    def indices_in_source(self) -> Tensor:
        """Indices (N,) of the training examples in the source, never None."""
        every = torch.arange(len(self.train[1]))
        return every if self.train_indices is None else self.train_indices

    @property
    def targets(self) -> TargetOptions:
        """Form of the targets in batches of this data."""
        return TargetOptions(ignore_index=self.ignore_index)

    def with_target_scale(self, scale: tuple[float, float] | None) -> "Splits":
        """Return the data with targets standardised by a mean and standard deviation, or unscaled.

        It first reverts an earlier standardisation.
        """
        (own_mean, own_std), (mean, std) = self.target_scale or (0.0, 1.0), scale or (0.0, 1.0)

        def scaled(pair: Any) -> Any:
            if pair is None:
                return None
            x, y = pair
            y = y.double() * own_std + own_mean  # numbers of the file, in the range of float64
            return x, ((y - mean) / std).float()

        parts = {name: scaled(part) for name, part in self.parts.items()}
        return replace(self, **parts, target_scale=scale)

    def _check_images(self) -> None:
        x, mean, std = self.train[0], self.mean or (), self.std or ()
        if not isinstance(x, Tensor) or x.dtype != torch.uint8 or x.dim() != 4:
            raise ValueError(
                f"{self.name} has examples of {described(x)}. Images must be uint8 pixels (N, C, "
                "H, W)."
            )
        if not len(mean) == len(std) == x.shape[1] or not all(s > 0 for s in std):
            raise ValueError(
                f"{self.name}: mean={mean}, std={std}. Each of the {x.shape[1]} channels needs a "
                "mean and a positive std. Remove channels in which all pixels are equal."
            )

    def _check_labels(self, name: str, y: Tensor, num_classes: int) -> None:
        labels = y if self.ignore_index is None else y[y != self.ignore_index]
        if not labels.numel():
            raise ValueError(
                f"{self.name}: all labels of {name} are {self.ignore_index}, the label that does "
                "not count. Add other labels."
            )
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"{self.name}: labels of {name} range from {low} to {high}. With {num_classes} "
                f"classes they must be in 0..{num_classes - 1}."
            )


def described(values: Inputs) -> str:
    """Return a description of examples; data for the same network have equal descriptions."""
    if isinstance(values, Graphs):
        return (
            f"graphs with {values.nodes.shape[1]} features per node and {values.edges.shape[1]} "
            "per edge"
        )
    return f"shape {tuple(values.shape[1:])} and dtype {values.dtype}"


def tensors_in(part: Pair) -> list[Tensor]:
    """Return the tensors of a split: inputs first, targets last."""
    x, y = part
    if isinstance(x, Tensor):
        return [x, y]
    return [*(getattr(x, field.name) for field in fields(x)), y]


def take(part: Pair, indices: Tensor) -> Pair:
    """Return the examples with these indices (M,), in this order."""
    x, y = part
    return x[indices], y[indices]


def check_values(name: str, values: Inputs) -> None:
    """Raise a ValueError if examples are empty or not finite."""
    if isinstance(values, Graphs):
        try:
            values.check()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        parts = {f"{name}, nodes": values.nodes, f"{name}, edges": values.edges}
    else:
        if values.dim() == 0 or not values.numel():
            raise ValueError(
                f"{name} is empty (shape {tuple(values.shape)}). It needs at least one example "
                "along its first axis."
            )
        parts = {name: values}
    for part, tensor in parts.items():
        bad = (~tensor.isfinite()).nonzero() if tensor.is_floating_point() else tensor[:0]
        if len(bad):
            raise ValueError(
                f"{part} contains {len(bad)} value(s) that are NaN or infinite, the first in row "
                f"{int(bad[0, 0])}. Remove these examples or fill in the values."
            )


# Choice of parts


def split_batches(
    splits: Splits,
    split: SplitName,
    batch_size: int,
    *,
    augment: bool = False,
    channels_last: bool = False,
    **options: Any,
) -> Batches:
    """Return a loader of a split, which normalises images; see `Batches` for the options.

    ``augment`` and ``channels_last`` are for images.
    """
    examples = splits.parts[split]
    if examples is None:
        raise ValueError(
            f"{splits.name} has no {split} examples. Split some off, for example with "
            "--data.validation 0.1."
        )
    if splits.mean is not None and splits.std is not None:
        options["normalisation"] = splits.mean, splits.std
        options |= {"augment": augment, "channels_last": channels_last}
    elif augment or channels_last:
        raise ValueError(
            f"{splits.name} contains no images. augment and channels_last are for images."
        )
    return Batches(*examples, batch_size, **options)


class SplitError(ValueError):
    """There are too few examples for the requested split."""


def hold_out(splits: Splits, share: float, seed: int, option: str = "held_out") -> Splits:
    """Return the data with a random share of the training examples as its validation set.

    The part is stratified if each example has a class. Mean and standard deviation of images do not
    change. A SplitError names the ``option`` if a part would be empty or lack a class.
    """
    y = splits.train[1]
    classes, size, cause = splits.classes or (), round(share * len(y)), f"{option}={share}"
    # Sequences, and examples whose label does not count, have no class.
    if classes and y.dim() == 1 and bool(((y >= 0) & (y < len(classes))).all()):
        chosen, rest = stratified(y, size, classes, seed, cause)
    else:
        _check_sizes(len(y), size, 1, cause)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        chosen, rest = order[:size].sort().values, order[size:].sort().values
    train, validation = take(splits.train, rest), take(splits.train, chosen)
    indices = splits.indices_in_source[rest]
    return replace(splits, train=train, validation=validation, train_indices=indices)


def divided(whole: Splits, test_fraction: float, validation: float, seed: int) -> Splits:
    """Return undivided data with a test set and a validation set, see `hold_out`.

    ``validation`` is a share of the examples that are not in the test set.
    """
    splits = hold_out(whole, test_fraction, seed, "test_fraction")
    assert splits.validation is not None
    splits = replace(splits, validation=None, test=splits.validation)
    return hold_out(splits, validation, seed, "validation") if validation else splits


def stratified(
    labels: Tensor, size: int, classes: tuple[str, ...], seed: int, cause: str
) -> tuple[Tensor, Tensor]:
    """Return the indices of a stratified random choice of ``size`` examples, and of the rest.

    The indices are in ascending order. In both parts, the shares of the classes are the same. A
    SplitError names the ``cause`` if a part would lack a class.
    """
    _check_sizes(len(labels), size, len(classes), cause)
    counts = labels.bincount(minlength=len(classes))
    if counts.min() < 2:
        raise SplitError(
            f"{cause}: class {classes[int(counts.argmin())]!r} has {counts.min()} example(s), but "
            "each part needs one. Add examples, or remove the class."
        )
    with extra("statistics"):
        from sklearn.model_selection import train_test_split  # imported here: it takes a second

    parts = train_test_split(
        np.arange(len(labels)), train_size=size, random_state=seed, stratify=labels.numpy()
    )
    chosen, rest = (torch.from_numpy(np.sort(part)) for part in parts)
    return chosen, rest


def _check_sizes(total: int, size: int, least: int, cause: str) -> None:
    if not least <= size <= total - least:
        none = " (0 for none)" if cause.startswith(("held_out", "validation")) else ""
        raise SplitError(
            f"{cause}: this splits {total} examples into {size} and {total - size}. Both parts "
            f"need at least {least}. Choose another number{none}, or use more examples."
        )


def pixel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of uint8 images (N, C, H, W) per channel, in 0..255.

    They are computed in float64 from a histogram with 256 bins, without a copy of the images in
    floating point. The standard deviation divides by N H W.
    """
    # Counts are exact, unlike a float32 mean of 150 million pixels.
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack(
        [channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]
    )
    shares = counts / counts.sum(1, keepdim=True).double()  # (C, 256)
    mean = shares @ values
    std = (shares * (values - mean[:, None]).square()).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())
