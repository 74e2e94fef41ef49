"""Runs as a page needs them: their folders read into plain data.

All that the page relies on in a run's files. They may hold more, and lack what is in brackets:

- results.json: data, model, num_data, metrics {predictive: {key: value}}, [intervals, differences,
  evidence {kept, epoch}, weight_decay {tensor: {parameters, [initial, learned,
  effective_parameters]}}, suspicious_labels {unknown} or {judged, number, agreement, examples
  [{index, label, predicted, score, [image]}]}, config, seconds, seconds_beside, device, threads,
  ranks, python, versions]
- log.jsonl: records of kind "epoch" with epoch, loss, seconds, [objective]; of kind "update" with
  epoch, evidence_per_example, weight_decay, seconds {part: value}, [evidence_before]
- evaluation.json: what `marglik.prediction.evaluation_record.evaluate` returns
- posterior.json: prior_precision, num_data, effective_parameters, parameters, [temperature,
  evidence, calibrations, model {class_path}, data {name}, device, threads, python, versions]
- config.yaml: options
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from kfac_backend.files import parse_json
from marglik.storage.record_file import POSTERIOR
from marglik.storage.run_folder import CONFIG, EVALUATION, LOG, RESULTS, RunFolder, read_log

__all__ = ["MISSING", "Layer", "Predictive", "Run", "differing", "predictives", "read_runs"]

MAIN_NAMES = (RESULTS, POSTERIOR, LOG, EVALUATION)
"""A folder with one of these files is a run; the first of them that exists gives its date."""
EVALUATION_FORMAT = {"format": "marglik.evaluation", "version": 1}

MISSING = "(not set)"
"""Text for an option that a run does not have, but another has."""
WITHOUT_EFFECT = {"output", "overwrite", "progress", "config"}
"""Options that do not affect the numbers of a run."""
MOST_IN_LABEL, LONGEST_LABEL = 3, 48


@dataclass(frozen=True)
class Layer:
    """A parameter tensor at the end of a run; None where the run does not say."""

    parameters: int
    effective: float | None
    """γ, the number of directions that the data determines."""
    weight_decay: float | None
    """T·δ/N."""


@dataclass(frozen=True)
class Run:
    """The content of a run folder; parts that do not exist are empty."""

    folder: Path
    results: dict[str, Any]
    epochs: list[dict[str, Any]]
    """The log's epochs."""
    updates: list[dict[str, Any]]
    """The log's updates of the hyperparameters."""
    evaluation: dict[str, Any]
    posterior: dict[str, Any]
    options: dict[str, Any]
    """Dotted name -> value, from config.yaml or, without it, from results.json."""
    date: datetime
    """When the run's main file was last written (UTC)."""
    label: str = ""
    """Its name on a page with several runs."""
    style: int = 0
    """Its index among the runs of the page: the position of its colour and symbol."""
    alone: bool = True
    """Whether it is the only run of the page."""

    @property
    def data(self) -> str | None:
        """Name of the data."""
        named = self.results.get("data") or self.evaluation.get("data")
        named = named or (self.posterior.get("data") or {}).get("name")
        return named or _last_part(self.options.get("data.class_path"))

    @property
    def model(self) -> str | None:
        """Class of the network."""
        path = (self.posterior.get("model") or {}).get("class_path")
        path = path or self.options.get("model.class_path")
        return self.results.get("model") or _last_part(path)

    @property
    def name(self) -> str:
        """Network and data as far as they are known, or else the folder."""
        known = " on ".join(part for part in (self.model, self.data) if part)
        return known or self.folder.resolve().name

    @property
    def num_data(self) -> int | None:
        """N, the number of training examples."""
        return (self.results or self.posterior).get("num_data")

    @property
    def evidence_per_example(self) -> float | None:
        """Log marginal likelihood of the update that was kept, divided by N (nats)."""
        kept = self.results.get("evidence", {}).get("kept", self.posterior.get("evidence"))
        return kept / self.num_data if kept is not None and self.num_data else None

    @property
    def initial_weight_decay(self) -> float | None:
        """The weight decay that all groups start with."""
        rows = self.results.get("weight_decay", {}).values()
        of_options = self.options.get("prior.weight_decay")
        return next((row["initial"] for row in rows if "initial" in row), of_options)

    @property
    def temperature(self) -> float:
        """T of the likelihood, 1 if no file has it."""
        return self.posterior.get("temperature", 1.0)

    @property
    def is_fit(self) -> bool:
        """Whether it is a posterior that was fitted to a trained network, which has no log."""
        return bool(self.posterior) and not (self.results or self.epochs or self.updates)

    @property
    def layers(self) -> dict[str, Layer]:
        """Tensor name -> its final state; from the input to the output."""
        if self.results or not self.posterior:
            return {
                name: Layer(row["parameters"], row.get("effective_parameters"), row.get("learned"))
                for name, row in self.results.get("weight_decay", {}).items()
            }
        delta, gamma = self.posterior["prior_precision"], self.posterior["effective_parameters"]
        scale = self.temperature / self.posterior["num_data"]
        return {
            name: Layer(count, gamma.get(name), delta[name] * scale if name in delta else None)
            for name, count in self.posterior["parameters"].items()
        }


