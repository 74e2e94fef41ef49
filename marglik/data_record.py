"""What a posterior remembers of its training data, to meet other data in the same form."""

from dataclasses import replace
from typing import Any

from marglik.data import ImageSplits, TensorSplits

__all__ = ["as_trained", "data_record"]


def data_record(
    splits: ImageSplits | TensorSplits, source: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Name, classes and normalisation, as plain data for JSON.

    Args:
        splits: the data.
        source: how it is loaded, ``{"class_path": ..., "init_args": {...}}``.
    """
    record: dict[str, Any] = {"name": splits.name, "source": source}
    if isinstance(splits, ImageSplits):
        record |= {
            "classes": list(splits.classes),
            "image_shape": list(splits.image_shape),
            "mean": list(splits.mean),
            "std": list(splits.std),
        }
    return record


def as_trained(
    splits: ImageSplits | TensorSplits, record: dict[str, Any] | None
) -> ImageSplits | TensorSplits:
    """The data, normalised as the training data was.

    Args:
        splits: the data.
        record: what `data_record` returned for the training data; None leaves all as it is.

    Raises:
        ValueError: classes or images of another kind than those of the training data.
    """
    if record is None:
        return splits
    trained_on_images = "image_shape" in record
    if isinstance(splits, ImageSplits) != trained_on_images:
        raise ValueError(
            f"{splits.name} holds {'images' if not trained_on_images else 'no images'}, unlike "
            f"{record['name']}, which the network was trained on. Pass data of its kind (--data)."
        )
    if not isinstance(splits, ImageSplits):
        return splits
    if list(splits.classes) != record["classes"]:
        raise ValueError(
            f"{splits.name} has {len(splits.classes)} classes ({_some(splits.classes)}), and the "
            f"network was trained on {len(record['classes'])} of {record['name']} "
            f"({_some(record['classes'])}). Pass data with the same classes (--data), or data of "
            "other classes as --ood."
        )
    if list(splits.image_shape) != record["image_shape"]:
        raise ValueError(
            f"{splits.name} has images of shape {splits.image_shape}, the network was trained on "
            f"{tuple(record['image_shape'])}. Pass data of that shape (--data)."
        )
    return replace(splits, mean=tuple(record["mean"]), std=tuple(record["std"]))


def _some(classes: Any) -> str:
    return ", ".join(classes[:4]) + (", ..." if len(classes) > 4 else "")
