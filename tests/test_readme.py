"""What README and docs/ show runs as it stands, and their numbers are those of the results."""

import importlib
import json
import re
import shlex
import statistics
from pathlib import Path

import pytest

from experiments import studies
from experiments.speed import curvature_report as bench_curvature_report
from experiments.speed import growth, large_classes
from experiments.table2 import report as table2_report
from experiments.weight_decay import presets
from kfac_backend.layers import registry
from marglik.cli import main

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
RESULTS = ROOT / "experiments/results"


def flat(text):
    """The text in one line, as paragraphs are wrapped."""
    return " ".join(text.split())


def test_benchmark_numbers_are_those_of_the_json():
    folder = ROOT / "experiments/results/bench_curvature_cpu"
    parts = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    sizes = {f"factor_{size}" for size in (1024, 4096, 8192)}
    assert set(parts) == {"batch_32", "batch_128", "growth", "evidence", *sizes}
    readme = (ROOT / "docs/numbers.md").read_text()
    made = (folder / "table.md").read_text().splitlines()
    factors = [
        row for row in made[made.index("| eigenvalues and 100 steps | seconds |") + 7 :] if row
    ]
    assert factors[0].startswith("| seconds for one factor of | 1,024 | 4,096 | 8,192 |")
    for row in (*bench_curvature_report.table(parts["batch_32"]).splitlines(), *factors):
        assert row in readme, row
    ratios, peak = parts["batch_128"]["times_the_limit"], parts["batch_32"]["peak_mebibytes"]
    update = parts["evidence"]["median_seconds"]
    for sentence in (
        f"At 128 images expand takes {ratios['ours, expand, exact']:.2f} and reduce "
        f"{ratios['ours, reduce, exact']:.2f} times the limit",
        f"({ratios['ours, expand, mc']:.2f} and {ratios['ours, reduce, mc']:.2f} with one sample)",
        f"takes {update['ours, expand']:.2f} s, laplace-torch's "
        f"{update['laplace-torch, expand']:.2f} s",
        f"Peak memory is {peak['ours alone, expand, exact']:.0f} MiB for expand and "
        f"{peak['ours alone, reduce, exact']:.0f} MiB for reduce, factors included; a training "
        f"step takes {peak['training step']:.0f} MiB",
    ):
        assert sentence in flat(readme), sentence
    assert (folder / "growth.png").exists()


def test_numbers_of_many_classes_and_of_growth_are_those_of_the_json():
    page = (ROOT / "docs/numbers.md").read_text().splitlines()
    folder = RESULTS / "large_classes"
    cases = {
        name: json.loads((folder / f"{name}.json").read_text())["cases"]
        for name in large_classes.PARTS
    }
    made = large_classes.table(cases).splitlines()
    assert (folder / "table.md").read_text().splitlines() == made
    start = page.index("## Many classes")
    rows = [row for row in page[start:] if row.startswith("|")]
    parts = {
        axis: json.loads((RESULTS / f"growth/{axis}.json").read_text()) for axis in growth.AXES
    }
    grown = growth.table(parts).splitlines()
    assert set(grown) <= set(rows) <= {*made, *grown}
    kept = [row for row in made if row.startswith("| 1,000") or "tied |" in row]
    assert sum(row in rows for row in kept) >= 13
    marked = {axis for axis in parts if growth.surprises(parts[axis], "seconds")}
    assert marked == {"vocabulary"}  # which the page explains


def test_the_fixed_costs_are_those_of_the_json():
    found = json.loads((ROOT / "experiments/results/bench_quick_cpu.json").read_text())
    ratios = found["times_the_limit"]
    readme = flat((ROOT / "docs/numbers.md").read_text())
    assert (
        f"takes {ratios['first pass, reduce, mc']:.2f} times the limit on a model that is new, "
        f"{ratios['later pass, reduce, mc']:.2f} on one that was proved before and whose structure "
        f"has not changed, and {ratios['batch, reduce, mc']:.2f} without a proof"
    ) in readme
    of = {name: f"{ratio:.2f}" for name, ratio in ratios.items()}
    for sentence in (
        f"ViT, exact, {of['ViT, expand, exact']} (expand) and {of['ViT, reduce, exact']} (reduce)",
        f"one sample a token, {of['GPT, expand, mc']} and {of['GPT, reduce, mc']} times",
        f"takes {of['epoch of the online loop']} times one of a loop written by hand",
    ):
        assert sentence in readme, sentence


