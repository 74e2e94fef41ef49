"""Create the content of each section of the page. page.html.j2 has titles and introductions."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kfac_backend.fisher import Fisher
from marglik.application.records import Example
from marglik.application.report import charts
from marglik.application.report.contents import MISSING, Run, differing, predictives
from marglik.application.report.tables import (
    NOTHING,
    Row,
    Table,
    differences_table,
    evaluated_and_rivals,
    number,
    percentage,
    summary_table,
)
from marglik.prediction.metric_types import Coverage
from marglik.storage.checkpoint import leaves


@dataclass(frozen=True)
class Gallery:
    """Images of examples side by side. A gallery without a title continues the gallery above."""

    title: str
    what: str
    """What the examples are, such as "Test image"."""
    examples: Sequence[Example]
    kind: str = "small"


@dataclass(frozen=True)
class Confusion:
    """Confusion matrix, labels in rows and predictions in columns, shown as a coloured table."""

    title: str
    classes: Sequence[str]
    counts: Sequence[Sequence[int]]


Blocks = list[str | Gallery | Confusion | Table | list[charts.Chart]]
"""Content of a section. A string is a paragraph."""


def _summary(runs: Sequence[Run]) -> Blocks:
    """Return metrics, differences on the same examples, and notes about them."""
    blocks: Blocks = [
        run.titled(run.evaluation.seen_in_words)
        for run in runs
        if run.evaluation and run.evaluation.seen_in_words
    ]
    blocks += [summary_table(runs)] if evaluated_and_rivals(runs) else []
    for run in runs:
        for network in run.results.networks.values() if run.results else ():
            title = run.titled("Difference to the plain network on the same test examples")
            blocks += differences_table(title, network.differences or {})
        against = {one.name: one.record.against for one in predictives([run])}
        rivals = ", ".join(dict.fromkeys(one.predictive for one in against.values() if one))
        title = run.titled(f"Differences to {rivals} on the same test examples")
        differences = {name: one.differences for name, one in against.items() if one}
        blocks += differences_table(title, differences)
    for evaluation in [run.evaluation for run in runs if run.evaluation]:
        if positions := evaluation.num_positions:
            blocks.append(
                f"Metrics are means over {positions:,} positions (tokens). The NLL is in nats per "
                "position. Each sequence is one example."
            )
        if ood := evaluation.ood:
            name = f"{ood.name} ({ood.num_examples:,} examples)"
            parts = [name, ood.note, "detected by entropy"]
            blocks.append(f"Out of distribution: {', '.join(filter(None, parts))}.")
    return blocks


def _curves(runs: Sequence[Run]) -> Blocks:
    updated, trained = [r for r in runs if r.updates], [r for r in runs if r.epochs]
    curves = [charts.evidence_chart(updated)] if updated else []
    curves += [charts.loss_chart(trained)] if trained else []
    blocks: Blocks = [curves]
    for run in updated:
        # A Fisher defined by the user may be unknown here. It counts as random.
        exact = [name for name, fisher in Fisher.by_name.items() if not fisher.draws]
        estimates = [
            update.num_examples < update.num_data or update.fisher not in exact
            for update in run.updates
        ]
        if any(estimates):
            except_the_last = "" if estimates[-1] else ", except the last one"
            blocks.append(
                run.titled(
                    "The evidences are estimates from a sample or from random vectors"
                    f"{except_the_last}."
                )
            )
    if curves and any(run.target_scale for run in runs):
        blocks.append(
            "Evidence and loss refer to the standardised target of the training. Metrics are in "
            "the unit of the target."
        )
    return blocks


def _weight_decay(runs: Sequence[Run]) -> Blocks:
    """Return weight decays over epochs, and a table of final weight decays by tensor."""
    updated = [run for run in runs if run.updates]
    final = [(run, run.results.weight_decay) for run in runs if run.results]
    rows = []
    for name in dict.fromkeys(name for _, tensors in final for name in tensors):
        cells, shares = [], []
        for tensor in (tensors.get(name) for _, tensors in final):
            if tensor is None:
                cells += [NOTHING] * 3
                shares += [""] * 3
                continue
            gamma, parameters = tensor.effective_parameters, tensor.parameters
            cells += [number(tensor.learned), number(gamma), number(parameters)]
            shares += ["", percentage(gamma / parameters, 1), ""]
        rows.append(Row(name, cells, small=shares))
    heads = ("weight decay", "effective parameters", "parameters")
    columns = ["Tensor", *(run.titled(head) for run, _ in final for head in heads)]
    table = Table("Each tensor at the end", columns, rows, summary="Each tensor at the end")
    charts_of = charts.weight_decay_charts(updated)
    return [*([charts_of] if updated else []), *([table] if rows else [])]


def _augmentation(runs: Sequence[Run]) -> Blocks:
    blocks: Blocks = []
    for run, augmentation in [(run, run.results.augmentation) for run in runs if run.results]:
        if augmentation is None:
            continue
        blocks.append([charts.ranges_chart(run, augmentation.ranges)])
        rows = [
            Row(name, [number(value, 3) for value in (one.initial, one.learned, one.largest)])
            for name, one in augmentation.ranges.items()
        ]
        columns = ["Range", "initial", "learned", "largest"]
        blocks.append(Table(run.titled("Ranges"), columns, rows))
        title = run.titled("Training images and their transformed copies")
        for i, images in enumerate(augmentation.examples):
            names = ["original", *(f"Copy {k}" for k in range(1, len(images)))]
            pairs = zip(names, images, strict=True)
            examples = [Example(i, name, image=image) for name, image in pairs]
            blocks.append(Gallery("" if i else title, "Training image", examples, "copies"))
    return blocks


def _reliability(runs: Sequence[Run]) -> Blocks:
    """Return the curves, and the held-out NLL with and without calibration of each run."""
    # Curves with the same bins or levels share a chart and its table.
    groups = defaultdict(list)
    for one in predictives(runs):
        data = one.record.reliability
        if data is not None:
            places = data.levels if isinstance(data, Coverage) else data.edges
            groups[one.chart, tuple(places)].append(one)
    reliability = [charts.reliability_chart(title, group) for (title, _), group in groups.items()]
    rows = []
    for run in runs:
        if run.results is None or (fit := run.results.calibration) is None:
            continue
        values = [fit.nll, fit.nll_uncalibrated, fit.nll_temperature_scaled, fit.nll_map]
        cells = [*(number(value, 4) for value in values), number(fit.num_terms)]
        rows.append(Row(run.titled(fit.predictive), cells, detail=fit.calibration.in_words))
    titles = ["calibrated", "uncalibrated", "MAP, temperature-scaled", "MAP", "held-out terms"]
    title = "NLL of the held-out data used for calibration"
    table = [Table(title, ["Predictive", *titles], rows, summary=title)] if rows else []
    return [reliability, *table]


def _errors(runs: Sequence[Run]) -> Blocks:
    """Return the error rate by coverage, and confusion matrices."""
    risks, matrices = defaultdict(list), []
    for one in predictives(runs):
        if one.record.risk_coverage:
            risks[one.chart].append(one)
    for run in runs:
        # Predictives with the same predicted classes share one matrix, titled by all names.
        alike = defaultdict(list)
        for one in predictives([run]):
            alike[repr(one.record.confusion)].append(one)
        for first, *others in alike.values():
            confusion = first.record.confusion
            if confusion and run.evaluation:
                numbers = [str(i) for i in range(len(confusion))]
                title = run.titled("; ".join(one.name for one in (first, *others)))
                classes = run.evaluation.classes or numbers
                matrices.append(Confusion(title, classes, confusion))
    curves = [
        charts.risk_coverage_chart(f"Error rate by coverage: {title}", group)
        for title, group in risks.items()
    ]
    return [curves, *matrices]


def _ood(runs: Sequence[Run]) -> Blocks:
    curves = defaultdict(list)
    for one in predictives(runs):
        if one.record.roc:
            evaluation = one.run.evaluation
            data = evaluation.ood.name if evaluation and evaluation.ood else ""
            curves[f"ROC curve: {one.name if one.run.label else data}"].append(one)
    return [[charts.roc_chart(title, group) for title, group in curves.items()]]


def _uncertain(runs: Sequence[Run]) -> Blocks:
    return [
        Gallery(run.titled(f"By {uncertain.predictive}"), "Test image", uncertain.examples, "")
        for run in runs
        if run.evaluation and (uncertain := run.evaluation.uncertain)
    ]


def _suspicious(runs: Sequence[Run]) -> Blocks:
    blocks: Blocks = []
    for run in runs:
        if run.results is None:
            continue
        labels = run.results.suspicious_labels
        if labels.unknown is not None:
            blocks.append(run.titled(labels.unknown))
            continue
        blocks.append(run.titled(labels.in_words))
        title = run.titled("The most suspicious labels")
        if labels.examples and labels.examples[0].image:
            blocks.append(Gallery(title, "Training image", labels.examples))
        elif labels.examples:
            columns = ["Training example", "label", "predicted", *labels.examples[0].numbers]
            rows = [_row(str(one.index), one) for one in labels.examples]
            blocks.append(Table(title, columns, rows, has_words=True))
    return blocks


def _row(header: str, one: Example) -> Row:
    words = [one.label] if one.predicted is None else [one.label, one.predicted]
    return Row(header, [*words, *map(number, one.numbers.values())])


def _explanations(runs: Sequence[Run]) -> Blocks:
    """Return each explained test prediction with the training examples of the largest effects."""
    blocks: Blocks = []
    for run in runs:
        if run.results is None or (explained := run.results.explanations) is None:
            continue
        if explained.unknown is not None:
            blocks.append(run.titled(explained.unknown))
        rows = []
        for one in explained.predictions:
            name = f"Test example {one.index}: {one.label}, predicted as {one.predicted}"
            if one.image is None:
                rows.append(Row(name))
                rows += [_row(f"Training example {e.index}", e) for e in one.explained_by]
                continue
            blocks.append(Gallery(run.titled(name), "Test example", [one]))
            blocks.append(Gallery("", "Training example", one.explained_by))
        if rows:
            title = run.titled("Test predictions with the largest losses")
            blocks.append(Table(title, ["Example", "label", "effect"], rows, has_words=True))
    return blocks


def _options(runs: Sequence[Run]) -> Blocks:
    """Return all options. With several runs, differing options come first, highlighted."""
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
    """Return versions and devices of training (or fit) and evaluation."""
    columns = {}
    for run in runs:
        for name, record in (("results", run.results), ("evaluation", run.evaluation)):
            if record:
                columns[run.titled(name)] = dict(
                    (key.removeprefix("versions."), str(value))
                    for key, value in leaves(record.environment).items()
                )
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
    "reliability": _reliability,
    "errors": _errors,
    "ood": _ood,
    "uncertain": _uncertain,
    "suspicious": _suspicious,
    "explanations": _explanations,
    "options": _options,
    "versions": _versions,
}
"""Id of a section in page.html.j2 -> its content. The page omits a section without content."""
