"""Records of data: to recognise it later, and to bring other data into the same form."""

from dataclasses import replace
from typing import Any

from kfac_backend.files import sha256_of_tensors
from marglik.data.splits import Splits, described, tensors_in
from marglik.graphs import Graphs


def data_record(splits: Splits, source: dict[str, Any] | None = None) -> dict[str, Any]:
    """The record of data for JSON: name, sum of the training examples, classes, form, scales.

    The form is what a network depends on; the scales are those of images, or of a table's targets.

    Args:
        splits: the data.
        source: how to load it, ``{"class_path": ..., "init_args": {...}}``.
    """
    record: dict[str, Any] = {
        "name": splits.name,
        "source": source,
        "train_sha256": sha256_of_tensors(tensors_in(splits.train)),
        "form": _form(splits),
    }
    if splits.classes is not None:
        record["classes"] = list(splits.classes)
    for name in ("mean", "std", "target_scale"):
        if (values := getattr(splits, name)) is not None:
            record[name] = list(values)
    return record


def as_trained(splits: Splits, record: dict[str, Any] | None) -> Splits:
    """The data, normalised as the training data was.

    Args:
        splits: the data.
        record: what `data_record` returned for the training data; None changes nothing.

    Raises:
        ValueError: classes, images, graphs or columns of another kind than those of the training
            data.
    """
    if record is None:
        return splits
    if (form := _form(splits)) != record["form"]:
        raise ValueError(
            f"{splits.name} has {form}; {record['name']}, which the network was trained on, has "
            f"{record['form']}. Pass data of that kind and shape (--data)."
        )
    # A file's labels have no names: nothing to compare.
    classes = record.get("classes")
    if classes and splits.classes and list(splits.classes) != classes:
        raise ValueError(
            f"{splits.name} has {len(splits.classes)} classes ({_some(splits.classes)}), and the "
            f"network was trained on {len(classes)} of {record['name']} ({_some(classes)}). Pass "
            "data with the same classes (--data), or images of other classes as --ood."
        )
    if splits.are_images:
        return replace(splits, mean=tuple(record["mean"]), std=tuple(record["std"]))
    scale = record.get("target_scale")
    if splits.target_scale is None or scale is None or list(splits.target_scale) == scale:
        return splits
    return splits.with_target_scale(*scale)


def is_held_out(splits: Splits, record: dict[str, Any] | None) -> bool:
    """Whether there is a validation set on which the network was certainly not trained.

    That is so if the training set is the recorded one, as the validation set is disjoint from it.
    """
    if splits.validation is None or record is None:
        return False
    return record.get("train_sha256") == sha256_of_tensors(tensors_in(splits.train))


def _form(splits: Splits) -> str:
    """What a network depends on: (C, H, W) of images, features of graphs, columns of a table."""
    if splits.are_images:
        return f"images of shape {splits.image_shape}"
    if splits.columns is not None:
        return f"columns {list(splits.columns)}"
    x = splits.train[0]
    return described(x) if isinstance(x, Graphs) else "no images, graphs or columns"


def _some(classes: Any) -> str:
    return ", ".join(classes[:4]) + (", ..." if len(classes) > 4 else "")
