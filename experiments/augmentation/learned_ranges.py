"""Augmentations whose ranges the evidence learns, beside none, known, usual and tuned ones.

Digits are upright, or turned, moved or scaled at random, each once; images of CIFAR-10 (JPEG) are
as they are. The network averages its outputs over four copies and learns all six ranges of an
affine transform at once (with colours and a flip for CIFAR-10), starting from a twentieth of the
largest. Its rivals have the same rates, average and learned weight decays: no augmentation; the
range that the data was made with, in the model or in the loader; random crops and flips; torch-
vision's TrivialAugmentWide; ranges that held-out data choose from five; and ranges learned by the
training loss with a bonus for wide ones (Augerino; Benton et al. 2020, arXiv:2010.11882). As four
copies take longer, the loaders' ways are also trained for four times as many epochs. Two controls
separate what the gain is made of: the ranges that were found, fixed from the start, which lacks
their growth alone; and the loader's network, averaged over four copies in the test. Test NLL at a
temperature that the held-out data choose, and each network's evidence.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchvision.transforms import v2

from experiments.studies import Result, grouped, markdown, mean_with_error, standard_error, study
from experiments.weight_decay import training
from experiments.weight_decay.training import (
    Batches,
    Split,
    Trained,
    averaged_model,
    convolutions,
    digits,
    no_norm,
    scores_of,
    small_images,
    with_wrong_labels,
)
from marglik.augmentation import Affine, Color, Flip, LearnedAugmentation, Transform

COPIES = 4
SHARES = (0.1, 0.25, 0.5, 1.0)
"""Of the largest ranges, from which, and from none, held-out data choose."""
BONUS = 0.05
"""Augerino's weight of ‖η‖, its authors' middle one."""
DECAY = 5e-4
"""Augerino's weight decay."""


@dataclass(frozen=True, kw_only=True)
class Problem(training.Problem):
    """A network, how it is trained, the data, and what was done to it."""

    done: dict[str, float] = field(default_factory=dict)
    """The ranges of an affine transform that each image was put through once, by name."""
    colour: bool = False

    @property
    def transforms(self) -> list[Transform]:
        """What is learned, without knowing what was done."""
        return [Affine(), Color(), Flip()] if self.colour else [Affine()]


def small_network() -> nn.Module:
    """Two convolutions for digits."""
    return convolutions(no_norm, "flattened")


def colour_network() -> nn.Module:
    """Two convolutions for 16×16 images."""
    return convolutions(no_norm, "flattened", 3, 16)


DIGITS = Problem(small_network, data=digits, examples=400, held_out=100)
CIFAR = Problem(
    colour_network, 30, lr=0.02, data=small_images, examples=1000, held_out=500, colour=True
)
PROBLEMS = {
    "digits": DIGITS,
    "digits, ±45°": replace(DIGITS, done={"rotate": math.pi / 4}),
    "digits, ±180°": replace(DIGITS, done={"rotate": math.pi}),
    "digits, moved": replace(DIGITS, done={"move x": 0.5, "move y": 0.5}),
    "digits, scaled": replace(DIGITS, done={"scale x": 0.5, "scale y": 0.5}),
    "CIFAR-10 (JPEG), 1,000": CIFAR,
    "CIFAR-10 (JPEG), 4,000": replace(CIFAR, examples=4000),
}


@dataclass(frozen=True)
class Config:
    """A problem and a seed."""

    problem: str
    seed: int


@dataclass
class Augmented:
    """Images that are transformed anew each time that they are read."""

    x: Tensor
    change: Callable[[Tensor], Tensor]

    def __getitem__(self, which: Tensor) -> Tensor:
        return self.change(self.x[which])


def moved(x: Tensor, ranges: dict[str, float]) -> Tensor:
    """Images put through an affine transform of random numbers within the ranges."""
    if not ranges:
        return x
    u = 2 * torch.rand(len(x), len(ranges)) - 1
    return Affine(*ranges)(x, torch.tensor(list(ranges.values())), u)


def cropped(x: Tensor) -> Tensor:
    """Random crops after padding by an eighth of the size, and flips."""
    size = x.shape[-1]
    augment = v2.Compose([v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()])
    return torch.stack([augment(image) for image in x])


def trivial(x: Tensor) -> Tensor:
    """TrivialAugmentWide on images, whose values it takes as those of pixels from 0 to 255."""
    low, high = x.min(), x.max()
    pixels = ((x - low) / (high - low) * 255).round().to(torch.uint8)
    augment = v2.TrivialAugmentWide()
    changed = torch.stack([augment(image) for image in pixels])
    return changed.float() / 255 * (high - low) + low


