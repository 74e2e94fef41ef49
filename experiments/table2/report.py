"""The tables of `marglik_cifar10` beside the paper's numbers, from its JSON files alone."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.studies import markdown, mean_with_error
from kfac_backend.files import write_file

__all__ = ["PAPER", "Setting", "gains", "load", "report", "write_report"]

# Eschenhagen et al. 2023, Table 2: test NLL and accuracy (%) of three seeds, by approach and
# augmentation; and seconds per update on an A100.
PAPER = {
    ("expand", False): ("0.422 ± 0.013", "88.89 ± 0.24"),
    ("expand", True): ("0.244 ± 0.004", "92.52 ± 0.12"),
    ("reduce", False): ("0.703 ± 0.012", "86.71 ± 0.13"),
    ("reduce", True): ("0.352 ± 0.008", "93.50 ± 0.06"),
}
PAPER_UPDATE = {"expand": (196, 22), "reduce": (99, 23)}
PRESETS = {"paper": "The paper's settings", "redux": "The predecessor's settings"}
NLL, ACCURACY, ECE = "test/cls/NLL", "test/cls/accuracy", "test/cal/ECE"
TEMPERED = "MAP, temperature-scaled"
Result = dict[str, Any]


class Setting(NamedTuple):
    """The settings that runs of different seeds share."""

    preset: str
    approach: str
    augment: bool

    @property
    def cells(self) -> tuple[str, str]:
        """The first two of a table's row."""
        return self.approach, "yes" if self.augment else "no"


Runs = Mapping[Setting, Sequence[Result]]


