"""The online loop on several ranks: what one process finds, and one error where a rank fails."""

import pytest
import torch

from tests.marglik.close_state import assert_near
from tests.worlds import failed

HERE = "tests.marglik.training.runs_on_ranks"
CASES = {
    "SGD": {},
    "K-FAC": {"optimizer": "kfac"},
    "regression, MacKay": {"likelihood": "regression", "method": "mackay"},
    "a last batch of one example": {"batch_size": 7, "n": 22, "optimizer": "kfac"},
}


@pytest.fixture
def each(worlds):
    """What each rank of a world returns."""
    return lambda size, name, *arguments: worlds.all(size, f"{HERE}:{name}", *arguments)


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("SGD", 2),
        pytest.param("K-FAC", 2, marks=pytest.mark.slow),
        ("regression, MacKay", 2),
        ("a last batch of one example", 2),
        pytest.param("a last batch of one example", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_find_what_one_process_finds(each, case, size):
    """To the order of sums; and all ranks the same, to the bit."""
    (alone,) = each(1, "trained", CASES[case])
    assert alone["num_data"] == (CASES[case].get("n", 23),) * 2
    del alone["next"]
    first, *others = each(size, "trained", CASES[case])
    for found in (first, *others):
        del found["next"]
        assert_near(found, alone)
    for other in others:
        for key in ("parameters", "precision", "evidences", "records"):
            assert_near(first[key], other[key], tolerance=0)


def test_equal_weights_for_unequal_parts_would_be_seen(each):
    """The control of the test above: 23 examples in batches of 8, 8 and 7."""
    (alone,), (wrong, _) = each(1, "trained", {}), each(2, "with_local_means", {})
    with pytest.raises(AssertionError):
        assert_near(wrong["parameters"], alone["parameters"], tolerance=1e-6)


def test_random_numbers_are_each_ranks_own_and_come_again(each):
    first, second = each(2, "with_dropout")
    assert not torch.equal(first["masks"], second["masks"])
    assert torch.equal(first["next"], second["next"])  # what comes after is common to all
    again, _ = each(2, "with_dropout")
    assert_near(again, first, tolerance=0)
    with pytest.raises(AssertionError):
        assert_near(again["evidences"], each(1, "with_dropout")[0]["evidences"], tolerance=1e-6)


def test_a_run_goes_on_with_another_number_of_ranks(each, tmp_path):
    (alone,) = each(1, "trained", {"optimizer": "kfac"})
    for stop, size in enumerate((1, 2, 4), 1):
        assert each(size, "trained_until", stop, str(tmp_path), {"optimizer": "kfac"})[0] is None
    (found,) = each(1, "trained_until", 9, str(tmp_path), {"optimizer": "kfac"})
    del alone["next"], found["next"]
    assert_near(found, alone)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("with_sampler", (False, 23), ["repeats 1 of 23", "drop_last=True"]),
        ("disagrees", ({"epochs": 6},), ["the schedule is", "on rank 0 and", "on rank 1"]),
        ("disagrees", ({"n": 25},), ["batches in train_loader: 3, 4"]),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused_before_training(
    worlds, function, arguments, words
):
    found = worlds.run(2, f"{HERE}:{function}", *arguments)
    assert all(failed(one) for one in found)
    assert all(word in "".join(one.args[1] for one in found) for word in words), found
    assert not any("in epoch" in one.args[1] for one in found)


def test_other_processes_need_a_fabric_of_them(each):
    for said in each(2, "without_fabric"):
        training, diagonal = said
        assert training.startswith("ValueError: This is one of 2 processes")
        assert 'Fabric(devices=2, strategy="ddp")' in training
        assert diagonal.startswith("NotImplementedError") and "'diag'" in diagonal


@pytest.mark.parametrize("mean_over", ["examples", "terms"])
def test_the_prior_is_learned_in_a_loop_of_somebody_elses(each, mean_over):
    (alone,) = each(1, "in_a_plain_loop", mean_over)
    first, second = each(2, "in_a_plain_loop", mean_over)
    assert_near(first, alone)
    for name, value in first.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[name])), name


def test_the_drop_in_takes_a_fabric(each):
    (alone,) = each(1, "drop_in")
    for found in each(2, "drop_in"):
        assert_near(found, alone)


@pytest.mark.parametrize(("how", "rank"), [("killed", 0), ("failing", 1), ("hung", 0)])
def test_where_a_rank_is_gone_the_others_say_so(worlds, how, rank):
    """A rank that hangs is waited for as long as the group's timeout is."""
    found = worlds.run(2, f"{HERE}:fails", rank, how, timeout=2 if how == "hung" else 60)
    gone, other = found[rank], found[1 - rank]
    ends = {"killed": -9, "hung": 3}
    assert (
        gone.args == ("ended", ends[how]) if how in ends else gone.args[0] == "FloatingPointError"
    )
    assert other.args[0] == "RankError"
    assert f"Rank {1 - rank} of 2 lost the others" in other.args[1]
