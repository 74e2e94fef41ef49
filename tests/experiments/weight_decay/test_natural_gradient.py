"""The study of optimisers under a learned prior: it runs, and its table is of what it found."""

import json
from dataclasses import replace

from experiments.weight_decay import natural_gradient, weight_decay_study
from experiments.weight_decay.natural_gradient import OPTIMIZERS, Config, run


def test_runs_every_optimiser_at_the_best_of_its_learning_rates(monkeypatch, tmp_path):
    problem = weight_decay_study.PROBLEMS["digits_lenet"]
    tiny = replace(problem, epochs={100: 1})
    monkeypatch.setitem(weight_decay_study.PROBLEMS, "digits_lenet", tiny)
    few = {name: (optimizer, rates[:2]) for name, (optimizer, rates) in OPTIMIZERS.items()}
    monkeypatch.setattr(natural_gradient, "OPTIMIZERS", few)
    found = run(Config(size=100))
    assert list(found["rows"]) == list(OPTIMIZERS)
    for row in found["rows"].values():
        best = min(row["validation"].values())
        assert row["validation"][row["lr"]] == best and 0 < row["nll"] < 5
    one, other = (found["rows"][name]["nll"] for name in ("K-FAC", "K-FAC, prior as damping"))
    assert one != other  # the prior is a part of the damping in one of them
    (tmp_path / "a.json").write_text(json.dumps(found))
    assert f"| K-FAC | {one:.3f} |" in natural_gradient.table(tmp_path)
