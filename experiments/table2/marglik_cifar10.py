"""Table 2 of Eschenhagen et al. 2023: weight decay learned on CIFAR-10, WRN-16-4 Fixup.

The paper's numbers, test NLL and accuracy (%) over three seeds: expand .422 ± .013 and 88.89 ± .24
without augmentation, .244 ± .004 and 92.52 ± .12 with; reduce .703 ± .012 and 86.71 ± .13, .352 ±
.008 and 93.50 ± .06. An update takes 196 ± 22 s with expand and 99 ± 23 s with reduce (A100).

Each run is ``marglik train --config cifar10_paper`` with a mode, or with the initial weight decay
kept ("fixed", whose posterior is reduce's). Three protocols: "full" is the paper's; "redux" starts
as the code of its predecessor does, with a tenth of the weight decay and 20 epochs without updates
(``cifar10_redux``); "scaled" has fewer images and epochs and a smaller network, the same algorithm
and settings, and takes two cores less than two hours. "Sampled" updates see a random part of the
images, as they do by default (``curvature_from="auto"``, which needs ``keep="last"``); the paper's
see all of them, and the best one is kept. Images are CIFAR-10 (JPEG) where there is an
archive, else CIFAR-10. A share of the training images is held out for calibration; the paper has
none.

    python -m experiments.table2.marglik_cifar10 --jobs 2
    python -m experiments.table2.marglik_cifar10 --protocol full --device cuda --jobs 3

Each run keeps its state in ``runs/table2`` and resumes when the command is given again.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.data import specification
from experiments.studies import Result, grouped, markdown, mean_with_error, metric_of, study
from marglik.application.cli import main as marglik
from marglik.application.records import to_json
from marglik.application.run_folder import read_log, read_results

# Eschenhagen et al. 2023, Table 2: test NLL and accuracy (%) of three seeds, by approach and
# augmentation; and seconds per update on an A100.
PAPER = {
    ("expand", False): ("0.422 ± 0.013", "88.89 ± 0.24"),
    ("expand", True): ("0.244 ± 0.004", "92.52 ± 0.12"),
    ("reduce", False): ("0.703 ± 0.012", "86.71 ± 0.13"),
    ("reduce", True): ("0.352 ± 0.008", "93.50 ± 0.06"),
}
PAPER_UPDATE = {"expand": "196 ± 22", "reduce": "99 ± 23"}
NLL, ACCURACY, ECE = "nll", "accuracy", "ece"
SCALED = "MAP, temperature-scaled"
APPROACHES = ("expand", "expand sampled", "fixed", "reduce", "reduce sampled")
"""K-FAC's mode, whose updates see all images or samples; or the initial weight decay is kept."""
RUNS = {
    f"{approach.replace(' ', '_')}_{'augmented' if augment else 'plain'}": (approach, augment)
    for approach in APPROACHES
    for augment in (False, True)
}
"""Name -> approach and augmentation."""


@dataclass(frozen=True)
class Protocol:
    """Size of the experiment, and its preset."""

    depth: int = 16
    widen_factor: int = 4
    epochs: int = 100
    every: int = 5
    """Epochs between updates."""
    max_train: int | None = None
    max_test: int | None = None
    held_out: float = 0.02
    """Share of the training images held out for calibration."""
    preset: str = "cifar10_paper"
    """All other settings."""


PROTOCOLS = {
    "full": Protocol(),
    "redux": Protocol(preset="cifar10_redux"),
    "scaled": Protocol(10, 1, 30, 5, 4000, 2000, 0.1),
}


