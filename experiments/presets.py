"""What the presets of transformers and graph networks learn, over several seeds.

Each run is ``marglik train --config PRESET --seed N``: the prior learned while the network trains,
and a second training with the initial weight decay kept. The paper has no such numbers.

``python -m experiments.presets`` takes about half an hour on two cores; again to go on.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.processes import as_they_finish, default_jobs
from marglik.cli import main as marglik
from marglik.record_file import write_json
from marglik.run_files import RESULTS
from marglik.run_log import environment

RESULT = Path(__file__).parent / "results/presets/presets.json"
TABLE = RESULT.with_name("table.md")
NAMES = {
    "vit_cifar10": "VisionTransformer, CIFAR-10 (JPEG)",
    "gpt_dart": "GPT, DART, per byte",
    "graph_network_nci1": "GraphNetwork, NCI1",
}


@dataclass(frozen=True)
class Config:
    """One run."""

    preset: str
    seed: int

    @property
    def folder(self) -> str:
        """Where it is kept."""
        return f"runs/presets/{self.preset}_{self.seed}"


def run(config: Config) -> dict[str, Any]:
    """Train, or read what was trained: config, metrics, evidences and seconds."""
    options = ["--config", config.preset, "--seed", str(config.seed), "--output", config.folder]
    status = marglik(["train", *options, "--resume", "--no_progress"])
    if status:
        raise RuntimeError(f"marglik train --config {config.preset} ended with status {status}.")
    found = json.loads((Path(config.folder) / RESULTS).read_text())
    kept = ("num_data", "metrics", "evidence", "weight_decay", "threads", "seconds")
    return {"config": asdict(config)} | {key: found[key] for key in kept}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """MAP and Laplace, learned and initial: means over seeds; differences with standard errors."""
    lines = [
        "| learned / initial weight decay | test NLL of the MAP | difference | lower in "
        "| accuracy | NLL of Laplace | minutes |",
        "|---|---|---|---|---|---|---|",
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
            f"{sum(gain < 0 for gain in gains)} of {len(gains)} seeds",
            _pair(own, "MAP", "cls/accuracy", "{:.1%}").replace("%", " %"),
            _pair(own, "Laplace", "cls/NLL", "{:.2f}"),
            f"{statistics.mean(r['seconds'] for r in own) / 60:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all presets and seeds, and write JSON and table."""
    parser = argparse.ArgumentParser(
        description="Learned against initial weight decay, by presets."
    )
    parser.add_argument("--presets", nargs="*", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--report", action="store_true", help="make the table from the JSON alone")
    parser.add_argument("--jobs", type=int, default=default_jobs("cpu"), help="runs at a time")
    options = parser.parse_args(arguments)
    tasks = [Config(preset, seed) for seed in options.seeds for preset in options.presets]
    known = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    if options.report:
        TABLE.write_text(table(known) + "\n")
        return
    runs = {(r["config"]["preset"], r["config"]["seed"]): r for r in known}
    for config, found in as_they_finish(run, tasks, options.jobs):
        if isinstance(found, Exception):
            print(f"{config}: {found}")
            continue
        runs[config.preset, config.seed] = found
        ordered = [runs[key] for key in sorted(runs)]
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        write_json(RESULT, {"environment": environment(torch.device("cpu")), "runs": ordered})
        TABLE.write_text(table(ordered) + "\n")
        print(table(ordered), flush=True)


def _metric(run: dict[str, Any], who: str, name: str = "cls/NLL") -> float:
    (key,) = [label for label in run["metrics"] if label.startswith(who)]
    return run["metrics"][key][f"test/{name}"]


def _pair(runs: Sequence[dict[str, Any]], which: str, name: str, form: str) -> str:
    """Means over seeds, learned / initial."""
    means = [
        statistics.mean(_metric(run, f"{weight_decay}, {which}", name) for run in runs)
        for weight_decay in ("learned", "initial")
    ]
    return " / ".join(form.format(mean) for mean in means)


def _mean(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):+.3f} ± {error:.3f}"


if __name__ == "__main__":
    main()
