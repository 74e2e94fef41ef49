"""What a command prints at its end: the numbers of its results, in lines that can be read."""

import json

import pytest

from marglik.runs.printing import print_evaluation, print_results

LONG = "encoder.layers.11.attention.output.projection.parametrizations.weight"


def test_results_and_evaluations(evaluated, capsys):
    results = json.loads((evaluated / "results.json").read_text())
    row = {"initial": 5e-4, "learned": 3e-2, "effective_parameters": 1234567.8}
    results["weight_decay"] = {f"{i} {LONG}": row | {"parameters": 10**9 + i} for i in range(25)}
    example = {"index": 3, "label": "0", "predicted": "9", "score": 4.5}
    results["suspicious_labels"] |= {"number": 1, "examples": [example], "agreement": 0.975}
    print_results(results | {"output": "runs/digits"}, "runs/digits/report.html")
    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    nll = results["metrics"]["learned, MAP"]["test/cls/NLL"]
    low, high = results["intervals"]["learned, MAP"]["test/cls/NLL"]
    assert f"learned, MAP {nll:.3f} ± {(high - low) / 2:.3f}" in words
    assert "5.0e-04 -> 3.00e-02" in words and "1234567.8 / 1000000024" in words
    assert "... and 5 smaller ones" in words and "24 encoder.layer...rizations.weight" in words
    assert (
        "{:+.3f} ({:+.3f} to {:+.3f})".format(*results["differences"]["MAP"]["test/cls/NLL"])
        in words
    )
    assert "1 of 241 have a score above 1" in words and "3 0 9 4.5" in words
    assert f"Their NLL: {results['calibration']['nll']:.4f}; MAP" in words
    record = json.loads((evaluated / "evaluation.json").read_text())
    print_evaluation(record | {"output": "x", "calibrated": {}, "num_positions": 12345}, "page")
    words = " ".join(capsys.readouterr().out.split())
    assert f"MAP {nll:.3f} ± " in words and "over 12345 positions (tokens)" in words


@pytest.mark.parametrize("columns", ["80", "50"])
def test_paragraphs_fit_a_terminal(columns, evaluated, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("marglik.runs.printing.sys.stdout.isatty", lambda: True, raising=False)
    results = json.loads((evaluated / "results.json").read_text())
    print_results(results | {"calibration": None, "output": "x"}, "x/report.html")
    paragraph = capsys.readouterr().out.partition("The predictive is")[2].partition("\n\n")[0]
    assert len(paragraph.splitlines()) > 2
    assert max(map(len, paragraph.splitlines()[1:])) <= int(columns)
