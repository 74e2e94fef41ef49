"""What stands in each section of the page; its title, and what to look for, are in page.html.j2.

A section is a function from the page's runs to blocks: lists of charts that stand side by side,
tables, notes, confusion matrices and galleries, which page.html.j2 shows each by its kind.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

from marglik.posterior.calibration import Calibration
from marglik.report import charts
from marglik.report.contents import MISSING, Run, differing, predictives
from marglik.report.tables import (
    NOTHING,
    Row,
    Table,
    differences_table,
    number,
    of_evaluation_and_results,
    percentage,
    summary_table,
)

__all__ = ["SECTIONS", "Confusion", "Copies", "Gallery", "Note", "Suspects"]

INTERVALS = (
    "In small print: 95 % confidence intervals over the choice of test examples. They are Wilson's "
    "for shares, Student's for means and DeLong's for the area under the ROC curve. The ECE has "
    "none: chance alone makes it larger, and so would resampling; the whiskers in the reliability "
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


@dataclass(frozen=True)
class Gallery:
    """Images with their predictions, as evaluation.json has them."""

    title: str
    examples: Sequence[dict[str, Any]]

    @property
    def largest_sum(self) -> float:
        """Length of the longest bar (nats)."""
        return max((e["aleatoric"] + e["epistemic"] for e in self.examples), default=0.0) or 1.0


@dataclass(frozen=True)
class Suspects:
    """Training images with their labels, as results.json has them."""

    title: str
    examples: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Copies:
    """Images, each followed by its transformed copies, as data URIs."""

    title: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Confusion:
    """Counts of labels (rows) by predictions (columns), as a table coloured by them."""

    title: str
    classes: Sequence[str]
    counts: Sequence[Sequence[int]]


Blocks = list[Note | Gallery | Suspects | Copies | Confusion | Table | list[charts.Chart]]


def _summary(runs: Sequence[Run]) -> Blocks:
    columns = of_evaluation_and_results(runs)
    blocks: Blocks = [note for run in runs for note in _gains(run)]
    blocks.append(summary_table(runs) if columns else Note("No file has any metrics."))
    for run in runs:
        who = "" if run.alone else f" ({run.label})"
        title = f"Learned minus initial weight decay, on the same test examples{who}"
        blocks += differences_table(title, run.results.get("differences", {}))
        found = {one.name: one.content["against"] for one in predictives([run], "against")}
        rivals = ", ".join(dict.fromkeys(one["predictive"] for one in found.values()))
        title = f"Differences from {rivals}, on the same test examples{who}"
        blocks += differences_table(
            title, {name: one["differences"] for name, one in found.items()}
        )
    if any(one.content.get("intervals") for one in columns):
        blocks.append(Note(INTERVALS))
    if len({one.run.data for one in columns}) > 1:
        blocks.append(Note("The runs have different data; the best values are marked for each."))
    texts = [run.evaluation["in_sample"] for run in runs if run.evaluation.get("in_sample")]
    texts += [
        f"For sequences, metrics are means over the positions (tokens) of the test set, the NLL in "
        f"nats per position: {run.data} ({run.evaluation['num_positions']:,})."
        for run in runs
        if run.evaluation.get("num_positions")
    ]
    for ood in [run.evaluation["ood"] for run in runs if run.evaluation.get("ood")]:
        size = f" ({ood['num_examples']:,} examples)" if "num_examples" in ood else ""
        parts = [f"{ood['name']}{size}", ood.get("note"), f"detected by {ood.get('score')}"]
        texts.append(f"Out of distribution: {', '.join(filter(None, parts))}.")
    return [
        *blocks,
        *map(Note, dict.fromkeys(texts)),
        *_without(runs, [r for r in runs if r.evaluation], "evaluation.json", ""),
    ]


def _gains(run: Run) -> list[Note]:
    """A sentence for each calibrated predictive that compares its NLL with the MAP's."""
    notes, found = [], predictives([run])
    for key in ("test/cls/NLL", "test/reg/NLL"):
        nll = {p.name: p.content["metrics"][key] for p in found if key in p.content["metrics"]}
        maps = ", ".join(f"{name} {nll[name]:.4f}" for name in nll if name.startswith("MAP"))
        for one in found:
            calibration = one.content.get("calibration")
            if maps and calibration and one.name in nll and not one.name.startswith("MAP"):
                who = "" if run.alone else f"{run.label}: "
                how = f"calibrated ({Calibration(**calibration).in_words})"
                text = (
                    f"{who}{one.name}, {how}, has a test NLL of {nll[one.name]:.4f} nats; {maps}."
                )
                notes.append(Note(text))
    return notes


def _curves(runs: Sequence[Run]) -> Blocks:
    updated, trained = [r for r in runs if r.updates], [r for r in runs if r.epochs]
    found = [charts.evidence_chart(updated)] if updated else []
    found += [charts.loss_chart(trained)] if trained else []
    return [found, *_without(runs, updated, "evidence over epochs")]


