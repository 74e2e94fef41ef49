"""What a command prints: lines of progress, and the tables at its end."""

import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["print_evaluation", "print_results", "print_table", "progress_lines"]

LAYERS_SHOWN = 20
SUSPICIOUS_SHOWN = 3
GAP = "   "
"""Between columns."""
HEADER = 12
"""Width to which headers are wrapped, unless the cells of their column are wider."""
NARROWEST_NAME = 16
"""Least width of the names of rows, which are shortened to leave room for a column."""


def print_results(results: dict[str, Any], report: Path) -> None:
    """Print what `marglik train` or `fit` found: evidence, weight decays, metrics, the folder."""
    num_data, evidence = results["num_data"], results["evidence"]
    if results.get("note"):
        _print_paragraph(f"Checkpoint: {results['note']}.")
    held_out = f", {results['held_out']} held out" if results.get("held_out") else ""
    seconds = f"{results['seconds']:.0f} s"
    print(f"\n{results['data']}: {num_data} training examples{held_out}, {seconds}")
    first, kept = "first weight decay", "one found"
    if evidence["epoch"] is not None:
        first, kept = "first update", f"kept one (epoch {evidence['epoch']})"
    _print_paragraph(
        f"log marginal likelihood per example: {evidence['first'] / num_data:.4f} at the {first}, "
        f"{evidence['kept'] / num_data:.4f} at the {kept}"
    )
    if results.get("sigma_noise") is not None:
        print(f"noise: standard deviation {results['sigma_noise']:.4g}")
    print()
    _print_weight_decays(results["weight_decay"])
    metrics = results.get("metrics", {})
    if metrics:
        _print_positions(results["num_positions"])
        shown = {name: _shifts_averaged(values) for name, values in metrics.items()}
        _print_metrics(shown, results["intervals"])
        _print_differences(results.get("differences", {}), metrics)
        if results["in_sample"]:
            _print_paragraph(results["in_sample"])
    _print_calibration(results["calibration"])
    _print_ranges(results.get("augmentation", {}))
    _print_suspicious(results.get("suspicious_labels", {}))
    print(f"\nWritten to {results['output']}; the report is {report}")
    if not metrics:
        print(f"Next: marglik evaluate {results['output']}")


def print_evaluation(results: dict[str, Any], report: Path) -> None:
    """Print the metrics of each predictive; for shifts, means over kinds and severities."""
    print(f"{results['data']}: {results['num_test']} test examples")
    _print_positions(results["num_positions"])
    if ood := results["ood"]:
        note = f", {ood['note']}" if ood["note"] else ""
        _print_paragraph(f"out of distribution: {ood['num_examples']} of {ood['name']}{note}")
    named = results["predictives"].items()
    metrics = {name: _shifts_averaged(entry["metrics"]) for name, entry in named}
    _print_metrics(metrics, {name: entry.get("intervals", {}) for name, entry in named})
    if results["in_sample"]:
        _print_paragraph(results["in_sample"])
    for fit in results["calibrated"].values():
        _print_calibration(fit)
    if any(name.endswith("uncalibrated") for name in results["predictives"]):
        _print_paragraph(
            "Uncalibrated: the posterior has no calibration of this predictive, or "
            "--predictive.calibration is none. marglik fit and marglik evaluate calibrate if the "
            "data has a validation set that the network was not trained on."
        )
    print(f"\nWritten to {results['output']}; the report is {report}")


def _print_calibration(fit: dict[str, Any] | None) -> None:
    """Print what calibration found, or that there was none."""
    print()
    if fit is None:
        _print_paragraph(
            "The predictive is not calibrated: there was no held-out data, or calibration was not "
            "asked for. To calibrate it, provide examples that the network was not trained on: "
            "--data.validation, or x_validation and y_validation in a TensorFile."
        )
        return
    from marglik.posterior.calibration import Calibration  # late: imports torch

    _print_paragraph(
        f"{fit['predictive']}: calibrated on {fit['num_terms']} held-out loss terms: "
        f"{Calibration(**fit['calibration']).in_words}. Their NLL: {fit['nll']:.4f}; MAP "
        f"{fit['nll_map']:.4f}, temperature-scaled {fit['nll_scaled_map']:.4f}; uncalibrated "
        f"Laplace {fit['nll_uncalibrated']:.4f}."
    )