def augerino(problem: Problem, split: Split, seed: int) -> Trained:
    """Ranges by stochastic gradient descent on the training loss less a bonus for wide ones."""
    torch.manual_seed(seed)
    model = LearnedAugmentation(problem.make(), problem.transforms, COPIES, learns=False)
    loader = Batches(*split, 50)
    optimizer = torch.optim.SGD(
        model.parameters(), problem.lr, momentum=0.9, nesterov=True, weight_decay=DECAY
    )
    ranges = model.ranges.requires_grad_()
    of_ranges = torch.optim.Adam([ranges], lr=0.01)
    average = averaged_model(model)
    started = time.process_time()
    for _ in range(problem.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            of_ranges.zero_grad()
            (F.cross_entropy(model(x), y) - BONUS * ranges.norm()).backward()
            optimizer.step()
            of_ranges.step()
            with torch.no_grad():
                ranges.clamp_(min=0.0).copy_(torch.minimum(ranges, model.largest))
            average.update_parameters(model)
    ranges.requires_grad_(False)
    model.load_state_dict(average.module.state_dict() | {"ranges": ranges})
    return Trained(model.eval(), time.process_time() - started)


def run(config: Config) -> Result:
    """All ways of a problem and a seed."""
    problem = PROBLEMS[config.problem]
    x, y = problem.data()
    torch.manual_seed(1000 + config.seed)
    x = moved(x, problem.done)
    (x, y), held_out, test = with_wrong_labels(
        x, y, problem.examples, problem.held_out, 0.0, config.seed
    )
    results: dict[str, Result] = {}

    def wrapped(
        transforms: Sequence[Transform], copies: int = COPIES, **options: Any
    ) -> Callable[[], nn.Module]:
        return lambda: LearnedAugmentation(problem.make(), transforms, copies, **options)

    def train(
        name: str,
        make: Callable[[], nn.Module] = problem.make,
        change: Callable[[Tensor], Tensor] | None = None,
        epochs: int = problem.epochs,
    ) -> Trained:
        inputs = x if change is None else Augmented(x, change)
        trained = replace(problem, make=make, epochs=epochs).run((inputs, y), config.seed, None)
        score(name, trained)
        return trained

    def score(name: str, trained: Trained) -> None:
        model = trained.model.eval()
        results[name] = scores_of(model, held_out, test, at_a_time=500)
        results[name] |= {"seconds": trained.seconds} | trained.record
        if isinstance(model, LearnedAugmentation):
            results[name]["ranges"] = dict(zip(model.names, model.ranges.tolist(), strict=True))

    problem.warm_up((x, y))
    train("none")
    train("learned", wrapped(problem.transforms))
    fixed = wrapped(problem.transforms, ranges=results["learned"]["ranges"], learns=False)
    train("found, fixed", fixed)
    train("learned, 8 copies", wrapped(problem.transforms, 2 * COPIES))
    half = {name: v / 2 for t in problem.transforms for name, v in t.limits.items()}
    train("learned, from wide", wrapped(problem.transforms, ranges=half))
    if problem.done:
        in_model = wrapped([Affine(*problem.done)], ranges=problem.done, learns=False)
        train("known, in the model", in_model)

        def change(images: Tensor) -> Tensor:
            return moved(images, problem.done)

        loaded = train("known, in the loader", change=change)
        averaged = LearnedAugmentation(
            loaded.model, [Affine(*problem.done)], COPIES, problem.done, learns=False
        )
        score("known, in the loader, averaged", replace(loaded, model=averaged))
        train("known, in the loader, 4×", change=change, epochs=4 * problem.epochs)
    else:
        train("none, 4×", epochs=4 * problem.epochs)
    if problem.colour:
        train("crop and flip", change=cropped)
        train("crop and flip, 4×", change=cropped, epochs=4 * problem.epochs)
        train("TrivialAugment", change=trivial)
    score("Augerino", augerino(problem, (x, y), config.seed))
    if problem.done:  # of what was done, as a user would tune it
        for share in SHARES:
            ranges = {name: share * Affine.limits[name] for name in problem.done}
            train(f"share {share}", wrapped([Affine(*ranges)], ranges=ranges, learns=False))
        choices = [results["none"], *(results[f"share {share}"] for share in SHARES)]
        best = min(choices, key=lambda choice: choice["held_out_nll"])
        results["tuned"] = best | {"seconds": sum(choice["seconds"] for choice in choices)}
    return {"results": results}


WAYS = (
    "none", "none, 4×", "learned", "learned, 8 copies", "learned, from wide", "found, fixed",
    "known, in the model", "known, in the loader", "known, in the loader, averaged",
    "known, in the loader, 4×", "crop and flip", "crop and flip, 4×", "TrivialAugment", "Augerino",
    "tuned",
)  # fmt: skip

LEARNED = ("learned", "learned, 8 copies", "learned, from wide")


def seeds_of(results: list[Result]) -> dict[str, list[Result]]:
    """Problem -> the results of its seeds by way."""
    return {p: [run["results"] for run in runs] for p, runs in grouped(results, "problem").items()}


def table(results: list[Result]) -> str:
    """Each way's scores and cost, and what the learned ranges bring, paired by seed."""
    by_problem = seeds_of(results)
    rows = [["data", "augmentation", "NLL", "less learned", "accuracy", "evidence", "cost"]]
    for problem in PROBLEMS:
        seeds = by_problem.get(problem, [])
        for way in WAYS:
            runs = [run for run in seeds if way in run]
            if not runs:
                continue
            differences = [run[way]["nll"] - run["learned"]["nll"] for run in runs]
            cost = statistics.fmean(run[way]["seconds"] / run["none"]["seconds"] for run in runs)
            evidences = [run[way].get("evidence_per_example", [math.nan])[-1] for run in runs]
            rows.append([
                problem, way, mean_with_error([run[way]["nll"] for run in runs]),
                "" if way == "learned" else mean_with_error(differences, "{:+.3f}"),
                f"{100 * statistics.fmean(run[way]['accuracy'] for run in runs):.1f} %",
                "" if math.isnan(evidences[0]) else mean_with_error(evidences), f"{cost:.1f}",
            ])  # fmt: skip
    times = [
        run["learned"]["seconds"] / run["found, fixed"]["seconds"]
        for seeds in by_problem.values()
        for run in seeds
    ]
    cost = (
        f"Learning ranges takes {statistics.median(times):.2f} times as long (median) as training "
        f"with those that it finds; {min(times):.2f} to {max(times):.2f} in {len(times)} runs."
    )
    return "\n\n".join([markdown(rows), markdown(ranges_table(by_problem)), cost])


def ranges_table(by_problem: dict[str, list[Result]]) -> list[list[str]]:
    """The ranges that were found from a twentieth and from a half of the largest."""
    rows = [["data", "range", "done", *LEARNED, "largest"]]
    for problem, seeds in by_problem.items():
        limits = {name: v for t in PROBLEMS[problem].transforms for name, v in t.limits.items()}
        for name, largest in limits.items():
            ways = [[run[way]["ranges"][name] for run in seeds] for way in LEARNED]
            done = PROBLEMS[problem].done.get(name, 0.0)
            cells = [mean_with_error(values, "{:.2f}") for values in ways]
            rows.append([problem, name, f"{done:.2f}", *cells, f"{largest:.2f}"])
    return rows


COLORS = {
    "none": "tab:gray", "known, in the loader": "tab:blue", "known, in the model": "tab:cyan",
    "learned": "tab:orange", "learned, 8 copies": "tab:red",
}  # fmt: skip
TURNED = ("digits", "digits, ±45°", "digits, ±180°")


def figures(results: list[Result]) -> dict[str, Figure]:
    """Turned digits: the NLL of some ways, and the angles that are found over the updates."""
    by_problem = seeds_of(results)
    turned = [by_problem.get(problem, []) for problem in TURNED]
    figure = Figure(figsize=(8.5, 3.0), layout="constrained")
    scores, angles = figure.subplots(1, 2, width_ratios=(3, 2))
    for k, (way, color) in enumerate(COLORS.items()):
        nll = [[run[way]["nll"] for run in seeds if way in run] for seeds in turned]
        shown = [(j, values) for j, values in enumerate(nll) if values]
        scores.bar(
            [j + 0.17 * (k - 2) for j, _ in shown], [statistics.fmean(v) for _, v in shown], 0.16,
            yerr=[standard_error(v) for _, v in shown], color=color, label=way,
        )  # fmt: skip
    scores.set_xticks(range(len(TURNED)), ["upright", "turned by up to 45°", "up to 180°"])
    scores.set_ylabel("test NLL (nats)")
    scores.legend(frameon=False, fontsize=8)
    names = {"upright": "C2", "±45°": "C4", "±180°": "C5"}
    for (name, color), seeds in zip(names.items(), turned, strict=True):
        for way, style in (("learned", "-"), ("learned, 8 copies", "--")):
            for run_of_seed in seeds:
                path = [math.degrees(update["rotate"]) for update in run_of_seed[way]["path"]]
                first = run_of_seed is seeds[0] and way == "learned"
                angles.plot(
                    range(1, len(path) + 1), path, style, color=color, alpha=0.6, lw=1,
                    label=name if first else None,
                )  # fmt: skip
    angles.set(
        xlabel="update", ylabel="range of angles found (°)", yticks=(0, 45, 90, 180), xlim=(0, 29)
    )
    angles.legend(frameon=False, fontsize=8, loc="center right", title="turned by")
    angles.set_title("four copies (solid), eight (dashed)", fontsize=8)
    return {"ranges": figure}


main = study(
    "learned_ranges",
    __doc__,
    run,
    lambda options: [Config(p, seed) for seed in range(options.seeds) for p in options.data],
    table,
    problems=PROBLEMS,
    seeds=5,
    figures=figures,
)

if __name__ == "__main__":
    sys.exit(main())
