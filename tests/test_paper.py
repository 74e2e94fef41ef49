"""docs/paper.md has each claim of the paper, files that exist, and the numbers of the JSON."""

import json
import re
import statistics
from functools import cache, partial
from pathlib import Path

import pytest

from experiments.optimizers.steps_to_target import settled_at, target_of
from experiments.studies import mean_with_error

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
VERDICTS = ("equal", "same order", "deviates", "missing")
ITEMS = [
    *("Figure 1", "Proposition 1", "Figure 2", "Proposition 2", "Table 1", "Figure 3", "Figure 4"),
    *("Table 2", "Lemma 3", "Proposition 4", "Lemma 5", "Proposition 6", "Remark 1", "Listing 1"),
    *("Table 3", "Table 4", "Figure 5", "Table 5"),
]
"""All that the paper numbers, except equations, in its order."""


@cache
def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def claims():
    """Name of a claim -> our cell, its files and its result, in the page's order.

    Tables without a column of results have only claims with which our checks agree.
    """
    lines = (ROOT / "docs/paper.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    found = [(row[0], *row[2:]) for row in rows if len(row) == 5 and row[-1].startswith(VERDICTS)]
    found += [(*row, "equal") for row in rows if len(row) == 3 and re.search(r"\]\(|::", row[2])]
    found.sort(key=lambda row: next(i for i, other in enumerate(rows) if other[0] == row[0]))
    assert len({row[0] for row in found}) == len(found)
    return {name: row for name, *row in found}


def test_the_page_has_all_that_the_paper_numbers_in_its_order():
    names = list(claims())
    assert len(names) > 50
    places = [next(i for i, name in enumerate(names) if name.startswith(item)) for item in ITEMS]
    assert places == sorted(places)


@pytest.mark.parametrize("name", claims())
def test_files_and_tests_of_a_claim_exist(name):
    _, where, verdict = claims()[name]
    files = re.findall(r"`([\w./]+\.(?:py|yaml))(?:::(\w+))?`", where)
    files += [(f"docs/{link}", "") for link in re.findall(r"\]\(([^)#]+)[^)]*\)", where)]
    assert files or verdict.startswith("missing")
    for file, test in files:
        path = ROOT / file
        assert path.exists(), file
        assert not test or re.search(rf"^def {test}\b", path.read_text(), re.M), test
    # A result that is not in a file has a test.
    assert verdict.startswith("missing") or any(
        test or file.startswith("docs/") for file, test in files
    )


# The numbers of the rows, from the JSON alone


def errors(network, setting, layer, mode):
    """Relative errors of the blocks over seeds."""
    (layers,) = (
        one["layers"]
        for one in result("exactness/exactness")["errors"]
        if (one["network"], one["setting"]) == (network, setting)
    )
    return layers[layer][mode]


def median_error(*case):
    return f"{100 * statistics.median(errors(*case)):.0f} %"


def largest_error(*case):
    return f"{max(errors(*case)):.0e}"


def step(batch, mode):
    """Seconds of a K-FAC step on the GPU."""
    return result(f"update_step_timing_cuda/{batch}")["median_seconds"][f"marglik, {mode}"]


def steps_to_target(study, problem, reference, method):
    """Number of seeds that reach the target, mean steps ± error, percent of steps and of time."""
    files = {m: f"{study}/{problem}_{m}_seeds".replace(" ", "_") for m in (reference, method)}
    seeds = {m: result(file) for m, file in files.items()}
    target, metric = target_of(seeds[reference]), seeds[reference]["metric"]
    steps = {
        m: [s for c in run["curves"] if (s := settled_at(c, metric, target)) is not None]
        for m, run in seeds.items()
    }
    seconds = result(f"{study}/{problem}_{reference}_timing")["step_seconds"]
    # A control takes the reference's steps, and "expand lower" those of expand.
    mode = method.split()[0]
    time = seconds.get(mode, seconds[reference])["median"] / seconds[reference]["median"]
    share = statistics.mean(steps[method]) / statistics.mean(steps[reference])
    return (
        f"{len(steps[method])} of {len(seeds[method]['curves'])}",
        mean_with_error(steps[method], "{:,.0f}"),
        f"{100 * share:.0f} %",
        f"{100 * time * share:.0f} %",
    )


graph = partial(steps_to_target, "graph_network_training", "nci1", "nesterov")
by_loss = partial(steps_to_target, "graph_network_loss", "nci1_loss", "nesterov")
images = partial(steps_to_target, "vision_transformer_training", "cifar10", "nadamw")


def every_step(method):
    """Number of seeds that reach the target, last accuracy, target, and time of a step."""
    folder = "vision_transformer_every_step/cifar10_every_step"
    target = target_of(result(f"{folder}_nadamw_seeds"))
    curves = result(f"{folder}_{method}_seeds")["curves"]
    reached = sum(settled_at(c, "accuracy", target) is not None for c in curves)
    seconds = result(f"{folder}_nadamw_timing")["step_seconds"]
    return (
        f"{reached} of {len(curves)}",
        mean_with_error([c["accuracy"][-1] for c in curves], "{:.4f}"),
        f"{target:.4f}",
        f"{seconds[method]['median'] / seconds['nadamw']['median']:.2f}",
    )


def control(reference, metric):
    """Seeds of the shorter schedule that reach the target, their last metric, and the target."""
    target = target_of(result(f"{reference}_seeds"))
    curves = result(f"{reference}_short_seeds")["curves"]
    reached = sum(settled_at(c, metric, target) is not None for c in curves)
    last = mean_with_error([c[metric][-1] for c in curves], "{:.4f}")
    return f"{reached} of {len(curves)} seeds; last {metric} {last}, target {target:.4f}"


def chosen(name):
    """Learning rate and damping of a method's seeds, as the page shows them."""
    candidate = result(f"{name}_seeds")["curves"][0]["candidate"]
    return f"{candidate['lr']:.3g} and {candidate['damping']:.3g}"


@cache
def scaled(approach, data):
    """The runs of table 2 at the small size, "plain" or "augmented"."""
    return [result(f"table2/scaled/{approach}_{data}_seed{seed}") for seed in range(3)]


def all_scaled(approach):
    return [*scaled(approach, "plain"), *scaled(approach, "augmented")]


def of_table2(metric, data, factor=1.0):
    """Mean of a metric of the MAP over seeds for expand and for reduce."""
    return [
        factor * statistics.mean(run["metrics"]["MAP"][metric] for run in scaled(approach, data))
        for approach in ("expand", "reduce")
    ]


def update(approach):
    """Mean seconds of an update of all data."""
    return statistics.mean(run["seconds_per_update"]["all"] for run in all_scaled(approach))


def training(approach):
    """Mean seconds of 30 epochs with an update after every fifth."""
    epoch = statistics.mean(run["seconds_per_epoch"] for run in all_scaled(approach))
    return 30 * epoch + 6 * update(approach)


def vit_steps(mode):
    """Seconds of a K-FAC step at 32 and at 128 images."""
    sizes = result("transformer_timing/vit_cuda")["sizes"]
    assert [size["N"] for size in sizes] == [32, 128]
    return [size["median_seconds"][f"K-FAC step, {mode}"] for size in sizes]


def at_256(mode):
    """Seconds on the straight line through both sizes."""
    small, large = vit_steps(mode)
    return large + (large - small) / (128 - 32) * (256 - 128)


MODES = ("expand", "reduce")
BATCHES = (128, 256, 512, 1024, 2048)
CPU, GPU = "bench_curvature_cpu/batch_32", "bench_curvature_cuda/update_50000"
LINEAR, POOLED = "deep linear network", "convolution, average pooling, linear layer"
ATTENTION = "linear self-attention, N = "


@cache
def numbers():
    """Beginning of a claim -> texts that our cell of its row has."""
    layers = [f"layer {i}" for i in (1, 2, 3)]
    worst = {
        mode: max(error for layer in layers for error in errors(LINEAR, mode, layer, mode))
        for mode in ("expand", "reduce")
    }
    of_pass, peak = result(CPU)["times_the_limit"], result(CPU)["peak_mebibytes"]
    seconds, unfolded = result(GPU)["median_seconds"], result("unfolded_reduce/cpu")
    ratio = {
        prefix: 100 * seconds[f"{prefix}, reduce"] / seconds[f"{prefix}, expand"]
        for prefix in ("ours", "ours, TF32, channels_last")
    }
    vit = [e / r for e, r in zip(vit_steps("expand"), vit_steps("reduce"), strict=True)]
    full = result("table2/full/reduce_augmented_seed0")["metrics"]
    nll, augmented = of_table2("nll", "plain"), of_table2("nll", "augmented")
    accuracy = of_table2("accuracy", "plain", 100), of_table2("accuracy", "augmented", 100)
    e, r = graph("expand"), graph("reduce")
    lower = graph("expand lower")
    c, E, R = graph("nesterov short"), images("expand"), images("reduce")
    passes = result("language_model_pass/gpt_cpu")
    of_gpt = {mode: mean_with_error(passes["seconds"][mode], "{:.2f}") for mode in MODES}
    of_gpt["percent"] = mean_with_error(passes["percent"], "{:.1f}")
    x, z = every_step("expand"), every_step("reduce")
    last = "block 2, query"
    inexact = {
        "for several examples": (8, last),
        "for W^K": (1, "block 2, key"),
        "for W^V": (1, "block 2, value"),
        "for W^Q in earlier blocks": (1, "block 1, query"),
    }
    return {
        "Figure 1": [f"{worst['expand']:.0e}", median_error(LINEAR, "expand", layers[0], "reduce")],
        "Figure 2": [f"{worst['reduce']:.0e}", median_error(LINEAR, "reduce", layers[0], "expand")],
        "Section 3.3: for convolutions": [
            largest_error(POOLED, "reduce", "convolution", "reduce"),
            median_error(POOLED, "reduce", "convolution", "expand"),
        ],
        "Section 3.3: reduce needs fewer": [
            f"{of_pass[f'ours, {mode}, mc']:.2f} times ({mode})" for mode in MODES
        ],
        "Section 3.3: reduce needs less memory": [
            f"{peak[f'ours alone, {mode}, exact']:.0f} MiB with {mode}"
            for mode in ("expand", "reduce")
        ],
        "Section 4.1: reduce is faster": [
            f"{unfolded['factors']['times']:.2f} times for the factors A",
            f"{unfolded['pass']['times']:.2f} times for a whole pass",
        ],
        "Table 1, expand": [" / ".join(f"{step(b, 'expand'):.2f}" for b in BATCHES)],
        "Table 1, reduce": [" / ".join(f"{step(b, 'reduce'):.2f}" for b in BATCHES)],
        "Section 4.1: the gain": [
            f"{100 * step(b, 'reduce') / step(b, 'expand'):.0f} % at {b:,}" for b in (128, 1024)
        ],
        "Section 4.1: reduce at 2,048": [
            f"{step(2048, 'reduce'):.2f} s and {step(1024, 'expand'):.2f} s"
        ],
        "Section 4.1 and table 4": ["{} % ± {} %".format(*of_gpt["percent"].split(" ± "))],
        "Table 4": [f"{of_gpt['expand']} (expand) and {of_gpt['reduce']} (reduce)"],
        "Abstract: both modes": [
            f"ViT {E[2]} and {R[2]}",
            f"graph network {lower[2]} ({lower[0]} seeds) and {r[2]}",
        ],
        **{
            f"Figure 3: steps to the target, {case}": [f"{run[2]} ({run[1]} steps, {run[0]} seeds)"]
            for case, run in (
                ("reduce", r),
                ("expand, lower ranges", lower),
                ("expand, ranges of reduce", e),
            )
        },
        "Figure 3: the share": [f"{e[3]} and {r[3]}"],
        "Section 4.2": [
            f"expand ± {e[1].split()[-1]} steps ({e[0]} seeds)",
            f"reduce ± {r[1].split()[-1]} steps",
            f"lower ranges: expand ± {lower[1].split()[-1]} steps",
        ],
        "Section 4: the control of figure 3": [f"{c[2]} ({c[1]} steps, {c[0]} seeds)"],
        "Figure 5: steps": [
            f"{x[0]} seeds with either mode",
            f"last accuracy {x[1]} and {z[1]}, target {x[2]}",
        ],
        "Figure 5: time": [f"a step takes {x[3]} and {z[3]} times"],
        "Section 4: the control of figure 4": [
            control("vision_transformer_training/cifar10_nadamw", "accuracy")
        ],
        "Figure 4: steps": [
            f"{mode} {run[2]} ({run[1]} steps, {run[0]} seeds)"
            for mode, run in zip(MODES, (E, R), strict=True)
        ],
        "Figure 4: time": [f"{E[3]} and {R[3]}"],
        "Section 4.3": [f"{vit[0]:.2f} times at 32 images, {vit[1]:.2f} times at 128"],
        "Table 2: expand has": [
            f"{nll[0]:.3f} and {nll[1]:.3f}",
            f"augmented {augmented[0]:.3f} and {augmented[1]:.3f}",
        ],
        "Table 2: without augmentation": [
            f"{name}{both[0]:.2f} % and {both[1]:.2f} %"
            for name, both in zip(("", "augmented "), accuracy, strict=True)
        ],
        "Table 2: augmentation": [
            f"by {augmented[0] - nll[0]:.3f} and {augmented[1] - nll[1]:.3f}"
        ],
        "Table 2, reduce with augmentation at full size: NLL": [
            f"MAP {full['MAP']['nll']:.3f}; calibrated Laplace {full['Laplace, mc']['nll']:.3f}"
        ],
        "Table 2, reduce with augmentation at full size: accuracy": [
            f"{100 * full['MAP']['accuracy']:.2f} %"
        ],
        "Table 2: an update": [
            f"{100 * update('reduce') / update('expand'):.0f} % (CPU)",
            f"{ratio['ours']:.0f} % (float32)",
            f"{ratio['ours, TF32, channels_last']:.0f} % (TF32)",
        ],
        "Appendix B.2: a weighted sum": [
            median_error("two zero-padded convolutions", "reduce", "convolution 1", "reduce")
        ],
        "Appendix B.3: linear self-attention": [
            f"{largest_error(f'{ATTENTION}1', mode, last, mode)} ({mode})"
            for mode in ("expand", "reduce")
        ],
        **{
            f"Appendix B.3: it is not exact {case}": [
                f"{median_error(f'{ATTENTION}{N}', mode, layer, mode)} ({mode})" for mode in MODES
            ]
            for case, (N, layer) in inexact.items()
        },
        "Appendix C.3: learning rate": [chosen("graph_network_training/nci1_reduce")],
        "Appendix C.3: the same, expand, ranges": [chosen("graph_network_training/nci1_expand")],
        "Appendix C.3: the same, expand, lower": [
            chosen("graph_network_training/nci1_expand_lower")
        ],
        "Appendix C.4": [
            chosen("vision_transformer_training/cifar10_expand"),
            chosen("vision_transformer_training/cifar10_reduce"),
        ],
        "Appendix C.5: a training run": [f"{100 * training('reduce') / training('expand'):.0f} %"],
        "Table 5": [
            "{:.2f} and {:.2f} in float32".format(
                *(seconds[f"ours, {m}"] for m in ("expand", "reduce"))
            ),
            "{:.2f} and {:.2f} in TF32".format(
                *(seconds[f"ours, TF32, channels_last, {m}"] for m in ("expand", "reduce"))
            ),
        ],
    }


@pytest.mark.parametrize("name", numbers())
def test_numbers_of_a_claim_are_those_of_the_json(name):
    (row,) = (row for claim, row in claims().items() if claim.startswith(name))
    for text in numbers()[name]:
        assert text in row[0], (text, row[0])


def test_each_measured_number_of_a_claim_is_compared():
    """A row with a JSON file or a table is in `numbers`, so that none is quoted by hand alone."""
    measured = [name for name, row in claims().items() if "results/" in row[1]]
    beginnings = tuple(numbers())
    by_hand = ["Section 5", "Table 3"]  # no number of ours
    assert [n for n in measured if not n.startswith((*beginnings, *by_hand))] == []


def test_numbers_of_the_reasons_are_those_of_the_json():
    text = " ".join((ROOT / "docs/paper.md").read_text().split())
    limit = result(CPU)["times_the_limit"]
    share = update("reduce") / update("expand"), training("reduce") / training("expand")
    graphs = "graph_network_training/nci1"
    target = target_of(result(f"{graphs}_nesterov_seeds"))
    searched = [c for c in result(f"{graphs}_expand_search")["curves"] if c["diverged"] is None]
    reached = [c for c in searched if c["average precision"][-1] >= target]
    _, *unfitted = sorted(c["loss"][-1] for c in reached)
    for sentence in (
        f"The target is an average precision of {target:.4f}",
        "three runs end above the target. The validation loss of two of them is "
        "{:.3f} and {:.3f} nats".format(*unfitted),
        "At 256 images, the ratio of the two extrapolated times is "
        f"{at_256('expand') / at_256('reduce'):.2f}.",
        f"our expand takes {limit['ours, expand, exact']:.2f} times the time of the passes alone. "
        "The exact GGN with our reduce takes "
        f"{limit['ours, reduce, exact']:.2f} times this time.",
        f"in ASDL takes {limit['asdl, expand, exact']:.2f} times the time of the passes alone",
        f"For an update, reduce takes {100 * share[0]:.0f} % of the time of expand.",
        "With an update every five epochs, a training run with reduce therefore takes "
        f"{100 * share[1]:.0f} % of the time of a run with expand.",
    ):
        assert sentence in text, sentence


def test_numbers_of_other_pages_are_those_of_the_json():
    """Those of the graph network's second study, and of a GPT on a GPU."""
    study = (ROOT / "experiments/optimizers/README.md").read_text()
    for name, method, paper in (
        ("reduce", "reduce", "49 %"),
        ("expand", "expand", "51 %"),
        ("control", "nesterov short", "none reaches it"),
    ):
        reached, _, share, _ = by_loss(method)
        assert f"| {name} | {share} | {paper} | {reached} |" in study
    *_, longest = result("transformer_timing/gpt_cuda")["sizes"]
    sentence = "the factors with reduce take {:.0f} % of the time with expand"
    text = " ".join((ROOT / "docs/gpu.md").read_text().split())
    assert sentence.format(100 * longest["reduce_over_expand"]["factors"]) in text
