"""The README's Python examples run as they stand, and its numbers are those of the results."""

import json
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def test_benchmark_table_is_that_of_the_json():
    results = json.loads((ROOT / "experiments/results/bench_curvature_cpu_32.json").read_text())
    seconds, ratios = results["median_seconds"], results["times_the_limit"]
    readme = (ROOT / "README.md").read_text()
    for who, label in (("ours", "**marglik**"), ("curvlinops", "laplace-torch + curvlinops")):
        for mode in ("expand", "reduce"):
            exact, mc = f"{who}, {mode}, exact", f"{who}, {mode}, mc"
            row = (
                f"| {label}, {mode} | {seconds[exact]:.2f} s | {ratios[exact]:.2f} "
                f"| {seconds[mc]:.2f} s | {ratios[mc]:.2f} |"
            )
            assert row in readme, row


@pytest.mark.filterwarnings("ignore:By default `link_approx`")
def test_python_examples_run(capsys):
    readme = (ROOT / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert len(examples) == 2
    torch.manual_seed(0)
    namespace: dict = {}
    for example in examples:
        exec(example, namespace)  # each goes on where the one before ended
    assert len(examples[0].splitlines()) <= 15
    assert len(set(namespace["laplace"].prior_precision.tolist())) == 10
    assert "torch.Size([75, 75])" in capsys.readouterr().out
