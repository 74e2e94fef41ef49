"""The table of K-FAC's defaults, from files, and a run of a few steps."""

import dataclasses
import inspect
import itertools
import json
import statistics

import pytest

from experiments.optimizers import optimizer_defaults as study
from experiments.optimizers.runs import Schedule
from experiments.options import SHIPPED
from kfac_backend.optimizer import KFAC


def test_the_table_is_of_means_over_seeds_and_names_what_diverges():
    def curve(lr, loss, diverged=None):
        curve = {"candidate": {"lr": lr}, "diverged": diverged}
        return curve | ({} if diverged else {"loss": [9.0, loss], "train loss": [9.0, loss / 2]})

    curves = [curve(0.03, 4.0), curve(0.03, 1.0), curve(0.1, 1.0), curve(0.1, 1.0, "step 2: NaN")]
    curves.append(curve(0.3, 5.0))
    config = {"problem": "lenet", "method": "peak"}
    text = study.table([{"config": config, "schedule": "cosine", "curves": curves}])
    *_, row = [line for line in text.splitlines() if "peak_kl_clip 0.01" in line]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == ["2 (1)", "2 (1)", "diverges", "5 (2.5)"]


@pytest.mark.parametrize("problem", ["binary", "squares", "lenet"])
def test_a_run_of_few_steps(problem, monkeypatch):
    monkeypatch.setattr(study, "STEPS", 10)
    monkeypatch.setattr(study, "SEEDS", (1,))
    monkeypatch.setattr(study, "KFAC_RATES", (0.1,))
    monkeypatch.setitem(study.SCHEDULES, "cosine", Schedule(10, 1))
    found = study.run_one(study.Task(problem, "cosine", "peak"))
    (curve,) = found["curves"]
    assert curve["diverged"] is None and curve["loss"][-1] < curve["loss"][0]


def test_the_options_that_matter_are_named():
    """Another default must change no result."""
    for method in study.METHODS.values():
        if method.kfac_approx is not None:
            named = {"norm_control", "norm_limit", "ema_decay", "factor_every", "update_every"}
            assert set(dataclasses.asdict(method)["options"]) == named


def test_the_default_rate_is_the_best_of_the_committed_study():
    """By the validation loss with kl_clip over that of tuned SGD or AdamW, in ten cases."""
    files = (SHIPPED / "optimizer_defaults").glob("*.json")
    losses = {}
    for record in map(json.loads, (path.read_text() for path in files)):
        config = record["config"]
        by_rate = {rate: of[0] for rate, of in study._losses(record).items()}
        losses[config["problem"], record["schedule"], config["method"]] = by_rate
    ratios = {rate: [] for rate in study.KFAC_RATES}
    for problem, schedule in itertools.product(study.PROBLEMS, study.SCHEDULES):
        tuned = [min(losses[problem, schedule, method].values()) for method in study.RATES]
        for rate, loss in losses[problem, schedule, "clip"].items():
            ratios[rate].append(loss / min(tuned))
    means = {rate: statistics.geometric_mean(of) for rate, of in ratios.items()}
    default = inspect.signature(KFAC).parameters["lr"].default
    assert default == min(means, key=means.__getitem__) and len(ratios[default]) == 10
    found = [f"{x:.2f}" for rate in (default, 0.1) for x in (means[rate], max(ratios[rate]))]
    assert found == ["0.94", "1.49", "0.99", "2.26"]  # as the docstring of `KFAC` says
