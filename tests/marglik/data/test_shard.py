"""Parts of batches: together the batch, and as equal as can be."""

import pytest
import torch

from marglik.data import ImageBatches, TensorBatches
from marglik.data.images.image_set import ImageSet
from marglik.data.shard import Shard


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("n", "batch_size"), [(23, 8), (22, 7), (4, 9), (6, 1)])
def test_the_parts_of_a_batch_are_the_batch(n, batch_size, ranks):
    parts = [Shard(rank, ranks).batches(n, batch_size) for rank in range(ranks)]
    covered = [i for of_batch in zip(*parts, strict=True) for s in of_batch for i in range(n)[s]]
    assert covered == list(range(n))
    for of_batch in zip(*parts, strict=True):
        sizes = [part.stop - part.start for part in of_batch]
        assert max(sizes) - min(sizes) <= 1
    assert sum(Shard(rank, ranks).num_examples(n, batch_size) for rank in range(ranks)) == n


def images(**options):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (11, 1, 8, 8), generator=generator, dtype=torch.uint8)
    image_set = ImageSet(pixels, torch.arange(11))
    return ImageBatches(image_set, [120.0], [60.0], 4, augment="crop_flip", **options)


def tensors(**options):
    return TensorBatches(torch.arange(22.0).view(11, 2), torch.arange(11), 4, **options)


@pytest.mark.parametrize("make", [images, tensors])
def test_ranks_draw_one_order_and_the_same_distortions(make):
    """Of each epoch; and every rank has as many batches."""
    whole = make(shuffle=True, seed=5)
    shards = [make(shuffle=True, seed=5, shard=Shard(rank, 3)) for rank in range(3)]
    assert {len(shard) for shard in shards} == {len(whole)} == {3}
    assert sum(shard.num_examples for shard in shards) == whole.num_examples == 11
    for _ in range(2):
        for (x, y), *parts in zip(whole, *shards, strict=True):
            assert torch.equal(torch.cat([part for part, _ in parts]), x)
            assert torch.equal(torch.cat([labels for _, labels in parts]), y)


def test_a_rank_that_is_none_of_them():
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        Shard(2, 2)
