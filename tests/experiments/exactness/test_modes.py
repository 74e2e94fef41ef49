"""Where each mode is exact, as the experiment finds it; its table and figures from JSON alone."""

import json

import pytest
import torch

from experiments.exactness import modes as exactness
from experiments.exactness.modes import Config, exact_blocks, main, run
from experiments.exactness.networks import cases
from experiments.exactness.report import EXACT, exact_modes
from tests import oracles

TINY = Config(
    seeds=2, num_examples=3, num_positions=3, num_outputs=2, image_size=4, nodes=(2, 3, 5)
)
ATTENTION = ("query", "key", "value", "output")
CONVOLUTIONS = ("convolution 1", "convolution 2")


def rows(network, setting, expected):
    """{(network, setting, layer): the exact mode} of one network."""
    return {(network, setting, layer): mode for layer, mode in expected.items()}


def expected_modes():
    expected = {}
    for setting in ("expand", "reduce"):
        of_layers = {f"layer {i}": setting for i in (1, 2, 3)}
        expected |= rows("deep linear network", setting, of_layers)
        # Only the last layer's positions never mix behind it; circular padding mixes them evenly.
        last = dict(zip(CONVOLUTIONS, ("none", setting), strict=True))
        even = dict.fromkeys(CONVOLUTIONS, "reduce") if setting == "reduce" else last
        expected |= rows("two circular convolutions", setting, even)
        expected |= rows("two circular convolutions, ReLU between", setting, last)
        expected |= rows("two zero-padded convolutions", setting, last)
        for kind in ("linear", "softmax"):
            for N in (1, TINY.num_examples):
                none = {f"block {i}, {name}": "none" for i in (1, 2) for name in ATTENTION}
                exact = {"block 2, output": setting}
                if (kind, N) == ("linear", 1):
                    exact["block 2, query"] = setting
                expected |= rows(f"{kind} self-attention, N = {N}", setting, none | exact)
    pooled = {"convolution": "reduce", "linear": "both"}
    expected |= rows("convolution, average pooling, linear layer", "reduce", pooled)
    for graphs, mode in {
        "equal sizes, sum": "reduce",
        "different sizes, sum": "none",
        "different sizes, mean": "none",
        "different sizes, sum / √V": "reduce",
    }.items():
        of_layers = {"edge": mode, "node": mode, "graph": "both"}
        expected |= rows(f"GraphNetwork, {graphs}", "reduce", of_layers)
    return expected


@pytest.fixture(scope="module")
def found():
    return run(TINY)


def test_modes_are_exact_where_they_should_be_and_nowhere_else(found):
    measured = {
        (entry["network"], entry["setting"], layer): exact_modes(errors)
        for entry in found["errors"]
        for layer, errors in entry["layers"].items()
    }
    assert measured == expected_modes()


def test_what_is_not_exact_is_far_off(found):
    """But for softmax attention, which makes positions so alike that the modes nearly agree."""
    for entry in found["errors"]:
        least = 1e-4 if entry["network"].startswith("softmax") else 0.1
        for layer, errors in entry["layers"].items():
            for mode, values in errors.items():
                assert len(values) == TINY.seeds
                if max(values) > EXACT:
                    assert min(values) > least, (entry["network"], layer, mode)


def test_reduce_has_no_curvature_for_keys_under_softmax(found):
    """The same shift of all keys changes no attention weight: their gradients sum to zero."""
    checked = 0
    for entry in found["errors"]:
        if entry["network"].startswith("softmax"):
            for block in ("block 1, key", "block 2, key"):
                assert entry["layers"][block]["reduce"] == pytest.approx([1.0] * TINY.seeds)
                checked += 1
    assert checked == 8


def test_exact_blocks_are_those_of_the_oracle():
    for case in cases(TINY):
        torch.manual_seed(0)
        model, batch = case.build()
        if isinstance(batch, dict):
            continue
        x = batch[0]
        blocks = exact_blocks(model, x)
        for name, block in oracles.dense_ggn_blocks(model, x, "regression").items():
            torch.testing.assert_close(blocks[name], block)


def test_the_program(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "--report" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--report", "--results", str(tmp_path)])
    assert "run without --report first" in capsys.readouterr().err
    first = list(cases(TINY))[:2]
    monkeypatch.setattr(exactness, "cases", lambda config: first)
    main(["--seeds", "1", "--results", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| deep linear network | layer 1 |" in printed
    folder = tmp_path / "exactness"
    assert json.loads((folder / "exactness.json").read_text())["config"]["seeds"] == 1
    assert len(list(folder.glob("*_setting.png"))) == 2
