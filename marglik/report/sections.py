"""What stands in each section of the page; its title, and what to look for, are in page.html.j2.

A section is a function from the page's runs to blocks: lists of charts that stand side by side,
tables, notes, confusion matrices and galleries, which page.html.j2 shows each by its kind.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marglik.data.record import seen_in_words
from marglik.prediction.links import Calibration
from marglik.report import charts
from marglik.report.contents import MISSING, Run, differing, predictives
from marglik.report.tables import (
    NOTHING,
    Row,
    Table,
    differences_table,
    duration,
    number,
    of_evaluation_and_results,
    percentage,
    summary_table,
)

PARTS = {
    "pass": "curvature pass",
    "eigenvalues": "eigenvalues",
    "steps": "hyperparameter steps",
}
"""Names of the parts of an update in the log."""


@dataclass(frozen=True)
class Picture:
    """An image as a data URI, and what to say below it."""

    image: str
    alt: str
    lines: Sequence[tuple[str, str]] = ()
    """(what, its value)."""
    parts: tuple[float, float] | None = None
    """Aleatoric and epistemic part of the entropy, as shares of the gallery's largest entropy."""


@dataclass(frozen=True)
class Gallery:
    """Pictures side by side; small ones without a title belong to the gallery above."""

    title: str
    pictures: Sequence[Picture]
    kind: str = ""


@dataclass(frozen=True)
class Confusion:
    """Counts of labels (rows) by predictions (columns), as a table coloured by them."""

    title: str
    classes: Sequence[str]
    counts: Sequence[Sequence[int]]


Blocks = list[str | Gallery | Confusion | Table | list[charts.Chart]]
"""A text is a paragraph."""


def _summary(runs: Sequence[Run]) -> Blocks:
    """Metrics, differences on the same examples, and what must be known to read them."""
    blocks: Blocks = [run.titled(seen) for run in runs if (seen := seen_in_words(run.evaluation))]
    blocks += [summary_table(runs)] if of_evaluation_and_results(runs) else []
    for run in runs:
        title = run.titled("Learned minus plain network, on the same test examples")
        blocks += differences_table(title, run.results.get("differences", {}))
        found = {one.name: one.content["against"] for one in predictives([run], "against")}
        rivals = ", ".join(dict.fromkeys(one["predictive"] for one in found.values()))
        title = run.titled(f"Differences from {rivals}, on the same test examples")
        blocks += differences_table(
            title, {name: one["differences"] for name, one in found.items()}
        )
    for evaluation in [run.evaluation for run in runs]:
        if positions := evaluation.get("num_positions"):
            blocks.append(
                f"Metrics are means over {positions:,} positions (tokens), the NLL in nats per "
                "position; each sequence counts as one example."
            )
        if ood := evaluation.get("ood"):
            name = f"{ood['name']} ({ood['num_examples']:,} examples)"
            parts = [name, ood.get("note"), f"detected by {ood.get('score')}"]
            blocks.append(f"Out of distribution: {', '.join(filter(None, parts))}.")
    return blocks


def _curves(runs: Sequence[Run]) -> Blocks:
    updated, trained = [r for r in runs if r.updates], [r for r in runs if r.epochs]
    found = [charts.evidence_chart(updated)] if updated else []
    found += [charts.loss_chart(trained)] if trained else []
    blocks: Blocks = [found]
    if found and any(run.target_scale for run in runs):
        blocks.append(
            "Evidence and loss are of the target as it was standardised for training; metrics are "
            "in its own unit."
        )
    return blocks


def _weight_decay(runs: Sequence[Run]) -> Blocks:
    """Over epochs, and for each tensor at the end, beside its effective parameters."""
    updated, final = [run for run in runs if run.updates], [run for run in runs if run.layers]
    keys, rows = ("learned", "effective_parameters", "parameters"), []
    for name in dict.fromkeys(name for run in final for name in run.layers):
        layers = [run.layers.get(name, {}) for run in final]
        cells = [number(layer.get(key)) for layer in layers for key in keys]
        shares = [
            percentage(layer["effective_parameters"] / layer["parameters"], 1) if layer else ""
            for layer in layers
        ]
        rows.append(Row(name, cells, small=[t for share in shares for t in ("", share, "")]))
    heads = ("weight decay", "effective parameters", "parameters")
    columns = ["Tensor", *(run.titled(head) for run in final for head in heads)]
    table = Table("Each tensor at the end", columns, rows, summary="Each tensor at the end")
    charts_of = charts.weight_decay_charts(updated)
    return [*([charts_of] if updated else []), *([table] if rows else [])]


