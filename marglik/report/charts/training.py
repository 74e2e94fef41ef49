"""Charts of how a run went: evidence and loss over epochs, and where the time went."""

from collections.abc import Mapping, Sequence

from marglik.report.charts.chart import Chart, Trace, axis, line, plain, series_style, shorten
from marglik.report.charts.colors import BACKGROUNDS, MUTED, SERIES
from marglik.report.contents import Run
from marglik.report.tables import NOTHING, Row, Table, duration, number, percentage

__all__ = ["evidence_chart", "loss_chart", "time_chart", "time_parts"]

SIZE, KEPT_SIZE = 6, 15
PARTS = {
    "pass": "curvature pass",
    "eigenvalues": "eigenvalues",
    "steps": "hyperparameter steps",
}
"""Names of the parts of an update in the log."""
BESIDE = {
    "start": "data and checks",
    "calibration": "calibration",
    "evaluation": "evaluation",
    "baseline": "baseline (initial weight decay)",
}
"""Names of what came before and after training, in results.json."""
REST = "everything else"


def evidence_chart(runs: Sequence[Run]) -> Chart:
    """Log marginal likelihood per example at each update; a star is the state that was kept.

    Of a single run also the value before the update's hyperparameter steps.
    """
    curves: dict[str, Trace] = {}
    for run in runs:
        epochs = [update["epoch"] for update in run.updates]
        style = series_style(run.position)
        kept = [epoch == _kept_epoch(run) for epoch in epochs]
        symbol = style["marker"]["symbol"]
        style["marker"] |= {
            "symbol": ["star" if is_kept else symbol for is_kept in kept],
            "size": [KEPT_SIZE if is_kept else SIZE for is_kept in kept],
        }
        values = [update["evidence_per_example"] for update in run.updates]
        name = run.label if not run.alone else "after the update"
        curves[name] = line(name, epochs, values, style)
    alone = runs[0] if runs[0].alone else None
    if alone and alone.num_data and all("evidence_before" in u for u in alone.updates):
        before = [update["evidence_before"] / alone.num_data for update in alone.updates]
        epochs = [update["epoch"] for update in alone.updates]
        first = line("before the update", epochs, before, _dotted(1))
        curves = {"before the update": first} | curves  # the star is drawn over it
    return _curve_chart("Log marginal likelihood", "at each update", curves, runs)


def _kept_epoch(run: Run) -> int | None:
    return (run.results or {}).get("evidence", {}).get("epoch")


def loss_chart(runs: Sequence[Run]) -> Chart:
    """Training loss per example over epochs; of a single run also the objective."""
    curves: dict[str, Trace] = {}
    for run in runs:
        epochs = [record["epoch"] for record in run.epochs]
        losses = [record["loss"] for record in run.epochs]
        name = run.label if not run.alone else "loss"
        curves[name] = line(name, epochs, losses, series_style(run.position), mode="lines")
    if runs[0].alone and all("objective" in record for record in runs[0].epochs):
        objective = [record["objective"] for record in runs[0].epochs]
        epochs = [record["epoch"] for record in runs[0].epochs]
        name = "loss and weight decay"
        curves[name] = line(name, epochs, objective, _dotted(1), mode="lines")
    chart = _curve_chart("Training loss", "over epochs", curves, runs)
    if all(value > 0 for curve in curves.values() for value in curve["y"]):
        chart.layout["yaxis"] |= {"type": "log", "tickformat": "~g", "dtick": "D2"}
    return chart


def _dotted(position: int) -> Trace:
    style = series_style(position)
    style["line"]["dash"] = "dot"
    return style


def _curve_chart(title: str, when: str, curves: Mapping[str, Trace], runs: Sequence[Run]) -> Chart:
    """Curves by their names over epochs, with a table of epochs in rows."""
    columns = [dict(zip(curve["x"], curve["y"], strict=True)) for curve in curves.values()]
    epochs = sorted({epoch for column in columns for epoch in column})
    return Chart(
        title,
        f"{title} per example {when}, of {_listed(runs)}.",
        list(curves.values()),
        {
            "xaxis": axis("epoch", rangemode="tozero"),
            "yaxis": axis("nats per example"),
            "hovermode": "x unified",
            "showlegend": len(curves) > 1,
        },
        Table(
            f"{title} per example (nats)",
            ["Epoch", *curves],
            [Row(str(epoch), [number(c.get(epoch), 4) for c in columns]) for epoch in epochs],
        ),
    )


def time_parts(run: Run) -> dict[str, float]:
    """Name of a part -> seconds spent on it, from the log; "the rest" completes the run's total."""
    steps = sum((record["seconds"] for record in run.epochs), 0.0)
    parts: dict[str, float] = {"training steps": steps}
    for update in run.updates:
        for key, seconds in update["seconds"].items():
            name = str(PARTS.get(key, key))
            parts[name] = parts.get(name, 0.0) + seconds
    for key, seconds in (run.results or {}).get("seconds_beside", {}).items():
        parts[str(BESIDE.get(key, key))] = seconds
    rest = (run.results or {}).get("seconds", 0.0) - sum(parts.values())
    return parts | {REST: rest} if rest > 0 else parts


def time_chart(runs: Sequence[Run]) -> Chart:
    """A stacked bar per run of the seconds that each part of it took."""
    parts = [time_parts(run) for run in runs]
    names = list(dict.fromkeys(name for one in parts for name in one))
    names.sort(key=lambda name: name == REST)
    rows = list(range(len(runs)))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(name),
            "x": [one.get(name, 0.0) for one in parts],
            "y": rows,
            "customdata": [percentage(_share(one, name), 1) for one in parts],
            "marker": {
                "color": MUTED if name == REST else SERIES[position % len(SERIES)],
                "line": {"color": BACKGROUNDS, "width": 1},
                "pattern": {"shape": "/" if position >= len(SERIES) and name != REST else ""},
            },
            "hovertemplate": "%{x:.2f} s, %{customdata}<extra>%{fullData.name}</extra>",
        }
        for position, name in enumerate(names)
    ]
    ticks = {"tickvals": rows, "ticktext": [plain(shorten(run.label)) for run in runs]}
    table_rows = [
        Row(name, [cell for one in parts for cell in _cells(one, name)]) for name in names
    ]
    return Chart(
        "Time by part",
        f"Seconds that each part of the training took, of {_listed(runs)}.",
        traces,
        {
            "barmode": "stack",
            "xaxis": axis("seconds"),
            "yaxis": axis("", autorange="reversed", showticklabels=not runs[0].alone, **ticks),
            "bargap": 0.45,
            "showlegend": True,
        },
        Table(
            "Time by part",
            ["Part", *(title for _ in runs for title in ("time", "share"))],
            table_rows,
            [("", 1), *((run.label, 2) for run in runs)] if not runs[0].alone else (),
        ),
        height=210 + 40 * len(runs),
        wide=True,
    )


def _share(parts: Mapping[str, float], name: str) -> float:
    return parts.get(name, 0.0) / max(sum(parts.values()), 1e-12)


def _cells(parts: Mapping[str, float], name: str) -> list[str]:
    if name not in parts:
        return [NOTHING, NOTHING]
    return [duration(parts[name]), percentage(_share(parts, name), 1)]


def _listed(runs: Sequence[Run]) -> str:
    return ", ".join(run.label for run in runs)
