"""Results of the presets of transformers and graph networks over several seeds.

Each run is ``marglik train --config experiments/presets/NAME.yaml --seed N``. It learns the prior
while the network trains; a second training keeps the initial weight decay. The paper has no such
numbers.

``python -m experiments.weight_decay.presets`` takes about half an hour on two cores.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.studies import (
    Result,
    file_name,
    grouped,
    markdown,
    mean_with_error,
    metric_of,
    study,
)
from marglik.application.cli import main as marglik
from marglik.application.records import to_json
from marglik.application.run_folder import read_results

NLL = "nll"
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
    def folder(self) -> str:
        """Folder of the run."""
        return f"runs/presets/{file_name(self)}"


def run(config: Config) -> Result:
    """Train, or read a finished training; returns config, metrics, evidences and seconds."""
    preset = str(PRESETS / f"{config.preset}.yaml")
    options = ["--seed", str(config.seed), "--output", config.folder, "--resume", "--no_progress"]
    if status := marglik(["train", "--config", preset, *options]):
        raise RuntimeError(f"marglik train --config {preset} ended with status {status}.")
    run_results = read_results(Path(config.folder))
    assert run_results is not None  # the command has written it
    names = ("num_data", "held_out", "calibration", "evidence", "weight_decay", "seconds")
    record = to_json(run_results)
    results = {name: record[name] for name in names if name in record}
    results["metrics"] = {
        name: to_json(scores.metrics) for name, scores in run_results.scores.items()
    }
    return results


def table(results: list[Result]) -> str:
    """Markdown of MAP and Laplace, learned and initial: means over seeds, paired differences."""
    rows = [
        ["learned / initial weight decay", "test NLL of the MAP", "difference", "seeds with less",
         "accuracy", "temperature-scaled MAP", "calibrated Laplace", "minutes"]
    ]  # fmt: skip
    groups = grouped(results, "preset")
    for preset, name in NAMES.items():
        if own := groups.get(preset):
            learned, initial = (
                [metric_of(r, f"{w}, MAP", NLL) for r in own] for w in _compared(own)
            )
            gains = [a - b for a, b in zip(learned, initial, strict=True)]
            rows.append(
                [
                    name,
                    _pair(own, "MAP", NLL, "{:.3f}"),
                    mean_with_error(gains, "{:+.3f}"),
                    f"{sum(gain < 0 for gain in gains)} of {len(gains)}",
                    _pair(own, "MAP", "accuracy", "{:.1%}").replace("%", " %"),
                    _pair(own, "MAP, temperature-scaled", NLL, "{:.3f}"),
                    _pair(own, "Laplace", NLL, "{:.3f}"),
                    f"{statistics.mean(r['seconds'] for r in own) / 60:.0f}",
                ]
            )
    return markdown(rows)


def _compared(runs: Sequence[Result], which: str = "MAP") -> list[str]:
    """The networks with this predictive: a plain one has no Laplace.

    The runs of the committed results had a second network with an average and a posterior of its
    own, called "initial".
    """
    labels = [label for run in runs for label in run["metrics"]]
    return [
        network
        for network in ("learned", "initial", "plain")
        if any(label.startswith(f"{network}, {which}") for label in labels)
    ]


def _pair(runs: Sequence[Result], which: str, name: str, form: str) -> str:
    """Means over seeds, learned / initial."""
    means = [
        statistics.mean(metric_of(run, f"{network}, {which}", name) for run in runs)
        for network in _compared(runs, which)
    ]
    return " / ".join(form.format(mean) for mean in means)


main = study(
    "presets",
    __doc__,
    run,
    lambda options: [Config(p, seed) for p in options.data for seed in range(options.seeds)],
    table,
    problems=NAMES,
    seeds=3,
    threads=None,
    shows_epochs=True,
)

if __name__ == "__main__":
    sys.exit(main())
