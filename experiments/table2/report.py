"""The tables of `marglik_cifar10` beside the paper's numbers, from its JSON files alone."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.studies import mean_with_error, save_figure
from experiments.table2.figures import curves_figure, weight_decay_figure
from kfac_backend.files import write_file

__all__ = ["PAPER", "Setting", "gains", "load", "report", "write_report"]

# Eschenhagen et al. 2023, Table 2: test NLL and accuracy (%) of three seeds, by approach and
# augmentation; and seconds per update on an A100.
PAPER = {
    ("expand", False): ((0.422, 0.013), (88.89, 0.24)),
    ("expand", True): ((0.244, 0.004), (92.52, 0.12)),
    ("reduce", False): ((0.703, 0.012), (86.71, 0.13)),
    ("reduce", True): ((0.352, 0.008), (93.50, 0.06)),
}
PAPER_UPDATE = {"expand": (196, 22), "reduce": (99, 23)}
PRESETS = {"paper": "the paper's settings", "redux": "the predecessor's settings"}
NLL, ACCURACY, ECE = "test/cls/NLL", "test/cls/accuracy", "test/cal/ECE"
TEMPERED = "MAP, temperature-scaled"


class Setting(NamedTuple):
    """The settings that runs of different seeds share."""

    preset: str
    variant: str | None
    approach: str
    augment: bool


Runs = Mapping[Setting, Sequence[dict[str, Any]]]


def load(folder: Path) -> dict[Setting, list[dict[str, Any]]]:
    """Results below a protocol's folder by setting, sorted by seed.

    Raises:
        ValueError: if runs of one setting differ in more than their seeds.
    """
    runs: dict[Setting, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.rglob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        group = runs[Setting(*(found["config"][field] for field in Setting._fields))]
        if group and _apart_from_seed(group[0]) != _apart_from_seed(found):
            raise ValueError(
                f"{path} has other settings than {group[0]['config']['name']}, the same but for "
                "the seed; move one of them away."
            )
        group.append(found)
    for group in runs.values():
        group.sort(key=lambda found: found["config"]["seed"])
    return dict(sorted(runs.items(), key=lambda item: tuple(str(part) for part in item[0])))


def _apart_from_seed(found: dict[str, Any]) -> Any:
    settings = json.loads(json.dumps(found["settings"]))
    del settings["run"]["seed"]
    settings["prior"].pop("sigma_noise", None)  # of regression alone; early runs do not have it
    return settings, found["data"], found["num_data"], found["device"]


def write_report(folder: Path) -> str:
    """Write table.md and the figures of a protocol's results into its folder; returns the table.

    Raises:
        FileNotFoundError: if the folder has no result.
    """
    runs = load(folder)
    if not runs:
        raise FileNotFoundError(
            f"No result in {folder}; run python -m experiments.table2.marglik_cifar10 --protocol "
            f"{folder.name}."
        )
    text = report(runs)
    write_file(folder / "table.md", (text + "\n").encode())
    for preset in PRESETS:
        own = {s: found for s, found in runs.items() if s.preset == preset and s.variant is None}
        learned = {
            s: found
            for s, found in own.items()
            if s.approach != "fixed" and found[0]["curves"]["updates"]
        }
        if not own:
            continue
        title = f"{_data(own)}, {PRESETS[preset]}"
        save_figure(curves_figure(own, title), folder / f"curves_{preset}.png")
        if learned:
            save_figure(weight_decay_figure(learned, title), folder / f"weight_decay_{preset}.png")
    return text


def report(runs: Runs) -> str:
    """All tables as Markdown: mean ± standard error over seeds."""
    parts = [_described(runs)]
    for preset, words in PRESETS.items():
        own = {s: found for s, found in runs.items() if s.preset == preset and s.variant is None}
        if own:
            parts += [f"## {words[0].upper()}{words[1:]}", _main_table(own)]
            tables = gains(own), _calibrated(own), _updates(own), _predictives(own)
            parts += [table for table in tables if table]
    variants = _variants(runs)
    if variants:
        parts += ["## What the paper leaves open", variants]
    return "\n\n".join(parts)


def _described(runs: Runs) -> str:
    first = next(iter(runs.values()))[0]
    scale = first["settings"]
    devices = sorted({found["device"] for group in runs.values() for found in group})
    images = f"{first['num_data']} training images of {_data(runs)}"
    test = "all" if scale["max_test"] is None else scale["max_test"]
    return (
        f'# Table 2, protocol "{first["config"]["protocol"]}"\n\n'
        f"WRN-{scale['depth']}-{scale['widen_factor']} Fixup, {images}, {test} test images, "
        f"{scale['epochs']} epochs, an update every {scale['every']}; {', '.join(devices)}, torch "
        f"{first['versions']['torch']}, {first['config']['jobs']} runs at a time. Mean ± standard "
        "error over seeds, the paper's as printed; NLL in nats per image. The Laplace predictive "
        "and the evidence of the fixed weight decay are reduce's."
    )


def _main_table(runs: Runs) -> str:
    rows = [
        ("weight decay", "augmented", "NLL, MAP", "accuracy, MAP", "NLL, Laplace",
         "accuracy, Laplace", "paper: NLL", "paper: accuracy", "evidence / N", "seeds")
    ]  # fmt: skip
    for setting, found in runs.items():
        nll, accuracy = PAPER.get((setting.approach, setting.augment), (None, None))
        rows.append(
            (
                setting.approach,
                "yes" if setting.augment else "no",
                _mean(found, lambda r: r["metrics"]["MAP"][NLL], 3),
                _mean(found, lambda r: 100 * r["metrics"]["MAP"][ACCURACY], 2),
                _mean(found, lambda r: r["metrics"][_laplace(r)][NLL], 3),
                _mean(found, lambda r: 100 * r["metrics"][_laplace(r)][ACCURACY], 2),
                f"{nll[0]:.3f} ± {nll[1]:.3f}" if nll else "",
                f"{accuracy[0]:.2f} ± {accuracy[1]:.2f}" if accuracy else "",
                _mean(found, lambda r: r["evidence_per_example"], 3),
                str(len(found)),
            )
        )
    return _markdown(rows)


def gains(runs: Runs) -> str:
    """Table of the NLL with the learned weight decay minus the fixed one's, paired by seed."""
    rows = [("learned against fixed", "augmented", "NLL of the MAP, difference", "lower in")]
    for setting, found in runs.items():
        fixed = _by_seed(runs.get(setting._replace(approach="fixed"), ()))
        pairs = [(r, fixed[s]) for s, r in _by_seed(found).items() if s in fixed]
        if setting.approach == "fixed" or not pairs:
            continue
        differences = [
            one["metrics"]["MAP"][NLL] - other["metrics"]["MAP"][NLL] for one, other in pairs
        ]
        lower = sum(d < 0 for d in differences)
        rows.append(
            (
                setting.approach,
                "yes" if setting.augment else "no",
                _mean(differences, float, 3, sign="+"),
                f"{lower} of {len(differences)} seeds",
            )
        )
    if len(rows) < 2:
        return ""
    return (
        f"{_markdown(rows)}\n\nDifferences are paired by seed. Paired runs share the initial "
        "parameters, and the batches up to the first update."
    )


