"""The benchmarks' main ratios in two minutes, beside the last ones: what a change costs or saves.

Developers run it before and after a change. It uses WRN-16-4 Fixup, 16 images of noise and one
thread, and counts processor seconds, so that other work on the machine matters little. All take
turns, and each is divided by its limit in the same round: a forward pass and one backward pass per
vector to the inputs only, with frozen weights in channels_last. A "first pass" is a call of
`kronecker_factors`, with its proof; a "later pass" the fit of a posterior that was fitted before.

    python -m experiments.speed.bench_quick           # measure, print, warn over 5 %; keeps nothing
    python -m experiments.speed.bench_quick --write   # and write the ratios, to be committed

A ratio depends on the machine, too. Warnings appear only if the committed ratios come from the same
processor and version of torch.
"""

import argparse
import copy
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.models import GPT, VisionTransformer
from experiments.speed.contenders import (
    Work,
    language_limit,
    limit,
    network,
    ours,
    training_step,
)
from experiments.studies import SHIPPED
from experiments.timing import interleaved, median_ratios, medians
from kfac_backend import CurvatureOptions, kronecker_factors
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from marglik import KronLaplace, Posterior
from marglik.application.runs.optimizers import OptimizerConfig, build_optimizer
from marglik.data import Batches
from marglik.models import MLP
from marglik.storage.environment import environment
from marglik.storage.record_files import write_json
from marglik.training.learner import PriorLearner
from marglik.training.loop import OnlineTraining

TOLERANCE = 0.05
"""Relative change of a ratio above which a warning is printed."""


def _work(batch_size: int, width: int) -> tuple[dict[str, Work], dict[str, str]]:
    """Functions to time by name, and the name of the limit that divides each."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    x, y = torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))
    work: dict[str, Work] = {}
    limits: dict[str, str] = {}

    def new() -> nn.Module:
        return network(device, width)

    for vectors in (1, 9, 10):
        work[f"limit of {vectors}"] = limit(network(device, width, channels_last=True), x, vectors)

    def add(name: str, vectors: int, do: Callable[[], object]) -> None:
        work[name], limits[name] = do, f"limit of {vectors}"

    for fisher, vectors in (("exact", 9), ("mc", 1)):
        for kfac_approx in ("expand", "reduce"):
            batch = ours(new(), x, y, kfac_approx=kfac_approx, fisher=fisher)
            add(f"batch, {kfac_approx}, {fisher}", vectors, batch)

    def one_pass(model: nn.Module) -> None:
        kronecker_factors(model, [(x, y)], "classification", kfac_approx="reduce", fisher="mc")

    never_seen, seen = new(), new()
    add("first pass, reduce, mc", 1, lambda: one_pass(copy.deepcopy(never_seen)))
    options = CurvatureOptions(kfac_approx="reduce", fisher="mc")
    posterior = Posterior(seen, "classification", options)
    add("later pass, reduce, mc", 1, lambda: posterior.fit([(x, y)]))
    laplace = KronLaplace(new(), "classification", prior_precision=50.0, kfac_approx="reduce")
    laplace.fit([(x, y)])
    add("covariances, all layers", 10, lambda: laplace.output_distribution(x))
    work["training step"] = training_step(new(), x, y)
    model = new()
    options = PreconditionerOptions(factor_every=10, update_every=10)
    optimizer = KFAC(model, "classification", 1e-3, options=options, kfac_approx="reduce")
    work["K-FAC step, reduce"] = training_step(model, x, y, optimizer)
    limits["K-FAC step, reduce"] = "training step"
    _add_epochs(work, limits, 4 * batch_size, width)
    _add_small_networks(work, limits, 4 * batch_size)
    return work, limits


def _add_small_networks(work: dict[str, Work], limits: dict[str, str], batch_size: int) -> None:
    """A batch of the presets' transformers, and a pass over 16 batches through an MLP."""
    images, classes = torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))
    tokens = torch.randint(256, (batch_size, 64))

    def vit() -> nn.Module:
        return VisionTransformer(num_classes=10, patch_size=4, dim=48, depth=3, heads=4).eval()

    def gpt() -> GPT:
        return GPT(vocab_size=256, context=64, dim=64, depth=2, heads=4).eval()

    work["ViT: limit of 9"] = limit(vit(), images, 9)
    work["GPT: limit of 1"] = language_limit(gpt(), tokens, part=batch_size)
    # A small network in small batches, as they are: the pass waits for Python and not for numbers.
    digits = [(torch.randn(32, 1, 8, 8), torch.randint(10, (32,))) for _ in range(16)]
    limit_of_batch = limit(MLP(64, (128, 128), 10), digits[0][0], 9)
    work["MLP: limit of 9"] = lambda: [limit_of_batch() for _ in digits]
    posterior = Posterior(MLP(64, (128, 128), 10), "classification", CurvatureOptions())
    work["MLP, small batches, exact"] = lambda: posterior.fit(digits)
    limits["MLP, small batches, exact"] = "MLP: limit of 9"
    for mode in ("expand", "reduce"):
        work[f"ViT, {mode}, exact"] = ours(vit(), images, classes, kfac_approx=mode)
        limits[f"ViT, {mode}, exact"] = "ViT: limit of 9"
        work[f"GPT, {mode}, mc"] = ours(gpt(), tokens, tokens, kfac_approx=mode, fisher="mc")
        limits[f"GPT, {mode}, mc"] = "GPT: limit of 1"


