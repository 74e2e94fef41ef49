"""The page's sections: the content of each, and what to look for in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from marglik.posterior.calibration import Calibration
from marglik.prediction.evaluation_record import IN_SAMPLE, has_in_sample_metrics
from marglik.report.charts.chart import Chart
from marglik.report.charts.errors import Confusion
from marglik.report.charts.layers import (
    effective_chart,
    final_weight_decay_chart,
    weight_decay_chart,
    weight_decay_ends,
)
from marglik.report.charts.training import evidence_chart, loss_chart, time_chart
from marglik.report.contents import Run
from marglik.report.metrics import predictives, summary_table
from marglik.report.tables import NOTHING, Row, Table, number

__all__ = [
    "Charts",
    "Details",
    "Gallery",
    "Note",
    "Section",
    "curves_section",
    "effective_section",
    "evaluate_command",
    "missing_evaluation",
    "summary_section",
    "time_section",
    "weight_decay_section",
]


DIFFERENCES = {
    "test/cls/NLL": "NLL (nats)",
    "test/cls/accuracy": "accuracy (percentage points)",
    "test/cls/Brier": "Brier score",
    "test/reg/NLL": "NLL (nats)",
}
INTERVALS = (
    "In small print: 95 % confidence intervals over the choice of test examples. They are Wilson's "
    "for shares, Student's for means, DeLong's for the area under the ROC curve, and the "
    "bootstrap's for AURC (too narrow if few predictions are wrong), AUPR and FPR95. The ECE has "
    "none: chance alone makes it larger, and so does resampling; the whiskers in the reliability "
    "diagram show which bins are off by more than chance. The intervals do not include the choice "
    "of seed or training set, which often changes more. Each sequence counts as one example. To "
    "compare predictives, look at their differences on the same examples: those intervals "
    "(Student's; Bonett and Price's for accuracy) are narrower than two separate ones suggest."
)


@dataclass(frozen=True)
class Note:
    """A paragraph, with the command that it recommends, if any."""

    text: str
    command: str = ""
    kind: str = "note"


@dataclass(frozen=True)
class Charts:
    """Charts in as many columns as fit."""

    charts: Sequence[Chart]
    kind: str = "charts"


@dataclass(frozen=True)
class Details:
    """A table that can be folded."""

    summary: str
    table: Table
    open: bool = False
    kind: str = "details"


@dataclass(frozen=True)
class Gallery:
    """Images with their predictions."""

    title: str
    examples: Sequence[dict[str, Any]]
    """As evaluation.json has them."""
    kind: str = "gallery"

    @property
    def largest_sum(self) -> float:
        """Length of the longest bar (nats)."""
        return max((e["aleatoric"] + e["epistemic"] for e in self.examples), default=0.0) or 1.0


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    id: str
    title: str
    lead: str
    """What to look for."""
    blocks: Sequence[Note | Charts | Confusion | Details | Gallery | Table] = field(
        default_factory=list
    )


def summary_section(runs: Sequence[Run]) -> Section:
    """The table of metrics."""
    lead = (
        "Every predictive, side by side. Look for a Laplace predictive that is better calibrated "
        "than the MAP (ECE, NLL) and at least as accurate; without calibration it is often too "
        "uncertain. The best value of each row is marked."
    )
    if not predictives(runs):
        note = "No metrics: neither results.json nor evaluation.json has any."
        return Section(
            "summary", "Summary", lead, [Note(note), *missing_evaluation(runs, "further metrics")]
        )
    blocks: list[Any] = [Note(text) for run in runs for text in _gains(run)]
    blocks.append(summary_table(runs))
    blocks += _differences(runs)
    if any(one.intervals for one in predictives(runs)):
        blocks.append(Note(INTERVALS))
    if any(run.evaluation and has_in_sample_metrics(run.evaluation) for run in runs):
        blocks.append(Note(IN_SAMPLE))
    if len({one.run.data for one in predictives(runs)}) > 1:
        blocks.append(Note("The runs have different data; the best values are marked for each."))
    sequences = dict.fromkeys(f"{r.data} ({r.num_positions:,})" for r in runs if r.num_positions)
    if sequences:
        text = "For sequences, metrics are means over the positions (tokens) of the test set"
        blocks.append(Note(f"{text}, the NLL in nats per position: {', '.join(sequences)}."))
    other_data = dict.fromkeys(filter(None, map(_ood_text, runs)))
    blocks += [Note(f"Out of distribution: {text}.") for text in other_data]
    return Section(
        "summary", "Summary", lead, [*blocks, *missing_evaluation(runs, "further metrics")]
    )


def _differences(runs: Sequence[Run]) -> list[Details]:
    """Tables of differences on the same test examples: from the baseline, and from the MAP."""
    tables = []
    for run in runs:
        who = "" if run.alone else f" ({run.label})"
        learned = (run.results or {}).get("differences", {})
        title = f"Learned minus initial weight decay, on the same test examples{who}"
        tables += _table_of_differences(title, learned)
        entries = (run.evaluation or {}).get("predictives", {})
        against = {name: entry["against"] for name, entry in entries.items() if "against" in entry}
        shown = {name: one["differences"] for name, one in against.items()}
        of = ", ".join(dict.fromkeys(one["predictive"] for one in against.values()))
        tables += _table_of_differences(
            f"Differences from {of}, on the same test examples{who}", shown
        )
    return tables


def _table_of_differences(
    title: str, shown: Mapping[str, Mapping[str, Sequence[float]]]
) -> list[Details]:
    keys = [k for k in DIFFERENCES if any(k in found for found in shown.values())]
    if not keys:
        return []
    rows = [
        Row(
            name,
            [_difference(key, found.get(key)) for key in keys],
            small=[_ends(key, found.get(key)) for key in keys],
        )
        for name, found in shown.items()
    ]
    columns = ["Predictive", *(DIFFERENCES[key] for key in keys)]
    return [Details(title, Table(title, columns, rows), open=True)]


def _difference(key: str, found: Sequence[float] | None) -> str:
    if found is None:
        return NOTHING
    share = key.endswith("accuracy")
    text = number(100 * found[0], 2) if share else number(found[0], 4)
    return f"+{text}" if found[0] > 0 else text


def _ends(key: str, found: Sequence[float] | None) -> str:
    if found is None:
        return ""
    scale, decimals = (100, 2) if key.endswith("accuracy") else (1, 4)
    return f"{number(scale * found[1], decimals)} to {number(scale * found[2], decimals)}"


def _gains(run: Run) -> list[str]:
    """A sentence for each calibrated predictive that compares its NLL with the MAP's."""
    entries = (run.evaluation or {}).get("predictives", {})
    key = next((k for k in ("test/cls/NLL", "test/reg/NLL") if k in _metrics(entries, "MAP")), "")
    texts = []
    for name, entry in entries.items():
        found = (entry.get("options") or {}).get("calibration")
        if not found or not key or name.startswith("MAP"):
            continue
        rivals = [
            f"{other} {_metrics(entries, other)[key]:.4f}"
            for other in entries
            if other.startswith("MAP") and key in _metrics(entries, other)
        ]
        who = "" if run.alone else f"{run.label}: "
        texts.append(
            f"{who}{name}, calibrated ({Calibration(**found).in_words}), has a test NLL of "
            f"{entry['metrics'][key]:.4f} nats; {', '.join(rivals)}."
        )
    return texts


