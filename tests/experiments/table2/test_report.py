"""The tables of the paper's Table 2, from results made up so that every number is known."""

import copy
import json

import pytest

from experiments.table2.report import PAPER, Setting, load, report, write_report

# (approach, augmented) -> test NLL of three seeds
NLLS = {
    ("expand", False): (1.0, 1.3, 1.6),
    ("reduce", False): (1.1, 1.2, 1.3),
    ("fixed", False): (1.2, 1.2, 1.2),
    ("reduce", True): (0.9, 0.9, 0.9),
}


def result(approach, augment, seed, nll):
    updates = [] if approach == "fixed" else [5, 10]
    slowness = {"expand": 2.0, "reduce": 1.0 + 0.1 * seed}.get(approach)
    weight_decay = {"conv.weight": 1e-3, "fc.bias": 2e-2}
    metrics = {
        name: {"test/cls/NLL": nll + shift, "test/cls/accuracy": 0.5}
        for name, shift in (("MAP", 0.0), ("Laplace, mc", 0.1))
    }
    return {
        "config": {
            "protocol": "scaled", "preset": "paper", "approach": approach, "augment": augment,
            "seed": seed, "jobs": 2, "name": f"{approach}{augment}{seed}",
        },
        "settings": {
            "depth": 10, "widen_factor": 1, "epochs": 10, "every": 5, "max_test": 20,
            "prior": {"weight_decay": 5e-3}, "run": {"seed": seed},
        },
        "data": "CIFAR-10 (JPEG)",
        "num_data": 40,
        "metrics": metrics,
        "evidence_per_example": -2.0,
        "kept_epoch": 10,
        "curves": {
            "monitor": {"test/cls/NLL": [[5, nll + 1], [10, nll]]},
            "updates": [
                {"epoch": e, "evidence_per_example": -3 + e / 10, "weight_decay": weight_decay}
                for e in updates
            ],
        },
        "seconds_per_update": {} if slowness is None else {
            "pass": slowness - 0.2, "eigenvalues": 0.1, "steps": 0.1, "all": slowness,
        },
        "device": "cpu (x)",
        "versions": {"torch": "2.15"},
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for (approach, augment), nlls in NLLS.items():
        for seed, nll in enumerate(nlls):
            write(tmp_path, result(approach, augment, seed, nll))
    return tmp_path


def write(folder, found):
    config = found["config"]
    path = folder / config["preset"] / f"{config['name']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found))
    return path


def row(text, *cells):
    (found,) = (
        line for line in text.splitlines() if line.startswith("| " + " | ".join(cells) + " |")
    )
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_means_and_standard_errors_beside_the_paper(folder):
    text = report(load(folder))
    main = text.split("| learned against fixed")[0]
    expand = row(main, "expand", "no")
    assert expand[2] == "1.300 ± 0.173"  # 0.3 / √3
    assert expand[4] == "1.400 ± 0.173"
    assert (expand[3], expand[5]) == ("50.00 ± 0.00", "50.00 ± 0.00")
    assert expand[6:8] == ["0.422 ± 0.013", "88.89 ± 0.24"]
    assert expand[9] == "3"
    assert row(main, "fixed", "no")[6:8] == ["", ""]
    assert row(main, "reduce", "yes")[6:8] == ["0.352 ± 0.008", "93.50 ± 0.06"]
    assert set(PAPER) == {(a, on) for a in ("expand", "reduce") for on in (True, False)}


def test_gains_are_paired_by_seed(folder):
    gains = report(load(folder)).split("| learned against fixed")[1].split("\n\n")[0]
    assert row(gains, "expand", "no")[2:] == ["+0.100 ± 0.173", "1 of 3 seeds"]
    assert row(gains, "reduce", "no")[2:] == ["+0.000 ± 0.058", "1 of 3 seeds"]
    assert "| reduce | yes |" not in gains  # there is no fixed one to compare with


def test_seconds_of_an_update(folder):
    text = report(load(folder))
    updates = text.split("| seconds of an update")[1].split("##")[0]
    assert row(updates, "expand")[1:] == [
        "1.80 ± 0.00", "0.10 ± 0.00", "0.10 ± 0.00", "2.00 ± 0.00", "196 ± 22",
    ]  # fmt: skip
    assert "Reduce takes 0.55 of expand's time (median of 3 pairs; paper: 0.51)." in text


def test_seeds_are_in_their_order(folder):
    runs = load(folder)
    found = runs[Setting("paper", "expand", False)]
    assert [r["config"]["seed"] for r in found] == [0, 1, 2]
    assert len(runs) == len(NLLS)
    assert write_report(folder) == write_report(folder)  # its own files are no results


@pytest.mark.parametrize(
    ("place", "value"),
    [(("settings", "epochs"), 11), (("data",), "CIFAR-10"), (("device",), "cuda (y)")],
)
def test_unlike_runs_are_not_pooled(place, value, folder):
    found = copy.deepcopy(result("expand", False, 3, 1.0))
    *path, last = place
    target = found
    for key in path:
        target = target[key]
    target[last] = value
    path = write(folder, found)
    with pytest.raises(ValueError, match=f"{path.name} has other settings than expandFalse0"):
        load(folder)


def test_calibrated_predictives_are_compared_with_the_tempered_map(folder):
    assert "temperature-scaled" not in report(load(folder))  # runs without held-out images
    for path in folder.rglob("reduceTrue*.json"):
        found = json.loads(path.read_text())
        seed = found["config"]["seed"]
        found["metrics"]["MAP"]["test/cal/ECE"] = 0.05
        others = {
            "MAP, temperature-scaled": (0.8, 0.03),
            "Laplace, mc": (0.8 - 0.01 * seed, 0.02),
        }
        for name, (nll, error) in others.items():
            metrics = {"test/cls/NLL": nll, "test/cls/accuracy": 0.5, "test/cal/ECE": error}
            found["metrics"][name] = metrics
        path.write_text(json.dumps(found))
    rows = report(load(folder)).split("temperature-scaled", 1)[1]
    cells = row(rows, "reduce", "yes", "0.900 ± 0.000")
    assert cells[3:6] == ["0.800 ± 0.000", "0.790 ± 0.006", "-0.0100 ± 0.0058"]
    assert cells[6:] == ["5.0 ± 0.0", "3.0 ± 0.0", "2.0 ± 0.0"]
