"""Read the folders of runs into records, from which the report is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kfac_backend.extras import extra
from marglik.application.provenance import check_yaml
from marglik.application.records import (
    EpochRecord,
    Evaluation,
    PredictiveRecord,
    Results,
    UpdateRecord,
    from_json,
)
from marglik.application.run_folder import (
    CONFIG,
    EVALUATION,
    LOG,
    RESULTS,
    read_evaluation,
    read_log,
    read_results,
)
from marglik.storage.checkpoint import leaves

with extra("report"):
    import yaml

MAIN_NAMES = (RESULTS, LOG, EVALUATION)
"""A folder with one of these files is a run. The first existing file determines its date."""

MISSING = "(not set)"
"""Text for an option that only other runs have."""
WITHOUT_EFFECT = {"output", "overwrite", "progress", "config"}
"""Options that do not affect the numbers of a run."""


@dataclass(frozen=True)
class Run:
    """The content of a run folder."""

    folder: Path
    results: Results | None
    epochs: list[EpochRecord]
    """Epochs in the log; empty for a posterior that was fitted to a trained network."""
    updates: list[UpdateRecord]
    """Updates of the hyperparameters in the log."""
    evaluation: Evaluation | None
    options: dict[str, Any]
    """Dotted name -> value, from config.yaml."""
    date: datetime
    """Time of the last change of the run's main file (UTC)."""
    label: str = ""
    """Name of the folder on a page with several runs; empty for the only run of a page."""
    style: int = 0
    """Index among the runs of the page, which selects colour and symbol."""

    @property
    def data(self) -> str | None:
        """Name of the data."""
        record = self.results or self.evaluation
        return record.data if record else _last_part(self.options.get("data.class_path"))

    @property
    def model(self) -> str | None:
        """Class of the network."""
        named = _last_part(self.options.get("model.class_path"))
        return self.results.model if self.results else named

    @property
    def target_scale(self) -> list[float] | None:
        """Mean and standard deviation by which targets were standardised for training, or None."""
        record = self.results or self.evaluation
        return record.target_scale if record else None

    @property
    def name(self) -> str:
        """Network and data, if they are known, otherwise the name of the folder."""
        names = " on ".join(part for part in (self.model, self.data) if part)
        return names or self.folder.resolve().name

    def titled(self, title: str) -> str:
        """Return a title, with the label of the run if the page has several runs."""
        return f"{self.label}: {title}" if self.label else title


@dataclass(frozen=True)
class Predictive:
    """A predictive of a run, shown as a curve or column."""

    run: Run
    name: str
    record: PredictiveRecord
    label: str = ""
    """Label in its chart."""
    place: int = 0
    """Index among the names of all predictives."""

    @property
    def chart(self) -> str:
        """Title of its chart. With several runs, a chart compares runs, otherwise predictives."""
        return self.name if self.run.label else "All predictives"

    @property
    def style(self) -> int:
        """Index of its colour and symbol."""
        return self.run.style if self.run.label else self.place


def predictives(runs: Sequence[Run]) -> list[Predictive]:
    """Return the predictives in evaluation.json."""
    records = [
        (run, name, record)
        for run in runs
        if run.evaluation is not None
        for name, record in run.evaluation.predictives.items()
    ]
    places = {name: i for i, name in enumerate(dict.fromkeys(name for _, name, _ in records))}
    return [
        Predictive(run, name, record, run.label or name, places[name])
        for run, name, record in records
    ]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs of a page, with different labels if there are several."""
    if not folders or len({folder.resolve() for folder in folders}) < len(folders):
        names = ", ".join(map(str, folders)) or "none"
        raise ValueError(
            f"The folders {names} are not different runs. Pass one or several folders, each once."
        )
    names = [folder.resolve().name for folder in folders]
    names = names if len({*names}) == len(names) else [str(folder) for folder in folders]
    labels = names if len(folders) > 1 else [""]
    return [
        replace(_read_run(folder), label=label, style=position)
        for position, (folder, label) in enumerate(zip(folders, labels, strict=True))
    ]


def _read_run(folder: Path) -> Run:
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist. Pass a folder written by marglik train.")
    main = next((folder / name for name in MAIN_NAMES if (folder / name).is_file()), None)
    if main is None:
        raise ValueError(
            f"{folder} is not the folder of a run: it contains none of {', '.join(MAIN_NAMES)}. "
            "Pass the folder that marglik train wrote to (--output)."
        )
    results, lines, config = read_results(folder), read_log(folder), folder / CONFIG
    try:
        text = config.read_text("utf-8") if config.is_file() else "{}"
        check_yaml(text)
        options = yaml.safe_load(text)
    except (ValueError, RecursionError, OverflowError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())  # remove line breaks
        raise ValueError(f"{config} cannot be read: {why}. Run the command again.") from error
    return Run(
        folder=folder,
        results=results,
        epochs=_records(folder, EpochRecord, lines, "epoch"),
        updates=_records(folder, UpdateRecord, lines, "update"),
        evaluation=read_evaluation(folder),
        options=leaves(options),
        date=datetime.fromtimestamp(main.stat().st_mtime, UTC),
    )


def _records(
    folder: Path, of_type: type[Any], lines: Sequence[dict[str, Any]], kind: str
) -> list[Any]:
    names = {field.name for field in fields(of_type)}
    own = [line for line in lines if line["kind"] == kind]
    try:
        return [from_json(of_type, {k: line[k] for k in names & line.keys()}) for line in own]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}: another version of marglik wrote the log ({error}). Train again, or write "
            "the report with that version."
        ) from error


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return names of options that differ between runs, in order of their first appearance.

    A missing option counts as null.
    """
    names = dict.fromkeys(name for one in options for name in one)
    return [
        name
        for name in names
        if name not in WITHOUT_EFFECT and len({repr(one.get(name)) for one in options}) > 1
    ]


def _last_part(class_path: Any) -> str | None:
    return str(class_path).rsplit(".", 1)[-1] if class_path else None
