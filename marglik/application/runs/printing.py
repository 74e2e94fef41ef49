"""Print progress lines and result tables."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from marglik.prediction.metric_types import METRICS

if TYPE_CHECKING:  # not imported for --help, because importing torch takes seconds
    from marglik.application.records import (
        Augmentation,
        CalibrationRecord,
        Evaluation,
        Results,
        Scores,
        SuspiciousLabels,
        TensorDecay,
    )

LAYERS_SHOWN, SUSPICIOUS_SHOWN = 20, 3
LONGEST_NAME = 36
"""Maximum length of row names. Dots replace the middle of longer names."""


def printable(text: str) -> str:
    """Return a text with control characters and unprintable characters escaped.

    Names of data, classes and tensors come from files, which others may have written.
    """
    characters = (
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(characters)


def say(text: str = "") -> None:
    """Print a `printable` text."""
    print(printable(text))


def print_results(results: Results, report: Path) -> None:
    """Print the results of `marglik train`: verdict, evidence, weight decays, metrics, folder."""
    num_data, evidence = results.num_data, results.evidence
    if results.verdict:
        say()
        for line in results.verdict.splitlines():
            _print_paragraph(line)
    if results.simple_models:
        _print_paragraph(results.simple_models)
    held_out = f", {results.held_out} held out" if results.held_out else ""
    say(f"\n{results.data}: {num_data} training examples{held_out}, {results.seconds:.0f} s")
    final = f"{evidence.final / num_data:.4f}"
    if evidence.first != evidence.final:  # otherwise there was no update
        first = f"{evidence.first / num_data:.4f} at the first update"
        final = f"{first}, {final} at the final one (epoch {evidence.epoch})"
    _print_paragraph(
        f"log marginal likelihood per example: {final}"
        f"{', of the standardised target' if results.target_scale else ''}"
    )
    if results.sigma_noise is not None:
        say(f"noise: standard deviation {', '.join(map(_significant, results.sigma_noise))}")
    _print_weight_decays(results.weight_decay)
    _print_metrics(results.scores, results)
    _print_calibration(results.calibration)
    _print_ranges(results.augmentation)
    _print_suspicious(results.suspicious_labels)
    say(f"\nWritten to {results.output}; the report is {report}")


def print_evaluation(evaluation: Evaluation, report: Path) -> None:
    """Print the main metrics of each predictive, and its calibration."""
    say(f"{evaluation.data}: {evaluation.num_test} test examples")
    if evaluation.seen_in_words:
        _print_paragraph(evaluation.seen_in_words)
    _print_metrics(evaluation.predictives, evaluation)
    for fit in (evaluation.calibrated or {}).values():
        _print_calibration(fit)
    say(f"\nWritten to {evaluation.output}; the report is {report}")


def _significant(value: float) -> str:
    """Return a number in the unit of the target as text; it may be large or small."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _print_weight_decays(tensors: Mapping[str, TensorDecay]) -> None:
    largest = sorted(tensors.items(), key=lambda item: -item[1].parameters)[:LAYERS_SHOWN]
    digits = max(len(str(row.parameters)) for _, row in largest)  # so that slashes are aligned
    rows = [
        [
            name,
            f"{row.initial:.1e} -> {row.learned:.2e}",
            f"{row.effective_parameters:.1f} / {row.parameters:<{digits}}",
        ]
        for name, row in largest
    ]
    _print_table(["parameter", "weight decay", "effective / all"], rows)
    if len(tensors) > len(largest):
        say(f"... and {len(tensors) - len(largest)} smaller tensors, in results.json")


