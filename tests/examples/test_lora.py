"""The example of adapters runs, and shows what its text says."""

import re
import runpy
from pathlib import Path

import pytest

from tests.marglik.threads import one_thread

EXAMPLE = Path(__file__).parents[2] / "examples/lora.py"


@pytest.mark.filterwarnings("ignore")
def test_lora_runs_from_its_first_cell_to_its_last(capsys):
    for package in ("transformers", "peft", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    with one_thread():
        runpy.run_path(str(EXAMPLE))
    printed = capsys.readouterr().out
    before, after = map(float, re.search(r"(-\d.*) -> (-\d.*) nats", printed).groups())
    assert after > before
    rows = dict(re.findall(r"^(MAP.*?|Laplace.*?) +(\d+\.\d+) ", printed, re.MULTILINE))
    assert set(rows) == {"MAP", "MAP, temperature", "Laplace", "Laplace, calibrated"}
    assert all(0 < float(nll) < 2 for nll in rows.values())
    kib, of_network = map(
        int, re.search(r"(\d+) KiB, the network (\d+) KiB: True", printed).groups()
    )
    assert kib < of_network
    assert "are not the ones that it was fitted with" in printed
    assert "largest stated error" in printed
