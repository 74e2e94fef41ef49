"""Record data, to recognise it later and to convert other data to the same form."""

from base64 import b64decode, b64encode
from dataclasses import asdict, replace
from typing import Any

import torch

from kfac_backend.atomic_files import sha256_of_tensors
from marglik.application.data.splits import (
    DataSource,
    SplitError,
    Splits,
    described,
    take,
    tensors_in,
)
from marglik.data.batches import Pair
from marglik.graphs import Graphs

SUM_BYTES = 6
"""Length of an example's checksum. Of 10,000 new examples, compared with 50,000 recorded examples,
2e-6 match by chance on average."""


def data_record(splits: Splits, source: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the record of data for JSON: name, checksums, classes, form and scales.

    The form has the properties on which a network depends. The scales normalise images, or the
    targets of a table. "seen" has `SUM_BYTES` bytes, in base64, of a checksum of the inputs of each
    example that a run uses for training or calibration. `num_seen` recognises these examples in
    other data. ``source`` is a specification that loads the data.
    """
    record: dict[str, Any] = {
        "name": splits.name,
        "source": source,
        "train_sha256": sha256_of_tensors(tensors_in(splits.train)),
        "test_sha256": sha256_of_tensors(tensors_in(splits.test)),
        "seen": b64encode(b"".join(_sums_of(splits.train) + _sums_of(splits.validation))).decode(),
        "form": _form(splits),
    }
    if splits.classes is not None:
        record["classes"] = list(splits.classes)
    if splits.table is not None:
        record["table"] = asdict(splits.table)
    for name in ("mean", "std", "target_scale"):
        if (values := getattr(splits, name)) is not None:
            record[name] = list(values)
    return record


def as_trained(splits: Splits, record: dict[str, Any] | None) -> Splits:
    """Return data with the normalisation of the training data, which must be of the same kind."""
    if record is None:
        return splits
    if (form := _form(splits)) != record["form"]:
        raise ValueError(
            f"{splits.name} has {form}, but the network was trained on {record['name']} with "
            f"{record['form']}. Pass data of this kind and shape (--data)."
        )
    # Labels of a tensor file have no names to compare.
    classes = record.get("classes")
    if classes and splits.classes and list(splits.classes) != classes:
        raise ValueError(
            f"{splits.name} has {len(splits.classes)} classes ({_some(splits.classes)}), but the "
            f"network was trained on {record['name']} with {len(classes)} classes "
            f"({_some(classes)}). Pass data with the same classes (--data), or images of other "
            "classes as --ood."
        )
    if splits.are_images:
        return replace(splits, mean=tuple(record["mean"]), std=tuple(record["std"]))
    scale = record.get("target_scale")
    scale = scale and tuple(scale)
    # A later check with the likelihood finds classes instead of numbers.
    is_same = splits.classes is not None or splits.target_scale == scale
    return splits if is_same else splits.with_target_scale(scale)


def data_to_evaluate(source: DataSource, record: dict[str, Any] | None) -> Splits:
    """Return data whose test part is to be evaluated.

    For the data of the training, it is the test part of the training run. For other data, it is the
    data's own test part, or all examples if the source is split at random. Without a record, it is
    the test part that the source loads.
    """
    source = source if record is None else source.encoded_as(record)
    try:
        splits = source.load()
    except SplitError:  # other data may be a few examples
        whole = None if record is None else source.load_undivided()
        if whole is None:
            raise
        return whole
    if record is None or is_own_test(splits, record):
        return splits
    return source.load_undivided() or splits


def is_own_test(splits: Splits, record: dict[str, Any]) -> bool:
    """Return whether the test examples are the same as in the recorded data."""
    return record["test_sha256"] == sha256_of_tensors(tensors_in(splits.test))


def num_seen(splits: Splits, record: dict[str, Any] | None) -> int | None:
    """Return the number of test examples whose inputs the recorded run used.

    A run uses inputs for training or calibration. The number is 0 for the test part of the run,
    where equal inputs are a coincidence, and None without a record.
    """
    if record is None:
        return None
    if is_own_test(splits, record):
        return 0
    text = b64decode(record["seen"])
    trained_on = {text[i : i + SUM_BYTES] for i in range(0, len(text), SUM_BYTES)}
    return sum(of_one in trained_on for of_one in _sums_of(splits.test))


def is_held_out(splits: Splits, record: dict[str, Any] | None) -> bool:
    """Return whether there is a validation set that the network was certainly not trained on.

    This is the case if the training set equals the recorded training set, because a validation set
    is disjoint from it.
    """
    if splits.validation is None or record is None:
        return False
    return record.get("train_sha256") == sha256_of_tensors(tensors_in(splits.train))


def _sums_of(part: Pair | None) -> list[bytes]:
    """Return the first bytes of the SHA-256 sum of each example's inputs."""
    if part is None:
        return []
    each = (tensors_in(take(part, torch.tensor([i])))[:-1] for i in range(len(part[1])))
    return [bytes.fromhex(sha256_of_tensors(inputs))[:SUM_BYTES] for inputs in each]


def _form(splits: Splits) -> str:
    """Return the form of inputs: shape of images, features of graphs, or columns of a table."""
    if splits.are_images:
        return f"images of shape {splits.image_shape}"
    if splits.table is not None:
        return f"columns {list(splits.table.columns)}"
    x = splits.train[0]
    return described(x) if isinstance(x, Graphs) else "no images, graphs or columns"


def _some(classes: Any) -> str:
    return ", ".join(classes[:4]) + (", ..." if len(classes) > 4 else "")
