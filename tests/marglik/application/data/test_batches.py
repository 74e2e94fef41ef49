"""Batches against brute force: normalisation, crop and flip, order, generator, ranks' parts."""

from types import SimpleNamespace

import pytest
import torch

from marglik.application.data.splits import split_batches
from marglik.data import Batches, Splits, crop_and_flip

MEAN, STD = (100.0, 120.0, 140.0), (50.0, 60.0, 70.0)


def crop_and_flip_one_by_one(images, top, left, flip, padding):
    """Oracle: pad, slice and mirror each image."""
    _, channels, height, width = images.shape
    results = []
    for image, t, x, mirror in zip(images, top, left, flip, strict=True):
        canvas = torch.zeros(channels, height + 2 * padding, width + 2 * padding).to(images)
        canvas[:, padding : padding + height, padding : padding + width] = image
        window = canvas[:, t : t + height, x : x + width]
        results.append(window.flip(2) if mirror else window)
    return torch.stack(results)


@pytest.mark.parametrize(("shape", "padding"), [((3, 32, 32), 4), ((2, 5, 9), 1), ((1, 8, 8), 0)])
def test_crop_and_flip_equals_one_image_after_the_other(shape, padding):
    images = torch.randint(256, (50, *shape), dtype=torch.uint8)
    top, left = torch.randint(2 * padding + 1, (2, 50))
    flip = torch.randint(2, (50,)).bool()
    expected = crop_and_flip_one_by_one(images, top, left, flip, padding)
    assert torch.equal(crop_and_flip(images, top, left, flip, padding), expected)
    if padding:  # negative control: rows and columns are not exchanged
        assert not torch.equal(crop_and_flip(images, left, top, flip, padding), expected)


def normalised(images):
    mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
    return (images.float() - mean) / std


def numbered(n, size=8):
    """Random images, image i labelled i."""
    pixels = torch.randint(256, (n, 3, size, size), dtype=torch.uint8)
    return pixels, torch.arange(n)


def concatenated(loader):
    x, y = zip(*loader, strict=True)
    return torch.cat(x), torch.cat(y)


@pytest.mark.parametrize(("batch_size", "sizes"), [(4, [4, 4, 2]), (16, [10])])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_the_normalised_images(batch_size, sizes, shuffle):
    images, labels = numbered(10)
    loader = Batches(images, labels, batch_size, shuffle=shuffle, normalisation=(MEAN, STD))
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [len(y) for _, y in batches] == sizes
    assert (len(loader), loader.num_examples, len(loader.dataset)) == (len(sizes), 10, 10)
    x, y = concatenated(batches)
    torch.testing.assert_close(x, normalised(images[y]))
    assert (y.tolist() == list(range(10))) == (not shuffle) and len(set(y.tolist())) == 10


def test_augmentation_is_a_crop_and_flip_in_pixel_space_before_normalisation():
    images, labels = numbered(300)
    options = {"normalisation": (MEAN, STD), "augment": True, "seed": 3}
    loader, same = (Batches(images, labels, 64, **options) for _ in range(2))
    top, left, flip = same._draw_distortions()
    x, _ = concatenated(loader)
    expected = crop_and_flip_one_by_one(images, top, left, flip, 4)
    torch.testing.assert_close(x, normalised(expected))
    # Negative control: the padding is black, not the mean pixel.
    assert (x == normalised(torch.zeros(1, 3, 1, 1))).float().mean() > 0.2
    assert top.unique().tolist() == left.unique().tolist() == list(range(9))
    assert 0.4 < flip.float().mean() < 0.6