def _calibrated(runs: Runs) -> str:
    """The calibrated predictive beside the MAP at its best temperature, both on held-out images."""
    rows: list[tuple[str, ...]] = [
        ("weight decay", "augmented", "NLL, MAP", "NLL, temperature-scaled", "NLL, Laplace",
         "Laplace - temperature-scaled", "ECE, %: MAP", "temperature-scaled", "Laplace")
    ]  # fmt: skip
    for setting, found in runs.items():
        found = [r for r in found if TEMPERED in r["metrics"]]
        if not found:
            continue
        three = [lambda r: "MAP", lambda r: TEMPERED, _laplace]
        nlls = [_mean(found, lambda r, of=of: r["metrics"][of(r)][NLL], 3) for of in three]
        errors = [_mean(found, lambda r, of=of: 100 * r["metrics"][of(r)][ECE], 1) for of in three]
        differences = [r["metrics"][_laplace(r)][NLL] - r["metrics"][TEMPERED][NLL] for r in found]
        gain = _mean(differences, float, 4, sign="+")
        augmented = "yes" if setting.augment else "no"
        rows.append((setting.approach, augmented, *nlls, gain, *errors))
    if len(rows) < 2:
        return ""
    return (
        f"{_markdown(rows)}\n\nTemperature, and scale of the covariance, fitted on the held-out "
        f"{_share(runs)} of the training images."
    )