def test_predictive_numbers_are_those_of_the_json():
    folder = ROOT / "experiments/results/bench_predictive_cpu"
    parts = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert {"batch_32", "jacobians"} <= set(parts)
    batch = parts["batch_32"]
    seconds, peak = batch["median_seconds"], batch["peak_mebibytes"]
    ran = [entry for entry in parts["jacobians"]["batches"] if "seconds" in entry]
    one, most = (ran[i]["seconds"] / ran[i]["batch_size"] for i in (0, -1))
    ours = seconds["ours"] / batch["config"]["batch_size"]
    readme = flat((ROOT / "docs/numbers.md").read_text())
    for sentence in (
        f"take {seconds['ours']:.1f} s, {batch['times_the_limit']['ours']:.1f} times their limit",
        f"{peak['ours']:.0f} MiB at the most, where a training step takes "
        f"{peak['training step']:.0f} MiB; the last layer's alone take "
        f"{seconds['ours, last layer']:.2f} s",
        f"Jacobians take {one:.1f} s an image one by one, {most:.1f} s and "
        f"{ran[-1]['peak_gibibytes']:.0f} GiB in batches of {ran[-1]['batch_size']}: "
        f"{one / ours:.0f} to {most / ours:.0f} times as long",
    ):
        assert sentence in readme, sentence
    assert peak["ours"] <= 1.5 * peak["training step"]


@pytest.mark.parametrize(
    ("title", "folder"),
    [
        ("Rivals of the Laplace predictive", "predictive_rivals"),
        ("Where the Laplace predictive loses", "predictive_study"),
        ("Is learning the weight decay worth it?", "weight_decay_study"),
        ("UCI regression", "uci"),
    ],
)
def test_quoted_means_are_those_of_the_tables(title, folder):
    """Each "mean ± standard error" of a section, whatever sign its sentence gives it."""
    folder = ROOT / "experiments/results" / folder
    page = (ROOT / "experiments/README.md").read_text()
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    quoted = re.findall(r"\d+\.\d+ ± \d+\.\d+", flat(section))
    table = (folder / "table.md").read_text()
    assert [number for number in quoted if number not in table] == []
    assert quoted


def test_table_of_the_readme_is_that_of_the_results():
    readme = (ROOT / "README.md").read_text()
    batch = json.loads((RESULTS / "bench_curvature_cpu/batch_32.json").read_text())
    update = json.loads((RESULTS / "bench_curvature_cpu/evidence.json").read_text())
    update = update["median_seconds"]
    of = {name: f"{value:.2f} s" for name, value in batch["median_seconds"].items()}
    row = r"\| 400 \| 20 % \| 5 \| ([\w ]+) \| [^|]+\| ([\d.]+) ±"
    study = (RESULTS / "weight_decay_study/table.md").read_text()
    nll = dict(re.findall(row, study)[:3])  # the first table: trained on all
    row = r"\| 4,000 \| 0 % \| \d \| ([\w ,]+) \| [^|]+\| ([\d.]+) ±"
    images = dict(re.findall(row, study)[:4])
    rivals = (RESULTS / "predictive_rivals/table.md").read_text().split("## ")[1]  # digits
    raw = dict(re.findall(r"^\| ([\w ,]+) \| ([\d.]+) ±", rivals, re.M))
    for row in (
        f"expand | {of['ours, expand, exact']} | curvlinops {of['curvlinops, expand, exact']}, "
        f"ASDL {of['asdl, expand, exact']} |",
        f"reduce | {of['ours, reduce, exact']} | curvlinops {of['curvlinops, reduce, exact']}; "
        f"the limit {of['limit, exact']} |",
        f"| {update['ours, expand']:.2f} s | laplace-torch "
        f"{update['laplace-torch, expand']:.2f} s |",
        f"| {nll['learned']} | grid of seven {nll['grid of seven']}, default {nll['default']} |",
        f"| {images['learned']} | grid of seven {images['grid of seven, by the scaled NLL']}, "
        f"default {images['default']} |",
        f"| {raw['marglik, probit, calibrated']} | its MAP {raw['marglik, MAP']}, uncalibrated "
        f"{raw['marglik, probit']} |",
        f"temperature scaling {raw['temperature scaling']}, MC dropout {raw['MC dropout']} |",
    ):
        assert row in readme, row


# Of earlier runs, too, that page has numbers; its tables have tests of their own.
@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/paper.md"])
def test_quoted_errors_are_measured(page):
    """Each "mean ± standard error" of a page, whatever sign it has there, is one of the results."""
    measured = (ROOT / "experiments/README.md").read_text()
    measured += "".join(path.read_text() for path in RESULTS.rglob("table.md"))
    quoted = set(re.findall(r"\d+\.\d+ ± \d+\.\d+", flat((ROOT / page).read_text())))
    assert [number for number in sorted(quoted) if number not in flat(measured)] == []


