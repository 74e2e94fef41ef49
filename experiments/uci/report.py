"""The table and figure of `regression`, from its JSON file alone, beside the recorded results."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.studies import mean_with_error, save_figure, standard_error
from kfac_backend.files import write_file

__all__ = ["RECORDED", "report", "runs_of", "verdict", "write_report"]

RECORDED = {
    "concrete": ((4.82, 0.16), (-2.93, 0.02)),
    "energy": ((0.54, 0.06), (-1.21, 0.01)),
    "kin8nm": ((0.08, 0.00), (1.14, 0.01)),
    "naval": ((0.00, 0.00), (4.45, 0.00)),
    "power plant": ((4.01, 0.04), (-2.80, 0.01)),
    "protein": ((4.27, 0.02), (-2.87, 0.00)),
    "red wine": ((0.62, 0.01), (-0.93, 0.01)),
    "yacht": ((0.67, 0.05), (-1.25, 0.01)),
}
"""MC dropout, one hidden layer: RMSE and test log likelihood, mean and standard error over splits.
Source: readme of github.com/yaringal/DropoutUncertaintyExps; hyperparameters by a grid search."""

METHODS = (
    "ours",
    "MAP, learned σ",
    "laplace-torch, post hoc",
    "grid search",
    "ensemble of five",
)
DECIMALS = {"kin8nm": 4, "naval": 5}
"""Decimals of the RMSE; other sets have 2."""

Runs = Mapping[str, Sequence[dict[str, Any]]]
"""Set -> results of its splits."""


def write_report(path: Path) -> str:
    """Write table and figure beside the JSON file, and return the table.

    Raises:
        ValueError: if no split is finished.
    """
    runs = runs_of(path)
    if not runs:
        raise ValueError(
            f"{path} has no finished split; run python -m experiments.uci.regression --resume."
        )
    text = report(runs)
    stem = "" if path.stem == "uci" else f"{path.stem}_"
    write_file(path.with_name(f"{stem}table.md"), (text + "\n").encode())
    save_figure(figure(runs), path.with_name(f"{stem}log_likelihood.png"))
    return text


def runs_of(path: Path) -> Runs:
    """The finished splits of each set that has any, in the order of the recorded results."""
    found = json.loads(path.read_text(encoding="utf-8"))["runs"]
    runs = {name: [r for r in found if r["config"]["dataset"] == name] for name in RECORDED}
    return {name: own for name, own in runs.items() if own}


def report(runs: Runs) -> str:
    """All tables as Markdown: mean ± standard error over splits, in the target's units."""
    head = f"| set | splits | MC dropout, recorded | {' | '.join(METHODS)} |"
    rule = "|" + "---|" * (3 + len(METHODS))
    parts = [
        "# UCI regression",
        verdict(runs),
        "Test log likelihood (nats per example, higher is better)",
        "\n".join([head, rule, *(_row(n, own, "log_likelihood", 1, 2) for n, own in runs.items())]),
        "RMSE (the target's units)",
        "\n".join(
            [head, rule, *(_row(n, own, "rmse", 0, DECIMALS.get(n, 2)) for n, own in runs.items())]
        ),
        "Log likelihood of ours minus the others', paired by split",
        _differences(runs),
        "σ of the standardised targets, and how many parameters the data determine (K-FAC)",
        _learned(runs),
        "Processor seconds of one split, all trainings included (one thread; the grid's and the "
        "ensemble's networks are trained side by side, which costs far less than one by one)",
        _cost(runs),
    ]
    return "\n\n".join(parts)


def verdict(runs: Runs) -> str:
    """Sentence on the sets where ours reaches the recorded and the grid search's log likelihood."""
    of_dropout, of_grid = [], []
    for name, own in runs.items():
        ours = [r["methods"]["ours"]["log_likelihood"] for r in own]
        if statistics.mean(ours) >= RECORDED[name][1][0]:
            of_dropout.append(name)
        gains = _gains(own, "grid search")
        if statistics.mean(gains) >= -standard_error(gains):
            of_grid.append(name)
    return (
        f"Ours has at least the recorded log likelihood for {_some(of_dropout, len(runs))}, and at "
        "least the grid search's minus one standard error of the difference for "
        f"{_some(of_grid, len(runs))}."
    )


