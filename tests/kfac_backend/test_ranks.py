"""Shards of the data on several ranks give what one process has of all the data."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend.distributed import RankError, check_same

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
    assert len(found[2][0]) == len(alone) > 1000
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
        "no data": "ValueError: The data is empty",
        "under DDP": "TypeError: The model is in DistributedDataParallel",
        "in parts": "NotImplementedError: Parameter '8.weight' is spread over ranks",
        "control": "no error",
    }.items(),
)
def test_both_ranks_are_told(told, name, words):
    for rank in (0, 1):
        assert words in told[f"{rank}, {name}"]


@pytest.mark.parametrize(
    ("name", "what", "words"),
    [
        ("a wrong label", "a curvature pass", "ValueError: "),
        ("eigenvalues", "eigenvalues", "ValueError: The curvature factor of '8.weight, A'"),
        ("eigenvectors", "eigenvectors", "ValueError: The curvature factor of '8.weight, A'"),
    ],
)
def test_a_failure_of_one_ends_both(told, name, what, words):
    texts = [told[f"{rank}, {name}"] for rank in (0, 1)]
    (own,) = [text for text in texts if text.startswith(words)]
    (others,) = [text for text in texts if text != own]
    assert others.startswith("RankError: Rank ")
    assert f"failed in {what}, which ends it for all: {words}" in others


def test_what_only_one_rank_has_is_a_difference():
    check_same([{"a": 1, "b": 2}] * 2, "a test")
    with pytest.raises(RankError, match="b is None on rank 0 and 2 on rank 1"):
        check_same([{"a": 1}, {"a": 1, "b": 2}], "a test")


def test_a_rank_that_is_gone(told):
    assert told["gone"].startswith("RankError: Rank 0 of 2 lost the others in a test: ")


LATE = "tests.kfac_backend.failures_on_ranks:late"


@pytest.mark.parametrize("how", ["beats", "beating"])
def test_a_slow_rank_that_gets_on_is_waited_for(worlds, how):
    """Longer than the group's timeout, which would end a silent one."""
    for said, seconds in worlds.run(3, LATE, 1.6, how, timeout=1):
        assert said == "no error" and seconds > 1.5


def test_a_rank_that_does_nothing_is_named_by_all_that_wait(worlds):
    waiting = worlds.run(3, LATE, 2.5, "silent", timeout=1)
    own, _ = waiting.pop(1)
    assert own.startswith("RankError: Rank 1 of 3 lost the others")  # it comes too late
    for said, seconds in waiting:
        assert seconds < 2
        named = "Rank 1 of 3 has done nothing for 1 s, and the others wait for it in a test"
        assert named in said or "lost the others" in said  # where another one left first
    assert any("has done nothing" in said for said, _ in waiting)
