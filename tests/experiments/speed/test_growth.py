"""Exponents of growth: of numbers whose exponent is known, and of small measurements."""

import math

import pytest

from experiments.speed import growth, large_classes


def part(limit, expand, reduce, values=(2, 4, 16)):
    kinds = {"limit": limit, "expand": expand, "reduce": reduce}
    points = []
    for value in values:
        of_kind = {kind: 3.0 * value**e for kind, e in kinds.items()}
        points.append({"value": value, "seconds": of_kind, "mebibytes": of_kind})
    return {"axis": "width", "points": points}


def test_exponents_are_found_and_what_grows_faster_is_marked():
    assert growth.exponent([1, 2, 8], [5, 20, 320]) == pytest.approx(2)
    assert growth.exponent([1, 2, 4], [1, 2 * math.e, 4]) == pytest.approx(1)  # a straight line
    found = part(1.0, 1.1, 1.2)
    assert growth.exponents(found, "seconds") == pytest.approx(
        {"limit": 1.0, "expand": 1.1, "reduce": 1.2}
    )
    assert growth.surprises(found, "seconds") == ["reduce"]
    assert growth.surprises(part(1.0, 1.14, 0.2), "mebibytes") == []
    assert "| 1.10 | **1.20** ! |" in growth.table({"width": found})


@pytest.mark.parametrize("axis", ["num_classes", "num_batches", "vocabulary_by_diagonal"])
def test_a_point_is_measured(axis):
    small = growth.Config(
        repetitions=1, batch_size=2, image_size=8, depth=10, num_classes=3, sequences=2,
        sequence_length=4, features=8, blocks=1,
    )  # fmt: skip
    config = growth.at(axis, 2 if axis != "vocabulary_by_diagonal" else 300, small)
    found = growth._point(axis, config)
    assert all(found["seconds"][kind] > 0 for kind in growth.KINDS)
    assert all(found["mebibytes"][kind] > 0 for kind in growth.KINDS)


def test_many_classes_in_small():
    config = large_classes.Config(
        classes=(4,), batch_size=2, image_size=8, vocabulary=40,
        sequences=2, positions=4, dim=8, depth=1, predicted=2, repetitions=1,
    )  # fmt: skip
    case = large_classes.exact_case(config, 4, "expand")
    assert case["largest_probability"] == pytest.approx(0.8, abs=1e-3)
    vocabulary = [large_classes._run_vocabulary(config, True, "expand", {"diagonal_above": 20})]
    variances = [large_classes._variances(config, 4, "last")]
    assert variances[0]["largest_difference"] < 1e-4
    text = large_classes.table({"exact": [case], "vocabulary": vocabulary, "variances": variances})
    assert "| 4 | expand |" in text and "| tied | expand | diagonal |" in text