@dataclass(frozen=True)
class Config:
    """Configuration of one run."""

    protocol: str = "scaled"
    approach: str = "reduce"
    augment: bool = True
    seed: int = 0
    device: str = "cpu"
    compile: str | None = None

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        kind = "augmented" if self.augment else "plain"
        return f"{self.approach.replace(' ', '_')}_{kind}_seed{self.seed}"

    @property
    def folder(self) -> str:
        """Folder of its training."""
        return f"runs/table2/{self.protocol}/{self.name}"

    def options(self) -> list[str]:
        """Those of ``marglik train``."""
        size, fixed = PROTOCOLS[self.protocol], self.approach == "fixed"
        images = specification(max_train=size.max_train, max_test=size.max_test)
        pairs: dict[str, Any] = {
            "config": size.preset,
            "model.depth": size.depth,
            "model.widen_factor": size.widen_factor,
            "data": images["class_path"],
            **{f"data.{name}": value for name, value in images["init_args"].items()},
            "epochs": size.epochs,
            "prior.every": size.every,
            "prior.method": "fixed" if fixed else "adam",
            "curvature.kfac_approx": "reduce" if fixed else self.approach.split()[0],
            "held_out": size.held_out,
            "seed": self.seed,
            "output": self.folder,
            "accelerator": self.device,
        }
        if self.approach.endswith("sampled"):
            pairs |= {"prior.curvature_from": "auto", "prior.keep": "last"}
        if self.compile:
            pairs["compile"] = self.compile
        arguments = [f"--{name}={value}" for name, value in pairs.items() if value is not None]
        augmentation = "standard" if self.augment else "none"
        return [*arguments, "--augmentation", augmentation, "--no_baseline", "--resume"]


def run(config: Config) -> dict[str, Any]:
    """Train and evaluate, or read a finished training; returns the results."""
    if status := marglik(["train", *config.options(), "--no_progress"]):
        raise RuntimeError(f"marglik train for {config.name} ended with status {status}.")
    results = read_results(Path(config.folder))
    assert results is not None  # the command has written it
    log = list(read_log(config.folder))
    updates = [record["seconds"] for record in log if record["kind"] == "update"]
    parts = ("pass", "eigenvalues", "steps") if updates else ()
    seconds = {part: statistics.median(update[part] for update in updates) for part in parts}
    return {
        "settings": asdict(PROTOCOLS[config.protocol]) | results.identity["config"],
        # Their names are "learned, MAP", "fixed, MAP" and the like.
        "metrics": {
            name.split(", ", 1)[1]: to_json(scores.metrics)
            for name, scores in results.scores.items()
        },
        "evidence_per_example": results.evidence.final / results.num_data,
        "seconds_per_epoch": statistics.median(r["seconds"] for r in log if r["kind"] == "epoch"),
        "seconds_per_update": seconds | {"all": sum(seconds.values())} if updates else {},
        "data": results.data,
        "num_data": results.num_data,
        "seconds": results.seconds,
        "weight_decay": to_json(results)["weight_decay"],
        **results.environment,
    }


# Tables, from JSON alone

Runs = Mapping[tuple[str, bool], Sequence[Result]]


def table(results: Sequence[Result]) -> str:
    """All tables as Markdown: mean ± standard error over seeds."""
    groups = grouped(results, "approach", "augment")
    runs = {setting: groups[setting] for setting in RUNS.values() if setting in groups}
    first = results[0]
    size = first["settings"]
    parts = (
        f'# Table 2, protocol "{first["config"]["protocol"]}"',
        f"WRN-{size['depth']}-{size['widen_factor']} Fixup, {first['num_data']} training "
        f"images of {first['data']}, {size['max_test'] or 'all'} test images, "
        f"{size['epochs']} epochs, an update every {size['every']}; {first['device']}, torch "
        f"{first['versions']['torch']}. Mean ± standard error over seeds, the paper's as "
        "printed; NLL in nats per image. Temperature, and scale of the covariance, are fitted "
        f"on the held-out {size['held_out']:.0%} of the training images.".replace("%", " %"),
        _main_table(runs),
        _calibrated(runs),
        gains(runs),
        _sampled(runs),
        _updates(runs),
    )
    return "\n\n".join(filter(None, parts))


def _cells(setting: tuple[str, bool]) -> tuple[str, str]:
    return setting[0], "yes" if setting[1] else "no"


def _of(own: Sequence[Result], predictive: str, key: str, form: str) -> str:
    factor = 1 if key == NLL else 100
    return mean_with_error([factor * metric_of(r, predictive, key) for r in own], form)


