"""The simulation of many ranks: its limits, and the document that quotes it."""

from pathlib import Path

import pytest

from experiments.ranks.simulate_ranks import (
    GPU,
    MODELS,
    Layer,
    bytes_of_factors,
    flops_of_pass,
    main,
    plan,
    seconds_to_reduce,
    simulate,
)
from kfac_backend.distributed import share_out

ROOT = Path(__file__).parents[3]


def test_the_document_has_these_tables():
    assert plan() in (ROOT / "docs/scaling.md").read_text()


def test_one_layer_by_hand():
    layers = [Layer(3, 2, positions=5)]
    assert bytes_of_factors(layers) == 4 * (9 + 4)
    # 10 examples: forward and one backward 2·5·6 each, Gram matrices 5·(9 + 4).
    assert flops_of_pass(layers, 10, 1, reduce=False) == 10 * (2 * 60 + 5 * 13)
    assert flops_of_pass(layers, 10, 1, reduce=True) == 10 * (2 * 60 + 13)
    assert seconds_to_reduce(100.0, 1, GPU) == 0
    of_two = seconds_to_reduce(1e12, 2, GPU)
    assert of_two == pytest.approx(1e12 / GPU.bandwidth, rel=1e-4)


def test_more_ranks_share_pass_and_eigenvalues():
    layers = [Layer(8, 8)] * 8
    one, four = (simulate(layers, n, GPU, examples=1000.0) for n in (1, 4))
    assert one.pass_seconds == pytest.approx(4 * four.pass_seconds)
    assert one.decompose_seconds == pytest.approx(4 * four.decompose_seconds)
    assert one.reduced_bytes == four.reduced_bytes
    floor = [simulate(MODELS["1e8 (GPT-2: 12 × 768)"], n, GPU, examples=1.0) for n in (8, 64)]
    assert floor[0].decompose_seconds == floor[1].decompose_seconds  # the vocabulary's factor


def test_work_is_shared_out_largest_first():
    assert share_out([1, 5, 3, 3], 2) == [0, 0, 1, 1]
    assert share_out([2.0, 2.0], 1) == [0, 0]
    assert share_out([], 3) == []


def test_it_prints_the_plan(capsys, tmp_path):
    main(["--measured", str(tmp_path / "none.json")])
    assert capsys.readouterr().out.strip() == plan()
