"""`marglik train` on sequences and on graphs: what a run leaves, its evaluation, wrong turns."""

import shutil

import pytest

from marglik.cli import main
from marglik.models import MLP
from marglik.posterior.posterior_file import load_posterior
from marglik.runs import training_setup
from marglik.storage.record_file import read_posterior
from marglik.storage.run_folder import read_log
from marglik.training.optimizers import build_optimizer
from tests.experiments.data.text_and_graphs import (
    dart_entries,
    nci1_texts,
    write_dart,
    write_nci1,
)
from tests.marglik import threads
from tests.marglik.linear_networks import NodeCounts, TokenNetwork
from tests.marglik.runs.command_line import UNCALIBRATED, evaluated, refusal, results_of
from tests.marglik.runs.tensor_problems import SIGMA, bernoulli, regression

TRAIN = [
    "train", "--optimizer.name", "adamw", "--optimizer.lr", "0.02", "--epochs", "4",
    "--prior.every", "2", "--prior.steps", "10", "--batch_size", "16", "--no_progress",
    "--monitor", "2",
]  # fmt: skip
KINDS = {
    "sequences": (
        "experiments.data.dart.DART", "TokenNetwork",
        ["--data.context", "16", "--data.num_train", "60", "--data.num_test", "20",
         "--data.validation", "0.1", "--curvature.fisher", "mc",
         "--predictive.method", "linearised"],
    ),
    "graphs": ("experiments.data.nci1.NCI1", "NodeCounts", ["--data.validation", "0.2"]),
}  # fmt: skip
NAMED = {
    kind: ["--model", f"tests.marglik.linear_networks.{model}", "--data", data]
    for kind, (data, model, _) in KINDS.items()
}
"""What `evaluate` needs to be told, as the classes are not marglik's."""
SIZES = {"sequences": (54, 6, 20), "graphs": (38, 10, 12)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Where the data is."""
    folder = tmp_path_factory.mktemp("data")
    return {
        "sequences": write_dart(folder / "dart.json.gz", dart_entries(40)),
        "graphs": write_nci1(folder / "nci1.tar.gz", nci1_texts(60)),
    }


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def commands(files):
    """The options of each kind."""
    return {
        kind: [
            *TRAIN, "--data", data, "--data.path", str(files[kind]),
            "--model", f"tests.marglik.linear_networks.{model}", *options,
        ]
        for kind, (data, model, options) in KINDS.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(commands, tmp_path_factory):
    """What the runs leave; not to be written to."""
    folder = tmp_path_factory.mktemp("runs")
    with threads.one_thread():
        for kind in KINDS:
            assert main([*commands[kind], "--output", str(folder / kind)]) == 0
    return folder


@pytest.fixture
def run(kind, trained, tmp_path):
    return shutil.copytree(trained / kind, tmp_path / "run")


def without_seconds(evaluation):
    predictives = {
        name: {k: v for k, v in one.items() if k != "seconds"}
        for name, one in evaluation["predictives"].items()
    }
    return evaluation | {"predictives": predictives}


def test_what_a_run_leaves(kind, run):
    results, evaluation = results_of(run), evaluated(run)
    train, validation, test = SIZES[kind]
    assert results["num_data"] == train
    assert results["examples"] == {"train": train, "validation": validation, "test": test}
    assert set(results["sums"]) == {"examples", "ood", "initial_parameters"}
    assert results["evidence"]["kept"] > results["evidence"]["first"]
    assert results["complete"]
    assert len(results["metrics"]) == 3
    assert evaluation["num_test"] == test
    positions = evaluation["num_positions"]
    assert results["num_positions"] == positions
    assert (positions is None) == (kind == "graphs")
    assert positions is None or test < positions < test * 16
    for values in results["metrics"].values():
        assert {"test/cls/NLL", "validation/cls/accuracy", "test/cal/ECE"} <= set(values)
    updates = [record for record in read_log(run) if record["kind"] == "update"]
    assert [record["epoch"] for record in updates] == [2, 4]
    assert "validation/cls/NLL" in [r for r in read_log(run) if r["kind"] == "epoch"][1]


def test_the_posterior_remembers_its_data(kind, run):
    posterior = read_posterior(run)
    data = posterior["data"]
    if kind == "sequences":
        assert len(data["classes"]) == 256 and "graphs" not in data
    else:
        assert data["classes"] == ["0", "1"]
        assert data["graphs"] == "graphs with 3 features per node and 1 per edge"
    model = TokenNetwork() if kind == "sequences" else NodeCounts()
    laplace = load_posterior(run, model)
    kept = results_of(run)["evidence"]["kept"]
    assert laplace.log_marginal_likelihood().item() == pytest.approx(kept)


def test_it_is_evaluated_as_at_its_end(kind, run, capsys):
    before = evaluated(run)
    options = ["--progress", "false", *NAMED[kind]]
    if kind == "sequences":
        options += ["--predictive.method", "linearised"]
    assert main(["evaluate", str(run), *options]) == 0
    after = evaluated(run)
    for key in before.keys() - {"config", "predictives"}:
        assert after[key] == before[key], key
    assert without_seconds(after)["predictives"] == without_seconds(before)["predictives"]
    printed = capsys.readouterr().out
    per_position = f"means over {before['num_positions']} positions (tokens), the NLL in nats per"
    assert (per_position in printed) == (kind == "sequences")


def test_the_page_says_what_metrics_are_about(kind, run):
    page = (run / "report.html").read_text()
    of_sequences = kind == "sequences"
    assert ("metrics are means over the positions (tokens)" in page) == of_sequences
    assert ("nats per position, lower is better" in page) == of_sequences
    assert ("nats per example, lower is better" in page) != of_sequences


def test_it_can_be_resumed(kind, run, commands, capsys):
    """A finished run is returned; with other data it is another run."""
    command = [*commands[kind], "--output", str(run), "--resume"]
    capsys.readouterr()
    assert main(command) == 0
    assert "log marginal likelihood per example" in capsys.readouterr().out
    message = refusal(capsys, *command, "--data.seed", "3")
    assert "sums.examples is" in message or "examples.train is" in message


@pytest.mark.parametrize(("kind", "method"), [("sequences", "validation"), ("graphs", "fixed")])
def test_fit_takes_them_too(kind, run, commands, tmp_path, method):
    checkpoint = shutil.copy(run / "model.safetensors", tmp_path / "net.safetensors")
    command = commands[kind]
    first, last = command.index("--data"), command.index("--monitor")
    of_data = command[first:]
    options = ["--checkpoint", str(checkpoint), "--no_progress", "--prior.method", method]
    options += UNCALIBRATED
    out = ["--output", str(tmp_path / "fit")]
    assert last < first
    assert main(["fit", *of_data, *options, *out, "--predictive.networks", "2"]) == 0
    assert read_posterior(tmp_path / "fit")["num_data"] == SIZES[kind][0]


def test_mixed_precision(kind, commands, tmp_path):
    command = [*commands[kind], "--epochs", "1", "--prior.every", "1", "--precision", "bf16-mixed"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    assert results_of(tmp_path)["num_data"] == SIZES[kind][0]


@pytest.mark.parametrize("approx", ["auto", "{outer: expand, '*': reduce}"])
def test_modes_of_layers(approx, commands, tmp_path):
    command = [*commands["sequences"], "--curvature.kfac_approx", approx]
    assert main([*command, "--epochs", "1", "--output", str(tmp_path)]) == 0
    asked = results_of(tmp_path)["config"]["curvature"]["kfac_approx"]
    assert asked in ("auto", {"outer": "expand", "*": "reduce"})
    assert load_posterior(tmp_path, TokenNetwork()).factors.num_data == SIZES["sequences"][0]


WRONG = {
    "a pattern without a layer": (
        "sequences",
        ["--curvature.kfac_approx", "{head: expand, '*': reduce}"],
        "The pattern 'head' of kfac_approx fits no layer; there are inner, outer",
    ),
    "augmentation": (
        "graphs",
        ["--augment"],
        "holds no images; augment is for images. Leave it out",
    ),
    "out-of-distribution images": (
        "graphs",
        ["--ood", "marglik.data.Noise"],
        "holds no images; ood is for images",
    ),
    "augmented images": ("sequences", ["--augment"], "holds no images; augment is for images"),
    "a missing file": (
        "graphs",
        ["--data.path", "/no/such/file"],
        "'/no/such/file' is not a file. Get ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_turns(case, commands, tmp_path, capsys):
    kind, options, message = WRONG[case]
    output = tmp_path / "run"
    assert message in refusal(capsys, *commands[kind], "--output", str(output), *options)
    assert not output.exists()


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [("sequences", "inputs of shape "), ("graphs", "graphs with 3 features per node")],
)
def test_a_network_of_images(kind, inputs, commands, tmp_path, capsys):
    options = ["--model", "marglik.models.MLP", "--model.in_features", "16"]
    message = refusal(capsys, *commands[kind], "--output", str(tmp_path / "run"), *options)
    assert f"MLP cannot take {inputs}" in message
    assert not (tmp_path / "run").exists()


def test_wrong_turns_of_sequences(commands, trained, tmp_path, capsys):
    command = [*commands["sequences"], "--output", str(tmp_path / "run")]
    message = "predictive.method 'mc' needs the covariances of 256 outputs at 16 positions"
    assert message in refusal(capsys, *command, "--predictive.method", "mc")
    assert not (tmp_path / "run").exists()
    assert "'probit' needs the covariances" in refusal(
        capsys, "evaluate", str(trained / "sequences"), *NAMED["sequences"],
        "--output", str(tmp_path / "elsewhere"),
    )  # fmt: skip
    message = refusal(capsys, *command, "--model.num_tokens", "300")
    assert "but DART has 256 classes; give the model 256 outputs" in message


def test_other_data_is_refused(files, trained, capsys):
    """Neither images for graphs nor graphs for sequences."""
    model = NAMED["graphs"][:2]
    message = refusal(capsys, "evaluate", str(trained / "graphs"), *model, "--data", "Digits")
    assert "digits holds images, unlike NCI1" in message
    options = ["--data", "experiments.data.nci1.NCI1", "--data.path", str(files["graphs"])]
    of_tokens = NAMED["sequences"][:2]
    message = refusal(capsys, "evaluate", str(trained / "sequences"), *of_tokens, *options)
    assert "NCI1 holds graphs, unlike DART" in message
    options = ["--data", "experiments.data.dart.DART", "--data.path", str(files["sequences"])]
    options += ["--data.num_test", "2"]
    message = refusal(capsys, "evaluate", str(trained / "graphs"), *model, *options)
    assert "DART holds no graphs, unlike NCI1" in message


@pytest.mark.parametrize("make_problem", [regression, bernoulli])
def test_targets_that_are_no_classes(make_problem, tmp_path, capsys):
    """Regression's noise is learned; what is saved, evaluated and shown knows the likelihood."""
    problem = make_problem(tmp_path)
    folder = tmp_path / "run"
    arguments = [
        "train", *problem.options, "--epochs", "30", "--prior.every", "10", "--batch_size", "25",
        "--optimizer.name", "adamw", "--optimizer.lr", "0.04", "--monitor", "10", "--no_progress",
        "--prior.average", "null",
    ]  # fmt: skip
    assert main([*arguments, "--output", str(folder)]) == 0
    results, evaluation = results_of(folder), evaluated(folder)
    assert results["likelihood"] == evaluation["likelihood"] == problem.likelihood
    is_regression = problem.likelihood == "regression"
    nll = "reg/NLL" if is_regression else "cls/NLL"
    (last,) = [r for r in read_log(folder) if r["kind"] == "epoch" and r["epoch"] == 30]
    # The monitor looks before the last update. That changes regression's σ, and with it the NLL,
    # but no prediction: the errors stay to rounding, and where there is no σ so does the NLL.
    error = "reg/RMSE" if is_regression else nll
    validation = evaluation["predictives"]["MAP"]["metrics"][f"validation/{error}"]
    assert last[f"validation/{error}"] == pytest.approx(validation, rel=1e-5)
    laplace = load_posterior(folder, MLP(3, (4,), 2, "tanh"))
    assert laplace.log_marginal_likelihood().item() == pytest.approx(results["evidence"]["kept"])
    if is_regression:
        assert results["sigma_noise"] == pytest.approx(SIGMA, rel=0.3)  # it starts at half of it
        assert f"noise: standard deviation {results['sigma_noise']:.4g}" in capsys.readouterr().out
    else:
        assert results["sigma_noise"] is None


def test_kfac_has_the_likelihood_of_the_run(tmp_path, monkeypatch):
    made = []

    def recorded(*args, **options):
        optimizer, scheduler = build_optimizer(*args, **options)
        made.append(optimizer.preconditioner)
        return optimizer, scheduler

    monkeypatch.setattr(training_setup, "build_optimizer", recorded)
    options = [
        "--optimizer.name", "kfac", "--epochs", "2", "--prior.every", "1", "--prior.steps", "5",
        "--no_progress",
    ]  # fmt: skip
    output = tmp_path / "run"
    problem = regression(tmp_path)
    assert main(["train", *problem.options, *options, "--output", str(output)]) == 0
    factors = made[0].factors(100, 0.0)
    assert factors.likelihood == "regression"
    posterior = load_posterior(output, MLP(3, (4,), 2, "tanh"))
    assert posterior.factors.likelihood == "regression"
