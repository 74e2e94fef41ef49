"""The page's sections that evaluation.json fills, and those of options and versions."""

from collections.abc import Sequence
from typing import Any

from marglik.posterior.calibration import Calibration
from marglik.report.charts.calibration import (
    Series,
    entropy_chart,
    entropy_shares,
    reliability_chart,
    shift_charts,
)
from marglik.report.charts.chart import Chart
from marglik.report.charts.errors import (
    Confusion,
    class_chart,
    class_names,
    risk_coverage_chart,
    roc_chart,
)
from marglik.report.contents import Run
from marglik.report.options import MISSING, differing
from marglik.report.sections import (
    Charts,
    Details,
    Gallery,
    Note,
    Section,
    evaluate_command,
    missing_evaluation,
)
from marglik.report.tables import NOTHING, Row, Table, number

__all__ = [
    "entropy_section",
    "errors_section",
    "options_section",
    "reliability_section",
    "shift_section",
    "uncertain_section",
    "versions_section",
]

BINS_LEAD = (
    "How often a predictive is right, against its confidence. On the dashed diagonal it is "
    "calibrated, below it overconfident, above it underconfident. Whiskers are Wilson's 95 % "
    "intervals: a point whose whisker meets the diagonal may be off it by chance. Large points and "
    "high bars stand for many predictions."
)
INTERVALS_LEAD = (
    "The share of targets inside the predictive's central intervals, against the share that should "
    "be. On the dashed diagonal it is calibrated, below it overconfident, above it underconfident. "
    "Whiskers are Wilson's 95 % intervals, as if all targets were independent."
)
HEADROOM = 1.05


def reliability_section(runs: Sequence[Run]) -> Section:
    """Calibration: one chart of all predictives of a run, or a chart per predictive of several."""
    groups: dict[Any, list[Series]] = {}
    having = []
    for run, one in _series(runs):
        reliability = one.content.get("reliability")
        if reliability:
            having.append(run)
            title = "All predictives" if run.alone else one.name
            bins = tuple(reliability.get("edges") or reliability["levels"])
            curve = one if run.alone else one._replace(name=run.label)
            groups.setdefault((title, bins), []).append(curve)
    charts = [reliability_chart(title, series) for (title, _), series in groups.items()]
    of_intervals = {"levels" in series[0].content["reliability"] for series in groups.values()}
    lead = INTERVALS_LEAD if of_intervals == {True} else BINS_LEAD
    blocks = [Charts(charts)] if charts else []
    tables = [block for run in runs if (block := _held_out(run)) is not None]
    notes = [*_of_positions(having), *_without(runs, having, "reliability")]
    return Section("reliability", "Calibration", lead, [*blocks, *tables, *notes])


def _of_positions(runs: Sequence[Run]) -> list[Note]:
    """A note on the whiskers of sequences, if a run has any."""
    if not any(run.num_positions for run in runs):
        return []
    return [
        Note(
            "For sequences, whiskers treat positions (tokens) as independent; they are too narrow "
            "if positions of the same sequence are correlated."
        )
    ]


def _held_out(run: Run) -> Details | None:
    """A table of the held-out NLLs that the posterior's calibrations store."""
    fits = (run.posterior or {}).get("calibrations") or {}
    if not fits:
        return None
    names = ("nll", "nll_uncalibrated", "nll_scaled_map", "nll_map")
    rows = [
        Row(
            label,
            [*(number(fit[name], 4) for name in names), number(fit["num_terms"])],
            detail=Calibration(**fit["calibration"]).in_words,
        )
        for label, fit in fits.items()
    ]
    titles = ["calibrated", "uncalibrated", "MAP, temperature-scaled", "MAP", "held-out terms"]
    of_run = "" if run.alone else f", {run.label}"
    table = Table("NLL of held-out data", ["Predictive", *titles], rows)
    return Details(f"NLL of the held-out data used for calibration{of_run}", table, open=True)