def load(folder: Path) -> dict[Setting, list[Result]]:
    """Results below a protocol's folder by setting, sorted by seed.

    Raises:
        ValueError: if runs of one setting differ in more than their seeds.
    """
    runs: dict[Setting, list[Result]] = defaultdict(list)
    for path in sorted(folder.rglob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        group = runs[Setting(*(found["config"][field] for field in Setting._fields))]
        if group and _apart_from_seed(group[0]) != _apart_from_seed(found):
            raise ValueError(
                f"{path} has other settings than {group[0]['config']['name']}, the same but for "
                "the seed; move one of them away."
            )
        group.append(found)
    return dict(sorted(runs.items()))


def _apart_from_seed(found: Result) -> Any:
    settings = json.loads(json.dumps(found["settings"]))
    del settings["run"]["seed"]
    settings["prior"].pop("sigma_noise", None)  # of regression alone; early runs do not have it
    return settings, found["data"], found["num_data"], found["device"]


def write_report(folder: Path) -> str:
    """Write table.md of a protocol's results into its folder, and return it."""
    text = report(load(folder))
    write_file(folder / "table.md", f"{text}\n".encode())
    return text


def report(runs: Runs) -> str:
    """All tables as Markdown: mean ± standard error over seeds."""
    first = next(iter(runs.values()))[0]
    everything = [found for group in runs.values() for found in group]
    data = ", ".join(sorted({found["data"] for found in everything}))
    devices = ", ".join(sorted({found["device"] for found in everything}))
    scale = first["settings"]
    parts = [
        f'# Table 2, protocol "{first["config"]["protocol"]}"',
        f"WRN-{scale['depth']}-{scale['widen_factor']} Fixup, {first['num_data']} training images "
        f"of {data}, {scale['max_test'] or 'all'} test images, {scale['epochs']} epochs, an update "
        f"every {scale['every']}; {devices}, torch {first['versions']['torch']}, "
        f"{first['config']['jobs']} runs at a time. Mean ± standard error over seeds, the paper's "
        "as printed; NLL in nats per image. The Laplace predictive and the evidence of the fixed "
        "weight decay are reduce's.",
    ]
    for preset, title in PRESETS.items():
        own = {setting: found for setting, found in runs.items() if setting.preset == preset}
        if own:
            tables = _main_table(own), gains(own), _calibrated(own), _updates(own), _several(own)
            parts += [f"## {title}", *(table for table in tables if table)]
    return "\n\n".join(parts)


def _main_table(runs: Runs) -> str:
    rows: list[Sequence[str]] = [
        ("weight decay", "augmented", "NLL, MAP", "accuracy, MAP", "NLL, Laplace",
         "accuracy, Laplace", "paper: NLL", "paper: accuracy", "evidence / N", "seeds")
    ]  # fmt: skip
    for setting, found in runs.items():
        own = [r["metrics"]["MAP"] for r in found], [r["metrics"][_laplace(r)] for r in found]
        cells = [
            cell
            for metrics in own
            for cell in (
                mean_with_error([m[NLL] for m in metrics]),
                mean_with_error([100 * m[ACCURACY] for m in metrics], "{:.2f}"),
            )
        ]
        paper = PAPER.get((setting.approach, setting.augment), ("", ""))
        evidence = mean_with_error([r["evidence_per_example"] for r in found])
        rows.append((*setting.cells, *cells, *paper, evidence, str(len(found))))
    return markdown(rows)


def gains(runs: Runs) -> str:
    """Table of the NLL with the learned weight decay minus the fixed one's, paired by seed."""
    rows: list[Sequence[str]] = [
        ("learned against fixed", "augmented", "NLL of the MAP, difference", "lower in")
    ]
    for setting, found in runs.items():
        fixed = _by_seed(runs.get(setting._replace(approach="fixed"), ()))
        differences = [
            result["metrics"]["MAP"][NLL] - fixed[seed]["metrics"]["MAP"][NLL]
            for seed, result in _by_seed(found).items()
            if seed in fixed and setting.approach != "fixed"
        ]
        if differences:
            lower = f"{sum(d < 0 for d in differences)} of {len(differences)} seeds"
            rows.append((*setting.cells, mean_with_error(differences, "{:+.3f}"), lower))
    return _with_note(
        rows,
        "Differences are paired by seed. Paired runs share the initial parameters, and the batches "
        "up to the first update.",
    )


def _calibrated(runs: Runs) -> str:
    """The calibrated predictive beside the MAP at its best temperature, both on held-out images."""
    rows: list[Sequence[str]] = [
        ("weight decay", "augmented", "NLL, MAP", "NLL, temperature-scaled", "NLL, Laplace",
         "Laplace - temperature-scaled", "ECE, %: MAP", "temperature-scaled", "Laplace")
    ]  # fmt: skip
    share = 0.1
    for setting, found in runs.items():
        found = [r for r in found if TEMPERED in r["metrics"]]
        if not found:
            continue
        share = found[0]["settings"].get("held_out", 0.1)
        names: list[Callable[[Result], str]] = [lambda r: "MAP", lambda r: TEMPERED, _laplace]
        nlls = [[r["metrics"][of(r)][NLL] for r in found] for of in names]
        errors = [[100 * r["metrics"][of(r)][ECE] for r in found] for of in names]
        gain = [laplace - tempered for tempered, laplace in zip(*nlls[1:], strict=True)]
        rows.append(
            (
                *setting.cells,
                *map(mean_with_error, nlls),
                mean_with_error(gain, "{:+.4f}"),
                *(mean_with_error(values, "{:.1f}") for values in errors),
            )
        )
    part = "tenth" if share == 0.1 else f"{share:.0%}".replace("%", " %")
    return _with_note(
        rows,
        f"Temperature, and scale of the covariance, fitted on the held-out {part} of the training "
        "images.",
    )


def _updates(runs: Runs) -> str:
    """Table of the seconds of an update's parts with expand and reduce, and their paired ratio."""
    parts = ("pass", "eigenvalues", "steps", "all")
    rows: list[Sequence[str]] = [("seconds of an update", *parts, "paper (A100)")]
    whole: dict[str, dict[Any, float]] = {}
    for approach, paper in PAPER_UPDATE.items():
        found = [
            r for s, group in runs.items() if s.approach == approach for r in group
            if r["seconds_per_update"]
        ]  # fmt: skip
        if found:
            cells = [
                mean_with_error([r["seconds_per_update"][part] for r in found], "{:.2f}")
                for part in parts
            ]
            rows.append((approach, *cells, f"{paper[0]} ± {paper[1]}"))
        whole[approach] = {
            (r["config"]["augment"], r["config"]["seed"]): r["seconds_per_update"]["all"]
            for r in found
        }
    ratios = [
        seconds / whole["expand"][key]
        for key, seconds in whole["reduce"].items()
        if key in whole["expand"]
    ]
    if not ratios:
        return _with_note(rows, "Medians of each run's updates.")
    paper = PAPER_UPDATE["reduce"][0] / PAPER_UPDATE["expand"][0]
    return _with_note(
        rows,
        "Medians of each run's updates. Reduce takes "
        f"{statistics.median(ratios):.2f} of expand's time (median of {len(ratios)} pairs; paper: "
        f"{paper:.2f}).",
    )


def _several(runs: Runs) -> str:
    """Table of the test NLL of all predictives of the same posteriors, for runs with several."""
    several = {
        setting: [r for r in found if sum(n.startswith("Laplace") for n in r["metrics"]) > 1]
        for setting, found in runs.items()
    }
    several = {setting: found for setting, found in several.items() if found}
    if not several:
        return ""
    names = list(next(iter(several.values()))[0]["metrics"])
    rows: list[Sequence[str]] = [("test NLL", "augmented", *names)]
    for setting, found in several.items():
        cells = [mean_with_error([r["metrics"][name][NLL] for r in found]) for name in names]
        rows.append((*setting.cells, *cells))
    seeds = sorted({r["config"]["seed"] for found in several.values() for r in found})
    return _with_note(rows, f"Seed {', '.join(map(str, seeds))}.")


def _with_note(rows: Sequence[Sequence[str]], note: str) -> str:
    """The table and a sentence below it; nothing for a table without rows."""
    return f"{markdown(rows)}\n\n{note}" if len(rows) > 1 else ""


def _laplace(found: Result) -> str:
    """The name of the preset's own Laplace predictive, the first of all."""
    return next(name for name in found["metrics"] if name.startswith("Laplace"))


def _by_seed(found: Iterable[Result]) -> dict[int, Result]:
    return {r["config"]["seed"]: r for r in found}