def _augmentation(runs: Sequence[Run]) -> Blocks:
    blocks: Blocks = []
    for run in [run for run in runs if run.results.get("augmentation")]:
        found = run.results["augmentation"]
        blocks.append([charts.ranges_chart(run, found["ranges"])])
        ends = ("initial", "learned", "largest")
        rows = [
            Row(name, [number(of[key], 3) for key in ends]) for name, of in found["ranges"].items()
        ]
        blocks.append(Table(run.titled("Ranges"), ["Range", *ends], rows))
        title = run.titled("Training images, and the copies whose outputs are averaged")
        for i, images in enumerate(found["examples"]):
            names = ["Training image", *(f"Its copy {k}" for k in range(1, len(images)))]
            pictures = [Picture(*pair) for pair in zip(images, names, strict=True)]
            blocks.append(Gallery("" if i else title, pictures, "copies"))
    return blocks


def _time(runs: Sequence[Run]) -> Blocks:
    """Seconds of each part of a training, and their shares."""
    logged = [run for run in runs if run.epochs]
    parts = [_seconds(run) for run in logged]
    rows = []
    for name in dict.fromkeys(name for one in parts for name in one):
        cells = [duration(one.get(name)) for one in parts]
        shares = [percentage(one.get(name, 0.0) / max(sum(one.values()), 1e-9), 1) for one in parts]
        rows.append(Row(name, cells, small=shares))
    heads = [run.label or "time" for run in logged]
    table = Table("Where the time went", ["Part", *heads], rows)
    return [table] if rows else []


def _seconds(run: Run) -> dict[str, float]:
    """Name of a part -> seconds spent on it; the last one completes the run's total."""
    # Epochs are in the log, and updates part by part.
    parts: defaultdict[str, float] = defaultdict(float)
    parts["training steps"] = sum(record["seconds"] for record in run.epochs)
    for update in run.updates:
        for key, seconds in update["seconds"].items():
            parts[PARTS[key] if key in PARTS else key] += seconds
    rest = run.results.get("seconds", 0.0) - sum(parts.values())
    return parts | {"everything else": rest} if rest > 0 else parts


def _reliability(runs: Sequence[Run]) -> Blocks:
    # Curves with the same bins or levels share a chart, and a table of its points.
    groups = defaultdict(list)
    for one in predictives(runs, "reliability"):
        found = one.content["reliability"]
        groups[one.chart, tuple(found.get("edges") or found["levels"])].append(one)
    found = [charts.reliability_chart(title, group) for (title, _), group in groups.items()]
    return [found, *_held_out(runs)]


def _held_out(runs: Sequence[Run]) -> list[Table]:
    """A table of the held-out NLLs by which the runs' predictives were calibrated."""
    names = ("nll", "nll_uncalibrated", "nll_scaled_map", "nll_map")
    fits = [(run, run.results["calibration"]) for run in runs if run.results.get("calibration")]
    rows = [
        Row(
            run.titled(fit["predictive"]),
            [*(number(fit[name], 4) for name in names), number(fit["num_terms"])],
            detail=Calibration(**fit["calibration"]).in_words,
        )
        for run, fit in fits
    ]
    titles = ["calibrated", "uncalibrated", "MAP, temperature-scaled", "MAP", "held-out terms"]
    title = "NLL of the held-out data used for calibration"
    return [Table(title, ["Predictive", *titles], rows, summary=title)] if rows else []


def _errors(runs: Sequence[Run]) -> Blocks:
    """Error rate by coverage; and what is taken for what."""
    risks, matrices = defaultdict(list), []
    for one in predictives(runs, "risk_coverage"):
        risks[one.chart].append(one)
    for run in runs:
        # Predictives with the same class predictions are shown once, with all their names.
        alike = defaultdict(list)
        for one in predictives([run], "classes"):
            alike[repr(one.content["classes"])].append(one)
        for group in alike.values():
            if counts := group[0].content["classes"].get("confusion"):
                classes = run.evaluation.get("classes") or [str(i) for i in range(len(counts))]
                title = run.titled("; ".join(one.name for one in group))
                matrices.append(Confusion(title, classes, counts))
    found = [
        charts.share_chart(f"Error rate by coverage: {title}", group, "risk_coverage")
        for title, group in risks.items()
    ]
    return [found, *matrices]


def _ood(runs: Sequence[Run]) -> Blocks:
    curves = defaultdict(list)
    for one in predictives(runs, "roc"):
        data = (one.run.evaluation.get("ood") or {}).get("name", "")
        curves[f"ROC curve: {one.name if one.run.label else data}"].append(one)
    return [[charts.share_chart(title, group, "roc") for title, group in curves.items()]]


