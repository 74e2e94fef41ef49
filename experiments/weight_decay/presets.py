"""Results of the presets of transformers and graph networks over several seeds.

Each run is ``marglik train --config experiments/presets/NAME.yaml --seed N``. It learns the prior
while the network trains; a second training keeps the initial weight decay. The paper has no such
numbers.

``python -m experiments.weight_decay.presets`` takes about half an hour on two cores. It resumes,
and writes ``results/presets/`` in the working directory.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.options import add_results
from experiments.processes import as_they_finish, default_jobs
from kfac_backend.files import parse_json
from marglik.cli import main as marglik
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json
from marglik.storage.run_files import RESULTS
from marglik.storage.run_folder import RunFolder

PRESETS = Path(__file__).parents[1] / "presets"
NAMES = {
    "vit_cifar10": "VisionTransformer, CIFAR-10 (JPEG)",
    "gpt_dart": "GPT, DART, per byte",
    "graph_network_nci1": "GraphNetwork, NCI1",
}


@dataclass(frozen=True)
class Config:
    """Configuration of one run."""

    preset: str
    seed: int

    @property
    def name(self) -> str:
        """Name in log lines."""
        return f"{self.preset}_{self.seed}"

    @property
    def folder(self) -> str:
        """Folder of the run."""
        return f"runs/presets/{self.name}"


def run(config: Config) -> dict[str, Any]:
    """Train, or read a finished training; returns config, metrics, evidences and seconds."""
    preset = str(PRESETS / f"{config.preset}.yaml")
    options = ["--seed", str(config.seed), "--output", config.folder, "--resume", "--no_progress"]
    if status := marglik(["train", "--config", preset, *options]):
        raise RuntimeError(f"marglik train --config {preset} ended with status {status}.")
    found = parse_json(RunFolder(config.folder).read(RESULTS) or b"{}")
    kept = (
        "num_data",
        "held_out",
        "calibration",
        "metrics",
        "evidence",
        "weight_decay",
        "threads",
        "seconds",
    )
    return {"config": asdict(config)} | {key: found[key] for key in kept}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown of MAP and Laplace, learned and initial: means over seeds, paired differences."""
    lines = [
        "| learned / initial weight decay | test NLL of the MAP | difference | seeds with less "
        "| accuracy | temperature-scaled MAP | calibrated Laplace | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for preset, name in NAMES.items():
        own = [r for r in runs if r["config"]["preset"] == preset]
        if not own:
            continue
        learned, initial = ([_metric(r, f"{w}, MAP") for r in own] for w in ("learned", "initial"))
        gains = [a - b for a, b in zip(learned, initial, strict=True)]
        cells = [
            name,
            _pair(own, "MAP", "cls/NLL", "{:.3f}"),
            _mean(gains),
            f"{sum(gain < 0 for gain in gains)} of {len(gains)}",
            _pair(own, "MAP", "cls/accuracy", "{:.1%}").replace("%", " %"),
            _pair(own, "MAP, temperature-scaled", "cls/NLL", "{:.3f}"),
            _pair(own, "Laplace", "cls/NLL", "{:.3f}"),
            f"{statistics.mean(r['seconds'] for r in own) / 60:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all presets and seeds, and write JSON and table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Learned against initial weight decay, by presets."
    )
    parser.add_argument(
        "--presets", nargs="*", choices=list(NAMES), default=list(NAMES), help="default: all"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--report", action="store_true", help="make the table from the JSON alone")
    parser.add_argument(
        "--jobs", type=int, default=default_jobs("cpu"), help="number of runs at a time"
    )
    add_results(parser)
    options = parser.parse_args(arguments)
    path = options.results / "presets" / "presets.json"
    tasks = [Config(preset, seed) for seed in options.seeds for preset in options.presets]
    known = json.loads(path.read_text())["runs"] if path.exists() else []
    if options.report:
        if not known:
            parser.error(f"--report: no {path}; run without --report first")
        path.with_name("table.md").write_text(table(known) + "\n")
        print(table(known))
        return 0
    runs = {(r["config"]["preset"], r["config"]["seed"]): r for r in known}
    print(f"{len(tasks)} runs, {options.jobs} at a time; results go to {path.parent}/", flush=True)
    failed = 0
    for config, found in as_they_finish(run, tasks, options.jobs):
        if isinstance(found, Exception):
            failed += 1
            print(f"{config.name}: {found}", file=sys.stderr, flush=True)
            continue
        runs[config.preset, config.seed] = found
        ordered = [runs[key] for key in sorted(runs)]
        write_json(path, {"environment": environment(torch.device("cpu")), "runs": ordered})
        path.with_name("table.md").write_text(table(ordered) + "\n")
        print(table(ordered), flush=True)
    return 1 if failed else 0


def _metric(run: dict[str, Any], who: str, name: str = "cls/NLL") -> float:
    # The Laplace predictive's name goes on with its method.
    (key,) = [
        label
        for label in run["metrics"]
        if label == who or (who.endswith("Laplace") and label.startswith(who))
    ]
    return run["metrics"][key][f"test/{name}"]


def _pair(runs: Sequence[dict[str, Any]], which: str, name: str, form: str) -> str:
    """Means over seeds, learned / initial."""
    means = [
        statistics.mean(_metric(run, f"{weight_decay}, {which}", name) for run in runs)
        for weight_decay in ("learned", "initial")
    ]
    return " / ".join(form.format(mean) for mean in means)


def _mean(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:+.3f}"
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):+.3f} ± {error:.3f}"


if __name__ == "__main__":
    sys.exit(main())
