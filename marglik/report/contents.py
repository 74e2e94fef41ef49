"""Run folders, read into plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from kfac_backend.files import parse_json
from marglik.report.formats import EVALUATION, POSTERIOR, RECORD, RESULTS, check_format
from marglik.report.options import flatten, run_labels
from marglik.storage import run_files
from marglik.storage.run_folder import RunFolder
from marglik.storage.yaml_text import check_yaml

__all__ = ["Layer", "Run", "read_run", "read_runs"]

MAIN_NAMES = (run_files.RESULTS, run_files.POSTERIOR, run_files.LOG, run_files.EVALUATION)
"""A folder with one of these files is a run; the first of them that exists gives its date."""
REMEDY = "Write it again with the marglik command that wrote the folder."


@dataclass(frozen=True)
class Layer:
    """A parameter tensor at the end of a run."""

    parameters: int
    effective: float | None
    """γ, the number of directions that the data determines."""
    weight_decay: float | None
    """T·δ/N."""


@dataclass(frozen=True)
class Run:
    """The content of a run folder; parts that do not exist are None or empty."""

    folder: Path
    results: dict[str, Any] | None
    records: list[dict[str, Any]]
    """The epochs and updates of the log, in order."""
    evaluation: dict[str, Any] | None
    posterior: dict[str, Any] | None
    options: dict[str, Any]
    """Dotted name -> value, from config.yaml or, without it, from results.json."""
    date: datetime
    """When the run's main file was last written (UTC)."""
    label: str = ""
    """Its name on a page with several runs."""
    position: int = 0
    """Its index among the runs of the page."""
    alone: bool = True
    """Whether it is the only run of the page."""

    @property
    def data(self) -> str | None:
        """Name of the data."""
        of_posterior = ((self.posterior or {}).get("data") or {}).get("name")
        named = (self.results or self.evaluation or {}).get("data") or of_posterior
        return named or _last_part(self.options.get("data.class_path"))

    @property
    def model(self) -> str | None:
        """Class of the network."""
        named = (self.results or {}).get("model")
        of_posterior = ((self.posterior or {}).get("model") or {}).get("class_path")
        return named or _last_part(of_posterior or self.options.get("model.class_path"))

    @property
    def name(self) -> str:
        """Network and data as far as they are known, or else the folder."""
        known = " on ".join(part for part in (self.model, self.data) if part)
        return known or self.folder.resolve().name

    @property
    def num_data(self) -> int | None:
        """N, the number of training examples."""
        return (self.results or self.posterior or {}).get("num_data")

    @property
    def num_positions(self) -> int | None:
        """Number of positions (tokens) that metrics are means over; None: over examples."""
        return (self.evaluation or {}).get("num_positions")

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The log's epochs."""
        return [record for record in self.records if record["kind"] == "epoch"]

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The log's updates of the hyperparameters."""
        return [record for record in self.records if record["kind"] == "update"]

    @property
    def evidence_per_example(self) -> float | None:
        """Log marginal likelihood of the update that was kept, divided by N (nats)."""
        kept = (self.results or {}).get("evidence", {}).get("kept")
        total = (self.posterior or {}).get("evidence") if kept is None else kept
        return total / self.num_data if total is not None and self.num_data else None

    @property
    def initial_weight_decay(self) -> float | None:
        """The weight decay that all groups start with."""
        rows = (self.results or {}).get("weight_decay", {}).values()
        first = next((row["initial"] for row in rows if "initial" in row), None)
        return self.options.get("prior.weight_decay") if first is None else first

    @property
    def temperature(self) -> float:
        """T of the likelihood, 1 if no file has it."""
        return (self.posterior or {}).get("temperature", 1.0)

    @property
    def is_fit(self) -> bool:
        """Whether it is a posterior that was fitted to a trained network, which has no log."""
        return self.results is None and self.posterior is not None and not self.records

    @property
    def layers(self) -> dict[str, Layer]:
        """Tensor name -> its final state; from the input to the output."""
        if self.results is not None:
            return {
                name: Layer(row["parameters"], row.get("effective_parameters"), row.get("learned"))
                for name, row in self.results.get("weight_decay", {}).items()
            }
        if self.posterior is None:
            return {}
        delta, gamma = self.posterior["prior_precision"], self.posterior["effective_parameters"]
        scale = self.temperature / self.posterior["num_data"]
        return {
            name: Layer(count, gamma.get(name), delta[name] * scale if name in delta else None)
            for name, count in self.posterior["parameters"].items()
        }


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of a page, each with a label that distinguishes it from the others.

    Raises:
        ValueError: no folder, a folder twice, or one that `read_run` cannot read.
        FileNotFoundError: a folder that is not there.
    """
    if not folders:
        raise ValueError("A report needs the folder of a run; pass one or several.")
    resolved = [folder.resolve() for folder in folders]
    twice = [str(f) for f, r in zip(folders, resolved, strict=True) if resolved.count(r) > 1]
    if twice:
        raise ValueError(f"{twice[0]} is given twice (as {', '.join(twice)}); pass it once.")
    runs = [read_run(folder) for folder in folders]
    labels = run_labels(folders, [run.options for run in runs])
    return [
        replace(run, label=label, position=position, alone=len(runs) == 1)
        for position, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]


def read_run(folder: Path) -> Run:
    """The content of a run folder.

    Args:
        folder: a folder that `marglik train`, `fit` or `evaluate` has written.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder is not that of a run, or a file in it was altered, or has an unknown
            version.
    """
    if not folder.exists():
        raise FileNotFoundError(
            f"{folder} does not exist; pass the folder of a run, which marglik train has written."
        )
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; pass the folder of the run that it is in.")
    main = next((folder / name for name in MAIN_NAMES if (folder / name).is_file()), None)
    if main is None:
        raise ValueError(
            f"{folder} is not the folder of a run: it has none of {', '.join(MAIN_NAMES)}. Pass "
            "the folder that marglik train wrote to (--output)."
        )
    run = RunFolder(folder)
    results, posterior, options = (
        _json(run, run_files.RESULTS, RESULTS),
        run.posterior(),
        _options(run),
    )
    if posterior is not None:
        check_format(posterior, POSTERIOR, folder / run_files.POSTERIOR)
    return Run(
        folder=folder,
        results=results,
        records=_records(run),
        evaluation=_json(run, run_files.EVALUATION, EVALUATION),
        posterior=posterior,
        options=_options_of(results) if options is None else options,
        date=datetime.fromtimestamp(main.stat().st_mtime, UTC),
    )


def _json(run: RunFolder, name: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    content = run.read(name)
    if content is None:
        return None
    parsed = _parse(content, str(run.path / name))
    check_format(parsed, schema, run.path / name)
    return parsed


def _records(run: RunFolder) -> list[dict[str, Any]]:
    path, records = run.path / run_files.LOG, []
    for number, line in enumerate((run.read(run_files.LOG) or b"").splitlines(), start=1):
        record = _parse(line, f"{path}, line {number}")
        check_format(record, RECORD, path, number)
        records.append(record)
    return records


def _options(run: RunFolder) -> dict[str, Any] | None:
    content = run.read(run_files.CONFIG)
    if content is None:
        return None
    path = run.path / run_files.CONFIG
    try:
        check_yaml(content)
        options = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}. {REMEDY}") from error
    if not isinstance(options, dict):
        raise ValueError(
            f"{path} holds {type(options).__name__}, not a mapping of options. {REMEDY}"
        )
    return flatten(options)


def _options_of(results: dict[str, Any] | None) -> dict[str, Any]:
    """The options in results.json, by the names that they have in config.yaml."""
    flat = flatten((results or {}).get("config", {}))
    return {name.removeprefix("run."): value for name, value in flat.items()}


def _parse(text: bytes, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}. {REMEDY}") from error


def _last_part(class_path: Any) -> str | None:
    return str(class_path).rsplit(".", 1)[-1] if class_path else None
