"""Tables fit the terminal, say all that they were given, and are plain where nobody looks."""

from random import Random
from types import SimpleNamespace

import pytest

from marglik.runs.printing import print_evaluation, print_results, print_table
from tests.marglik.report.fabricate import CALIBRATION, classification, regression, suspicious

TERMINAL = SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True))
LONG = "encoder.layers.11.attention.output.projection.parametrizations.weight"
DIFFERENCES = {
    "test/cls/NLL": [-0.0123, -0.02, 0.001], "test/cls/accuracy": [0.0, -0.01, 0.01],
    "test/cal/coverage50": [0.0, -0.01, 0.01],
}  # fmt: skip


@pytest.fixture(params=[80, 200])
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setattr("marglik.runs.printing.sys", TERMINAL)
    return request.param


def fits(text, width):
    """Whether all lines do but those with a path, which must stay whole."""
    lines = [line for line in text.splitlines() if not line.startswith("Written to")]
    return max(map(len, lines)) <= width


def results():
    metrics = {name: entry["metrics"] for name, entry in classification()["predictives"].items()}
    ends = {name: entry["intervals"] for name, entry in classification()["predictives"].items()}
    row = {"initial": 5e-4, "learned": 3e-2, "effective_parameters": 1234567.8}
    return {
        "data": "digits",
        "num_data": 1294,
        "held_out": 144,
        "seconds": 12.0,
        "evidence": {"first": -5000.0, "kept": -1000.0, "epoch": 40},
        "weight_decay": {LONG + str(i): row | {"parameters": 10**9 + i} for i in range(25)},
        "metrics": {
            f"{which}, {name}": values
            for which in ("learned", "initial")
            for name, values in metrics.items()
        },
        "intervals": {f"learned, {name}": values for name, values in ends.items()},
        "differences": {name: DIFFERENCES for name in metrics},
        "num_positions": 12345,
        "in_sample": "",
        "suspicious_labels": suspicious(),
        "calibration": CALIBRATION,
        "output": "runs/digits",
    }


def test_train(width, capsys):
    print_results(results(), "runs/digits/report.html")
    printed = capsys.readouterr().out
    assert fits(printed, width)
    words = " ".join(printed.split())
    assert "0.9432-0.9814 0.9432-0.9814" in words  # the intervals
    assert "5.0e-04 -> 3.00e-02" in words and "1234567.8 / 1000000024" in words
    assert "... and 5 smaller ones" in words
    assert "Their NLL: 0.1000; MAP 0.2000" in words
    assert "2 of 1438 have a score above 1" in words and "0 0 9 4.5 1 1 9 3.5" in words
    assert "-0.0200..+0.0010" in words and "coverage50" not in words
    assert "Learned minus initial weight decay, on the same test examples" in words
    # Six predictives: in blocks that fit, or all beside each other.
    before = printed[: printed.index("Learned minus")]
    assert before.count("test/cls/NLL") == (1 if width == 200 else 2)


def test_evaluate(width, capsys):
    extra = {"calibrated": {"Laplace, mc": CALIBRATION}, "in_sample": "", "output": "runs/digits"}
    for record in (classification(), regression()):
        print_evaluation(record | extra | {"num_positions": 12345}, "runs/digits/report.html")
        assert fits(capsys.readouterr().out, width)


@pytest.mark.parametrize("seed", range(5))
def test_every_cell_is_there_in_its_row(seed, monkeypatch, capsys):
    random = Random(seed)
    columns, number, width = random.randint(1, 7), random.randint(1, 4), random.randint(60, 120)
    headers = ["name", *(f"head {c}, of it" for c in range(columns))]
    rows = [
        [
            f"{i}{'abc.' * random.randint(1, 20)}",
            *(f"{'0' * random.randint(0, 15)}|{i}|{c}" for c in range(columns)),
        ]
        for i in range(number)
    ]
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(headers, rows)
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= width
    for i, row in enumerate(rows):
        mine = [line for line in printed if line.startswith(str(i))]
        assert [cell for line in mine for cell in line.split()[1:]] == row[1:]
