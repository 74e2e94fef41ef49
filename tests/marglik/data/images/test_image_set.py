"""Image sets and their splits check what they are made of."""

import pytest
import torch

from marglik.data import ImageSet, ImageSplits
from tests.marglik.data.image_helpers import synthetic


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images, labels: (images.float(), labels), "float32"),
        (lambda images, labels: (images[:, 0], labels), r"\(2, 4, 4\)"),
        (lambda images, labels: (images, labels[:1]), r"labels .* \(1,\)"),
        (lambda images, labels: (images, labels.int()), "int32"),
    ],
    ids=["image dtype", "image shape", "number of labels", "label dtype"],
)
def test_image_set_rejects_other_dtypes_and_shapes(change, message):
    images, labels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    assert len(ImageSet(images, labels)) == 2
    with pytest.raises(ValueError, match=message):
        ImageSet(*change(images, labels))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": synthetic([2, 2], size=5)}, r"test images have shape \(3, 5, 5\)"),
        ({"classes": ("a",)}, "labels reach from 0 to 1; with 1 classes"),
        ({"mean": (1.0,)}, "mean=.* 1 entries.* 3 channels"),
        ({"std": (1.0, 0.0, 1.0)}, "std=.* not positive"),
    ],
    ids=["test images", "classes", "mean", "std"],
)
def test_image_splits_reject_what_does_not_fit(change, message):
    train = synthetic([2, 2])
    fitting = {
        "train": train,
        "validation": None,
        "test": train,
        "classes": ("a", "b"),
        "mean": (1.0,) * 3,
        "std": (1.0,) * 3,
        "name": "x",
    }
    splits = ImageSplits(**fitting)
    assert splits.image_shape == (3, 4, 4)
    assert splits.num_classes == 2
    with pytest.raises(ValueError, match=message):
        ImageSplits(**{**fitting, **change})
