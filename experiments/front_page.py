"""The figure of the README, drawn from committed results alone: wrong labels, unknown rotations.

    python -m experiments.front_page --results experiments/results

It reads the studies ``label_noise`` and ``learned_ranges`` and writes ``front_page.png``. Points
are means over five seeds, bars are standard errors. Each panel has what people do today beside
marglik with its default options.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure

from experiments.studies import results_in
from kfac_backend.atomic_files import write_file

SHARES = (0, 20, 40)
WRONG_LABELS = {  # label -> training, score, colour
    "no weight decay, with τ": ("MAP", "scaled_nll", "tab:gray"),
    "grid of seven, with τ": ("grid", "scaled_nll", "tab:blue"),
    "grid of seven, with τ and ε": ("grid", "nll", "tab:olive"),
    "marglik, with τ and ε": ("noise learned", "nll", "tab:green"),
}
ROTATIONS = {"digits, ±45°": "±45°", "digits, ±180°": "±180°"}
AUGMENTATIONS = {  # label -> result, colour
    "no augmentation": ("none", "tab:gray"),
    "Augerino": ("Augerino", "tab:blue"),
    "marglik: learned ranges": ("learned", "tab:green"),
    "true range, known in advance": ("known, in the model", "tab:olive"),
}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error."""
    return fmean(values), stdev(values) / len(values) ** 0.5


def draw(folder: Path) -> Figure:
    """The figure, from the JSON files in a folder of results."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    labels, rotations = figure.subplots(1, 2)

    noises = [
        run["noises"]
        for run in results_in(folder / "label_noise")
        if run["config"]["problem"] == "digits, convolutions"
    ]
    for label, (way, score, color) in WRONG_LABELS.items():
        points = [
            mean_and_error([noise[f"flipped {share} %"]["ways"][way][score] for noise in noises])
            for share in SHARES
        ]
        means, errors = zip(*points, strict=True)
        labels.errorbar(
            SHARES, means, errors, color=color, marker="o", ms=5, capsize=3, label=label
        )
    labels.set(title="Wrong training labels (%)", xticks=SHARES, ylim=0, ylabel="test NLL (nats)")

    runs, width = results_in(folder / "learned_ranges"), 0.2
    for place, (label, (name, color)) in enumerate(AUGMENTATIONS.items()):
        for group, problem in enumerate(ROTATIONS):
            values = [
                run["results"][name]["nll"] for run in runs if run["config"]["problem"] == problem
            ]
            mean, error = mean_and_error(values)
            at = group + width * (place - 1.5)
            rotations.bar(
                at, mean, width, yerr=error, color=color, capsize=3, label=None if group else label
            )
    rotations.set(title="Images turned by an unknown angle", xticks=range(len(ROTATIONS)))
    rotations.set_xticklabels(ROTATIONS.values())
    for axis in (labels, rotations):
        axis.legend(fontsize=7.5, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--results", type=Path, default=Path("experiments/results"))
    folder, content = parser.parse_args(arguments).results, io.BytesIO()
    draw(folder).savefig(content, dpi=130, format="png")
    write_file(folder / "front_page.png", content.getvalue())
    print(f"Written to {folder / 'front_page.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