def _metrics(entries: dict[str, Any], name: str) -> dict[str, float]:
    return entries.get(name, {}).get("metrics", {})


def _ood_text(run: Run) -> str | None:
    ood = (run.evaluation or {}).get("ood")
    if not ood:
        return None
    size = f" ({ood['num_examples']:,} examples)" if "num_examples" in ood else ""
    how = f", {ood['note']}" if ood.get("note") else ""
    score = f", detected by {ood['score']}" if ood.get("score") else ""
    return f"{ood['name']}{size}{how}{score}"


def curves_section(runs: Sequence[Run]) -> Section:
    """Evidence and loss over epochs."""
    lead = (
        "The evidence should rise while the weight decays are learned, and the loss should fall. "
        "If the evidence falls late while the loss still improves, the network overfits. The star "
        "marks the update that was kept."
    )
    charts = []
    for chart, kind in ((evidence_chart, "update"), (loss_chart, "epoch")):
        logged = _with_records(runs, kind)
        if logged:
            charts.append(chart(logged))
    blocks = [Charts(charts)] if charts else []
    return Section(
        "curves",
        "Evidence and loss",
        lead,
        [*blocks, *missing_log(runs, "evidence over epochs", "update")],
    )


def weight_decay_section(runs: Sequence[Run]) -> Section:
    """Weight decay over time and, of several runs or one without a log, at the end."""
    lead = (
        "All groups start with the same weight decay, then each learns its own. Look for curves "
        "that have settled; one that keeps rising belongs to parameters that the data does not "
        "need. Dotted lines are biases."
    )
    updated = _with_records(runs, "update")
    ends = weight_decay_ends(updated)
    charts = [weight_decay_chart(run, ends) for run in updated]
    final = [run for run in runs if run.layers]
    if final and (len(runs) > 1 or not updated):
        charts.insert(0, final_weight_decay_chart(final))
    blocks: list[Any] = [Charts(charts)] if charts else []
    fitted = [run for run in runs if run.is_fit]
    if fitted:
        temperatures = ", ".join(dict.fromkeys(f"{run.temperature:g}" for run in fitted))
        text = "For a fitted posterior, the weight decay is computed from its prior precision δ"
        blocks.append(Note(f"{text}: T·δ/N, with temperature T = {temperatures}."))
    blocks += missing_log(runs, "weight decay over epochs", "update")
    return Section("weight-decay", "Weight decay per layer", lead, blocks)


