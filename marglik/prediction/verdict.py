"""What learning gained, in one sentence: a network against a plain one, on the same test data.

The plain network is what one would train otherwise: the same architecture, data, optimiser and
epochs, with a fixed weight decay, a learning rate that falls with a cosine, and no average of its
parameters. Both are compared at their parameters, temperature-scaled on the same held-out data
where it is given, so that calibration counts for neither.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from kfac_backend.engine.batches import split_batch
from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.options import TargetOptions
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.intervals import differences, of_examples
from marglik.prediction.metrics import compute_metrics, example_scores
from marglik.prediction.predictive import predict_all
from marglik.records import METRICS, Difference, Metrics

MEASURES = ("nll", "accuracy")
"""The metrics that a verdict is about."""


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
    """What ``model`` gained against ``plain`` on test data, with 95 % intervals, in one sentence.

    The intervals are of paired differences, over the choice of test examples; another seed of
    training may change more.

    Args:
        model: the network that was trained with what was learned.
        plain: the same network, trained without; see this module.
        test: (x, y), or mappings.
        likelihood: distribution of the targets.
        held_out: (x, y), or mappings, that neither was trained on. Each network's outputs are
            divided by the temperature (regression: has the σ) of least NLL there, as the command
            does with the examples that it holds out. Without them both are compared as they are.
        sigma_noise: σ of both networks, for regression.
        learned: what was learned, for the sentence.
        targets: how batches give their targets.

    Raises:
        ValueError: no test example, or regression without σ.
    """
    likelihood = likelihood_of(likelihood)
    if likelihood.has_sigma and sigma_noise is None:
        raise ValueError("Regression needs the noise of both networks; pass sigma_noise=(σ, σ).")
    batches, held_out, metrics, scores = list(test), list(held_out), [], []
    for network, sigma in zip((model, plain), sigma_noise or (1.0, 1.0), strict=True):
        alone = Ensemble([network], likelihood, sigma)
        if held_out:
            alone.calibrate(held_out, targets=targets)
        p, y = predict_all(alone, batches, targets=targets)
        metrics.append(compute_metrics(p, y, likelihood))
        scores.append(example_scores(p, y, likelihood))
    # Positions of one example are not independent: they are averaged first. Where not all count,
    # the rows do not say which example they belong to.
    ys = [split_batch(batch, targets)[1] for batch in batches]
    own_axes = not likelihood.has_labels
    rows = sum(y.shape[: y.dim() - own_axes].numel() for y in ys)
    changes: Metrics[Difference] = Metrics()
    if rows == len(scores[0].nll):
        positions = rows // sum(map(len, ys))
        changes = differences(*(s.map(lambda row: of_examples(row, positions)) for s in scores))
    return in_one_sentence(changes, metrics[0], metrics[1], learned)


def in_one_sentence(
    differences: Metrics[Difference],
    metrics: Metrics[float],
    of_plain: Metrics[float],
    learned: Sequence[str] = ("learned weight decays",),
) -> str:
    """The verdict.

    Args:
        differences: from the plain network.
        metrics: of the learned network.
        of_plain: of the plain network.
        learned: what was learned.
    """
    better, worse, phrases = [], [], []
    for field in MEASURES:
        if getattr(differences, field) is None:
            continue
        metric = METRICS[field]
        name, is_share = metric.short, metric.unit == "%"
        factor, decimals, unit, percent = (100, 1, " points", " %") if is_share else (1, 3, "", "")
        change, low, high = (factor * value for value in getattr(differences, field))
        if not low <= 0 <= high:
            (better if (change > 0) == (metric.better == "higher") else worse).append(name)
        here, there = (
            f"{factor * getattr(one, field):.{decimals}f}{percent}" for one in (metrics, of_plain)
        )
        if change == low == high == 0:
            phrases.append(f"{name} {here} for both, and the same for each example")
            continue
        ends = f"95 % interval {low:+.{decimals}f} to {high:+.{decimals}f}"
        phrases.append(f"{name} {here} instead of {there} ({change:+.{decimals}f}{unit}, {ends})")
    subject = _listed(learned)
    subject = f"{subject[0].upper()}{subject[1:]}"
    if not phrases:
        return f"{subject}: no verdict, as the test examples allow no interval of the differences."
    changes = [f"improved the {_listed(better)}"] if better else []
    changes += [f"worsened the {_listed(worse)}"] if worse else []
    verb = " and ".join(changes) or "gained nothing that the test data can show"
    return f"{subject} {verb} against the plain network: {'; '.join(phrases)}."


def instability(losses: Sequence[float]) -> str:
    """A sentence on a plain network that did not come back from a jump of its loss, or "".

    A comparison with it would say more of its learning rate than of what was learned.

    Args:
        losses: mean training loss (nats) of each epoch.
    """
    lowest, last = min(losses), losses[-1]
    if last <= max(2 * lowest, losses[0] / 10):
        return ""
    return (
        f" But the plain network's training is unstable, its loss rose from {lowest:.3g} to "
        f"{last:.3g}: compare at a lower learning rate."
    )


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