def _share(runs: Runs) -> str:
    """The share that was held out, the same for all runs of a protocol."""
    share = next(r["settings"].get("held_out", 0.1) for found in runs.values() for r in found)
    return "tenth" if share == 0.1 else f"{share:.0%}".replace("%", " %")


def _updates(runs: Runs) -> str:
    """Table of the seconds of an update's parts with expand and reduce, and their paired ratio."""
    rows: list[tuple[str, ...]] = [
        ("seconds of an update", "pass", "eigenvalues", "steps", "all", "paper (A100)")
    ]
    whole: dict[str, dict[Any, float]] = {}
    for approach, paper in PAPER_UPDATE.items():
        found = [
            r for s, group in runs.items() if s.approach == approach for r in group
            if r["seconds_per_update"]
        ]  # fmt: skip
        if found:
            parts = ("pass", "eigenvalues", "steps", "all")
            cells = [
                _mean(found, lambda r, part=p: r["seconds_per_update"][part], 2) for p in parts
            ]
            rows.append((approach, *cells, f"{paper[0]} ± {paper[1]}"))
            whole[approach] = {
                (r["config"]["augment"], r["config"]["seed"]): r["seconds_per_update"]["all"]
                for r in found
            }
    expand, reduce = whole.get("expand", {}), whole.get("reduce", {})
    ratios = [reduce[key] / expand[key] for key in reduce if key in expand]
    if not ratios:
        return _markdown(rows) if whole else ""
    paper = PAPER_UPDATE["reduce"][0] / PAPER_UPDATE["expand"][0]
    return (
        f"{_markdown(rows)}\n\nMedians of each run's updates. Reduce takes "
        f"{statistics.median(ratios):.2f} of expand's time (median of {len(ratios)} pairs; paper: "
        f"{paper:.2f})."
    )


def _predictives(runs: Runs) -> str:
    """Table of the test NLL of all predictives of the same posteriors, for runs with several."""
    several = {
        setting: [r for r in found if sum(n.startswith("Laplace") for n in r["metrics"]) > 1]
        for setting, found in runs.items()
    }
    several = {setting: found for setting, found in several.items() if found}
    if not several:
        return ""
    names = list(next(iter(several.values()))[0]["metrics"])
    rows = [("test NLL", "augmented", *names)]
    for setting, found in several.items():
        cells = [_mean(found, lambda r, name=n: r["metrics"][name][NLL], 3) for n in names]
        rows.append((setting.approach, "yes" if setting.augment else "no", *cells))
    seeds = sorted({r["config"]["seed"] for found in several.values() for r in found})
    return f"{_markdown(rows)}\n\nSeed {', '.join(map(str, seeds))}."


def _variants(runs: Runs) -> str:
    """Table of each variant's change of the NLL, on the seeds that it shares with the preset."""
    rows = [
        ("variant", "weight decay", "augmented", "NLL, MAP", "difference", "NLL, Laplace",
         "difference", "seeds")
    ]  # fmt: skip
    for setting, found in runs.items():
        base = _by_seed(runs.get(setting._replace(variant=None), ()))
        pairs = [(r, base[s]) for s, r in _by_seed(found).items() if s in base]
        if setting.variant is None or not pairs:
            continue
        cells = []
        for of in (lambda r: r["metrics"]["MAP"][NLL], lambda r: r["metrics"][_laplace(r)][NLL]):
            cells.append(_mean([own for own, _ in pairs], of, 3))
            differences = [of(own) - of(other) for own, other in pairs]
            cells.append(_mean(differences, float, 3, sign="+"))
        name = f"{setting.variant} ({setting.preset})"
        augmented = "yes" if setting.augment else "no"
        rows.append((name, setting.approach, augmented, *cells, str(len(pairs))))
    return _markdown(rows) if len(rows) > 1 else ""


def _laplace(found: dict[str, Any]) -> str:
    """The name of the preset's own Laplace predictive, the first of all."""
    return next(name for name in found["metrics"] if name.startswith("Laplace"))


def _data(runs: Runs) -> str:
    return ", ".join(sorted({found["data"] for group in runs.values() for found in group}))


def _by_seed(found: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {r["config"]["seed"]: r for r in found}


def _mean(found: Sequence[Any], value: Callable[[Any], float], digits: int, sign: str = "") -> str:
    """Mean ± standard error; the mean alone for a single run."""
    return mean_with_error([value(r) for r in found], f"{{:{sign}.{digits}f}}")


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
