"""One way to batches of any data."""

import pytest
import torch

from marglik.data import ImageSet, ImageSplits, TensorSplits
from marglik.data.batches import split_batches


def part(n, first=0):
    pixels = torch.arange(first, first + n, dtype=torch.uint8)[:, None, None, None]
    return ImageSet(pixels.expand(n, 3, 8, 8).contiguous(), torch.arange(n) % 2)


IMAGES = ImageSplits(
    part(10), part(4, 10), part(5, 20), ("a", "b"), (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "pets"
)
X = torch.arange(36, dtype=torch.float64).view(12, 3)
TENSORS = TensorSplits(
    (X[:6], X[:6, :1]), (X[6:9], X[6:9, :1]), (X[9:], X[9:, :1]), "waves"
)  # fmt: skip


def joined(batches):
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_images_are_normalised(split):
    batches = split_batches(IMAGES, split, 4)
    assert [len(x) for x, _ in batches][0] == 4
    x, y = joined(batches)
    images = getattr(IMAGES, split)
    mean, std = (torch.tensor(v)[:, None, None] for v in (IMAGES.mean, IMAGES.std))
    torch.testing.assert_close(x, (images.images.float() - mean) / std)
    assert torch.equal(y, images.labels)


def test_tensors_are_as_they_are():
    x, y = joined(split_batches(TENSORS, "validation", 2))
    assert torch.equal(x, TENSORS.validation[0]) and x.dtype == torch.float64
    assert torch.equal(y, TENSORS.validation[1])


@pytest.mark.parametrize("splits", [IMAGES, TENSORS], ids=["images", "tensors"])
def test_each_seed_has_its_order(splits):
    first, again, other = (
        joined(split_batches(splits, "train", 4, shuffle=True, seed=seed))[0] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_augmentation_is_asked_for():
    plain = joined(split_batches(IMAGES, "train", 10))[0]
    augmented = joined(split_batches(IMAGES, "train", 10, augment=True))[0]
    assert not torch.equal(plain, augmented)  # borders of the crops are black


def test_a_split_that_is_not_there():
    images = ImageSplits(
        IMAGES.train, None, IMAGES.test, IMAGES.classes, IMAGES.mean, IMAGES.std, "pets"
    )
    with pytest.raises(ValueError, match="pets has no validation images; .*--data.validation 0.1"):
        split_batches(images, "validation", 4)
