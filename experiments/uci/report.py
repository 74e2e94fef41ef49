"""The tables of `regression`, from its JSON files alone, beside the recorded results."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.studies import markdown, mean_with_error, standard_error

__all__ = ["RECORDED", "report", "verdict"]

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


def report(found: Sequence[dict[str, Any]]) -> str:
    """All tables as Markdown: mean ± standard error over splits, in the target's units."""
    splits = {result["config"]["data"]: result["splits"] for result in found}
    runs = {name: splits[name] for name in RECORDED if name in splits}
    others = METHODS[1:]
    differences = [
        [name, *(mean_with_error(_gains(own, other), "{:+.3f}") for other in others)]
        for name, own in runs.items()
    ]
    learned = [
        [
            name,
            *(
                mean_with_error([r[key]["sigma_noise"] for r in own])
                for key in ("learned", "grid search")
            ),
            f"{statistics.mean(r['learned']['effective_parameters'] for r in own):.0f}",
        ]
        for name, own in runs.items()
    ]
    paid = [method for method in METHODS if method != "MAP, learned σ"]
    trainings = next(iter(runs.values()))[0]["methods"]
    costs = [
        [
            name,
            *(f"{statistics.median(r['methods'][m]['seconds'] for r in own):.1f}" for m in paid),
        ]
        for name, own in runs.items()
    ]
    return "\n\n".join(
        [
            "# UCI regression",
            verdict(runs),
            "Test log likelihood (nats per example, higher is better)",
            _of_metric(runs, "log_likelihood", 1, {}),
            "RMSE (the target's units)",
            _of_metric(runs, "rmse", 0, DECIMALS),
            "Log likelihood of ours minus the others', paired by split",
            markdown([["set", *others], *differences]),
            "σ of the standardised targets, and how many parameters the data determine (K-FAC)",
            markdown([["set", "σ, learned", "σ, grid search", "effective parameters"], *learned]),
            "Processor seconds of one split, all trainings included (one thread; the grid's and "
            "the ensemble's networks are trained side by side, which costs far less than one by "
            "one)",
            markdown(
                [
                    [
                        "set (networks trained in brackets)",
                        *(f"{m} ({trainings[m]['trainings']})" for m in paid),
                    ],
                    *costs,
                ]
            ),
        ]
    )


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
    dropout, grid = (
        f"{len(names)} of {len(runs)} sets ({', '.join(names) or 'none'})"
        for names in (of_dropout, of_grid)
    )
    return (
        f"Ours has at least the recorded log likelihood for {dropout}, and at least the grid "
        f"search's minus one standard error of the difference for {grid}."
    )


def _of_metric(runs: Runs, key: str, column: int, decimals: Mapping[str, int]) -> str:
    """A row per set: the recorded result, and each method's."""
    rows = [["set", "splits", "MC dropout, recorded", *METHODS]]
    for name, own in runs.items():
        mean, error = RECORDED[name][column]
        form = f"{{:.{decimals.get(name, 2)}f}}"
        cells = [mean_with_error([r["methods"][m][key] for r in own], form) for m in METHODS]
        rows.append([name, str(len(own)), f"{mean:.2f} ± {error:.2f}", *cells])
    return markdown(rows)


def _gains(own: Sequence[dict[str, Any]], other: str) -> list[float]:
    """Log likelihood of ours minus another's, by split."""
    pairs = [(r["methods"]["ours"], r["methods"][other]) for r in own]
    return [a["log_likelihood"] - b["log_likelihood"] for a, b in pairs]