def _uncertain(runs: Sequence[Run]) -> Blocks:
    galleries: Blocks = []
    for run in [run for run in runs if run.evaluation.get("uncertain")]:
        found = run.evaluation["uncertain"]
        largest = max(e["aleatoric"] + e["epistemic"] for e in found["examples"]) or 1.0
        pictures = [
            Picture(
                e["image"],
                f"Test image {e['index']}: {e['label']}, predicted as {e['predicted']}",
                [
                    ("predicted", f"{e['predicted']} ({100 * e['probability']:.0f} %)"),
                    ("label", f"{e['label']} {'✓' if e['predicted'] == e['label'] else '✗'}"),
                    ("entropy", f"{e['entropy']:.2f}"),
                    ("of it epistemic", f"{e['epistemic']:.2f}"),
                    ("image", str(e["index"])),
                ],
                (e["aleatoric"] / largest, e["epistemic"] / largest),
            )
            for e in found["examples"]
        ]
        galleries.append(Gallery(run.titled(f"By {found['predictive']}"), pictures))
    return galleries


def _suspicious(runs: Sequence[Run]) -> Blocks:
    blocks: Blocks = []
    for run in [run for run in runs if run.results.get("suspicious_labels")]:
        found = run.results["suspicious_labels"]
        if "unknown" in found:
            blocks.append(run.titled(found["unknown"]))
            continue
        text = (
            f"{found['number']:,} of {found['judged']:,} labels have a score above 1. The network "
            f"predicted {percentage(found['agreement'], 1)} of the labels, on average over the "
            "epochs."
        )
        blocks.append(run.titled(text))
        examples, title = found["examples"], run.titled("The most suspicious")
        cells = [
            [str(e["index"]), e["label"], e["predicted"], number(e["score"], 2)] for e in examples
        ]
        columns = ["example", "label", "predicted", "score"]
        if examples and "wrong" in examples[0]:
            columns.append("probability of being wrong")
            cells = [
                [*row, number(e["wrong"], 2)] for row, e in zip(cells, examples, strict=True)
            ]
        if examples and "image" in examples[0]:
            pictures = [
                Picture(
                    e["image"],
                    f"Training image {of[0]}: labelled {of[1]}, predicted as {of[2]}",
                    [*zip(columns, of, strict=True)],
                )
                for e, of in zip(examples, cells, strict=True)
            ]
            blocks.append(Gallery(title, pictures, "small"))
        elif examples:
            rows = [Row(index, rest) for index, *rest in cells]
            blocks.append(Table(title, ["Training example", *columns[1:]], rows, has_words=True))
    return blocks


def _options(runs: Sequence[Run]) -> Blocks:
    """All options; of several runs, those that differ come first and are highlighted."""
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    different = differing([run.options for run in runs])
    rows = []
    for name in [*different, *(name for name in names if name not in different)]:
        values = [run.options.get(name, MISSING) for run in runs]
        cells = ["null" if value is None else str(value) for value in values]
        rows.append(Row(name, cells, differs=name in different))
    columns, summary = ["Option", *(run.label or "value" for run in runs)], f"{len(rows)} options"
    return [Table("Options", columns, rows, True, summary, bool(different))] if rows else []


def _versions(runs: Sequence[Run]) -> Blocks:
    """Versions and devices of training (or fit) and evaluation."""
    names, columns = ("device", "threads", "ranks", "python"), {}
    for run in runs:
        for of, record in (("results", run.results), ("evaluation", run.evaluation)):
            if record:
                found = {name: str(record[name]) for name in names if name in record}
                columns[run.titled(of)] = found | record.get("versions", {})
    rows = [
        Row(name, [column.get(name, NOTHING) for column in columns.values()])
        for name in dict.fromkeys(name for column in columns.values() for name in column)
    ]
    return [Table("Versions and device", ["Part", *columns], rows, has_words=True)] if rows else []


SECTIONS: dict[str, Callable[[Sequence[Run]], Blocks]] = {
    "summary": _summary,
    "curves": _curves,
    "weight-decay": _weight_decay,
    "augmentation": _augmentation,
    "time": _time,
    "reliability": _reliability,
    "errors": _errors,
    "ood": _ood,
    "uncertain": _uncertain,
    "suspicious": _suspicious,
    "options": _options,
    "versions": _versions,
}
"""Id of a section in page.html.j2 -> what stands in it; one without blocks is left out."""
