"""What README and docs/ show runs as it stands, and their numbers are those of the results."""

import importlib
import inspect
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kfac_backend.layers import registry
from marglik import Laplace, laplace_predictive
from marglik.application.cli import main

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
STUDIES = ["experiments/README.md"]
STUDIES += sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("experiments/*/README.md"))
RESULTS = ROOT / "experiments/results"


def flat(text):
    """The text in one line, as paragraphs are wrapped."""
    return " ".join(text.split())


def result(name):
    """A JSON file of the results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_measurements_are_rows_of_the_results():
    """Each "mean ± standard error", whatever sign it has on the page; of two pages, whole rows."""
    tables = "\n".join(path.read_text() for path in RESULTS.rglob("table.md"))
    numbers = {}
    for page in (*PAGES, *STUDIES):
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.S | re.M)
        quoted = set(re.findall(r"\d+\.\d+ ± \d+\.\d+", flat(text)))
        assert [number for number in sorted(quoted) if number not in flat(tables)] == [], page
        numbers[page] = len(quoted)
        rows = [row for row in text.splitlines() if re.match(r"\|.*\d\.\d", row)]
        if page == "docs/paper.md":  # the claims, which test_paper.py compares
            rows = [
                row
                for row in rows
                if not re.search(r"\| (equal|same order|deviates|missing)[^|]*\|$", row)
                and not re.search(r"(::\w+`|\.json\)) \|$", row)
            ]
        if page in ("docs/numbers.md", "docs/paper.md"):
            assert rows and set(rows) <= set(tables.splitlines()), page
    for folder in "weight_decay labels augmentation table2 uci predictions optimizers".split():
        assert numbers[f"experiments/{folder}/README.md"]
    assert sum(numbers[page] for page in STUDIES) > 150


def test_sentences_of_the_page_of_numbers_are_those_of_the_json():
    text = flat((ROOT / "docs/numbers.md").read_text())
    folder = "bench_curvature_cpu"
    update = result(f"{folder}/evidence")["median_seconds"]
    peak = result(f"{folder}/batch_32")["peak_mebibytes"]
    quick = {n: f"{x:.2f}" for n, x in result("bench_quick_cpu")["times_the_limit"].items()}
    batch = result("bench_predictive_cpu/batch_32")
    seconds, most = batch["median_seconds"], batch["peak_mebibytes"]
    ran = [result(f"bench_predictive_cpu/jacobians_{N}") for N in (1, 8)]
    one, last = (ran[i]["seconds"] / ran[i]["batch_size"] for i in (0, -1))
    ours = seconds["ours"] / batch["config"]["batch_size"]
    for sentence in (
        f"takes {update['ours, expand']:.2f} s. laplace-torch's update takes "
        f"{update['laplace-torch, expand']:.2f} s.",
        f"is {peak['ours alone, expand, exact']:.0f} MiB for expand and "
        f"{peak['ours alone, reduce, exact']:.0f} MiB for reduce. A training step takes "
        f"{peak['training step']:.0f} MiB.",
        f"ViT with the exact GGN: expand takes {quick['ViT, expand, exact']} times the limit, "
        f"and reduce {quick['ViT, reduce, exact']} times.",
        f"GPT with one sample per token: expand takes {quick['GPT, expand, mc']} times the limit, "
        f"and reduce {quick['GPT, reduce, mc']} times.",
        f"takes {quick['epoch of the online loop']} times as long as an epoch of a "
        "hand-written loop",
        f"covariances of {batch['config']['batch_size']} images take {seconds['ours']:.1f} s. "
        f"This is {batch['times_the_limit']['ours']:.1f} times the limit.",
        f"The peak memory is {most['ours']:.0f} MiB. A training step takes "
        f"{most['training step']:.0f} MiB.",
        f"The last layer alone** takes {seconds['ours, last layer']:.2f} s.",
        f"Jacobians** take {one:.1f} s per image if they are computed for one image at a time. In "
        f"batches of {ran[-1]['batch_size']} they take {last:.1f} s per image and "
        f"{ran[-1]['peak_gibibytes']:.0f} GiB. Per image, marglik's covariances are "
        f"{one / ours:.0f} to {last / ours:.0f} times as fast.",
    ):
        assert sentence in text, sentence
    assert most["ours"] <= 1.5 * most["training step"]


def test_coverages_of_confidence_thresholds_are_those_of_the_json():
    text = flat((ROOT / "docs/after-training.md").read_text())

    def of(risk, N):
        found = result(f"confidence_thresholds/risk_{risk}_of_{N}")
        ours = found["confidence_threshold"]
        return [f"{100 * value:.0f} %" for value in (found["best"], ours["coverage"], ours["none"])]

    for risk in (5, 2):
        sizes = [of(risk, N) for N in (500, 1000, 3000)]
        cells = " | ".join(f"{coverage} ({none})" for _, coverage, none in sizes)
        assert f"| {risk} % | {sizes[0][0]} | {cells} |" in text


def test_table_of_the_readme_is_that_of_the_results():
    readme = (ROOT / "README.md").read_text()
    batch = result("bench_curvature_cpu/batch_32")
    update = result("bench_curvature_cpu/evidence")["median_seconds"]
    of = {name: f"{value:.2f} s" for name, value in batch["median_seconds"].items()}
    study = (RESULTS / "weight_decay_study/table.md").read_text()

    def nll_of(problem: str) -> dict[str, str]:
        """Of each way the temperature-scaled NLL, or with wrong labels the lower NLL.

        The calibrated Laplace predictive has a temperature of its own, and is not scaled again.
        """
        row = rf"\| {re.escape(problem)} \| \d \| ([\w ,'-]+) \| ([\d.]+) \| ([\d.]+) ±"
        is_clean = problem.endswith("| 0%")
        rows = re.findall(row, study)
        nlls = {way: scaled if is_clean else min(raw, scaled) for way, raw, scaled in rows}
        return nlls | {way: raw for way, raw, _ in rows if way == "Laplace"}

    mlp, convolutions, lenet = map(
        nll_of,
        (
            "digits, MLP | 400 | 20%",
            "digits, convolutions | 1,000 | 20%",
            "digits, LeNet | 600 | 0%",
        ),
    )
    bought = (RESULTS / "active_learning/table.md").read_text().split("**")[2]
    labels = dict(re.findall(r"\| ([\w ]+) \| [\d.]+ ±[^|]*\|[^|]*\| ([\d.]+) ±", bought))
    for row in (
        f"expand | {of['ours, expand, exact']} | curvlinops {of['curvlinops, expand, exact']}, "
        f"ASDL {of['asdl, expand, exact']} |",
        f"reduce | {of['ours, reduce, exact']} | curvlinops {of['curvlinops, reduce, exact']}; "
        f"the limit {of['limit, exact']} |",
        f"| {update['ours, expand']:.2f} s | laplace-torch "
        f"{update['laplace-torch, expand']:.2f} s |",
        f"| {mlp['learned']} | grid of seven {mlp['grid']}, default {mlp['default']} |",
        f"| {convolutions['learned']} | grid of seven {convolutions['grid']}, "
        f"default {convolutions['default']} |",
        f"| {lenet['learned']} | grid of seven {lenet['grid']}, default {lenet['default']}, "
        f"dropout {lenet['dropout']} |",
        f"| {labels['mutual information']} | random {labels['random']}, ensemble of three "
        f"{labels['ensemble']} |",
        f"| {lenet['Laplace']} | laplace-torch, with the weight decay of the grid, "
        f"{lenet['laplace-torch']} |",
    ):
        assert row in readme, row
    peak = batch["peak_mebibytes"]
    memory = (
        f"needs [{peak['ours alone, expand, exact']:.0f} MiB](docs/numbers.md#a-batch) and a "
        f"training step {peak['training step']:.0f} MiB."
    )
    assert memory in flat(readme)


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
    if page == "docs/seven-uses.md":
        _check_seven_uses(examples_of(page), namespace, commands((ROOT / page).read_text()))
    if page == "README.md":
        assert [len(example.splitlines()) <= 15 for example in examples_of(page)] == [True, True]
        for posterior in (namespace["laplace"], namespace["prior"].posterior):
            assert len(set(posterior.prior_precision.tolist())) == 10
    shown = capsys.readouterr().out
    if page == "docs/calibration.md":
        _check_conformal_sets(namespace)
    if page == "docs/index.md":
        assert "torch.Size([75, 75])" in shown
    if page == "docs/adding-a-layer.md":
        blocks = ["0.class_token", "0.gain", "1.A", "1.B", "3.weight", "3.bias"]
        assert shown.strip() == str(blocks)


def _check_seven_uses(examples, namespace, of_table):
    assert len(examples) == 7 and all(len(e.splitlines()) <= 30 for e in examples)
    for program, *arguments in of_table:
        assert program == "marglik" and main(arguments) == 0
    rows = Path("predictions.csv").read_text().splitlines()
    assert len(rows) == 21 and rows[0] == "mean,std,low,high"
    assert namespace["training_losses"]["K-FAC"] < namespace["training_losses"]["SGD"]
    assert namespace["right"] > 3 * namespace["left"]  # the noise is 5 times as large there


def _check_conformal_sets(namespace):
    """By the definition: probabilities above the quantile of the labels' of new examples."""
    classifier, X, labels = (namespace[name] for name in ("classifier", "X_new", "labels_new"))
    scores = np.sort(1 - classifier.predict_proba(X)[range(len(X)), labels])
    threshold = scores[int(np.ceil((len(X) + 1) * 0.95)) - 1]
    probabilities = classifier.predict_proba(namespace["X_test"])
    assert (namespace["sets"][:, :, 0] == (probabilities >= 1 - threshold)).all()
    # Coverages of 400 and 800 examples: a standard deviation of 0.013.
    assert 0.91 < namespace["contained"].mean() < 0.99
    assert 1 <= namespace["sets"].sum(1).mean() < 2