def effective_section(runs: Sequence[Run]) -> Section:
    """Effective parameters."""
    lead = (
        "How many directions in the parameters of each tensor the data determines (the dot), and "
        "how many parameters it has (the tick). A layer whose dot is near its tick uses all its "
        "parameters; one whose dot is far to the left would need fewer."
    )
    final = [run for run in runs if run.layers]
    note = Note("Neither results.json nor posterior.json has effective parameters.")
    blocks = [Charts([effective_chart(final)])] if final else [note]
    return Section("effective", "Effective number of parameters", lead, blocks)


def time_section(runs: Sequence[Run]) -> Section:
    """Where the time went."""
    lead = (
        "The cost of learning the weight decays, compared with training itself. If the curvature "
        "passes take longer than the steps, make them rarer (prior.every) or cheaper (curvature "
        "options)."
    )
    logged = _with_records(runs, "epoch")
    blocks = [Charts([time_chart(logged)])] if logged else []
    return Section(
        "time", "Where the time went", lead, [*blocks, *missing_log(runs, "times", "epoch")]
    )


def _with_records(runs: Sequence[Run], kind: str) -> list[Run]:
    return [run for run in runs if any(record["kind"] == kind for record in run.records)]


def missing_log(runs: Sequence[Run], what: str, kind: str) -> list[Note]:
    """A note for each run without records of a kind, which says why.

    Args:
        runs: the runs of the page.
        what: what the page cannot show without these records.
        kind: the kind of record that it needs.
    """
    notes = []
    for run in runs:
        if any(record["kind"] == kind for record in run.records):
            continue
        if run.records:
            why = "no update of the weight decays was due"
        elif run.is_fit:
            why = "a posterior that was fitted to a trained network has no epochs"
        else:
            why = "the folder has no log.jsonl"
        notes.append(Note(f"No {what} for {run.folder}: {why}."))
    return notes


def evaluate_command(run: Run, option: str = "") -> str:
    """The command that evaluates a run."""
    return f"marglik evaluate {quote(str(run.folder))} {option}".strip()


def missing_evaluation(runs: Sequence[Run], what: str) -> list[Note]:
    """A note for each run that has not been evaluated, with the command that does it.

    Args:
        runs: the runs of the page.
        what: what the page cannot show without an evaluation.
    """
    return [
        Note(
            f"{run.folder} has no evaluation.json, which holds {what}. To get it:",
            evaluate_command(run),
        )
        for run in runs
        if run.evaluation is None
    ]
