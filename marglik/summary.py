"""The tables at the end of a run."""

from typing import Any

__all__ = ["print_summary"]

LAYERS_SHOWN = 20


def print_summary(results: dict[str, Any]) -> None:
    """Print evidence, learned weight decays, metrics, and where the files are."""
    num_data, evidence = results["num_data"], results["evidence"]
    print(f"\n{results['data']}: {num_data} training images, {results['seconds']:.0f} s")
    print(
        f"log marginal likelihood per example: {evidence['first'] / num_data:.4f} at the first "
        f"update, {evidence['kept'] / num_data:.4f} at the kept one (epoch {evidence['epoch']})\n"
    )
    _print_weight_decays(results["weight_decay"])
    _print_metrics(results["metrics"])
    print(f"\nWritten to {results['output']}, the plot as evidence.png")


def _print_weight_decays(layers: dict[str, dict[str, float]]) -> None:
    rows = sorted(layers.items(), key=lambda item: -item[1]["parameters"])[:LAYERS_SHOWN]
    width = max(len(name) for name, _ in rows)
    print(f"{'parameter':<{width}}   weight decay            effective / all parameters")
    for name, row in rows:
        print(
            f"{name:<{width}}   {row['initial']:.1e} -> {row['learned']:.2e}    "
            f"{row['effective_parameters']:10.1f} / {row['parameters']}"
        )
    if len(layers) > len(rows):
        print(f"... and {len(layers) - len(rows)} smaller ones, in results.json")


def _print_metrics(metrics: dict[str, dict[str, float]]) -> None:
    columns = list(next(iter(metrics.values())))
    width = max(map(len, metrics))
    print("\n" + " " * width + "".join(f"{column:>25}" for column in columns))
    for name, values in metrics.items():
        print(f"{name:<{width}}" + "".join(f"{values[column]:>25.4f}" for column in columns))