def examples_of(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


@pytest.mark.filterwarnings("ignore:By default `link_approx`")
@pytest.mark.parametrize(
    "page", [page for page in (*PAGES, "kfac_backend/README.md") if examples_of(page)]
)
def test_python_examples_run(page, capsys, monkeypatch, tmp_path):
    """Each goes on where the one before it on the page ended."""
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr(registry, "PARAMETERS", dict(registry.PARAMETERS))
    namespace: dict = {}
    for example in examples_of(page):
        exec(compile(example, f"<{page}>", "exec"), namespace)
    if page == "README.md":
        assert len(examples_of(page)) == 1 and len(examples_of(page)[0].splitlines()) <= 15
        assert len(set(namespace["laplace"].prior_precision.tolist())) == 10
    shown = capsys.readouterr().out
    if page == "docs/index.md":
        assert "torch.Size([75, 75])" in shown
    if page == "kfac_backend/README.md":
        blocks = ["0.class_token", "0.gain", "1.A", "1.B", "3.weight", "3.bias"]
        assert shown.strip() == str(blocks)


INSTALLATION = [
    ["source", ".venv/bin/activate"],
    ["pip", "install", "-e", "."],
    ["conda", "env", "create", "-f", "environment.yml"],
    ["conda", "activate", "marglik"],
]


def commands(text):
    """Each command of the shell's blocks, as a list of arguments."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in blocks.splitlines() if line]


@pytest.mark.parametrize("page", [*PAGES, "experiments/README.md"])
def test_commands_are_those_of_the_programs(page, capsys):
    for program, *arguments in commands((ROOT / page).read_text()):
        arguments = [str(ROOT / a) if a.startswith("experiments/") else a for a in arguments]
        if program == "marglik" and page == "docs/own-network.md":
            continue  # these run below
        if program == "marglik" and arguments[0] == "train":
            with pytest.raises(SystemExit) as stopped:
                main([*arguments, "--print_config"])
            assert stopped.value.code == 0, arguments
        elif program == "python":
            assert arguments[0] == "-m"
            with pytest.raises(SystemExit) as stopped:
                importlib.import_module(arguments[1]).main([*arguments[2:], "--help"])
            assert stopped.value.code == 0, arguments
        elif program in ("source", "pip", "conda"):
            assert [program, *arguments] in INSTALLATION
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
        else:  # these run below
            assert page == "docs/after-training.md" and program == "marglik", program
            assert arguments[0] in ("evaluate", "report", "fit")


def test_commands_after_make_train_run_as_they_stand(capsys):
    """But for the epochs of training."""
    found = commands((ROOT / "docs/after-training.md").read_text())
    of_digits = [c[1:] for c in found if c[0] == "marglik" and "digits" in " ".join(c)]
    assert [c[0] for c in of_digits] == ["evaluate", "train", "report", "fit"]
    assert main(["train", "--config", "digits", "--epochs", "2"]) == 0  # make train's
    for command in of_digits:
        shorter = ["--epochs", "2"] if command[0] == "train" else []
        assert main([*command, *shorter]) == 0, command
    for file in ("both.html", "runs/digits/report.html", "runs/fitted/posterior.json"):
        assert Path(file).stat().st_size > 100
    shown = capsys.readouterr().out
    assert "shift/mean/cls/NLL" in shown and "marglik evaluate runs/fitted" in shown


def test_commands_on_ones_own_network_run(capsys):
    """With few epochs, and the network in a file of this folder, which is not on Python's path."""
    page = "docs/own-network.md"
    network, data, *_, tensors = examples_of(page)
    Path("my_net.py").write_text(network)
    namespace: dict = {}
    exec(data + tensors, namespace)
    train, evaluate = (c[1:] for c in commands((ROOT / page).read_text()))
    assert (train[0], evaluate) == ("train", ["evaluate", "runs/mine"])
    assert main([*train, "--epochs", "2", "--prior.every", "2", "--no_progress"]) == 0
    assert main(evaluate) == 0
    assert "my_net.MyNet" in Path("runs/mine/posterior.json").read_text()


def test_table_of_presets_is_that_of_the_json():
    folder = ROOT / "experiments/results/presets"
    runs = studies.results_in(folder)
    readme = (ROOT / "docs/paper.md").read_text()
    for row in presets.table(runs).splitlines():
        assert row in readme, row


def test_table_2_with_calibration_is_that_of_the_json():
    folder = ROOT / "experiments/results/table2/scaled_calibrated"
    runs = table2_report.load(folder)
    text = table2_report.report(runs)
    assert (folder / "table.md").read_text() == text + "\n"


def test_table_2_is_that_of_the_json():
    """A page quotes the tables."""
    folder = ROOT / "experiments/results/table2/scaled"
    runs = table2_report.load(folder)
    main = {s: found for s, found in runs.items() if s.preset == "paper"}
    assert {(s.approach, s.augment) for s in main} == {
        (approach, augment)
        for approach in ("expand", "reduce", "fixed")
        for augment in (True, False)
    }
    assert all([r["config"]["seed"] for r in found] == [0, 1, 2] for found in main.values())
    readme = (ROOT / "docs/paper.md").read_text()
    for row in table2_report.gains(main).splitlines()[:6]:
        assert row in readme, row
    redux = {s: found for s, found in runs.items() if s.preset == "redux"}
    (gain,) = re.findall(r"reduce \| yes \| (\S+ ± \S+) ", table2_report.gains(redux))
    assert f"it is {gain} (reduce, augmented)" in flat(readme)
    nll = {
        s.approach: statistics.mean(r["metrics"]["Laplace, mc"]["test/cls/NLL"] for r in found)
        for s, found in redux.items()
    }
    assert f"(NLL {nll['reduce']:.2f} instead of {nll['fixed']:.2f})" in flat(readme)
