"""The example of adapters runs, and shows what its text says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_lora_runs_from_its_first_cell_to_its_last():
    for package in ("transformers", "peft", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    command = [sys.executable, "-W", "ignore", "examples/lora.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, after = map(float, re.search(r"(-\d.*) -> (-\d.*) nats", run.stdout).groups())
    assert after > before
    rows = dict(re.findall(r"^(MAP.*?|Laplace.*?) +(\d+\.\d+) ", run.stdout, re.MULTILINE))
    assert set(rows) == {"MAP", "MAP, temperature", "Laplace", "Laplace, calibrated"}
    assert all(0 < float(nll) < 2 for nll in rows.values())
    kib, of_network = map(
        int, re.search(r"(\d+) KiB, the network (\d+) KiB: True", run.stdout).groups()
    )
    assert kib < of_network
    assert "has others than it was fitted with" in run.stdout
    assert "largest stated error" in run.stdout
