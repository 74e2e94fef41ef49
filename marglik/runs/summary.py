"""The tables that a command prints at its end."""

from pathlib import Path
from typing import Any

from marglik.posterior.calibration import Calibration
from marglik.prediction.evaluation_record import IN_SAMPLE
from marglik.runs.terminal import print_paragraph, print_table

__all__ = ["print_evaluation", "print_fit", "print_summary"]

LAYERS_SHOWN = 20
SUSPICIOUS_SHOWN = 3


def print_summary(results: dict[str, Any], report: Path) -> None:
    """Print the results of `marglik train`: evidence, weight decays, metrics, and the folder."""
    num_data, evidence = results["num_data"], results["evidence"]
    held_out = f", {results['held_out']} held out" if results.get("held_out") else ""
    seconds = f"{results['seconds']:.0f} s"
    print(f"\n{results['data']}: {num_data} training examples{held_out}, {seconds}")
    print_paragraph(
        f"log marginal likelihood per example: {evidence['first'] / num_data:.4f} at the first "
        f"update, {evidence['kept'] / num_data:.4f} at the kept one (epoch {evidence['epoch']})"
    )
    if results.get("sigma_noise") is not None:
        print(f"noise: standard deviation {results['sigma_noise']:.4g}")
    print()
    _print_weight_decays(results["weight_decay"])
    _print_positions(results.get("num_positions"))
    metrics = {name: _shifts_averaged(values) for name, values in results["metrics"].items()}
    _print_metrics(metrics, results.get("intervals", {}))
    _print_differences(results.get("differences", {}), results["metrics"])
    fit = results.get("calibration")
    if fit and any(key.startswith("validation/") for m in results["metrics"].values() for key in m):
        print_paragraph(IN_SAMPLE)
    _print_calibration(fit)
    _print_suspicious(results.get("suspicious_labels", {}))
    print(f"\nWritten to {results['output']}; the report is {report}")


def print_fit(results: dict[str, Any]) -> None:
    """Print the results of `marglik fit`: evidence, weight decays, calibration, and the folder."""
    if results["note"]:
        print_paragraph(f"Checkpoint: {results['note']}.")
    num_data, evidence = results["num_data"], results["evidence"]
    print(f"{results['data']}: {num_data} training examples, {results['seconds']:.0f} s")
    print_paragraph(
        f"log marginal likelihood per example: {evidence['before'] / num_data:.4f} at the first "
        f"weight decay, {evidence['after'] / num_data:.4f} at the one found"
    )
    print()
    rows = results["weight_decay"]
    shown = [[name, f"{decay:.2e}"] for name, decay in list(rows.items())[:LAYERS_SHOWN]]
    print_table(["parameter", "weight decay"], shown)
    if len(rows) > LAYERS_SHOWN:
        print(f"... and {len(rows) - LAYERS_SHOWN} more, in posterior.json")
    if results["at_bound"]:
        print()
        print_paragraph(
            "The validation loss still falls at the bound of the search: the data does not "
            "determine this weight decay."
        )
    if results["no_validation"]:
        print()
        print_paragraph(
            f"The predictive is not calibrated: {results['data']} has no validation set. To "
            "calibrate it, provide examples that the network was not trained on: x_validation and "
            "y_validation in a TensorFile, or the --data.validation of its training."
        )
    else:
        _print_calibration(results["calibration"])
    print(f"\nWritten to {results['output']}; next: marglik evaluate {results['output']}")


def print_evaluation(results: dict[str, Any]) -> None:
    """Print the metrics of each predictive; for shifts, means over kinds and severities."""
    print(f"{results['data']}: {results['num_test']} test examples")
    _print_positions(results.get("num_positions"))
    if results["ood"]:
        ood = results["ood"]
        note = f", {ood['note']}" if ood["note"] else ""
        print_paragraph(f"out of distribution: {ood['num_examples']} of {ood['name']}{note}")
    named = results["predictives"].items()
    metrics = {name: _shifts_averaged(entry["metrics"]) for name, entry in named}
    _print_metrics(metrics, {name: entry.get("intervals", {}) for name, entry in named})
    if results["in_sample"]:
        print_paragraph(IN_SAMPLE)
    for label, fit in results["calibrated"].items():
        _print_calibration(fit, f"{label}: c")
    if any(name.endswith("uncalibrated") for name in results["predictives"]):
        print_paragraph(
            "Uncalibrated: the posterior has no calibration of this predictive, or "
            "--predictive.calibration is none. marglik fit and marglik evaluate calibrate if the "
            "data has a validation set that the network was not trained on."
        )