def test_iterations_differ_and_seeds_repeat_them():
    """One that is left early draws as much as a whole one."""
    images = numbered(60)

    def loader(seed):
        return Batches(*images, 16, shuffle=True, augment=True, seed=seed)

    first, same, other = loader(0), loader(0), loader(1)
    (x, y), (x_same, y_same) = concatenated(first), concatenated(same)
    assert torch.equal(x, x_same) and torch.equal(y, y_same)
    assert not torch.equal(y, concatenated(other)[1])
    next(iter(first))
    concatenated(same)
    (x2, y2), (x2_same, _) = concatenated(first), concatenated(same)
    assert torch.equal(x2, x2_same) and not torch.equal(y, y2)
    assert not torch.equal(x[y.argsort()], x2[y2.argsort()])  # the distortions differ, too


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize(("number", "sizes"), [(10, [4, 4, 2]), (8, [4, 4]), (30, [4] * 7 + [2])])
def test_a_sample_is_of_random_images_augmented_as_a_batch_is(number, sizes, augment):
    """Its last batch may be smaller than the others; the next iteration is not changed by it."""
    images, labels = numbered(30)
    loader, same = (Batches(images, labels, 16, augment=augment, seed=0) for _ in range(2))
    batches = list(loader.sample(number, 4, torch.Generator().manual_seed(1)))
    assert [len(y) for _, y in batches] == sizes
    x, y = concatenated(batches)
    assert len(set(y.tolist())) == number
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(y, torch.randperm(30, generator=generator)[:number])
    expected = images[y]
    if augment:
        same.generator = generator
        top, left, flip = (d[:number] for d in same._draw_distortions())
        expected = crop_and_flip_one_by_one(expected, top, left, flip, 4)
        assert not torch.equal(expected, images[y])
        same.generator = torch.Generator().manual_seed(0)
    assert torch.equal(x, expected)
    assert torch.equal(concatenated(loader)[0], concatenated(same)[0])
    # Three ranks' parts together are the sample of one process.
    parts = []
    for rank in range(3):
        shard = SimpleNamespace(rank=rank, size=3)
        loader = Batches(images, labels, 16, augment=augment, seed=0, ranks=shard)
        parts.append(concatenated(loader.sample(number, 4, torch.Generator().manual_seed(1))))
    of_ranks, numbers = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    assert torch.equal(of_ranks[numbers.argsort()], x[y.argsort()])


SPLITS = Splits(numbered(10), None, numbered(5), "pets", tuple("0123456789"), mean=MEAN, std=STD)
X = torch.arange(22.0).view(11, 2)
TENSORS = Splits((X, X[:, :1]), None, (X[:3], X[:3, :1]), "waves")


def test_batches_of_any_splits():
    x, y = concatenated(split_batches(SPLITS, "test", 2))
    torch.testing.assert_close(x, normalised(SPLITS.test[0]))
    assert torch.equal(y, SPLITS.test[1])
    assert torch.equal(concatenated(split_batches(TENSORS, "test", 2))[0], X[:3])
    for splits in (SPLITS, TENSORS):
        with pytest.raises(ValueError, match=f"{splits.name} has no validation"):
            split_batches(splits, "validation", 4)
    for option in ("augment", "channels_last"):
        with pytest.raises(ValueError, match="waves contains no images. .* for images"):
            split_batches(TENSORS, "train", 2, **{option: True})


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("n", "batch_size"), [(23, 8), (4, 9), (6, 1)])
def test_the_parts_of_a_batch_are_the_batch(n, batch_size, ranks):
    x = torch.arange(n)
    parts = [
        [part.tolist() for part, _ in Batches(x, x, batch_size, ranks=shard)]
        for shard in (SimpleNamespace(rank=rank, size=ranks) for rank in range(ranks))
    ]
    assert [i for of_batch in zip(*parts, strict=True) for part in of_batch for i in part] == [*x]
    for of_batch in zip(*parts, strict=True):
        assert max(map(len, of_batch)) - min(map(len, of_batch)) <= 1


@pytest.mark.parametrize("options", [{"augment": True}, {}], ids=["images", "tensors"])
def test_ranks_draw_one_order_and_the_same_distortions(options):
    splits = SPLITS if options else TENSORS
    whole = split_batches(splits, "train", 4, shuffle=True, seed=5, **options)
    shards = [
        split_batches(splits, "train", 4, shuffle=True, seed=5, ranks=of_rank, **options)
        for of_rank in (SimpleNamespace(rank=rank, size=3) for rank in range(3))
    ]
    assert sum(shard.num_examples for shard in shards) == whole.num_examples
    for _ in range(2):
        for (x, y), *parts in zip(whole, *shards, strict=True):
            assert torch.equal(torch.cat([part for part, _ in parts]), x)
            assert torch.equal(torch.cat([labels for _, labels in parts]), y)


@pytest.mark.gpu
def test_batches_are_the_same_on_the_gpu():
    images = numbered(60, size=32)
    loaders = [
        Batches(*images, 16, shuffle=True, augment=True, device=device)
        for device in ("cpu", "cuda")
    ]
    for (x, y), (x_gpu, y_gpu) in zip(*loaders, strict=True):
        assert x_gpu.device.type == y_gpu.device.type == "cuda"
        torch.testing.assert_close(x, x_gpu.cpu())
        assert torch.equal(y, y_gpu.cpu())
