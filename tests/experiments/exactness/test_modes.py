"""Where each mode is exact, as the experiment finds it; its table and figures from JSON alone."""

import copy
import json

import pytest
import torch

from experiments.exactness import modes as exactness
from experiments.exactness.modes import Config, exact_blocks, main, run
from experiments.exactness.networks import cases
from experiments.exactness.report import EXACT, blocks_figure, exact_modes, report
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


def test_exact_blocks_of_graphs_are_the_sum_over_the_graphs():
    case = [case for case in cases(TINY) if "GraphNetwork" in case.network][-1]
    torch.manual_seed(0)
    model, batch = case.build()
    total = dict.fromkeys(dict(model.named_parameters()), 0.0)
    for n in range(len(batch["labels"])):
        nodes = batch["graph_of_node"] == n
        edges = nodes[batch["receiver"]]
        first = int(nodes.nonzero()[0])
        alone = {
            "nodes": batch["nodes"][nodes],
            "edges": batch["edges"][edges],
            "sender": batch["sender"][edges] - first,
            "receiver": batch["receiver"][edges] - first,
            "graph_of_node": torch.zeros(int(nodes.sum()), dtype=torch.long),
            "labels": batch["labels"][n : n + 1],
        }
        for name, block in exact_blocks(model, alone).items():
            total[name] = total[name] + block
    for name, block in exact_blocks(model, batch).items():
        torch.testing.assert_close(block, total[name])


def test_results_name_their_settings(found):
    found = json.loads(json.dumps(found, allow_nan=False))
    assert found["config"]["nodes"] == [2, 3, 5]
    assert {"versions", "device", "seconds", "python"} <= set(found)
    assert list(found["matrices"]) == ["expand", "reduce"]
    layer = found["matrices"]["expand"]["layer 3"]
    assert torch.tensor(layer["exact"]).shape == (8, 8)
    assert torch.tensor(layer["reduce"]["B"]).shape == (2, 2)
    B, A = (torch.tensor(layer["expand"][F], dtype=torch.float64) for F in "BA")
    exact = torch.tensor(layer["exact"], dtype=torch.float64)
    torch.testing.assert_close(torch.kron(B, A), exact)


def test_table_and_figures_come_from_the_json_alone(found, tmp_path, monkeypatch):
    for function in ("cases", "exact_blocks", "kronecker_factors"):
        monkeypatch.delattr(exactness, function)
    folder = tmp_path / "exactness"
    folder.mkdir()
    (folder / "exactness.json").write_text(json.dumps(found))
    main(["--report", "--results", str(tmp_path)])
    assert (folder / "table.md").read_text() == report(found) + "\n"
    for setting in ("expand", "reduce"):
        png = (folder / f"{setting}_setting.png").read_bytes()
        assert png.startswith(b"\x89PNG")


def test_rows_of_the_table(found):
    read = copy.deepcopy(found)
    read["errors"] = [
        {
            "network": "one",
            "setting": "reduce",
            "layers": {
                "first": {"expand": [0.5, 0.25, 1.0], "reduce": [1e-16, 3e-16, 2e-16]},
                "second": {"expand": [1e-16, 0.5, 0.5], "reduce": [1e-16, 1e-16, 1e-16]},
            },
        }
    ]
    lines = report(read).splitlines()
    assert "| one | first |  |  |  | 50 % (25 – 100) | **3e-16** | reduce |" in lines
    assert "|  | second |  |  |  | 50 % (0 – 50) | **1e-16** | reduce |" in lines


def test_panels_of_a_figure(found):
    figure = blocks_figure(found["matrices"]["expand"], "expand")
    *panels, colorbar = figure.axes
    assert len(panels) == 3 * 5
    images = [axes.images[0] for axes in panels]
    assert len({(image.norm.vmin, image.norm.vmax) for image in images}) == 1
    assert images[0].norm.vmin == -images[0].norm.vmax
    exact, expand, its_error, _, error_of_reduce = (image.get_array() for image in images[:5])
    assert abs(exact).max() == 1
    assert abs(exact - expand).max() < 1e-12
    assert its_error.max() < 1e-12
    assert error_of_reduce.max() > 0.1
    assert "%" in panels[4].get_xlabel() and "e-1" in panels[2].get_xlabel()


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