@dataclass(frozen=True)
class Predictive:
    """A predictive of a run, as one of several curves or columns."""

    run: Run
    name: str
    content: Mapping[str, Any]
    """Its entry in evaluation.json; of results.json only metrics and intervals."""
    label: str = ""
    """What tells it apart in its chart."""
    place: int = 0
    """Its index among the names of all predictives."""

    @property
    def chart(self) -> str:
        """The title of its chart: all predictives of one run share a chart, or all runs do."""
        return "All predictives" if self.run.alone else self.name

    @property
    def style(self) -> int:
        """The position of its colour and symbol."""
        return self.place if self.run.alone else self.run.style


def predictives(runs: Sequence[Run], key: str = "metrics") -> list[Predictive]:
    """The predictives in evaluation.json that have this part."""
    found = [(run, *item) for run in runs for item in run.evaluation.get("predictives", {}).items()]
    places = {name: i for i, name in enumerate(dict.fromkeys(name for _, name, _ in found))}
    return [
        Predictive(run, name, content, name if run.alone else run.label, places[name])
        for run, name, content in found
        if content.get(key)
    ]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of a page, each with a label that distinguishes it from the others.

    Raises:
        ValueError: no folder, a folder twice, one that is not of a run, or a damaged file in it.
        FileNotFoundError: a folder that is not there.
    """
    if not folders:
        raise ValueError("A report needs the folder of a run; pass one or several.")
    for folder, times in Counter(folder.resolve() for folder in folders).items():
        if times > 1:
            raise ValueError(f"{folder} is given {times} times; pass it once.")
    runs = [_read_run(folder) for folder in folders]
    labels = _labels(folders, [run.options for run in runs])
    return [
        replace(run, label=label, style=position, alone=len(runs) == 1)
        for position, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]


def _read_run(folder: Path) -> Run:
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        error = ValueError if folder.exists() else FileNotFoundError
        raise error(f"{folder} {problem}; pass the folder of a run, which marglik train writes.")
    main = next((folder / name for name in MAIN_NAMES if (folder / name).is_file()), None)
    if main is None:
        raise ValueError(
            f"{folder} is not the folder of a run: it has none of {', '.join(MAIN_NAMES)}. Pass "
            "the folder that marglik train wrote to (--output)."
        )
    run, records = RunFolder(folder), read_log(folder)
    results, evaluation = (_parsed(run, n) for n in (RESULTS, EVALUATION))
    version = {key: evaluation.get(key) for key in EVALUATION_FORMAT}
    if evaluation and version != EVALUATION_FORMAT:
        raise ValueError(
            f"{folder / EVALUATION} is {version}, and this marglik reads "
            f"{EVALUATION_FORMAT}. Write it again: marglik evaluate {folder}."
        )
    options = _flat(_parsed(run, CONFIG)) or {
        name.removeprefix("run."): value for name, value in _flat(results.get("config", {})).items()
    }
    return Run(
        folder=folder,
        results=results,
        epochs=[record for record in records if record["kind"] == "epoch"],
        updates=[record for record in records if record["kind"] == "update"],
        evaluation=evaluation,
        posterior=run.posterior() or {},
        options=options,
        date=datetime.fromtimestamp(main.stat().st_mtime, UTC),
    )


def _parsed(run: RunFolder, name: str) -> dict[str, Any]:
    """The content of a JSON or YAML file, verified by its sum; empty if there is none."""
    content = run.read(name)
    if content is None:
        return {}
    try:
        found = yaml.safe_load(content) if name.endswith(".yaml") else parse_json(content)
    except (ValueError, RecursionError, OverflowError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())  # in one line
        raise ValueError(f"{run.path / name} cannot be read: {why}. Run it again.") from error
    return found or {}


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options as a flat mapping with dotted names; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the options that differ between runs, in order of their first appearance.

    An option that a run lacks counts as null: options that are not set are null.
    """
    names = dict.fromkeys(name for one in options for name in one)
    return [
        name
        for name in names
        if name not in WITHOUT_EFFECT and len({repr(one.get(name)) for one in options}) > 1
    ]


def _labels(folders: Sequence[Path], options: Sequence[Mapping[str, Any]]) -> list[str]:
    """A label for each run: the options in which it differs, or else its folder.

    An option with a word as its value is shown by the value ("expand", "reduce"), others with their
    name ("seed 1"). Folders are used if more than three options differ, or if two runs would get
    the same label.
    """
    names = differing(options)
    # Where a class differs, its own arguments need not be said.
    of_classes = tuple(f"{n.removesuffix('class_path')}init_args." for n in names if "class_" in n)
    names = [name for name in names if not name.startswith(of_classes)]

    def said(name: str, value: Any) -> str:
        if name.endswith("class_path"):
            return str(_last_part(value))
        is_word = isinstance(value, str) and value[:1].isalpha()
        return value if is_word else f"{name} {'null' if value is None else value}"

    labels = [", ".join(said(n, one.get(n, MISSING)) for n in names) for one in options]
    is_short = len(names) <= MOST_IN_LABEL and max(map(len, labels)) <= LONGEST_LABEL
    for found in (labels if is_short else [], [folder.resolve().name for folder in folders]):
        if len(set(found)) == len(folders) and all(found):
            return found
    return [str(folder) for folder in folders]


def _last_part(class_path: Any) -> str | None:
    return str(class_path).rsplit(".", 1)[-1] if class_path else None