def errors_section(runs: Sequence[Run]) -> Section:
    """Risk over coverage, accuracy by class, and confusion matrices."""
    lead = (
        "Which errors are made, and whether confidence predicts them. If only the most confident "
        "predictions are kept (the left end of the curve), few should be wrong. Whiskers are "
        "Wilson's 95 % intervals; for a class with few examples they are wide."
    )
    risks: dict[str, list[Series]] = {}
    by_class: dict[Any, list[Series]] = {}
    having = []
    for run, one in _series(runs):
        curve = one if run.alone else one._replace(name=run.label)
        title = "All predictives" if run.alone else one.name
        if "risk_coverage" in one.content:
            having.append(run)
            risks.setdefault(title, []).append(curve)
        if "classes" in one.content:
            names = class_names(
                (run.evaluation or {}).get("classes"), len(one.content["classes"]["counts"])
            )
            by_class.setdefault((title, tuple(names)), []).append(curve)
    charts = [
        risk_coverage_chart(
            "Error rate by coverage" if runs[0].alone else f"Error rate by coverage: {title}", group
        )
        for title, group in risks.items()
    ]
    blocks: list[Any] = []
    for (title, names), group in by_class.items():
        alike = _merged(group)
        heading = "Accuracy by class" if runs[0].alone else f"Accuracy by class: {title}"
        charts.append(class_chart(heading, alike, names))
        for one in alike:
            if "confusion" in one.content["classes"]:
                of = one.name if runs[0].alone else f"{title}, {one.name}"
                blocks.append(Confusion(of, names, one.content["classes"]["confusion"]))
    notes = [*_of_positions(having), *_without(runs, having, "errors by class")]
    charts_first = [Charts(charts)] if charts else []
    return Section("errors", "Errors", lead, [*charts_first, *blocks, *notes])


def _merged(series: Sequence[Series]) -> list[Series]:
    """Predictives with the same class predictions merged into one, with all their names."""
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(repr(one.content["classes"]), []).append(one)
    return [
        group[0]._replace(name="; ".join(one.name for one in group)) for group in groups.values()
    ]


def entropy_section(runs: Sequence[Run]) -> Section:
    """Histograms of predictive entropy, one per predictive and run."""
    lead = (
        "How uncertain a predictive is. On test data most predictions should be certain (left); on "
        "out-of-distribution data, uncertain (right). The less the two overlap, the better "
        "out-of-distribution data is detected."
    )
    found = [
        (run, name, predictive["entropy"])
        for run in runs
        for name, predictive in _predictives(run).items()
        if predictive.get("entropy")
    ]
    order = list(_names(runs))
    found.sort(key=lambda one: order.index(one[1]))  # one predictive of all runs side by side
    shares = [s for _, _, entropy in found for of in entropy_shares(entropy).values() for s in of]
    largest = HEADROOM * max(shares, default=1.0)
    curves: dict[str, list[Series]] = {}
    for run, one in _series(runs):
        if "roc" in one.content:
            title = f"ROC curve: {_ood_data(run)}" if run.alone else f"ROC curve: {one.name}"
            curve = one if run.alone else one._replace(name=run.label)
            curves.setdefault(title, []).append(curve)
    charts = [roc_chart(title, series) for title, series in curves.items()]
    charts += [
        entropy_chart(
            name if run.alone else f"{name}: {run.label}", entropy, _ood_name(run), largest
        )
        for run, name, entropy in found
    ]
    notes = _without(runs, [run for run, _, _ in found], "predictive entropy")
    closed = {id(run): run for run, _, entropy in found if "ood" not in entropy}
    for run in closed.values():
        text = f"The evaluation in {run.folder} has no out-of-distribution data. For images:"
        notes.append(Note(text, evaluate_command(run, "--ood marglik.data.Noise")))
    return _section("entropy", "Predictive entropy", lead, charts, notes)


def shift_section(runs: Sequence[Run]) -> Section:
    """Metrics over the severity of shifts."""
    lead = (
        "How predictives degrade as their inputs are corrupted more and more. All get worse; a "
        "good posterior gets worse more slowly, and its calibration error grows less."
    )
    having, series = [], []
    for run, one in _series(runs):
        if any(key.startswith("shift/") for key in one.content["metrics"]):
            having.append(run)
            series.append(one if run.alone else one._replace(name=f"{run.label}: {one.name}"))
    notes = _without(runs, having, "shifted test sets", "--evaluation.shift true")
    return _section("shift", "Distribution shift", lead, shift_charts(series), notes)


def uncertain_section(runs: Sequence[Run]) -> Section:
    """The images on which a predictive is most uncertain."""
    lead = (
        "The test images with the highest predictive entropy. More training data would reduce its "
        "epistemic part, but not its aleatoric part (of an ambiguous image). Look for wrong "
        "labels, and for kinds of images that the network has not learned."
    )
    having, galleries = [], []
    for run in runs:
        uncertain = (run.evaluation or {}).get("uncertain")
        if uncertain:
            having.append(run)
            of_run = "By" if run.alone else f"{run.label}, by"
            galleries.append(Gallery(f"{of_run} {uncertain['predictive']}", uncertain["examples"]))
    notes = _without(runs, having, "images")
    return Section("uncertain", "Most uncertain test images", lead, [*galleries, *notes])


