"""The online loop on several ranks: what one process finds, and an error where a rank fails."""

import pytest
import torch

from tests.marglik.states import assert_near
from tests.worlds import failed

HERE = "tests.marglik.training.runs"
LAST_OF_ONE = {"batch_size": 7, "n": 22}  # the last batch has one example


@pytest.fixture
def each(worlds):
    """What each rank of a world returns."""
    return lambda size, name, *arguments: worlds.all(size, f"{HERE}:{name}", *arguments)


@pytest.mark.parametrize(
    ("case", "options", "size"),
    [
        ("SGD", {}, 2),
        ("regression, MacKay", {}, 2),
        ("noisy labels", {}, 2),
        ("corrected", {}, 2),
        ("a falling rate", LAST_OF_ONE, 2),
        ("K-FAC", LAST_OF_ONE, 2),
        pytest.param("K-FAC", LAST_OF_ONE, 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_find_what_one_process_finds(each, case, options, size):
    """To the order of sums; and all ranks the same, to the bit."""
    (alone,) = each(1, "on_ranks", case, options)
    assert alone["n"] == options.get("n", 23)
    first, *others = each(size, "on_ranks", case, options)
    assert (alone["noise"] > 0.05) == (case == "noisy labels")
    rates = [record["lr"] for record in alone["records"] if record["kind"] == "epoch"]
    assert (rates[-1] == 0) == (case == "a falling rate")
    for found in (first, *others):
        # The search for ε stops where rounding makes it; and decays and steps follow ε.
        tolerance = 1e-7 if case in ("noisy labels", "corrected") else 1e-9
        assert_near({**found, "next": 0, "mask": 0}, {**alone, "next": 0, "mask": 0}, tolerance)
        for key in ("parameters", "laplace", "evidence", "records"):
            assert_near(found[key], first[key], tolerance=0)
    if case == "SGD":  # control: equal weights for unequal parts would be seen
        wrong, _ = each(2, "on_ranks", case, options, "local means")
        with pytest.raises(AssertionError):
            assert_near(wrong["parameters"], alone["parameters"], tolerance=1e-6)


def test_default_updates_of_ranks_see_a_sample_with_signs_of_their_own(each):
    """All ranks have the same numbers to the bit, and about those of one process."""
    options = {"curvature_from": "auto", "keep": "last", "every": 1, "n": 600, "batch_size": 100}
    first, second = each(2, "on_ranks", "SGD", options)
    for key in ("parameters", "laplace", "evidence", "records"):
        assert_near(second[key], first[key], tolerance=0)
    updates = [record for record in first["records"] if record["kind"] == "update"]
    assert [update["fisher"] for update in updates] == [*["random_signs"] * 3, "exact"]
    assert [update["num_examples"] for update in updates] == [256, 256, 256, 600]
    (alone,) = each(1, "on_ranks", "SGD", options)
    assert_near(first["evidence"], alone["evidence"], tolerance=0.05)


def test_random_numbers_are_each_ranks_own_and_come_again(each):
    arguments = "random labels", {"dropout": 0.5}
    first, second = each(2, "on_ranks", *arguments)
    assert not torch.equal(first["mask"], second["mask"])
    assert torch.equal(first["next"], second["next"])  # what comes after is common to all
    again, _ = each(2, "on_ranks", *arguments)
    assert_near(again, first, tolerance=0)


def test_a_run_goes_on_with_another_number_of_ranks(each, tmp_path):
    (alone,) = each(1, "on_ranks", "K-FAC", {})
    for stop, size in enumerate((1, 2, 4), 1):
        assert each(size, "until", stop, str(tmp_path), "K-FAC")[0] is None
    (found,) = each(1, "until", 9, str(tmp_path), "K-FAC")
    assert_near(found["parameters"], alone["parameters"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": "pads", "n": 23}, ["repeats 1 of 23", "drop_last=True"]),
        ({"differs": {"epochs": 6}}, ["the number of epochs is", "on rank 0 and", "on rank 1"]),
        ({"differs": {"n": 25}}, ["numbers of batches: 3, 4"]),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused_before_training(worlds, options, words):
    found = worlds.run(2, f"{HERE}:on_ranks", "SGD", options)
    assert all(failed(one) for one in found)
    assert all(word in "".join(one.args[1] for one in found) for word in words), found
    assert not any("in epoch" in one.args[1] for one in found)


def test_a_sampler_that_drops_the_rest_is_counted_and_shuffles_each_epoch(each):
    for found in each(2, "on_ranks", "SGD", {"sampler": "drops", "n": 23}):
        assert (found["n"], found["epoch"]) == (22, 4)


def test_other_processes_need_a_fabric_of_them(each):
    for said in each(2, "without_fabric"):
        assert said.startswith("This is one of 2 processes")
        assert 'Fabric(devices=2, strategy="ddp")' in said


@pytest.mark.parametrize("loss_mean_over", ["examples", "terms"])
def test_a_plain_loop_learns_what_one_process_learns(each, loss_mean_over):
    (alone,) = each(1, "in_a_plain_loop", loss_mean_over)
    first, second = each(2, "in_a_plain_loop", loss_mean_over)
    assert_near(first, alone)
    assert_near(second, first, tolerance=0)


def test_a_rank_that_fails_ends_the_others(worlds):
    gone, other = worlds.run(2, f"{HERE}:fails", 0)
    assert gone.args[0] == "FloatingPointError" and "one rank alone" in gone.args[1]
    assert failed(other)