def _weight_decay(runs: Sequence[Run]) -> Blocks:
    updated, final = [run for run in runs if run.updates], [run for run in runs if run.layers]
    found = charts.weight_decay_charts(updated)
    if final and (len(runs) > 1 or not updated):
        found.insert(0, charts.final_weight_decay_chart(final))
    notes = _without(runs, updated, "weight decay over epochs")
    return [found, *notes]


def _augmentation(runs: Sequence[Run]) -> Blocks:
    blocks: Blocks = []
    for run in runs:
        found = run.results.get("augmentation")
        if not found:
            continue
        who = "" if run.alone else f"{run.label}: "
        blocks.append([charts.ranges_chart(run, found["ranges"])])
        rows = [
            Row(name, [number(of[key], 3) for key in ("initial", "learned", "largest")])
            for name, of in found["ranges"].items()
        ]
        blocks.append(Table(f"{who}Ranges", ["Range", "initial", "learned", "largest"], rows))
        title = f"{who}Training images, and the copies whose outputs are averaged"
        blocks.append(Copies(title, found["examples"]))
    return blocks


def _effective(runs: Sequence[Run]) -> Blocks:
    final = [run for run in runs if run.layers]
    missing = Note("No results.json has effective parameters.")
    return [[charts.effective_chart(final)] if final else missing]


def _time(runs: Sequence[Run]) -> Blocks:
    logged = [run for run in runs if run.epochs]
    return [[charts.time_chart(logged)] if logged else [], *_without(runs, logged, "times")]


def _reliability(runs: Sequence[Run]) -> Blocks:
    series, groups = predictives(runs, "reliability"), defaultdict(list)
    for one in series:
        found = one.content["reliability"]
        groups[one.chart, tuple(found.get("edges") or found["levels"])].append(one)
    found = [charts.reliability_chart(title, group) for (title, _), group in groups.items()]
    return [
        found,
        *_held_out(runs),
        *_without(runs, [one.run for one in series], "reliability diagram", ""),
    ]


def _held_out(runs: Sequence[Run]) -> list[Table]:
    """A table of the held-out NLLs by which the runs' predictives were calibrated."""
    names = ("nll", "nll_uncalibrated", "nll_scaled_map", "nll_map")
    calibrated = [
        (run, run.results["calibration"]) for run in runs if run.results.get("calibration")
    ]
    rows = [
        Row(
            fit["predictive"] if run.alone else f"{run.label}: {fit['predictive']}",
            [*(number(fit[name], 4) for name in names), number(fit["num_terms"])],
            detail=Calibration(**fit["calibration"]).in_words,
        )
        for run, fit in calibrated
    ]
    titles = ["calibrated", "uncalibrated", "MAP, temperature-scaled", "MAP", "held-out terms"]
    title = "NLL of the held-out data used for calibration"
    return [Table(title, ["Predictive", *titles], rows, summary=title)] if rows else []


def _errors(runs: Sequence[Run]) -> Blocks:
    series, risks, by_class = predictives(runs, "risk_coverage"), defaultdict(list), {}
    for one in series:
        risks[one.chart].append(one)
    for one in predictives(runs, "classes"):
        indices = range(len(one.content["classes"]["counts"]))
        names = one.run.evaluation.get("classes") or [str(i) for i in indices]
        # Predictives with the same class predictions are shown once, with all their names.
        alike = by_class.setdefault((one.chart, tuple(names)), {})
        alike.setdefault(repr(one.content["classes"]), []).append(one)
    found, matrices = [], []
    for title, group in risks.items():
        of = "" if runs[0].alone else f": {title}"
        found.append(charts.share_chart(f"Error rate by coverage{of}", group, "risk_coverage"))
    for (title, names), groups in by_class.items():
        of = "" if runs[0].alone else f": {title}"
        merged = [
            replace(group[0], label="; ".join(one.label for one in group))
            for group in groups.values()
        ]
        found.append(charts.class_chart(f"Accuracy by class{of}", merged, names))
        for one in merged:
            if counts := one.content["classes"].get("confusion"):
                of = one.label if one.run.alone else f"{title}, {one.label}"
                matrices.append(Confusion(of, names, counts))
    return [found, *matrices, *_without(runs, [one.run for one in series], "errors by class", "")]


def _entropy(runs: Sequence[Run]) -> Blocks:
    # One predictive of all runs side by side.
    series = sorted(predictives(runs, "entropy"), key=lambda one: one.place)
    shares = [share for p in series for of in charts.entropy_shares(p).values() for share in of]
    curves = defaultdict(list)
    for one in predictives(runs, "roc"):
        data = (one.run.evaluation.get("ood") or {}).get("name", "")
        curves[f"ROC curve: {data if one.run.alone else one.name}"].append(one)
    found = [charts.share_chart(title, group, "roc") for title, group in curves.items()]
    found += [charts.entropy_chart(one, 1.05 * max(shares)) for one in series]
    notes = _without(runs, [one.run for one in series], "predictive entropy", "")
    others = [one.run for one in series if "ood" in one.content["entropy"]]
    told = [run for run in runs if any(run is one.run for one in series)]
    notes += _without(told, others, "out-of-distribution data", "--ood marglik.data.Noise")
    return [found, *notes]