def options_section(runs: Sequence[Run]) -> Section:
    """The configuration; for several runs, the options that differ come first."""
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    if not names:
        note = Note("No options: there is no config.yaml.")
        return Section("options", "Options", "The options of the runs.", [note])
    different = differing([run.options for run in runs])
    columns = ["Option", *(["value"] if runs[0].alone else [run.label for run in runs])]
    words = frozenset(range(len(runs)))

    def table(caption: str, chosen: Sequence[str]) -> Table:
        rows = [
            Row(
                name,
                [_option(run, name) for run in runs],
                differs=not runs[0].alone and name in different,
            )
            for name in chosen
        ]
        return Table(caption, columns, rows, text_columns=words)

    everything = Details(f"All options ({len(names)})", table("All options", names))
    if runs[0].alone:
        lead = "The options of the run, from config.yaml."
        return Section("options", "Options", lead, [everything])
    lead = (
        "The options of the runs. Options that differ explain the differences above; those that do "
        "not affect the numbers, such as the output folder, are not listed as different."
    )
    note = Note("All options that affect the numbers are the same.")
    first = Details(
        f"Options that differ ({len(different)})", table("Options that differ", different), True
    )
    return Section("options", "Options", lead, [first if different else note, everything])


def versions_section(runs: Sequence[Run]) -> Section:
    """Versions and devices of training and, if they differ, of evaluation."""
    columns: dict[str, dict[str, str]] = {}
    for run in runs:
        stages = {
            "fit" if run.is_fit else "training": run.posterior if run.is_fit else run.results,
            "evaluation": run.evaluation,
        }
        environments = {stage: _environment(made) for stage, made in stages.items() if made}
        if len(environments) == 2 and len({repr(e) for e in environments.values()}) == 1:
            environments = {" and ".join(environments): next(iter(environments.values()))}
        for stage, environment in environments.items():
            columns[stage if run.alone else f"{run.label}: {stage}"] = environment
    lead = "The software and hardware of the runs; look here first if numbers cannot be reproduced."
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    if not names:
        return Section("versions", "Versions and device", lead, [Note("No file has them.")])
    rows = [Row(name, [c.get(name, NOTHING) for c in columns.values()]) for name in names]
    table = Table(
        "Versions and device", ["Part", *columns], rows, text_columns=frozenset(range(len(columns)))
    )
    return Section("versions", "Versions and device", lead, [table])


def _environment(made: dict[str, Any]) -> dict[str, str]:
    names = ("device", "threads", "ranks", "python")
    shown = {name: str(made[name]) for name in names if name in made}
    return shown | made.get("versions", {})


def _option(run: Run, name: str) -> str:
    if name not in run.options:
        return MISSING
    value = run.options[name]
    return "null" if value is None else str(value)


def _predictives(run: Run) -> dict[str, Any]:
    return run.evaluation["predictives"] if run.evaluation else {}


def _names(runs: Sequence[Run]) -> dict[str, None]:
    """The names of the predictives of all runs, each once, in order."""
    return dict.fromkeys(name for run in runs for name in _predictives(run))


def _series(runs: Sequence[Run]) -> list[tuple[Run, Series]]:
    """The predictives as series: in colours of their own for a single run, else in their run's."""
    positions = {name: position for position, name in enumerate(_names(runs))}
    return [
        (
            run,
            Series(positions[name] if run.alone else run.position, name, content, positions[name]),
        )
        for run in runs
        for name, content in _predictives(run).items()
    ]


def _ood_name(run: Run) -> str:
    name = _ood_data(run)
    return f"out of distribution: {name}" if name else "out of distribution"


def _ood_data(run: Run) -> str:
    return ((run.evaluation or {}).get("ood") or {}).get("name", "")


def _section(
    id: str, title: str, lead: str, charts: Sequence[Chart], notes: Sequence[Note]
) -> Section:
    return Section(id, title, lead, [*([Charts(charts)] if charts else []), *notes])


def _without(runs: Sequence[Run], having: Sequence[Run], what: str, option: str = "") -> list[Note]:
    """Notes on runs that lack a part, because they have no evaluation, or one without the part.

    Args:
        runs: the runs of the page.
        having: the runs with the part.
        what: name of the part.
        option: option of `marglik evaluate` that adds the part for images.
    """
    notes = []
    for run in runs:
        if run.evaluation and not any(run is one for one in having):
            text = f"The evaluation in {run.folder} has no {what}."
            command = evaluate_command(run, option) if option else ""
            notes.append(Note(f"{text} For images:" if option else text, command))
    return [*notes, *missing_evaluation(runs, what)]
