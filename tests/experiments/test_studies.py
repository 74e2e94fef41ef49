"""Every study: its smallest run, its tables from the JSON alone, and what is run at all."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from experiments import studies, unfolded_reduce
from experiments.augmentation import learned_ranges
from experiments.exactness.networks import Config as Exactness
from experiments.labels import label_noise, suspicious_labels
from experiments.optimizers import optimizer_comparison, steps_to_target
from experiments.optimizers.training import Candidate, Method, Problem, Schedule, Training
from experiments.predictions import active_learning, latency, out_of_distribution
from experiments.speed import (
    bench_curvature,
    bench_predictive,
    bench_quick,
    ekfac_timing,
    fits,
    language_model_pass,
    price,
    step_cost,
    transformer_timing,
    update_step_timing,
)
from experiments.speed import large_classes as classes
from experiments.studies import SHIPPED, record_of
from experiments.table2 import marglik_cifar10 as table2
from experiments.uci import beyond_the_data, input_noise, likelihoods, regression
from experiments.weight_decay import (
    any_loop,
    default_options,
    held_out_labels,
    late_fit,
    presets,
    sampled_updates,
    waiting_updates,
    weight_decay_study,
)
from experiments.weight_decay.training import averaged_model, digits, mlp, no_norm
from marglik.application.cli import main as marglik
from marglik.data import Splits
from marglik.models import MLP
from tests.experiments.data.text_and_graphs import (
    dart_entries,
    nci1_texts,
    write_dart,
    write_nci1,
)
from tests.experiments.tasks import Task, run_task

TO_TARGET = "optimizers.steps_to_target"
TABLES = {
    "active_learning": ("predictions.active_learning",),
    "attribution": ("attribution.linear_datamodeling",),
    "any_loop": ("weight_decay.any_loop",),
    "bench_curvature_cpu": ("speed.bench_curvature",),
    "bench_curvature_cuda": ("speed.bench_curvature", "--device", "cuda"),
    "bench_predictive_cpu": ("speed.bench_predictive",),
    "confidence_thresholds": ("predictions.confidence_thresholds",),
    "default_options": ("weight_decay.default_options",),
    "ekfac_timing": ("speed.ekfac_timing",),
    "exactness": ("exactness.modes",),
    "fits": ("speed.fits",),
    "graph_network_loss": (TO_TARGET, "--study", "graph_network_loss"),
    "graph_network_training": (TO_TARGET, "--study", "graph_network_training"),
    "label_noise": ("labels.label_noise",),
    "language_model_pass": ("speed.language_model_pass",),
    "large_classes": ("speed.large_classes",),
    "held_out_labels": ("weight_decay.held_out_labels",),
    "input_noise": ("uci.input_noise",),
    "late_fit": ("weight_decay.late_fit",),
    "latency": ("predictions.latency",),
    "learned_ranges": ("augmentation.learned_ranges",),
    "optimizer_comparison": ("optimizers.optimizer_comparison",),
    "out_of_distribution": ("predictions.out_of_distribution",),
    "presets": ("weight_decay.presets",),
    "price": ("speed.price",),
    "ranks_timing": ("speed.ranks_timing",),
    "sampled_updates": ("weight_decay.sampled_updates",),
    "waiting_updates": ("weight_decay.waiting_updates",),
    "scikit_learn": ("uci.scikit_learn",),
    "step_cost": ("speed.step_cost",),
    "suspicious_labels": ("labels.suspicious_labels",),
    "table2/full": ("table2.marglik_cifar10", "--protocol", "full"),
    "table2/scaled": ("table2.marglik_cifar10",),
    "transformer_timing": ("speed.transformer_timing",),
    "beyond_the_data": ("uci.beyond_the_data",),
    "uci": ("uci.regression",),
    "unfolded_reduce": ("unfolded_reduce",),
    "uci_likelihoods": ("uci.likelihoods",),
    "update_step_timing_cpu": ("speed.update_step_timing",),
    "update_step_timing_cuda": ("speed.update_step_timing", "--device", "cuda"),
    "vision_transformer_every_step": (TO_TARGET, "--study", "vision_transformer_every_step"),
    "vision_transformer_training": (TO_TARGET, "--study", "vision_transformer_training"),
    "weight_decay_study": ("weight_decay.weight_decay_study",),
}
"""Folder of results -> module and options."""


def main_of(module, *arguments):
    return import_module(f"experiments.{module}").main(list(arguments))


def test_all_results_are_of_a_study():
    of_others = {"models", "gpu_tests.json", "bench_quick_cpu.json", "front_page.png"}
    found = {path.name for path in SHIPPED.iterdir()} - of_others
    assert found == {name.partition("/")[0] for name in TABLES}


def test_the_readmes_figure_is_made_from_the_json_alone(tmp_path):
    for name in ("label_noise", "learned_ranges"):
        shutil.copytree(SHIPPED / name, tmp_path / name)
    assert main_of("front_page", "--results", str(tmp_path)) == 0
    assert (tmp_path / "front_page.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", TABLES)
def test_tables_and_figures_are_made_from_the_json_alone(name, tmp_path, capsys):
    """They are those that come with the project, whose files stay as they are."""
    module, *options = TABLES[name]
    shipped = SHIPPED / name
    folder = shutil.copytree(shipped, tmp_path / name)
    for path in [*folder.glob("*.md"), *folder.glob("*.png")]:
        path.unlink()
    assert main_of(module, *options, "--report", "--results", str(tmp_path)) == 0
    text = (folder / "table.md").read_text()
    assert text == (shipped / "table.md").read_text() and text.strip() in capsys.readouterr().out
    figures = {path.name for path in folder.glob("*.png")}
    assert figures == {path.name for path in shipped.glob("*.png")}
    with pytest.raises(SystemExit):
        main_of(module, *options, "--report", "--results", str(tmp_path / "none"))
    assert "run without --report first" in capsys.readouterr().err


def command(tasks, then, folder, *options):
    main = studies.study(
        "study", "A study.", run_task, lambda _: [Task(name) for name in tasks],
        lambda found: " ".join(run["name"] for run in found),
        then=lambda _, found: [Task(name) for name in then if len(found) > 1],
    )  # fmt: skip
    return main(["--results", str(folder), *options])


def test_what_is_missing_is_run_and_a_run_that_fails_is_named(tmp_path, capsys, in_this_process):
    (tmp_path / "study").mkdir()
    (tmp_path / "study/first.json").write_text("{}")
    assert command(["first", "wrong", "last"], ["then"], tmp_path) == 1
    shown, said = capsys.readouterr()
    assert said == "wrong: no such data\n" and "first last" in shown
    assert in_this_process == ["wrong", "last"]
    later = iter([["then"], []])
    assert command(["first", "last"], (n for n in next(later)), tmp_path) == 0
    assert in_this_process[2:] == ["then"]
    assert (tmp_path / "study/table.md").read_text() == "first last then\n"


def test_each_run_has_a_process_and_ones_own_results_lie_apart(tmp_path):
    ((task, found),) = studies.as_they_finish(run_task, [Task("one")], 2, None, False)
    assert task.name == "one" and found["threads"] == max(1, torch.get_num_threads() // 2)
    assert studies.mean_with_error([1.0, 2.0], "{:+.2f}") == "+1.50 ± 0.50"


# The smallest run of each study; each case returns results, and makes a table of them


def blobs(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=generator)
    x = torch.stack([y.float(), (y == 1).float()], 1)
    return x + 0.3 * torch.randn(n, 2, generator=generator), y


CPU = torch.device("cpu")
SPLITS = Splits(blobs(60), blobs(40, 1), blobs(40, 2), "blobs", ("a", "b", "c"))


def few_digits():
    return tuple(part[:200] for part in digits())


class Blobs:
    def __init__(self, seed=0):
        pass

    def load(self):
        return SPLITS


def small_exactness(patch):
    from experiments.exactness import modes

    config = Exactness(seeds=1, num_examples=2, num_positions=2, num_outputs=2, nodes=(2, 3))
    return [record_of(modes.run, config)], modes.table


def small_out_of_distribution(patch):
    config = out_of_distribution.Config("digits", 0, 1, 20, 2, 8, 3)
    found = record_of(out_of_distribution.run, config)
    assert len(found["rows"]) == 5 and all(len(r["shift"]) == 20 for r in found["rows"].values())
    return [found], out_of_distribution.table


def small_active_learning(patch):
    x, nothing = torch.randn(60, 8), torch.zeros(50, dtype=torch.bool)
    table = active_learning.Pool(x[:50], x[:50, :1], nothing, x[50:], x[50:, :1])
    small = replace(active_learning.PROBLEMS["concrete"], pool=lambda seed: table)
    patch.setitem(active_learning.PROBLEMS, "concrete", small)
    found = [
        record_of(active_learning.run, active_learning.Config(pool, method, 0, 1, 2))
        for pool in ("clean", "concrete")
        for method in ("mutual information", "random", "ensemble")
    ]
    return found, active_learning.table


def small_optimizer_comparison(patch):
    patch.setitem(optimizer_comparison.STEPS, "autoencoder", 30)
    patch.setattr(optimizer_comparison, "SEEDS", (1, 2))
    for method in ("sgd", "muon", "kfac"):
        patch.setitem(optimizer_comparison.RATES, method, (1e-4, 0.03))
    found = [
        record_of(optimizer_comparison.run_one, optimizer_comparison.Task("autoencoder", method))
        for method in ("sgd", "muon", "kfac")
    ]
    for result in found:
        assert result["lr"] == 0.03 and result["search"]["0.0001"] > result["search"]["0.03"]
        assert all(curve["train loss"][-1] < curve["train loss"][0] for curve in result["curves"])
    # K-FAC has its default rate, too.
    assert {curve["lr"] for curve in found[-1]["curves"]} == {0.03, 0.1}
    assert set(optimizer_comparison.figure(found)) == {"curves"}
    return found, optimizer_comparison.table


def small_table2(patch):
    patch.setitem(table2.PROTOCOLS, "scaled", table2.Protocol(10, 1, 1, 1, held_out=0.25))
    configs = [table2.Config(approach=name, augment=False) for name in ("expand", "expand sampled")]
    results = [record_of(table2.run, config) for config in configs]
    for found in results:
        assert (found["data"], found["num_data"]) == ("CIFAR-10 (JPEG)", 30)
        assert len(found["weight_decay"]) == 28 and found["seconds_per_update"]["all"] > 0
    return results, table2.table


def small_uci(patch):
    splits = [regression.run_split(regression.Config("yacht", 1, 40, updates=4), 0)]
    ours, single = (splits[0]["methods"][name] for name in ("ours", "MAP, learned σ"))
    assert ours["rmse"] == single["rmse"] and ours["log_likelihood"] != single["log_likelihood"]
    return [{"config": {"data": "yacht"}, "splits": splits}], regression.report


def small_uci_likelihoods(patch):
    cases = "regression", "heteroscedastic", "student_t", "negative_binomial 10"
    found = [record_of(likelihoods.run, likelihoods.Config("yacht", case, 1, 40)) for case in cases]
    for result in found:
        ways = result["splits"][0]["ways"]
        assert len({way["log_likelihood"] for way in ways.values()}) == len(ways)
    of_inputs, *others = (result["splits"][0]["ways"] for result in found[1:])
    assert "strength" in of_inputs["cosine"]["likelihood"]
    assert of_inputs["plain"]["likelihood"] == "heteroscedastic"
    for ways, name in zip(others, ("scale", "r"), strict=True):  # "plain" fits the number, too
        start = likelihoods.likelihood_of(ways["plain"]["likelihood"].partition("(")[0])
        fitted = likelihoods.likelihood_of(ways["plain"]["likelihood"])
        assert abs(fitted.parameters[name] - start.parameters[name]) > 0.05
    return found, likelihoods.report


def small_input_noise(patch):
    configs = [input_noise.Config("wave", 2, 2, 3), input_noise.Config("diabetes", 1, 2, 3)]
    found = [record_of(input_noise.run, config) for config in configs]
    of_wave, of_diabetes = (result["runs"][0] for result in found)
    assert of_wave["ways"].keys() == {*input_noise.WAYS, "plain", "plain, constant rate"}
    assert (of_wave["num_data"], of_diabetes["num_data"]) == (150, 354)
    # The true noise is 0.05 for half of the inputs and 0.3 for the others.
    entropy = 0.5 * (1 + math.log(2 * math.pi)) + 0.5 * math.log(0.05 * 0.3)
    assert of_wave["best"] == pytest.approx(-entropy, abs=0.05)
    return found, input_noise.report


def small_beyond_the_data(patch):
    patch.setattr(beyond_the_data, "EPOCHS", 2)
    found = [record_of(beyond_the_data.run, beyond_the_data.Config(0))]
    assert beyond_the_data.figures(found)
    coverage = found[0]["methods"][beyond_the_data.PROCESS]["at the data"]["coverage"]
    assert coverage == pytest.approx(0.9, abs=0.1)  # of the model that the functions are drawn from
    return found, beyond_the_data.table


def small_bench_curvature(patch):
    patch.setattr(bench_curvature, "GROWTH", {"batch_size": ("batch size", (1,))})
    patch.setattr(bench_curvature, "network", partial(bench_curvature.network, depth=10))
    config = bench_curvature.Config(1, 1, image_size=8, num_classes=3, repetitions=1)
    found = [bench_curvature.run_growth(config) | {"name": "growth"}]
    assert bench_curvature.figures(found)
    patch.setattr(bench_curvature, "STEPS", 1)
    for update in bench_curvature.evidence_work(bench_curvature.network(CPU, 1), "reduce"):
        update()
    patch.setattr(bench_curvature, "PASS", (4, (2,)))
    found = [bench_curvature.run_passes(config) | {"name": "passes"}]
    found.append(bench_curvature.run_batch(config) | {"name": "batch_32"})
    return found, bench_curvature.tables


def small_fits(patch):
    return [record_of(fits.run, fits.Config("mlp", 4, 2, 1)) | {"name": "mlp"}], fits.table


def small_latency(patch):
    names = ("one_input_mlp", "tiny_mlp")
    found = [
        record_of(latency.run, latency.Config(name, 1, 4, 1)) | {"name": name} for name in names
    ]
    assert all(seconds > 0 for run in found for of in run["seconds"].values() for seconds in of)
    return found, latency.table


def small_bench_predictive(patch):
    patch.setattr(bench_predictive, "network", partial(bench_predictive.network, width=1, depth=10))
    found = bench_predictive.run_batch(2, repetitions=1, epochs=1, num_train=40)
    return [found], bench_predictive.table


def small_large_classes(patch):
    config = partial(
        classes.Config, classes=(4,), batch_size=2, image_size=8,
        vocabulary=40, diagonal_above=20, sequences=2, positions=4, dim=8, repetitions=1,
    )  # fmt: skip
    found = [
        record_of(classes.run, config(name)) | {"name": name} for name in ("exact", "vocabulary")
    ]
    assert all(case["times_limit"] > 0 for part in found for case in part["cases"])
    return found, classes.table


def small_transformer_timing(patch):
    of_text = transformer_timing.Shape(((4, 2),), 8, 1, 1)
    shapes = {"vit_cpu": replace(of_text, image_size=8, num_classes=3), "lstm_cpu": of_text}
    found = [
        record_of(transformer_timing.run, transformer_timing.Config(name, shape, 1))
        | {"name": name}
        for name, shape in shapes.items()
    ]
    return found, transformer_timing.table


def small_unfolded_reduce(patch):
    small = unfolded_reduce.Config("cpu", 10, 1, 2, repetitions=1)
    found = record_of(unfolded_reduce.run, small) | {"name": "cpu"}
    assert found["largest_relative_difference"] < 1e-5
    unfolded = {}
    layer = torch.nn.Conv2d(3, 4, 3, padding=1)
    rule = unfolded_reduce.ConvolutionRule(layer, "reduce", {"weight"})
    for name in unfolded_reduce.WAYS:  # other code, the same numbers
        with unfolded_reduce.way(name):
            unfolded[name] = rule.input_sums.__name__, *rule.input_sums(torch.ones(2, 3, 4, 5))
    (one, a, R), (other, b, S) = unfolded.values()
    assert (one, other, R) == ("input_sums", "unfolded_sums", S)
    torch.testing.assert_close(a, b)
    return [found], unfolded_reduce.table


def small_language_model_pass(patch):
    path = write_dart(Path(language_model_pass.FILE).resolve(), dart_entries(40))
    patch.setenv("MARGLIK_DATA", str(path.parent))
    small = language_model_pass.Config(
        "gpt_cpu", 8, 2, 3, dim=8, depth=1, heads=1, vocabulary=300, diagonal_above=100,
        repetitions=2,
    )  # fmt: skip
    found = record_of(language_model_pass.run, small) | {"name": small.name}
    assert (found["windows"], found["tokens"]) == (3, 24)
    assert {len(seconds) for seconds in found["seconds"].values()} == {2}
    return [found], language_model_pass.table


def test_random_merges_are_the_text_and_fit_the_vocabulary():
    texts = [b"\na | b => a b c\n" * 20, bytes(range(256))]
    for vocabulary in (256, 280, 10_000):
        numbers = language_model_pass.tokens_of(texts, vocabulary)
        assert max(numbers) < vocabulary and numbers == language_model_pass.tokens_of(
            texts, vocabulary
        )
        if vocabulary == 256:  # no merge: the bytes themselves
            assert bytes(numbers) == b"".join(texts)
    # One to seven bytes a token, four on average.
    assert sum(map(len, texts)) / 5 < len(numbers) < sum(map(len, texts)) / 3


def small_ekfac_timing(patch):
    small = ekfac_timing.Size("gpt2", 4, 2, tokens=6, dim=64, depth=1, vocabulary=11)
    sizes = {"resnet9_cpu": ekfac_timing.Size("resnet9", 4, 2, dim=4), "gpt2_cpu": small}
    found = [
        record_of(ekfac_timing.run, ekfac_timing.Config(name, size)) for name, size in sizes.items()
    ]
    assert all(run["seconds"]["factors"] > 0 for run in found)
    return found, ekfac_timing.table


def small_update_step_timing(patch):
    patch.setattr(update_step_timing, "network", partial(update_step_timing.network, depth=10))
    found = record_of(update_step_timing.run, update_step_timing.Config(2, repetitions=1, width=1))
    assert found["times_sgd"]["SGD"] == 1.0 and set(found["amortised_times_sgd"]) == {
        "expand", "reduce",
    }  # fmt: skip
    return [found], update_step_timing.table


def small_default_options(patch):
    small = replace(default_options.PROBLEMS["MLP"], examples=60, epochs=2)
    patch.setitem(default_options.PROBLEMS, "MLP", small)
    patch.setattr(default_options, "GRID", (1e-3, 1e-1))
    parts = ("default", "grid")
    found = [
        record_of(default_options.run, default_options.Config("MLP", 0.2, part, 0))
        for part in parts
    ]
    return found, default_options.table


def small_sampled_updates(patch):
    name, problem = next(iter(sampled_updates.PROBLEMS.items()))
    patch.setitem(sampled_updates.PROBLEMS, name, replace(problem, examples=60, epochs=2))
    return [
        record_of(sampled_updates.run, sampled_updates.Config(name, 0.4, 0))
    ], sampled_updates.table


def small_waiting_updates(patch):
    name, problem = next(iter(sampled_updates.PROBLEMS.items()))
    patch.setitem(sampled_updates.PROBLEMS, name, replace(problem, examples=60, epochs=2))
    runs = [waiting_updates.Config(name, 0.4, 0, ratio) for ratio in waiting_updates.RATIOS]
    return [record_of(waiting_updates.run, run) for run in runs], waiting_updates.table


def small_any_loop(patch):
    name, problem = next(iter(any_loop.PROBLEMS.items()))
    patch.setitem(any_loop.PROBLEMS, name, replace(problem, examples=60))
    patch.setattr(any_loop, "EPOCHS", 3)
    patch.setattr(any_loop, "LATE", 2)
    return [record_of(any_loop.run, any_loop.Config(name, 0))], any_loop.table


def small_held_out_labels(patch):
    name = "digits, MLP"
    small = replace(held_out_labels.PROBLEMS[name], examples=60, held_out=20, epochs=3)
    patch.setitem(held_out_labels.PROBLEMS, name, small)
    patch.setattr(held_out_labels, "GRID", held_out_labels.GRID[:2])
    results = [
        record_of(held_out_labels.run, held_out_labels.Config(name, seed)) for seed in (0, 3)
    ]
    return results, held_out_labels.table


def small_late_fit(patch):
    name, (problem, shares) = next(iter(late_fit.PROBLEMS.items()))
    small = replace(problem, examples=60, epochs=2)
    patch.setitem(late_fit.PROBLEMS, name, (small, shares))
    return [record_of(late_fit.run, late_fit.Config(name, 0.2, 0))], late_fit.table


def small_step_cost(patch):
    name, (make, shape, _) = next(iter(step_cost.NETWORKS.items()))
    patch.setitem(step_cost.NETWORKS, name, (make, (4, *shape[1:]), 2))
    found = record_of(step_cost.run, step_cost.Config(name))
    kept = found["kept_bytes"]
    assert kept["learned"] - kept["no average"] == found["weights_bytes"]  # one copy
    assert kept["no average"] - kept["no average, no comparison"] == 6 * 8  # one number a tensor
    assert kept["no average, no comparison"] < 200 and kept["plain"] == 0
    return [found], step_cost.table


def small_price(patch):
    name, problem = next(iter(price.PROBLEMS.items()))
    patch.setitem(price.PROBLEMS, name, replace(problem, examples=60, epochs=2))
    return [record_of(price.run, price.Config(name, 0.4, 0))], price.table


def small_learned_ranges(patch):
    for name in ("digits, ±45°", "CIFAR-10 (JPEG), 1,000"):
        data = learned_ranges.PROBLEMS[name]
        channels = 3 if data.colour else 1  # digits in three colours stand in for the photos
        small = replace(
            data, examples=20, held_out=10, epochs=1, batch_size=10,
            data=lambda n=channels: (few_digits()[0].expand(-1, n, -1, -1), few_digits()[1]),
            make=lambda n=channels: mlp(64 * n, 10, no_norm, hidden=8),
        )  # fmt: skip
        patch.setitem(learned_ranges.PROBLEMS, name, small)
    patch.setattr(learned_ranges, "SHARES", (0.5,))
    names = list(learned_ranges.PROBLEMS)
    turned, photos = (
        record_of(learned_ranges.run, learned_ranges.Config(names[k], 0)) for k in (1, 5)
    )
    assert "tuned" in turned["results"] and "TrivialAugment" in photos["results"]
    learned_ranges.figures([turned])
    return [turned, photos], learned_ranges.table


def small_suspicious_labels(patch):
    assert all(problem.make() for problem in suspicious_labels.PROBLEMS.values())
    small = replace(suspicious_labels.PROBLEMS["digits, MLP"], examples=80, epochs=2)
    patch.setitem(suspicious_labels.PROBLEMS, "digits, MLP", small)

    def by_cleanlab(y, p):  # its package comes with [bench] alone
        own = p.gather(1, y[:, None]).squeeze(1)
        return {"cleanlab": -own}, own < 0.1

    patch.setattr(suspicious_labels, "by_cleanlab", by_cleanlab)
    found = record_of(
        suspicious_labels.run, suspicious_labels.Config("digits, MLP", "structured", 0.2, 0)
    )
    assert all(0 < of["AUROC"] < 1 for of in found["found"].values())
    return [found], suspicious_labels.table


def small_label_noise(patch):
    assert all(problem.make() for problem, *_ in label_noise.RECIPES.values())
    small = replace(label_noise.PROBLEMS["digits, MLP"], examples=80, epochs=3)
    patch.setitem(label_noise.PROBLEMS, "digits, MLP", small)
    patch.setattr(label_noise, "NOISES", (("flipped", 0.0), ("flipped", 0.2)))
    patch.setattr(label_noise, "GRID", (1e-3, 1e-1))
    issues = torch.arange(80) < 20
    patch.setattr(label_noise, "by_cleanlab", lambda y, p: ({"cleanlab": -p[:, 0]}, issues))
    found = record_of(label_noise.run, label_noise.Config("digits, MLP", 0))
    assert found["noises"]["flipped 20 %"]["cleanlab"]["issues"][0] == 20
    assert found["noises"]["flipped 0 %"]["suspicious"]["learned"]["number"] == 0
    label_noise.figures([found])
    return [found], label_noise.table


def small_presets(patch):
    path = write_nci1(Path("nci1.tar.gz").resolve(), nci1_texts(30))
    small = {
        "epochs": 1, "prior.every": 1, "prior.steps": 5, "held_out": 0.34,
        "data.path": path, "model.node_features": 3,
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in small.items()]
    patch.setattr(presets, "marglik", lambda arguments: marglik([*arguments, *options]))
    found = record_of(presets.run, presets.Config("graph_network_nci1", 0))
    assert len({row["learned"] for row in found["weight_decay"].values()}) > 10
    return [found], presets.table


def small_weight_decay_study(patch):
    for name, value in {
        "GRID": (1e-3, 1e-1),
        "DROPOUT": (0.1,),
        "SAMPLES": 2,
        "MEMBERS": 2,
    }.items():
        patch.setattr(weight_decay_study, name, value)
    network = lambda: mlp(64, 10, no_norm, hidden=8)  # noqa: E731
    problem = weight_decay_study.PROBLEMS["digits, MLP"]
    small = replace(problem, make=network, epochs=6, data=few_digits, held_out=60)
    patch.setitem(weight_decay_study.PROBLEMS, "digits, MLP", small)
    # IVON's package comes with [bench] alone.
    patch.setattr(weight_decay_study.Comparison, "ivon", lambda ways, *pair: ways.swag(1e-3))
    found = record_of(
        weight_decay_study.run, weight_decay_study.Config("digits, MLP", 60, 0.2, 0, True)
    )
    trainings = {name: way["trainings"] for name, way in found["ways"].items()}
    assert trainings["ensemble, grid's decay"] == trainings["dropout"] == 2 + 1
    assert trainings["learned"] == 1
    return [found], weight_decay_study.table


SMALL = {name.removeprefix("small_"): of for name, of in globals().items() if "small_" in name[:6]}
DATA = {"table2": "tiny_cifar10", "bench_predictive": "tiny_cifar10"}
DATA |= dict.fromkeys(("uci", "uci_likelihoods"), "tiny_yacht")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALL)
def test_the_smallest_run(name, monkeypatch, request):
    if name in DATA:
        request.getfixturevalue(DATA[name])
    found, table = SMALL[name](monkeypatch)
    found = json.loads(json.dumps(found, allow_nan=False))
    assert table(found).count("|") > 10 and "nan" not in table(found)


def test_the_quick_benchmark_warns_of_what_has_become_slower(monkeypatch):
    monkeypatch.setattr(bench_quick, "network", partial(bench_quick.network, depth=10))
    found = bench_quick.measure(repetitions=1, batch_size=1, width=1)
    ratios = found["times_the_limit"]
    assert set(ratios) == set(found["limits"]) and min(ratios.values()) > 0
    slower = found | {"times_the_limit": {name: 1.06 * ratio for name, ratio in ratios.items()}}
    assert "WARNING" in bench_quick.compare(slower, found)
    assert "WARNING" not in bench_quick.compare(found, found)
    other = found | {"measured_with": {"processor": "another"}}
    assert "WARNING" not in bench_quick.compare(slower, other)


@pytest.mark.slow  # two processes import everything
def test_two_ranks_find_the_bytes_of_the_formula():
    from experiments.speed import ranks_timing

    config = ranks_timing.Config("two", num_images=8, batch_size=2, repetitions=1, width=1)
    found = record_of(ranks_timing.run, config)
    # Fixup's scalars and the head's bias are not in the formula: 32 and 100 numbers.
    assert found["bytes_reduced"] - found["bytes_of_the_formula"] == 4 * (32 + 100)


TINY = steps_to_target.Study(
    "tiny",
    Problem("tiny", Blobs().load, lambda: MLP(2, (5,), 3), "classification", 8),
    {
        "sgd": Method("SGD", "nesterov"),
        "adamw": Method("AdamW", "nadamw"),
        "reduce": Method("K-FAC-reduce", "nesterov", "reduce", pace=0.75),
        "diverges": Method("K-FAC, plain", "nesterov", "expand", {"kl_clip": None}),
    },
    Schedule(12, 2),
    {"sgd": (1e-2, 1e-1), "adamw": (1e-3, 1e-2), "reduce": (1e-3, 1e-2), "diverges": (0.1, 1e4)},
    damping=dict.fromkeys(("reduce", "diverges"), (1e-2, 1.0)),
    block=2,
    trials=3,
    seeds=2,
    paper=dict.fromkeys(("sgd", "adamw", "reduce", "diverges"), ("100", "100", "100")),
)


def test_a_study_to_a_target_goes_through_its_stages(
    tmp_path, capsys, monkeypatch, in_this_process
):
    monkeypatch.setitem(steps_to_target.STUDIES, "tiny", TINY)
    arguments = ["--study", "tiny", "--results", str(tmp_path)]
    assert steps_to_target.main(arguments) == 0
    assert in_this_process == [
        *(f"tiny_{name}_search" for name in TINY.methods),
        *(f"tiny_{name}_seeds" for name in TINY.methods),
        "tiny_sgd_timing",
    ]
    text = (tmp_path / "tiny/table.md").read_text()
    assert "| SGD | " in text and "| 100 | 100 | 100 |" in text
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("tiny/*.json")}
    for name in ("sgd", "adamw", "reduce"):
        curves = files[f"tiny_{name}_seeds"]["curves"]
        assert [curve["seed"] for curve in curves] == [1, 2]
        assert all(curve["loss"][-1] < curve["loss"][0] for curve in curves)
    # A shorter schedule takes as long a step as the reference, and is not timed.
    assert files["tiny_sgd_timing"]["config"]["methods"] == ["sgd", "reduce", "diverges"]
    (tmp_path / "tiny/tiny_adamw_seeds.json").unlink()
    in_this_process.clear()
    assert steps_to_target.main(arguments) == 0
    assert in_this_process == ["tiny_adamw_seeds"]


def test_with_one_damping_kfac_takes_the_references_rate(tmp_path, monkeypatch, in_this_process):
    """As in the appendix' second run of figure 4's training."""
    methods = {
        "sgd": Method("SGD", "nesterov", max_norm=0.5),
        "reduce": Method(
            "K-FAC-reduce", "nesterov", "reduce", {"factor_every": 1, "ema_decay": 0.9}, pace=0.5
        ),
    }
    study = replace(TINY, methods=methods, lr={"sgd": (1e-2, 1e-1)}, damping=1e-3)
    monkeypatch.setitem(steps_to_target.STUDIES, "tiny", study)
    assert steps_to_target.main(["--study", "tiny", "--results", str(tmp_path)]) == 0
    assert in_this_process == [
        "tiny_sgd_search", "tiny_sgd_seeds", "tiny_reduce_seeds", "tiny_sgd_timing",
    ]  # fmt: skip
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("tiny/*.json")}
    chosen = {m: files[f"tiny_{m}_seeds"]["curves"][0]["candidate"] for m in methods}
    assert chosen["reduce"] == {"lr": chosen["sgd"]["lr"], "damping": 1e-3}
    assert "| K-FAC-reduce | " in (tmp_path / "tiny/table.md").read_text()


def test_gradients_are_clipped_to_the_norm():
    def moved(max_norm):
        method = Method("SGD", "nesterov", momentum=1e-9, max_norm=max_norm)
        training = Training(
            TINY.problem, Blobs().load(), method, Candidate(1.0), 0, Schedule(10**6, 0)
        )
        before = parameters_to_vector(training.model.parameters())
        training.step()
        return (parameters_to_vector(training.model.parameters()) - before).norm().item()

    assert moved(1e-3) == pytest.approx(1e-3, rel=1e-3) and moved(None) > 1e-2


def test_plain_trainings_have_the_average_of_learners():
    """Step i has the weight i(i+1)(i+2)(i+3); equal weights are the negative control."""
    model, steps = torch.nn.Linear(2, 2).double(), []
    average = averaged_model(model)
    for _ in range(7):
        torch.nn.init.normal_(model.weight)
        steps.append(model.weight.detach().clone())
        average.update_parameters(model)
    i = torch.arange(1, 8, dtype=torch.float64)
    weights = i * (i + 1) * (i + 2) * (i + 3)
    found = average.module.weight.detach()
    torch.testing.assert_close(
        found, torch.tensordot(weights / weights.sum(), torch.stack(steps), 1)
    )
    assert (found - torch.stack(steps).mean(0)).norm() > 0.1 * found.norm()
