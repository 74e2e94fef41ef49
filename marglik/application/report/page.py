"""Render the sections of the report into one self-contained HTML file."""

import base64
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from kfac_backend.atomic_files import write_file
from kfac_backend.extras import extra
from marglik.application.report.charts import gain_charts
from marglik.application.report.contents import Run, read_runs
from marglik.application.report.sections import SECTIONS
from marglik.application.report.tables import NOTHING, duration, number
from marglik.application.run_folder import ALL, REPORT, run_folder_of

with extra("report"):
    from jinja2 import Environment, PackageLoader, StrictUndefined

COMPARISON = "comparison.html"
"""Report about several runs, next to the folder of the first run."""
DATE_FORMAT = "%Y-%m-%d %H:%M UTC"


def write_report(folders: Sequence[Path | str], output: Path | str | None = None) -> Path:
    """Write one HTML page about one or several runs, and return its path.

    The page contains everything, including its scripts, and makes no network request.

    Args:
        folders: folders of runs written by `marglik train`. Several runs are compared.
        output: file to write to, which is replaced if it exists. None selects report.html in the
            folder of a single run, or comparison.html next to the first folder of several runs.

    Raises:
        FileNotFoundError: a folder does not exist.
        ValueError: there is no folder, a folder is given twice or is not the folder of a run, a
            file in it is damaged, or the output is a folder or a file of a run.
    """
    runs = read_runs([Path(folder) for folder in folders])
    first = runs[0].folder
    path = first / REPORT if len(runs) == 1 else first.resolve().parent / COMPARISON
    path = path if output is None else Path(output)
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Pass a file such as {path / REPORT}.")
    if path.name in set(ALL) - {REPORT} and run_folder_of(path) is not None:
        raise ValueError(
            f"{path} is a file of a run, which a report never replaces. Pass another file."
        )
    write_file(path, _render(runs).encode("utf-8"))
    return path


def _render(runs: Sequence[Run]) -> str:
    """Return the HTML of the page. Autoescape and `Chart.json` escape all text of runs."""
    environment = Environment(
        loader=PackageLoader("marglik.application.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"kind": lambda block: type(block).__name__, "number": number}
    folder = files("marglik.application.report")
    # The charts need only the basic bundle of plotly.js, with scatters and bars. The whole library
    # would make a page of 1.9 MB packed and 4.9 MB unpacked. The page unpacks the bundle after the
    # browser has shown the text.
    plotly = zlib.compress((folder / "plotly/plotly-basic.min.js").read_bytes(), 9)
    return environment.get_template("page.html.j2").render(
        title=" and ".join(dict.fromkeys(run.name for run in runs)),
        runs=runs,
        facts=_facts(runs),
        gains=[gain_charts(run) for run in runs] if len(runs) == 1 else [],
        blocks={id: blocks_of(runs) for id, blocks_of in SECTIONS.items()},
        css=(folder / "page.css").read_text("utf-8"),
        scripts={name: (folder / f"{name}.js").read_text("utf-8") for name in ("theme", "page")},
        plotly=base64.b64encode(plotly).decode("ascii"),
        version=version("marglik"),
        written=datetime.now(UTC).strftime(DATE_FORMAT),
    )


def _facts(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return (name, value for each run) of the facts that at least one run has."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        results, scale = run.results, run.target_scale
        unfinished = ", unfinished" if run.epochs and not results else ""
        facts = {
            "Network": run.model,
            "Data": run.data,
            "Date of the run": f"{run.date.strftime(DATE_FORMAT)}{unfinished}",
            "Training examples": results and number(results.num_data),
            "Target": scale
            and "standardised for training, by mean "
            f"{number(scale[0])} and standard deviation {number(scale[1])}",
            "Epochs": str(run.epochs[-1].epoch) if run.epochs else None,
            "Log marginal likelihood": None,
            "Effective parameters": None,
            "Time": results and duration(results.seconds),
            "Folder": str(run.folder),
        }
        if results:
            evidence, tensors = results.evidence, results.weight_decay.values()
            per_example = number(evidence.final / results.num_data, 4)
            facts["Log marginal likelihood"] = f"{per_example} nats per example"
            effective = round(sum(tensor.effective_parameters for tensor in tensors))
            total = sum(tensor.parameters for tensor in tensors)
            facts["Effective parameters"] = f"{number(effective)} of {number(total)}"
            facts["Epochs"] = facts["Epochs"] and f"{facts['Epochs']} (kept: {evidence.epoch})"
        for name, value in facts.items():
            rows.setdefault(name, []).append(value or NOTHING)
    return [(name, values) for name, values in rows.items() if {*values} != {NOTHING}]