def _print_metrics(scores: Mapping[str, Scores], record: Results | Evaluation) -> None:
    """Print a row per predictive, with ± half of the 95 % interval if it is known."""
    names = {name for one in scores.values() for name, _ in one.metrics.items()}
    columns = {name: metric for name, metric in METRICS.items() if metric.short and name in names}

    def cell(one: Scores, name: str) -> str:
        value, ends = getattr(one.metrics, name), getattr(one.intervals, name)
        if value is None:
            return ""
        numbers = [value, *([(ends[1] - ends[0]) / 2] if ends else [])]
        in_unit = columns[name].decimals is None
        return " ± ".join(_significant(v) if in_unit else f"{v:.3f}" for v in numbers)

    rows = [[label, *(cell(one, name) for name in columns)] for label, one in scores.items()]
    _print_table(["", *(metric.short for metric in columns.values())], rows)
    positions = record.num_positions
    per = f", over {positions} positions (tokens)" if positions is not None else ""
    unit = " NLL and RMSE are in the unit of the target." if record.target_scale else ""
    _print_paragraph(
        f"Test set{per}; ± half of a 95 % interval over the choice of test examples.{unit} The "
        "report has all metrics."
    )


def _print_calibration(fit: CalibrationRecord | None) -> None:
    """Print the calibration, or why there is none."""
    say()
    if fit is None:
        _print_paragraph(
            "The predictive is not calibrated, because there was no held-out data or calibration "
            "was turned off. To calibrate it, provide validation data: --data.validation, or "
            "x_validation and y_validation in a TensorFile."
        )
        return
    _print_paragraph(
        f"{fit.predictive}: calibrated on {fit.num_terms} held-out loss terms: "
        f"{fit.calibration.in_words}. NLL of these terms: {fit.nll:.4f} (MAP "
        f"{fit.nll_map:.4f}, temperature-scaled MAP {fit.nll_temperature_scaled:.4f}, "
        f"uncalibrated Laplace {fit.nll_uncalibrated:.4f})."
    )


def _print_ranges(augmentation: Augmentation | None) -> None:
    """Print the ranges of a learned augmentation that are not at their minimum."""
    if augmentation is None:
        return
    wide = [
        f"{name} ±{one.learned:.2g}"
        for name, one in augmentation.ranges.items()
        if one.learned > 0.02 * one.largest
    ]
    _print_paragraph(
        f"Learned invariances (angles in radians, shifts in halves of the image): "
        f"{', '.join(wide) or 'none'}. The network averages {augmentation.copies} copies of each "
        "image."
    )


def _print_suspicious(labels: SuspiciousLabels) -> None:
    """Print the first possibly wrong labels, if there are any."""
    if not labels.number:
        return
    say()
    _print_paragraph(labels.in_words)
    examples = labels.examples[:SUSPICIOUS_SHOWN]
    columns = ["example", "label", "predicted", *examples[0].numbers]
    rows = [
        [str(one.index), one.label, str(one.predicted), *(f"{v:.2f}" for v in one.numbers.values())]
        for one in examples
    ]
    _print_table(columns, rows)


def _print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print an empty line, then rows with names aligned left and cells aligned right."""
    half = (LONGEST_NAME - 3) // 2
    lines = [
        [n if len(n) <= LONGEST_NAME else f"{n[:half]}...{n[-half:]}", *cells]
        for n, *cells in [headers, *rows]
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    say()
    for name, *cells in lines:
        right = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        say("   ".join([f"{name:<{widths[0]}}", *right]).rstrip())


def _print_paragraph(text: str) -> None:
    """Print a paragraph, wrapped on a terminal and as a single line in files and pipes."""
    width = shutil.get_terminal_size((80, 24)).columns
    say(textwrap.fill(text, width) if sys.stdout.isatty() else text)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextmanager
def progress_lines(prefix: str = "") -> Iterator[None]:
    """Context manager that prints marglik's log (epochs, updates, evaluations) to stderr.

    Use it for files and pipes, for which progress bars are hidden.

    Args:
        prefix: start of each line, such as the name of the run if several share stderr.
    """
    logger = logging.getLogger("marglik")
    handler = logging.StreamHandler(sys.stderr)  # flushes after each line
    handler.setFormatter(_PrintableFormatter(prefix.replace("%", "%%") + "%(message)s"))
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