def _some(names: Sequence[str], number: int) -> str:
    return f"{len(names)} of {number} sets ({', '.join(names) or 'none'})"


def _gains(own: Sequence[dict[str, Any]], other: str) -> list[float]:
    """Log likelihood of ours minus another's, by split."""
    pairs = [(r["methods"]["ours"], r["methods"][other]) for r in own]
    return [a["log_likelihood"] - b["log_likelihood"] for a, b in pairs]


def _row(name: str, own: Sequence[dict[str, Any]], key: str, column: int, decimals: int) -> str:
    recorded = RECORDED[name][column]
    cells = [_mean([r["methods"][m][key] for r in own], decimals) for m in METHODS]
    first = f"{recorded[0]:.2f} ± {recorded[1]:.2f}"
    return f"| {name} | {len(own)} | {first} | {' | '.join(cells)} |"


def _differences(runs: Runs) -> str:
    others = METHODS[1:]
    lines = [f"| set | {' | '.join(others)} |", "|" + "---|" * (1 + len(others))]
    for name, own in runs.items():
        cells = []
        for other in others:
            cells.append(_mean(_gains(own, other), 3, sign=True))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _learned(runs: Runs) -> str:
    lines = ["| set | σ, learned | σ, grid search | effective parameters |", "|---|---|---|---|"]
    for name, own in runs.items():
        ours, grid = (
            _mean([r[key]["sigma_noise"] for r in own], 3) for key in ("learned", "grid search")
        )
        effective = statistics.mean(r["learned"]["effective_parameters"] for r in own)
        lines.append(f"| {name} | {ours} | {grid} | {effective:.0f} |")
    return "\n".join(lines)


def _cost(runs: Runs) -> str:
    others = [m for m in METHODS if m != "MAP, learned σ"]
    counts = next(iter(runs.values()))[0]["methods"]
    titles = [f"{m} ({counts[m]['trainings']})" for m in others]
    lines = [
        f"| set (networks trained in brackets) | {' | '.join(titles)} |",
        "|" + "---|" * (1 + len(others)),
    ]
    for name, own in runs.items():
        medians = (statistics.median(r["methods"][m]["seconds"] for r in own) for m in others)
        lines.append(f"| {name} | {' | '.join(f'{m:.1f}' for m in medians)} |")
    return "\n".join(lines)


def _mean(values: Sequence[float], decimals: int, sign: bool = False) -> str:
    """Mean ± standard error; the mean alone for a single value."""
    return mean_with_error(values, f"{{:{'+' if sign else ''}.{decimals}f}}")


def figure(runs: Runs) -> Figure:
    """A panel per set with the methods' test log likelihoods, means and standard errors."""
    figure = Figure(figsize=(12, 2.6 * -(-len(runs) // 2)), layout="constrained")
    panels = figure.subplots(-(-len(runs) // 2), 2, squeeze=False).flatten()
    for axes, (name, own) in zip(panels, runs.items(), strict=False):
        names = ("MC dropout, recorded", *METHODS)
        for place, method in enumerate(METHODS, 1):
            values = [r["methods"][method]["log_likelihood"] for r in own]
            error = standard_error(values)
            color = "tab:blue" if method == "ours" else "tab:gray"
            axes.errorbar(statistics.mean(values), place, xerr=error, fmt="o", color=color)
        recorded = RECORDED[name][1]
        axes.errorbar(recorded[0], 0, xerr=recorded[1], fmt="s", color="tab:orange")
        axes.axvline(recorded[0], color="tab:orange", lw=0.8, ls="--")
        axes.set_yticks(range(len(names)), names, fontsize="small")
        axes.invert_yaxis()
        axes.set_title(f"{name} ({len(own)})", fontsize="medium")
        axes.grid(alpha=0.3)
    for axes in panels[len(runs) :]:
        axes.remove()
    figure.supxlabel("test log likelihood (nats per example); number of splits in brackets")
    return figure
