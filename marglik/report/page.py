"""The page: sections rendered into one self-contained HTML file."""

import base64
import hashlib
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kfac_backend.files import write_file
from marglik.report.contents import Run, read_runs
from marglik.report.evaluation_sections import (
    entropy_section,
    errors_section,
    options_section,
    reliability_section,
    shift_section,
    uncertain_section,
    versions_section,
)
from marglik.report.sections import (
    curves_section,
    effective_section,
    summary_section,
    time_section,
    weight_decay_section,
)
from marglik.report.tables import NOTHING, duration, number
from marglik.storage.run_files import REPORT

__all__ = ["write_report"]

SECTIONS = (
    summary_section,
    curves_section,
    weight_decay_section,
    effective_section,
    time_section,
    reliability_section,
    errors_section,
    entropy_section,
    shift_section,
    uncertain_section,
    options_section,
    versions_section,
)
DATE_FORMAT = "%Y-%m-%d %H:%M UTC"


def write_report(folders: Sequence[Path | str], output: Path | str | None = None) -> Path:
    """Write one HTML page about one or several runs; returns its path.

    The page contains all that it shows, including its scripts, and makes no network request.

    Args:
        folders: folders of runs that `marglik train` or `marglik fit` has written; several are
            compared.
        output: the file to write, replaced if it exists; None writes report.html into the first
            folder.

    Raises:
        FileNotFoundError: a folder that does not exist.
        ValueError: no folder, a folder given twice, a folder that is not of a run, a damaged file
            in it, or an output that is a folder.
    """
    runs = read_runs([Path(folder) for folder in folders])
    path = runs[0].folder / REPORT if output is None else Path(output)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; pass a file such as {path / REPORT}.")
    page = render(runs)
    # As bytes: newlines must not be translated, since the page has the hashes of its scripts.
    write_file(path, page.encode("utf-8"))
    return path


def render(runs: Sequence[Run]) -> str:
    """The page's HTML."""
    environment = Environment(
        loader=PackageLoader("marglik.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    scripts = {"theme": _inline(_source("theme.js")), "page": _inline(_source("page.js"))}
    # The basic bundle of plotly.js, since the charts need only scatters and bars. Measured in
    # Chromium on two x86-64 cores, a page with 17 charts: with the whole plotly.js 4.9 MB, drawn
    # after 2.6 s; with the basic bundle 1.3 MB and 1.9 s; deflated, as here, 0.7 MB and 1.7 s, with
    # the text visible after 0.3 s. Smaller libraries lack what we need: 18 line charts take 0.2 MB
    # and 0.2 s with uPlot, which has no horizontal bars or dots; 0.3 MB and 0.6 s with Chart.js,
    # whose whiskers and zoom are plugins; and 0.9 s with plotly.
    plotly = _source("plotly/plotly-basic.min.js")  # page.js unpacks it; the CSP allows its hash
    return environment.get_template("page.html.j2").render(
        title=_title(runs),
        runs=runs,
        facts=_facts(runs),
        sections=[section(runs) for section in SECTIONS],
        css=_source("page.css"),
        scripts=scripts,
        plotly=_packed(plotly),
        script_hashes=[_hash(script) for script in (*scripts.values(), plotly)],
        version=version("marglik"),
        written=datetime.now(UTC).strftime(DATE_FORMAT),
    )


def _source(name: str) -> str:
    return (files("marglik.report") / name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """A script as an HTML parser reads it: without the end of its element, newlines normalised."""
    return script.replace("</script", "<\\/script").replace("\r\n", "\n").replace("\r", "\n")


def _packed(script: str) -> str:
    """A script, deflated and in base64: a third of its length."""
    return base64.b64encode(zlib.compress(script.encode("utf-8"), 9)).decode("ascii")


def _hash(script: str) -> str:
    """The source expression that allows a script in the page's content security policy."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _title(runs: Sequence[Run]) -> str:
    """The network and the data of the runs."""
    return " and ".join(dict.fromkeys(run.name for run in runs))


def _facts(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(name, value for each run) of the facts in the page's head, without those that no run has."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        for name, value in _facts_of(run).items():
            rows.setdefault(name, []).append(value)
    return [(name, values) for name, values in rows.items() if set(values) != {NOTHING}]


def _facts_of(run: Run) -> dict[str, str]:
    results: dict[str, Any] = run.results or {}
    layers = run.layers.values()
    total = sum(layer.parameters for layer in layers)
    effective = sum(layer.effective or 0.0 for layer in layers)
    of_all = f"{number(round(effective))} of {number(total)}"
    evidence = run.evidence_per_example
    in_nats = NOTHING if evidence is None else f"{number(evidence, 4)} nats per example"
    unfinished = ", unfinished" if run.records and not run.results else ""
    epochs = f"{run.epochs[-1]['epoch']}" if run.epochs else NOTHING
    kept = results.get("evidence", {}).get("epoch")
    return {
        "Network": run.model or NOTHING,
        "Data": run.data or NOTHING,
        "Date of the run": f"{run.date.strftime(DATE_FORMAT)}{unfinished}",
        "Training examples": number(run.num_data),
        "Epochs": epochs if kept is None or not run.epochs else f"{epochs} (kept: {kept})",
        "Log marginal likelihood": in_nats,
        "Effective parameters": of_all if total else NOTHING,
        "Time": duration(results.get("seconds")),
        "Ranks": number(results.get("ranks")),
        "Folder": str(run.folder),
    }
