"""The benchmark of single factors times what it says, and tells it by size."""

import json

import pytest
import torch

from experiments.speed import curvature_report as bench_curvature_report
from experiments.speed.bench_curvature import Config, run_factor
from experiments.speed.evidence import factor_work


def test_all_solve_the_same_problem():
    work = factor_work(24, torch.device("cpu"))
    found = {name: do() for name, do in work.items()}
    inverses = [x for name, x in found.items() if "inverse" in name]
    torch.testing.assert_close(inverses[0], inverses[1], rtol=1e-3, atol=1e-3)
    values = [
        torch.as_tensor(x[0] if isinstance(x, tuple) else x).double()
        for name, x in found.items()
        if "inverse" not in name
    ]
    assert len(values) == 5
    for others in values[1:]:
        torch.testing.assert_close(others, values[0], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_sizes_are_columns(tmp_path):
    for size in (16, 8):
        part = run_factor(Config(factor_size=size, repetitions=1, device="cpu"))
        (tmp_path / f"factor_{size}.json").write_text(json.dumps(part))
    text = bench_curvature_report.write(tmp_path)
    assert "| seconds for one factor of | 8 | 16 |" in text
    assert "| ours, inverse (Cholesky) |" in text