def _main_table(runs: Runs) -> str:
    rows: list[Sequence[str]] = [
        ("weight decay", "augmented", "NLL, MAP", "accuracy, MAP", "NLL, Laplace",
         "accuracy, Laplace", "paper: NLL", "paper: accuracy", "evidence / N", "seeds")
    ]  # fmt: skip
    for setting, own in runs.items():
        cells = [
            _of(own, name, key, "{:.3f}" if key == NLL else "{:.2f}")
            for name in ("MAP", "Laplace")
            for key in (NLL, ACCURACY)
        ]
        evidence = mean_with_error([r["evidence_per_example"] for r in own])
        paper = PAPER.get(setting, ("", ""))
        rows.append((*_cells(setting), *cells, *paper, evidence, str(len(own))))
    return markdown(rows)


def _calibrated(runs: Runs) -> str:
    """The calibrated predictive beside the MAP at its best temperature."""
    names = ("MAP", SCALED, "Laplace")
    rows: list[Sequence[str]] = [
        ("weight decay", "augmented", "NLL, MAP", "NLL, temperature-scaled", "NLL, Laplace",
         "Laplace - temperature-scaled", "ECE, %: MAP", "temperature-scaled", "Laplace")
    ]  # fmt: skip
    for setting, own in runs.items():
        gain = [metric_of(r, "Laplace", NLL) - metric_of(r, SCALED, NLL) for r in own]
        rows.append(
            (
                *_cells(setting),
                *(_of(own, name, NLL, "{:.3f}") for name in names),
                mean_with_error(gain, "{:+.4f}"),
                *(_of(own, name, ECE, "{:.1f}") for name in names),
            )
        )
    return markdown(rows)


def gains(runs: Runs) -> str:
    """The NLL with the learned weight decay minus the fixed one's, paired by seed."""
    others = {approach: "fixed" for approach in APPROACHES if approach != "fixed"}
    return _differences("learned against fixed", runs, others)


def _sampled(runs: Runs) -> str:
    """The NLL with sampled updates minus that with updates from all images, paired by seed."""
    others = {f"{mode} sampled": mode for mode in PAPER_UPDATE}
    return _differences("sampled against all images", runs, others)


def _differences(title: str, runs: Runs, others: Mapping[str, str]) -> str:
    """The MAP's NLL of approaches minus that of the other that is named for each; "" of none."""
    rows: list[Sequence[str]] = [(title, "augmented", "NLL of the MAP, difference", "lower in")]
    for (approach, augment), own in runs.items():
        other = {r["config"]["seed"]: r for r in runs.get((others.get(approach, ""), augment), ())}
        differences = [
            metric_of(r, "MAP", NLL) - metric_of(other[r["config"]["seed"]], "MAP", NLL)
            for r in own
            if r["config"]["seed"] in other
        ]
        if differences:
            lower = f"{sum(d < 0 for d in differences)} of {len(differences)} seeds"
            cells = mean_with_error(differences, "{:+.3f}"), lower
            rows.append((*_cells((approach, augment)), *cells))
    return markdown(rows) if len(rows) > 1 else ""


def _updates(runs: Runs) -> str:
    """Seconds of an update's parts and of an epoch: means of each run's medians."""
    parts = ("pass", "eigenvalues", "steps", "all")
    rows: list[Sequence[str]] = [("seconds of an update", *parts, "an epoch", "paper (A100)")]
    for approach in APPROACHES:
        own = [
            result
            for (name, _), results in runs.items()
            for result in results
            if name == approach and result["seconds_per_update"]
        ]
        if own:
            seconds = [[result["seconds_per_update"][part] for result in own] for part in parts]
            seconds.append([result["seconds_per_epoch"] for result in own])
            cells = (mean_with_error(values, "{:.2f}") for values in seconds)
            rows.append((approach, *cells, PAPER_UPDATE.get(approach, "")))
    return markdown(rows)


main = study(
    "table2/{protocol}",
    __doc__,
    run,
    lambda options: [
        Config(options.protocol, *RUNS[name], seed, options.device, options.compile)
        for seed in range(options.seeds)
        for name in options.data
    ],
    table,
    problems=RUNS,
    seeds=3,
    threads=None,
    shows_epochs=True,
    extra={
        "--protocol": {"choices": PROTOCOLS, "default": "scaled"},
        "--device": {"choices": ("cpu", "cuda"), "default": "cpu"},
        "--compile": {"help": "torch.compile's mode"},
    },
)

if __name__ == "__main__":
    sys.exit(main())
