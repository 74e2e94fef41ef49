"""Modes by the outputs' shape and by layers' names."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kfac_backend import KroneckerFactors
from tests.kfac_backend.block_checks import (
    MODES,
    OTHER,
    assert_blocks,
    assert_same,
    factors_of,
    randomize,
)
from tests.kfac_backend.networks import Model
from tests.random_numbers import error, normal


def setting(pool: bool = True) -> tuple[nn.Module, list]:
    """Three linear layers and a norm on positions (N, R, d); logits of these or of examples."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        f = m.head(m.norm(m.body(x)).tanh())
        return f.mean(1) if pool else f

    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    model = Model(forward, body=body, norm=nn.LayerNorm(4), head=nn.Linear(4, 3))
    model, x = randomize(model), normal(5, 4, 3, seed=1)
    return model, [(x, torch.arange(model(x)[..., 0].numel()).view(model(x).shape[:-1]) % 3)]


@pytest.mark.parametrize(("pool", "mode"), [(True, "reduce"), (False, "expand")])
def test_auto_follows_the_outputs(pool, mode, tmp_path):
    model, data = setting(pool)
    factors = factors_of(model, data, "auto")
    assert factors.options.kfac_approx == mode
    assert_same(factors, factors_of(model, data, mode))
    other = factors_of(model, data, OTHER[mode])
    for name in ("body.0.weight", "body.2.weight", "head.weight"):
        assert error(other.to_dense(name), factors.to_dense(name)) > 0.1
    factors.save(tmp_path / "factors")
    assert KroneckerFactors.load(tmp_path / "factors").options.kfac_approx == mode
    assert (factors + factors_of(model, data, mode)).options.kfac_approx == mode
    with pytest.raises(ValueError, match="kfac_approx 'expand' and 'reduce'|'reduce' and 'expand'"):
        factors + other


MAPPINGS = {
    # name: (mapping, the layers whose mode is reduce)
    "names": ({"head": "reduce", "*": "expand"}, ["head"]),
    "pattern": ({"body.*": "reduce", "*": "expand"}, ["body.0", "body.2"]),
    "the first that fits": (
        {"body.2": "expand", "body.?": "reduce", "*": "expand"},
        ["body.0"],
    ),
    "one for all": ({"*": "reduce"}, ["body.0", "body.2", "head"]),
    "no other": ({"[bh]*": "expand", "norm": "reduce", "*": "reduce"}, []),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_mappings_are_the_single_modes_layer_by_layer(name):
    mapping, reduced = MAPPINGS[name]
    model, data = setting()
    factors = factors_of(model, data, mapping)
    assert factors.options.kfac_approx == mapping
    single = {mode: factors_of(model, data, mode) for mode in MODES}
    for parameter in factors.blocks:
        layer = parameter.rpartition(".")[0]
        mode = "reduce" if layer in reduced else "expand"
        assert_blocks(factors, {parameter: single[mode].to_dense(parameter)})
        if layer != "norm":  # negative control
            other = single[OTHER[mode]].to_dense(parameter)
            assert error(other, factors.to_dense(parameter)) > 0.1


def test_mappings_are_kept_in_their_order(tmp_path):
    model, data = setting()
    # Both patterns fit the head.
    mapping = {"*d": "expand", "[bhn]*": "reduce"}
    factors = factors_of(model, data, mapping)
    factors.save(tmp_path / "factors")
    loaded = KroneckerFactors.load(tmp_path / "factors")
    assert list(loaded.options.kfac_approx.items()) == list(mapping.items())
    assert_same(factors + loaded, factors_of(model, 2 * data, mapping))
    # Equal mappings in another order give other modes.
    flipped = replace(
        factors, options=factors.options.replace(kfac_approx=dict(reversed(mapping.items())))
    )
    with pytest.raises(ValueError, match="Cannot add factors with kfac_approx"):
        factors + flipped


WRONG = {
    "no pattern fits": (
        {"body*": "reduce", "head": "expand"},
        "layer 'norm': body., head. Add a pattern",
    ),
    "a pattern fits nothing": (
        {"heads*": "expand", "*": "reduce"},
        "'heads.' of kfac_approx matches no layer.* The layers are body.0, body.2, norm, head",
    ),
    "a pattern is hidden": (
        {"*": "reduce", "body.0": "expand"},
        "'body.0' of kfac_approx matches no layer, or only layers of earlier patterns. The layers",
    ),
    "unknown mode": ({"head": "mean", "*": "reduce"}, r"kfac_approx\['head'\]='mean' is not supp"),
    "auto for one layer": ({"*": "auto"}, r"kfac_approx\['\*'\]='auto' is not supported"),
    "empty": ({}, "No pattern of kfac_approx matches layer"),
    "a list": (["expand"], "choose one of 'expand', 'reduce', 'auto', or a mapping"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_modes_are_named_before_any_data(case):
    kfac_approx, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        factors_of(setting()[0], [], kfac_approx)