def _print_ranges(found: dict[str, Any]) -> None:
    """Print the ranges of a learned augmentation that are not at their smallest."""
    if not found:
        return
    wide = {
        name: of["learned"]
        for name, of in found["ranges"].items()
        if of["learned"] > 0.02 * of["largest"]
    }
    ranges = ", ".join(f"{name} ±{value:.2g}" for name, value in wide.items()) or "none"
    _print_paragraph(
        f"Learned invariances (angles in radians, moves in halves of the image): {ranges}. The "
        f"network averages {found['copies']} copies of each image."
    )


def _print_suspicious(found: dict[str, Any]) -> None:
    """Print the first of the labels that may be wrong; nothing if there are none."""
    if not found.get("number"):
        return
    print()
    _print_paragraph(
        f"Training labels to look at, wrong or hard: {found['number']} of {found['judged']} have "
        f"a score above 1. The network predicted {100 * found['agreement']:.0f} % of all, on "
        "average over training."
    )
    shown = found["examples"][:SUSPICIOUS_SHOWN]
    rows = [[str(e["index"]), e["label"], e["predicted"], f"{e['score']:.1f}"] for e in shown]
    print_table(["example", "label", "predicted", "score"], rows)


def _print_positions(number: int | None) -> None:
    if number is not None:
        _print_paragraph(
            f"metrics are means over {number} positions (tokens), the NLL in nats per position"
        )


def _shifts_averaged(metrics: dict[str, float]) -> dict[str, float]:
    shown = {key: value for key, value in metrics.items() if not key.startswith("shift/")}
    shifted: dict[str, list[float]] = {}
    for key in metrics.keys() - shown.keys():
        metric = key.split("/", 3)[3]  # shift/KIND/SEVERITY/METRIC
        shifted.setdefault(f"shift/mean/{metric}", []).append(metrics[key])
    return shown | {key: sum(values) / len(values) for key, values in sorted(shifted.items())}


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
        _print_paragraph(
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
        _print_paragraph("Learned minus initial weight decay, on the same test examples:")
        print_table(["", *differences], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; columns that do not fit follow below in another block, with the row names.

    Args:
        headers: headers of all columns, that of the row names first; wrapped if the table would
            otherwise be too wide.
        rows: a name, aligned left, then cells, aligned right. Long names lose their middle.
    """
    width = _width()
    (title, *names), *columns = zip(headers, *rows, strict=True)
    whole = sum(max(map(len, column)) + len(GAP) for column in [(title, *names), *columns])
    lines: list[list[str]] = []  # of each column but the first: its header, wrapped, and its cells
    for header, *cells in columns:
        size = max(HEADER if whole > width else len(header), *map(len, cells))
        lines.append([*textwrap.wrap(header, size, break_long_words=False), *cells])
    depth = max(map(len, lines))
    lines = [[*[""] * (depth - len(column)), *column] for column in lines]
    sizes = [max(map(len, column)) for column in lines]
    longest = max(NARROWEST_NAME, width - len(GAP) - max(sizes))
    end = (longest - 3) // 2
    names = [n if len(n) <= longest else f"{n[: longest - 3 - end]}...{n[-end:]}" for n in names]
    lines.insert(0, [*[""] * (depth - len(rows) - 1), title, *names])
    sizes.insert(0, max(map(len, lines[0])))
    first = 1
    while first < len(lines):
        # As many columns as fit beside the names, but one at least.
        last, used = first + 1, sizes[0] + len(GAP) + sizes[first]
        while last < len(lines) and used + len(GAP) + sizes[last] <= width:
            used += len(GAP) + sizes[last]
            last += 1
        for name, *cells in zip(lines[0], *lines[first:last], strict=True):
            shown = [f"{cell:>{size}}" for cell, size in zip(cells, sizes[first:last], strict=True)]
            print(GAP.join([f"{name:<{sizes[0]}}", *shown]).rstrip())
        first = last
        if first < len(lines):
            print()


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def _print_paragraph(text: str) -> None:
    """Print a paragraph: wrapped on a terminal, as a single line in files and pipes."""
    print(textwrap.fill(text, _width()) if sys.stdout.isatty() else text)


@contextmanager
def progress_lines(prefix: str = "") -> Iterator[None]:
    """A context that prints what the package logs (epochs, updates, evaluations) to stderr.

    For files and pipes, where progress bars are hidden.

    Args:
        prefix: start of each line, such as the name of the run if several share stderr.
    """
    logger = logging.getLogger("marglik")
    handler = logging.StreamHandler(sys.stderr)  # flushes after each line
    handler.setFormatter(logging.Formatter(prefix.replace("%", "%%") + "%(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
