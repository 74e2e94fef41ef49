"""Shards of the data on several ranks give what one process has of all the data."""

import pytest
import torch
from torch.testing import assert_close

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def found(worlds):
    use = "tests.kfac_backend.curvature_on_ranks:everything"
    return {world: worlds.all(world, use) for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS[1:])
def test_factors_are_those_of_one_process(found, world):
    (alone,) = found[1]
    for of_rank in found[world]:
        assert of_rank.keys() <= alone.keys()
        for name, tensor in of_rank.items():
            if not name.startswith("mc, "):
                # Gradients that cancel (reduce, keys of attention) leave squares of rounding.
                atol = 1e-10 * float(alone[name].abs().max()) + 1e-24
                assert_close(tensor, alone[name], rtol=1e-10, atol=atol, msg=name)
    assert len(found[2][0]) == len(alone) > 500
    assert len(found[4][0]) > 250


@pytest.mark.parametrize("world", WORLDS[1:])
def test_all_ranks_have_the_same_to_the_bit(found, world):
    for of_rank in found[world][1:]:
        for name, tensor in found[world][0].items():
            assert torch.equal(of_rank[name], tensor), name


@pytest.mark.parametrize("world", WORLDS[1:])
def test_each_rank_draws_labels_of_its_own(found, world):
    of_rank = found[world][0]
    names = [name for name in of_rank if name.startswith("mc, together")]
    assert names
    for name in names:
        one_by_one = of_rank[name.replace("together", "one by one")]
        assert_close(of_rank[name], one_by_one, rtol=1e-10, atol=1e-12)
    other = [of_rank[name.replace("together", "the next pass")] for name in names]
    differ = [not torch.allclose(of_rank[name], o) for name, o in zip(names, other, strict=True)]
    assert any(differ)  # the next pass draws others
    numbers = of_rank["mc, numbers"]
    assert len(torch.unique(numbers)) == numbers.numel() == 4 * world


@pytest.fixture(scope="module")
def told(worlds):
    of_first, _ = worlds.run(2, "tests.kfac_backend.failures_on_ranks:told_of_each")
    return of_first


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "other options": "Ranks disagree in a curvature pass: the options is",
        "another model": "Ranks disagree in a curvature pass: the trainable parameters is",
        "other weights": "parameter '8.weight' has norm",
        "one has a value more": "Ranks disagree in a test: b is None on rank 0 and 2 on rank 1",
        "no data": "ValueError: The data is empty",
        "under DDP": "TypeError: The model is in DistributedDataParallel",
        "in parts": "NotImplementedError: Parameter '8.weight' is spread over ranks",
        "control": "no error",
    }.items(),
)
def test_both_ranks_are_told(told, name, words):
    for rank in (0, 1):
        assert words in told[f"{rank}, {name}"]


def test_a_rank_that_is_gone(told):
    assert told["gone"].startswith("RankError: Rank 0 of 2 lost the others in a test: ")


def test_a_rank_that_does_nothing_is_given_up_after_the_timeout(worlds):
    waiting = worlds.run(3, "tests.kfac_backend.failures_on_ranks:late", 4.0, timeout=1)
    del waiting[1]
    for said, seconds in waiting:
        assert "lost the others in a test" in said and seconds < 3.5