def _shift(runs: Sequence[Run]) -> Blocks:
    series = [p for p in predictives(runs) if any("shift/" in key for key in p.content["metrics"])]
    notes = _without(runs, [one.run for one in series], "shifted test sets", "--shift true")
    return [charts.shift_charts(series), *notes]


def _uncertain(runs: Sequence[Run]) -> Blocks:
    series = [one for one in predictives(runs) if one.run.evaluation.get("uncertain")]
    galleries = []
    for run in {id(one.run): one.run for one in series}.values():
        by = "By" if run.alone else f"{run.label}, by"
        found = run.evaluation["uncertain"]
        galleries.append(Gallery(f"{by} {found['predictive']}", found["examples"]))
    return [*galleries, *_without(runs, [one.run for one in series], "images", "")]


def _suspicious(runs: Sequence[Run]) -> Blocks:
    blocks: Blocks = []
    for run in runs:
        who = "" if run.alone else f"{run.label}: "
        found = run.results.get("suspicious_labels", {})
        if "number" not in found:
            why = f"{run.folder} has no results of a training with this version of marglik."
            blocks.append(Note(f"{who}{found.get('unknown', why)}"))
            continue
        text = (
            f"{who}{found['number']:,} of {found['judged']:,} labels have a score above 1. The "
            f"network predicted {percentage(found['agreement'], 1)} of the labels, on average over "
            "the epochs."
        )
        blocks.append(Note(text))
        examples, title = found["examples"], f"{who}The most suspicious"
        if examples and "image" in examples[0]:
            blocks.append(Suspects(title, examples))
        elif examples:
            rows = [
                Row(str(e["index"]), [e["label"], e["predicted"], number(e["score"], 2)])
                for e in examples
            ]
            columns = ["Training example", "label", "predicted", "score"]
            blocks.append(Table(title, columns, rows, has_words=True))
    return blocks


def _options(runs: Sequence[Run]) -> Blocks:
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    different = differing([run.options for run in runs])

    def table(caption: str, chosen: Sequence[str], is_open: bool) -> Table:
        rows = []
        for name in chosen:
            values = [run.options.get(name, MISSING) for run in runs]
            cells = ["null" if value is None else str(value) for value in values]
            rows.append(Row(name, cells, differs=name in different))
        columns = ["Option", *("value" if run.alone else run.label for run in runs)]
        summary = f"{caption} ({len(chosen)})"
        return Table(caption, columns, rows, has_words=True, summary=summary, open=is_open)

    blocks: Blocks = [table("All options", names, False)]
    if len(runs) > 1:
        same = Note("All options that affect the numbers are the same.")
        blocks.insert(0, table("Options that differ", different, True) if different else same)
    return blocks


def _versions(runs: Sequence[Run]) -> Blocks:
    """Versions and devices of training and, if they differ, of evaluation."""
    columns: dict[str, dict[str, str]] = {}
    for run in runs:
        trained = {"fit" if run.is_fit else "training": run.results}
        made = {
            of: _environment(r) for of, r in (trained | {"evaluation": run.evaluation}).items() if r
        }
        if len(made) == 2 and len({repr(one) for one in made.values()}) == 1:
            made = {" and ".join(made): next(iter(made.values()))}
        columns |= {of if run.alone else f"{run.label}: {of}": one for of, one in made.items()}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [Row(name, [c.get(name, NOTHING) for c in columns.values()]) for name in names]
    return [Table("Versions and device", ["Part", *columns], rows, has_words=True)]


def _environment(record: dict[str, Any]) -> dict[str, str]:
    names = ("device", "threads", "ranks", "python")
    return {name: str(record[name]) for name in names if name in record} | record.get(
        "versions", {}
    )


SECTIONS: dict[str, Callable[[Sequence[Run]], Blocks]] = {
    "summary": _summary,
    "curves": _curves,
    "weight-decay": _weight_decay,
    "augmentation": _augmentation,
    "effective": _effective,
    "time": _time,
    "reliability": _reliability,
    "errors": _errors,
    "entropy": _entropy,
    "shift": _shift,
    "uncertain": _uncertain,
    "suspicious": _suspicious,
    "options": _options,
    "versions": _versions,
}
"""Id of a section in page.html.j2 -> what stands in it."""


def _without(
    runs: Sequence[Run], having: Sequence[Run], what: str, option: str | None = None
) -> list[Note]:
    """A note for each run that lacks a part of the page, with the command that adds it.

    Args:
        runs: the runs of the page.
        having: those with the part.
        what: name of the part.
        option: option of `marglik evaluate` that adds the part for images; "" if it always does,
            None if no command does.
    """
    notes = []
    for run in [run for run in runs if not any(run is one for one in having)]:
        adds = option is not None and (option or not run.evaluation)
        command = f"marglik evaluate {quote(str(run.folder))} {option}".strip() if adds else ""
        hint = " For images:" if option else " To get it:" if adds else ""
        notes.append(Note(f"{run.folder} has no {what}.{hint}", command))
    return notes