def plain_epoch(model: nn.Module, loader: Batches) -> Work:
    """An epoch of a loop written by hand: fused SGD with Nesterov's momentum and weight decay."""
    optimizer = torch.optim.SGD(
        model.parameters(), 1e-6, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )

    def epoch() -> None:
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return epoch


def online_epoch(model: nn.Module, loader: Batches) -> Work:
    """An epoch of the online loop between two updates, a weight decay for each tensor."""
    optimizer, scheduler = build_optimizer(model, OptimizerConfig(lr=1e-6), 1000 * len(loader))
    learner = PriorLearner("classification", curvature_from="pass", epochs=1000)
    training = OnlineTraining(model, optimizer, loader, learner, scheduler=scheduler)
    return lambda: training.train_epoch()


def _add_epochs(work: dict[str, Work], limits: dict[str, str], batch_size: int, width: int) -> None:
    """Two batches of augmented images, in the online loop and in a loop written by hand."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (2 * batch_size, 3, 32, 32), generator=generator)
    labels = torch.randint(10, (2 * batch_size,), generator=generator)

    def loader() -> Batches:
        return Batches(
            pixels.to(torch.uint8), labels, batch_size, shuffle=True,
            normalisation=((127.0,) * 3, (64.0,) * 3), augment=True, channels_last=True,
        )  # fmt: skip

    def new() -> nn.Module:
        return network(torch.device("cpu"), width, channels_last=True)

    work["epoch of a plain loop"] = plain_epoch(new(), loader())
    work["epoch of the online loop"] = online_epoch(new(), loader())
    limits["epoch of the online loop"] = "epoch of a plain loop"


def measure(repetitions: int = 4, batch_size: int = 16, width: int = 4) -> dict[str, Any]:
    """The median ratio of each to its limit, and the conditions of the measurement."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work, limits = _work(batch_size, width)
        seconds = interleaved(work, repetitions, torch.device("cpu"), clock="processor")
    finally:
        torch.set_num_threads(threads)
    ratios = {name: median_ratios(seconds, to)[name] for name, to in limits.items()}
    config = {"repetitions": repetitions, "batch_size": batch_size, "width": width}
    return {
        "config": config | {"threads": 1, "clock": "processor"},
        "times_the_limit": ratios,
        "limits": limits,
        "median_seconds": medians(seconds),
        "measured_with": {"processor": _processor(), "torch": torch.__version__},
        **environment(torch.device("cpu")),
    }


def _processor() -> str:
    """Name of the processor, if the system tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def compare(now: dict[str, Any], before: dict[str, Any] | None) -> str:
    """A table of both, and the warning about changes over 5 %."""
    old = before["times_the_limit"] if before else {}
    lines = [f"{'times its limit':28}{'now':>8}{'before':>8}{'change':>9}"]
    worse = []
    for name, ratio in now["times_the_limit"].items():
        line = f"{name:28}{ratio:8.3f}"
        if name in old:
            change = ratio / old[name] - 1
            line += f"{old[name]:8.3f}{100 * change:+8.1f} %"
            worse += [name] if change > TOLERANCE else []
        lines.append(line)
    if before and before["measured_with"] != now["measured_with"]:
        lines.append("The earlier ratios are from another processor or version of torch.")
    elif worse:
        lines.append(f"WARNING: over {100 * TOLERANCE:.0f} % slower: {', '.join(worse)}.")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the committed ratios")
    options = parser.parse_args(arguments)
    committed = SHIPPED / "bench_quick_cpu.json"
    before = json.loads(committed.read_text()) if committed.exists() else None
    now = measure()
    print(compare(now, before))
    if options.write:
        write_json(committed, now)


if __name__ == "__main__":
    main()
