"""Records of data: to recognise it later, and to bring other data into the same form."""

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from kfac_backend.files import sha256_of_tensors
from marglik.data import ImageSet, ImageSplits, Splits
from marglik.data.tensors import described
from marglik.graphs import Graphs

__all__ = ["as_trained", "data_record", "is_held_out", "tensors_in"]


def data_record(splits: Splits, source: dict[str, Any] | None = None) -> dict[str, Any]:
    """The record of data for JSON: name, sum of the training examples, classes, and form.

    The form is the shape and normalisation of images, or the number of features of graphs.

    Args:
        splits: the data.
        source: how to load it, ``{"class_path": ..., "init_args": {...}}``.
    """
    record: dict[str, Any] = {
        "name": splits.name,
        "source": source,
        "train_sha256": _sum_of_training(splits),
    }
    if isinstance(splits, ImageSplits):
        record |= {
            "classes": list(splits.classes),
            "image_shape": list(splits.image_shape),
            "mean": list(splits.mean),
            "std": list(splits.std),
        }
        return record
    if splits.classes is not None:
        record["classes"] = list(splits.classes)
    graphs = _graphs(splits)
    return record if graphs is None else record | {"graphs": graphs}


def as_trained(splits: Splits, record: dict[str, Any] | None) -> Splits:
    """The data, normalised as the training data was.

    Args:
        splits: the data.
        record: what `data_record` returned for the training data; None changes nothing.

    Raises:
        ValueError: classes, images or graphs of another kind than those of the training data.
    """
    if record is None:
        return splits
    trained_on = {"images": record.get("image_shape"), "graphs": record.get("graphs")}
    for what, here in (("images", _images(splits)), ("graphs", _graphs(splits))):
        there = trained_on[what]
        if (here is None) != (there is None):
            raise ValueError(
                f"{splits.name} holds {what if here else f'no {what}'}, unlike {record['name']}, "
                "which the network was trained on. Pass data of its kind (--data)."
            )
    # A file's labels have no names: nothing to compare.
    classes = record.get("classes")
    if classes and splits.classes and list(splits.classes) != classes:
        raise ValueError(
            f"{splits.name} has {len(splits.classes)} classes ({_some(splits.classes)}), and the "
            f"network was trained on {len(classes)} of {record['name']} ({_some(classes)}). Pass "
            "data with the same classes (--data), or images of other classes as --ood."
        )
    if _graphs(splits) != record.get("graphs"):
        raise ValueError(
            f"{splits.name} has {_graphs(splits)}, the network was trained on {record['graphs']}. "
            "Pass such data (--data)."
        )
    if not isinstance(splits, ImageSplits):
        return splits
    if _images(splits) != record["image_shape"]:
        raise ValueError(
            f"{splits.name} has images of shape {splits.image_shape}, the network was trained on "
            f"{tuple(record['image_shape'])}. Pass data of that shape (--data)."
        )
    return replace(splits, mean=tuple(record["mean"]), std=tuple(record["std"]))


def is_held_out(splits: Splits, record: dict[str, Any] | None) -> bool:
    """Whether there is a validation set on which the network was certainly not trained.

    That is so if the training set is the recorded one, as the validation set is disjoint from it.
    """
    if splits.validation is None or record is None:
        return False
    return record.get("train_sha256") == _sum_of_training(splits)


def tensors_in(part: ImageSet | tuple[Tensor | Graphs, Tensor]) -> list[Tensor]:
    """The tensors of a split: inputs first, the targets last."""
    x, y = (part.images, part.labels) if isinstance(part, ImageSet) else part
    if isinstance(x, Tensor):
        return [x, y]
    return [*(getattr(x, field.name) for field in fields(x)), y]


def _sum_of_training(splits: Splits) -> str:
    """SHA-256 sum of the training inputs and targets; of images, before normalisation."""
    return sha256_of_tensors(tensors_in(splits.train))


def _images(splits: Splits) -> list[int] | None:
    """(C, H, W) of images; None for other data."""
    return list(splits.image_shape) if isinstance(splits, ImageSplits) else None


def _graphs(splits: Splits) -> str | None:
    """A description of graphs; None for other data."""
    if isinstance(splits, ImageSplits) or not isinstance(splits.train[0], Graphs):
        return None
    return described(splits.train[0])


def _some(classes: Any) -> str:
    return ", ".join(classes[:4]) + (", ..." if len(classes) > 4 else "")