def _print_calibration(fit: dict[str, Any] | None, begin: str = "C") -> None:
    """Print what calibration found, or that there was none."""
    print()
    if fit is None:
        print_paragraph(
            "The predictive is not calibrated: there was no held-out data, or calibration was not "
            "asked for."
        )
        return
    print_paragraph(
        f"{begin}alibrated on {fit['num_terms']} held-out loss terms: "
        f"{Calibration(**fit['calibration']).in_words}. Their NLL: {fit['nll']:.4f}; MAP "
        f"{fit['nll_map']:.4f}, temperature-scaled {fit['nll_scaled_map']:.4f}; uncalibrated "
        f"Laplace {fit['nll_uncalibrated']:.4f}."
    )


def _print_suspicious(found: dict[str, Any]) -> None:
    """Print the first of the labels that may be wrong; nothing if there are none."""
    if not found.get("number"):
        return
    print()
    print_paragraph(
        f"Training labels to look at, wrong or hard: {found['number']} of {found['judged']} have "
        f"a score above 1. The network predicted {100 * found['agreement']:.0f} % of all, on "
        "average over training."
    )
    shown = found["examples"][:SUSPICIOUS_SHOWN]
    rows = [[str(e["index"]), e["label"], e["predicted"], f"{e['score']:.1f}"] for e in shown]
    print_table(["example", "label", "predicted", "score"], rows)


def _print_positions(number: int | None) -> None:
    if number is not None:
        print_paragraph(
            f"metrics are means over {number} positions (tokens), the NLL in nats per position"
        )


def _shifts_averaged(metrics: dict[str, float]) -> dict[str, float]:
    shown = {key: value for key, value in metrics.items() if not key.startswith("shift/")}
    shifted: dict[str, list[float]] = {}
    for key, value in metrics.items():
        if key.startswith("shift/"):
            _, _, _, metric = key.split("/", 3)
            shifted.setdefault(f"shift/mean/{metric}", []).append(value)
    return shown | {key: sum(values) / len(values) for key, values in shifted.items()}


def _print_weight_decays(layers: dict[str, dict[str, float]]) -> None:
    shown = sorted(layers.items(), key=lambda item: -item[1]["parameters"])[:LAYERS_SHOWN]
    digits = max(len(str(row["parameters"])) for _, row in shown)  # so that slashes are aligned
    rows = [
        [
            name,
            f"{row['initial']:.1e} -> {row['learned']:.2e}",
            f"{row['effective_parameters']:.1f} / {row['parameters']:<{digits}}",
        ]
        for name, row in shown
    ]
    print_table(["parameter", "weight decay", "effective / all"], rows)
    if len(layers) > len(shown):
        print(f"... and {len(layers) - len(shown)} smaller ones, in results.json")


def _print_metrics(
    metrics: dict[str, dict[str, float]], intervals: dict[str, dict[str, list[float]]]
) -> None:
    """Print a column per predictive; below each metric a row of its intervals, if there are any."""
    rows = []
    for key in dict.fromkeys(key for column in metrics.values() for key in column):
        rows.append([key, *(_number(column.get(key)) for column in metrics.values())])
        ends = [intervals.get(name, {}).get(key) for name in metrics]
        if any(ends):
            rows.append(["  95 %", *("-".join(map(_number, pair or ())) for pair in ends)])
    print()
    print_table(["", *metrics], rows)
    if any(intervals.values()):
        print()
        print_paragraph(
            "95 %: confidence intervals over the choice of test examples; the report says how they "
            "are computed."
        )


def _print_differences(
    differences: dict[str, dict[str, list[float]]], metrics: dict[str, dict[str, float]]
) -> None:
    """Print a column per predictive: metrics of the learned network minus the baseline's."""
    rows = []
    for key in dict.fromkeys(key for column in metrics.values() for key in column):
        found = [column.get(key) for column in differences.values()]
        if not any(found) or "/cal/" in key:  # for coverages, more is not better
            continue
        rows.append([key, *("" if d is None else f"{d[0]:+.4f}" for d in found)])
        rows.append(["  95 %", *("" if d is None else f"{d[1]:+.4f}..{d[2]:+.4f}" for d in found)])
    if rows:
        print()
        print_paragraph("Learned minus initial weight decay, on the same test examples:")
        print_table(["", *differences], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
