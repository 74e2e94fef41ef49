"""The README's Python examples run as they stand."""

import re
from pathlib import Path

import pytest
import torch


@pytest.mark.filterwarnings("ignore:By default `link_approx`")
def test_python_examples_run(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert len(examples) == 2
    torch.manual_seed(0)
    namespace: dict = {}
    for example in examples:
        exec(example, namespace)  # each goes on where the one before ended
    assert len(examples[0].splitlines()) <= 15
    assert len(set(namespace["laplace"].prior_precision.tolist())) == 10
    assert "torch.Size([75, 75])" in capsys.readouterr().out
