"""Verdict: compare a network with a plain network on the same test data, in a few lines.

The plain network has the same architecture, data, optimiser and epochs. It has a fixed weight
decay, a cosine learning rate schedule, and no average of its parameters. Both networks predict with
their parameters, without a posterior. If there is held-out data, it calibrates both networks, so
that the comparison does not depend on the calibration.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from kfac_backend.engine.batches import split_batch
from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.options import TargetOptions
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.intervals import differences, of_examples
from marglik.prediction.metric_types import METRICS, Difference, Metrics
from marglik.prediction.metrics import compute_metrics, example_scores
from marglik.prediction.predictive import predict_all

MEASURES = ("nll", "accuracy")
"""The metrics of a verdict."""


def verdict(
    model: nn.Module,
    plain: nn.Module,
    test: Iterable[Any],
    likelihood: Likelihood | str = "classification",
    *,
    held_out: Iterable[Any] = (),
    sigma_noise: tuple[float, float] | None = None,
    learned: Sequence[str] = ("learned weight decays",),
    targets: TargetOptions = TargetOptions(),  # noqa: B008
) -> str:
    """Return three lines that compare ``model`` with ``plain`` on test data, with 95 % intervals.

    The intervals are for paired differences, over the choice of test examples. They do not include
    the variation between seeds, which can be larger.

    Args:
        model: the network with learned weight decays.
        plain: the same network, trained with a fixed weight decay; see this module.
        test: test data (x, y), or mappings.
        likelihood: likelihood of the targets.
        held_out: held-out data (x, y), or mappings. It determines the temperature of each network
            (for classes also the share of wrong labels), or σ in regression, by the lowest NLL.
            Without it the networks are not calibrated.
        sigma_noise: σ of both networks, for regression, in the unit of the targets.
        learned: names of the learned quantities, for the first line.
        targets: form of the targets in batches.

    Raises:
        ValueError: there is no test example, or regression has no σ.
    """
    likelihood = likelihood_of(likelihood)
    if likelihood.has_sigma and sigma_noise is None:
        raise ValueError("Regression needs the noise of both networks. Pass sigma_noise=(σ, σ).")
    batches, held_out, metrics, scores = list(test), list(held_out), [], []
    for network, sigma in zip((model, plain), sigma_noise or (1.0, 1.0), strict=True):
        alone = Ensemble([network], likelihood, sigma)
        if held_out:
            alone.calibrate(held_out, targets=targets)
        p, y = predict_all(alone, batches, targets=targets)
        metrics.append(compute_metrics(p, y, likelihood))
        scores.append(example_scores(p, y, likelihood))
    # Positions of one example are not independent, so average them first. If some positions do not
    # count, the examples of the rows are unknown, and there are no intervals.
    ys = [split_batch(batch, targets)[1] for batch in batches]
    own_axes = not likelihood.has_labels
    rows = sum(y.shape[: y.dim() - own_axes].numel() for y in ys)
    changes: Metrics[Difference] = Metrics()
    if rows == len(scores[0].nll):
        positions = rows // sum(map(len, ys))
        changes = differences(*(s.map(lambda row: of_examples(row, positions)) for s in scores))
    return in_words(changes, metrics[0], metrics[1], sum(map(len, ys)), learned)


def in_words(
    differences: Metrics[Difference],
    metrics: Metrics[float],
    of_plain: Metrics[float],
    num_test: int,
    learned: Sequence[str] = ("learned weight decays",),
) -> str:
    """Return a line that compares both networks, and a line for each metric with its interval.

    Args:
        differences: differences, learned minus plain network, with 95 % intervals.
        metrics: metrics of the network with learned quantities.
        of_plain: metrics of the plain network.
        num_test: number of test examples.
        learned: names of the learned quantities.
    """
    changes, lines = [], []
    for field in MEASURES:
        if getattr(differences, field) is None:
            continue
        metric = METRICS[field]
        factor, decimals, unit, percent = (
            (100, 1, " points", " %") if metric.unit == "%" else (1, 3, "", "")
        )
        change, low, high = (factor * value for value in getattr(differences, field))
        here, there = (
            f"{factor * getattr(one, field):.{decimals}f}{percent}" for one in (metrics, of_plain)
        )
        name = metric.short if metric.short.isupper() else metric.short.capitalize()
        if change == low == high == 0:
            lines.append(f"{name}: {here} for both, equal on every test example.")
            continue
        line = (
            f"{name}: {here} instead of {there}. Difference {change:+.{decimals}f}{unit}, 95 % "
            f"interval {low:+.{decimals}f} to {high:+.{decimals}f}."
        )
        if low <= 0 <= high:
            line += f" {num_test} test examples are too few to tell."
        else:
            changes.append((f"{'higher' if change > 0 else 'lower'} {metric.short}",
                            (change > 0) == (metric.better == "higher")))  # fmt: skip
        lines.append(line)
    subject = f"With {_listed(learned)}"
    if not lines:
        return f"{subject}: no verdict, because the test examples give no interval."
    if not changes:
        first = f"{subject}: no significant difference from the plain network."
    else:
        # Join a gain and a loss by "but", two gains or two losses by "and".
        contrast = len({is_gain for _, is_gain in changes}) > 1
        joined = (" but a " if contrast else " and a ").join(name for name, _ in changes)
        first = f"{subject}, the network has a {joined} than the plain network."
    return "\n".join([first, *lines])


def instability(losses: Sequence[float]) -> str:
    """Return a warning if the plain network's loss rose and did not recover, otherwise "".

    The comparison would then depend more on the learning rate than on the learned quantities.

    Args:
        losses: mean training loss (nats) of each epoch.
    """
    lowest, last = min(losses), losses[-1]
    if last <= max(2 * lowest, losses[0] / 10):
        return ""
    return (
        f"\nThe training of the plain network is unstable: its loss rose from {lowest:.3g} to "
        f"{last:.3g}. Compare at a lower learning rate."
    )


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
