"""Groups of parameters, and weight decay <-> precision."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend.layers import Bias
from marglik.posterior.prior import (
    PriorGroups,
    precision_to_weight_decay,
    weight_decay_to_precision,
)


@pytest.fixture
def model():
    return nn.ModuleDict(
        {"stem": nn.Conv2d(1, 2, 3), "stage1": nn.Sequential(Bias(), nn.Linear(2, 2))}
    )


@pytest.mark.parametrize(
    ("structure", "names", "index"),
    [
        (
            "layerwise",
            ("stem.weight", "stem.bias", "stage1.0.bias", "stage1.1.weight", "stage1.1.bias"),
            (0, 1, 2, 3, 4),
        ),
        ("scalar", ("all",), (0, 0, 0, 0, 0)),
        ("kind", ("weights", "biases", "scalars"), (0, 1, 2, 0, 1)),
        ("stage", ("stem", "stage1"), (0, 0, 1, 1, 1)),
        (
            {"bias": "kind:biases", "first": "stem.*", "rest": "*"},
            ("first", "bias", "rest"),
            (0, 1, 2, 2, 1),
        ),
    ],
)
def test_structures(model, structure, names, index):
    groups = PriorGroups.from_model(model, structure)
    assert groups.names == names
    assert groups.index == index
    values = torch.arange(1.0, len(names) + 1)
    assert groups.for_laplace(values).tolist() == [values[i] for i in index]
    assert_close(groups.sum_over_tensors(torch.ones(5)).sum(), torch.tensor(5.0))


def test_diagonal_has_a_value_for_every_entry(model):
    groups = PriorGroups.from_model(model, "diagonal")
    P = sum(p.numel() for p in model.parameters())
    values = torch.arange(float(P))
    assert groups.num_values == P
    parts = groups.for_parameters(values)
    assert [part.shape for part in parts] == [p.shape for p in model.parameters()]
    assert_close(torch.cat([part.flatten() for part in parts]), values)


def test_weight_decay_and_precision_are_inverse():
    assert weight_decay_to_precision(5e-3, 50_000) == pytest.approx(250.0)
    assert weight_decay_to_precision(5e-4, 50_000) == pytest.approx(25.0)
    assert precision_to_weight_decay(weight_decay_to_precision(0.3, 7, 2.0), 7, 2.0) == 0.3
    assert precision_to_weight_decay(10.0, 100, temperature=2.0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ("blockwise", "'blockwise' is not supported; choose one of 'layerwise'"),
        ({"first": "stem.*"}, "No prior group matches parameter 'stage1.0.bias'"),
        ({"all": "*", "never": "stem.*"}, "'never' \\('stem.\\*'\\) matches no parameter"),
        ({"a": "kind:matrices"}, "kinds are kind:weights"),
    ],
)
def test_wrong_structures(model, structure, message):
    with pytest.raises(ValueError, match=message):
        PriorGroups.from_model(model, structure)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "has length 2; expected 1 or 5"),
        (0.0, "positive and finite, not 0.0"),
        ([1.0, 1.0, -3.0, 1.0, 1.0], "not -3.0"),
        (float("nan"), "not nan"),
        (float("inf"), "not inf"),
    ],
)
def test_wrong_initial_precisions(model, value, message):
    with pytest.raises(ValueError, match=message):
        PriorGroups.from_model(model).initial(value)


def test_no_trainable_parameter():
    with pytest.raises(ValueError, match="no trainable parameter"):
        PriorGroups.from_model(nn.ReLU())