def test_a_posterior_is_shared_on_the_hub(monkeypatch):
    """By docs/files.md, with a client that copies folders and makes links as the real one does."""
    hub = pytest.importorskip("huggingface_hub")
    page = (ROOT / "docs/files.md").read_text().partition("### Share a posterior")[2]
    share, load = re.findall(r"```py\n(.*?)```", page, re.S)[:2]
    real = {name: getattr(hub, name) for name in ("create_repo", "upload_folder")}
    calls = []

    def called(name):
        def call(*arguments, **options):  # the arguments must be those of the real function
            calls.append(inspect.signature(real[name]).bind(*arguments, **options).arguments)

        return call

    def download(repo_id):  # a snapshot of links into a folder of blobs
        assert repo_id == calls[0]["repo_id"] == calls[1]["repo_id"]
        blobs, snapshot = Path("blobs").absolute(), Path("snapshot")
        snapshot.mkdir()
        shutil.copytree(calls[1]["folder_path"], blobs)
        for path in blobs.iterdir():
            (snapshot / path.name).symlink_to(path)
        return str(snapshot)

    for name in real:
        monkeypatch.setattr(hub, name, called(name))
    monkeypatch.setattr(hub, "snapshot_download", download)
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    model, other = (torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)) for _ in "ab")
    posterior = Laplace(model, "classification")
    posterior.fit([(x, y)])
    exec(share, {"posterior": posterior})
    namespace = {"model": other}
    exec(load, namespace)
    assert torch.equal(namespace["predict"](x).mean, laplace_predictive(posterior)(x).mean)


