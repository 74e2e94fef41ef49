"""Table 2 of Eschenhagen et al. 2023: weight decay learned on CIFAR-10, WRN-16-4 Fixup.

The paper's numbers, test NLL and accuracy (%) over three seeds: expand .422 ± .013 and 88.89 ± .24
without augmentation, .244 ± .004 and 92.52 ± .12 with; reduce .703 ± .012 and 86.71 ± .13, .352 ±
.008 and 93.50 ± .06. An update takes 196 ± 22 s with expand and 99 ± 23 s with reduce (A100).

Two protocols: "full" is the paper's; "scaled" has fewer images and epochs and a smaller network,
the same algorithm and settings, and takes two cores less than two hours. Both come with the
settings of the paper and of its predecessor (``marglik/presets``), and with a baseline that keeps
the initial weight decay.

    python -m experiments.table2.marglik_cifar10               # scaled, the paper's settings
    python -m experiments.table2.marglik_cifar10 --protocol full --device cuda --jobs 3
    python -m experiments.table2.marglik_cifar10 --report      # the tables alone

Each run keeps its state in ``runs/table2`` and resumes when the command is given again.
"""

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from experiments.data import Source, default_source
from experiments.options import add_results
from experiments.processes import default_jobs
from experiments.studies import run_missing
from experiments.table2.report import write_report
from experiments.table2.settings import (
    PROTOCOLS,
    Approach,
    Config,
    Preset,
    Settings,
)
from marglik.data import ImageData
from marglik.runs.build import build_from_spec
from marglik.runs.config import RunConfig
from marglik.runs.evaluate import evaluate_run
from marglik.runs.train import train
from marglik.storage.provenance import Provenance
from marglik.storage.record_file import read_posterior, write_json
from marglik.storage.run_folder import read_log

__all__ = ["configs", "curves", "main", "run"]

RUNS = Path("runs/table2")


def run(config: Config, folder: Path | None = None) -> dict[str, Any]:
    """Train and evaluate; returns the results.

    Args:
        config: the run.
        folder: for the run's own files; None for one below runs/table2. An unfinished run resumes.
    """
    folder = folder or RUNS / config.name
    settings, size = Settings.of(config), config.size
    torch.manual_seed(config.seed)  # of the initial parameters
    results = train(
        build_from_spec(nn.Module, settings.model),
        build_from_spec(ImageData, settings.data, named=[settings.data["class_path"]]),
        settings.optimizer,
        settings.prior,
        settings.curvature,
        settings.predictive,
        run=RunConfig(
            epochs=size.epochs,
            batch_size=settings.batch_size,
            augment=config.augment,
            monitor=size.monitor,
            held_out=size.held_out,
            seed=config.seed,
            output=str(folder),
            resume=True,
            accelerator=config.device,
            precision=config.precision,
            channels_last=True,
            compile=config.compile,
            progress=False,
        ),
        provenance=Provenance(None, settings.model, settings.data),
    )
    # Their names are "learned, MAP", "fixed, MAP" and the like.
    metrics = {name.split(", ", 1)[1]: found for name, found in results["metrics"].items()}
    if config.predictives:
        metrics |= _of_other_predictives(config, settings, folder)
    kfac_approx = settings.curvature.kfac_approx
    return {
        "config": asdict(config) | {"name": config.name, "kfac_approx": kfac_approx},
        "settings": asdict(size) | results["config"],
        "data": results["data"],
        "num_data": results["num_data"],
        "metrics": metrics,
        "evidence_per_example": results["evidence"]["kept"] / results["num_data"],
        "kept_epoch": results["evidence"]["epoch"],
        **curves(read_log(folder)),
        "seconds": results["seconds"],
        **{key: results[key] for key in ("device", "threads", "python", "versions")},
    }


def _of_other_predictives(
    config: Config, settings: Settings, folder: Path
) -> dict[str, dict[str, float]]:
    """Metrics of predictives, from the saved posterior; they are kept beside it."""
    path = folder / "predictives.json"
    posterior = read_posterior(folder)["sha256"]
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found["posterior"], found["methods"]) == (posterior, list(config.predictives)):
            return found["metrics"]
    others = evaluate_run(
        str(folder),
        data=settings.data["class_path"],
        methods=list(config.predictives),
        predictive=settings.predictive,
        output=str(folder / "predictives"),
        accelerator=config.device,
        seed=config.seed,
        progress=False,
    )
    del others["predictives"]["MAP"]  # which training has evaluated
    metrics = {name: found["metrics"] for name, found in others["predictives"].items()}
    record = {"posterior": posterior, "methods": list(config.predictives), "metrics": metrics}
    write_json(path, record)
    return metrics


def curves(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Curves over epochs and updates from a run's log, and median seconds of an update's parts."""
    epochs = [record for record in records if record["kind"] == "epoch"]
    updates = [record for record in records if record["kind"] == "update"]
    looks = {
        key: [[record["epoch"], record[key]] for record in epochs if key in record]
        for key in ("test/cls/NLL", "test/cls/accuracy", "validation/cls/NLL")
    }
    of_update = {
        part: statistics.median(update["seconds"][part] for update in updates)
        for part in ("pass", "eigenvalues", "steps")
        if updates
    }
    return {
        "curves": {
            "loss": [record["loss"] for record in epochs],
            "accuracy": [record["accuracy"] for record in epochs],
            "monitor": {key: curve for key, curve in looks.items() if curve},
            "updates": [
                {key: u[key] for key in ("epoch", "evidence_per_example", "weight_decay")}
                for u in updates
            ],
        },
        "seconds_per_epoch": statistics.median(record["seconds"] for record in epochs),
        "seconds_per_update": of_update | {"all": sum(of_update.values())} if updates else {},
    }


def configs(options: argparse.Namespace) -> list[Config]:
    """The runs that the options ask for, sorted by seed first."""
    names = ("protocol", "source", "device", "precision", "compile", "jobs")
    common = {name: getattr(options, name) for name in names}
    augment = {"both": (False, True), "on": (True,), "off": (False,)}[options.augment]
    return [
        Config(
            preset=preset,
            approach=approach,
            augment=on,
            seed=seed,
            predictives=("probit", "linearised") if seed == 0 else (),
            **common,
        )
        for seed, preset, on, approach in product(
            options.seeds, options.presets, augment, options.approaches
        )
    ]


def _parser() -> argparse.ArgumentParser:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--protocol", choices=PROTOCOLS, default="scaled", help="default: scaled")
    add("--presets", nargs="+", choices=get_args(Preset), default=["paper"], help="default: paper")
    add("--approaches", nargs="+", choices=get_args(Approach), default=list(get_args(Approach)),
        help="default: all")  # fmt: skip
    add("--augment", choices=("both", "on", "off"), default="both", help="default: both")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    add("--source", choices=get_args(Source), default=default_source(),
        help="re-encoded images or the original; default on this machine: %(default)s")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default=device, help="default here: %(default)s")
    add("--precision", choices=("32-true", "bf16-mixed"), default="32-true",
        help="precision of the network's steps; default: 32-true")  # fmt: skip
    add("--compile", choices=("default", "reduce-overhead"), help="torch.compile's mode")
    add("--jobs", type=int, help="runs at a time; default: one per core, or one on a GPU")
    add("--report", action="store_true", help="make the tables from the results that exist")
    add_results(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the options ask for, and write results and tables; returns the exit status."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the processes, too
    options.jobs = options.jobs or default_jobs(options.device)
    folder = options.results / "table2"
    return run_missing(
        run, configs(options), folder, lambda _: write_report(folder / options.protocol), options
    )


if __name__ == "__main__":
    sys.exit(main())
