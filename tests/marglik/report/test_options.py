"""What differs between runs, and what to call them by it."""

from pathlib import Path

import pytest

from marglik.report.options import differing, flatten, run_labels

FOLDERS = [Path("runs/first"), Path("runs/second")]


def test_flatten():
    nested = {"prior": {"lr": 0.1, "rules": {"a": "*"}}, "hidden": [1, 2], "empty": {}}
    assert flatten(nested) == {"prior.lr": 0.1, "prior.rules.a": "*", "hidden": [1, 2]}


def test_what_differs():
    first = {"a": 1, "b": 2, "null": None, "output": "x", "overwrite": True}
    second = {"a": 1, "b": 3, "c": 4, "output": "y", "overwrite": False}
    assert differing([first, second]) == ["b", "c"]
    assert differing([first, first]) == []
    assert differing([{"a": True}, {"a": 1}]) == ["a"]  # 1 == True in Python


LABELS = {
    "a word": (
        [{"curvature.kfac_approx": "expand"}, {"curvature.kfac_approx": "reduce"}],
        ["expand", "reduce"],
    ),
    "a number": ([{"seed": 0}, {"seed": 1}], ["seed 0", "seed 1"]),
    "a truth value": ([{"augment": True}, {"augment": False}], ["augment True", "augment False"]),
    "null": ([{"size": None, "x": 1}, {"size": 3, "x": 1}], ["size null", "size 3"]),
    "not set": ([{"x": 1}, {"x": 1, "size": 3}], ["size (not set)", "size 3"]),
    "two": (
        [{"k": "expand", "seed": 0}, {"k": "reduce", "seed": 1}],
        ["expand, seed 0", "reduce, seed 1"],
    ),
    "the same last part": (
        [{"optimizer.lr": 1, "prior.lr": 2}, {"optimizer.lr": 3, "prior.lr": 4}],
        ["optimizer.lr 1, prior.lr 2", "optimizer.lr 3, prior.lr 4"],
    ),
    "classes without their arguments": (
        [
            {"model.class_path": "marglik.models.LeNet", "model.init_args.image_size": 8},
            {"model.class_path": "marglik.models.MLP", "model.init_args.hidden": [4]},
        ],
        ["LeNet", "MLP"],
    ),
    "nothing differs": ([{"seed": 0}, {"seed": 0}], ["first", "second"]),
    "too much differs": ([dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 1)], ["first", "second"]),
    "too long": ([{"rules": "a" * 60}, {"rules": "b" * 60}], ["first", "second"]),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels(case):
    options, expected = LABELS[case]
    assert run_labels(FOLDERS, options) == expected


def test_labels_that_would_be_the_same_are_not_used():
    """Of three runs, two have the same options."""
    folders = [*FOLDERS, Path("runs/third")]
    options = [{"seed": 0}, {"seed": 0}, {"seed": 1}]
    assert run_labels(folders, options) == ["first", "second", "third"]
    assert run_labels(folders, [{"seed": s} for s in range(3)]) == ["seed 0", "seed 1", "seed 2"]


def test_folders_of_one_name_are_told_by_their_paths():
    folders = [Path("a/run"), Path("b/run")]
    assert run_labels(folders, [{}, {}]) == [str(folder) for folder in folders]