INSTALLATION = [
    ["source", ".venv/bin/activate"],
    ["pip", "install", "-e", ".[all]"],
    ["uv", "pip", "install", "torch", "--torch-backend", "cpu"],
    ["conda", "env", "create", "-f", "environment.yml"],
    ["conda", "activate", "marglik"],
]


OF_TABLES = ("docs/tables.md", "docs/active-learning.md", "docs/influence.md")
"""Pages whose commands take tables that do not exist here."""


def commands(text):
    """Each command of the shell's blocks, as a list of arguments."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in blocks.splitlines() if line]


@pytest.mark.parametrize("page", [*PAGES, *STUDIES])
def test_commands_are_those_of_the_programs(page, capsys):
    for program, *arguments in commands((ROOT / page).read_text()):
        arguments = [str(ROOT / a) if a.startswith("experiments/") else a for a in arguments]
        if program == "torchrun" and "marglik" not in arguments:
            program, arguments = "python", arguments[arguments.index("-m") :]
        elif program == "torchrun":
            program, arguments = "marglik", arguments[arguments.index("marglik") + 1 :]
        if program == "marglik" and page in ("docs/own-network.md", "docs/seven-uses.md"):
            continue  # these run below, or with the page's examples
        if program == "marglik" and (arguments[0] == "train" or page in OF_TABLES):
            with pytest.raises(SystemExit) as stopped:
                main([*arguments, "--print_config"])
            assert stopped.value.code == 0, arguments
        elif program == "python":
            assert arguments[0] == "-m"
            with pytest.raises(SystemExit) as stopped:
                importlib.import_module(arguments[1]).main([*arguments[2:], "--help"])
            assert stopped.value.code == 0, arguments
        elif program in ("source", "pip", "uv", "conda"):
            assert [program, *arguments] in INSTALLATION
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
        else:  # these run below
            assert page == "docs/after-training.md" and program == "marglik", program
            assert arguments[0] in ("evaluate", "report", "fit")


def test_commands_after_make_train_run_as_they_stand(capsys, monkeypatch):
    """But for the epochs of training, and with an eighth of the digits."""
    table = np.loadtxt
    monkeypatch.setattr(np, "loadtxt", lambda *given, **more: table(*given, **more)[::8])
    found = commands((ROOT / "docs/after-training.md").read_text())
    of_digits = [c[1:] for c in found if c[0] == "marglik" and "digits" in " ".join(c)]
    assert [c[0] for c in of_digits] == ["evaluate", "train", "report", "fit"]
    assert main(["train", "--config", "digits", "--epochs", "2"]) == 0  # make train's
    for command in of_digits:
        shorter = ["--epochs", "2"] if command[0] == "train" else []
        assert main([*command, *shorter]) == 0, command
    for file in ("runs/comparison.html", "runs/digits/report.html", "runs/fitted/posterior.json"):
        assert Path(file).stat().st_size > 100
    shown = capsys.readouterr().out
    assert "Laplace, mc" in shown and "102 training examples" in shown


def test_commands_on_ones_own_network_run(capsys):
    """With few epochs, and the network in a file of this folder, which is not on Python's path."""
    page = "docs/own-network.md"
    network, data, *_, tensors = examples_of(page)
    Path("my_net.py").write_text(network)
    namespace: dict = {}
    exec(data + tensors, namespace)
    train, evaluate = (c[1:] for c in commands((ROOT / page).read_text()))
    named = ["--model", "my_net.MyNet", "--data", "TensorFile", "--data.path"]
    expected = ["evaluate", "runs/mine", *named, "my_data.safetensors"]
    assert (train[0], evaluate) == ("train", expected)
    assert main([*train, "--epochs", "2", "--prior.every", "2", "--no_progress"]) == 0
    assert main(evaluate) == 0
    assert "my_net.MyNet" in Path("runs/mine/posterior.json").read_text()
