"""Cost of many classes: 10, 100 and 1,000 with the exact GGN, a sampled vocabulary of 50,257.

- exact: WRN-16-1 Fixup on noise of 16×16 pixels, C − 1 backward passes a batch; the time divided by
  the limit's, a forward pass and C − 1 backward passes to the inputs.
- vocabulary: a GPT of two blocks of 64 features with one sample per token, 8 sequences of 128
  tokens. Its output layer's B would take 9.4 GiB as a matrix; here its diagonal is kept
  (``diagonal_above``).

Peak memory is that of a batch's tensors beyond those that were there before, with the factors.
Seconds are processor seconds of one thread, medians of interleaved rounds.
``python -m experiments.speed.large_classes`` takes six minutes of one core.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from experiments.models import GPT
from experiments.speed.contenders import (
    language_limit,
    limit,
    network,
    one_batch_alone,
    training_step,
)
from experiments.studies import Result, markdown, study
from experiments.timing import interleaved, median_ratios, peak_memory
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.options import Mode

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Config:
    """A part, "exact" or "vocabulary", and its sizes."""

    name: str
    classes: tuple[int, ...] = (10, 100, 1000)
    batch_size: int = 16
    image_size: int = 16
    vocabulary: int = 50257
    diagonal_above: int = 8192
    sequences: int = 8
    positions: int = 128
    dim: int = 64
    repetitions: int = 3


def run(config: Config) -> Result:
    """All cases of a part."""
    modes: tuple[Mode, ...] = ("expand", "reduce")
    if config.name == "exact":
        cases = [exact(config, C, mode) for C in config.classes for mode in modes]
    else:
        cases = [vocabulary(config, tied, mode) for tied in (True, False) for mode in modes]
    return {"cases": cases}


def exact(config: Config, C: int, mode: Mode) -> dict[str, Any]:
    """One number of classes: the time of a batch."""
    torch.manual_seed(0)
    x = torch.randn(config.batch_size, 3, config.image_size, config.image_size)
    y = torch.randint(C, (config.batch_size,))
    work = {
        "limit": limit(network(CPU, 1, C), x, C - 1),
        "pass": one_batch_alone(network(CPU, 1, C), x, y, kfac_approx=mode),
    }
    # A round of 1,000 classes takes a minute; its ratios hardly vary.
    measured = interleaved(work, 1 if C >= 1000 else config.repetitions, CPU, "processor")
    return {"classes": C, "mode": mode, "times_limit": median_ratios(measured, "limit")["pass"]}


def vocabulary(config: Config, tied: bool, mode: Mode) -> dict[str, Any]:
    """A language model's batch: seconds and memory, beside a training step's."""
    C = config.vocabulary
    torch.manual_seed(0)
    x = torch.randint(C, (config.sequences, config.positions))
    y = torch.randint(C, x.shape)

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(C, config.positions, config.dim, 2, tied=tied)

    curvature = CurvaturePass(
        model(), "classification", kfac_approx=mode, fisher="mc",
        diagonal_above=config.diagonal_above,
    )  # fmt: skip

    def batch() -> KroneckerFactors:
        curvature.add(x, y)
        return curvature.factors()

    work = {
        "limit": language_limit(model(), x, part=config.sequences),
        "training step": training_step(model(), x, y),
        "pass": batch,
    }
    first = peak_memory(batch, CPU)
    measured = interleaved(work, config.repetitions, CPU, "processor")
    return {
        "tied": tied,
        "mode": mode,
        "times_limit": median_ratios(measured, "limit")["pass"],
        "times_step": median_ratios(measured, "training step")["pass"],
        "peak_first_mebibytes": first / 2**20,
        "peak_mebibytes": peak_memory(batch, CPU) / 2**20,
        "peak_step_mebibytes": peak_memory(work["training step"], CPU) / 2**20,
    }


def table(results: list[Result]) -> str:
    """A table of each part in Markdown."""
    cases = {part["name"]: part["cases"] for part in results}
    rows = [["classes", "mode", "times the limit"]]
    rows += [
        [f"{case['classes']:,}", case["mode"], f"{case['times_limit']:.2f}"]
        for case in cases.get("exact", [])
    ]
    head = ["vocabulary 50,257", "mode", "times the limit", "times a training step", "peak, MiB"]
    others = [[*head, "first batch, MiB", "training step, MiB"]]
    others += [
        [
            "tied" if case["tied"] else "untied", case["mode"], f"{case['times_limit']:.2f}",
            f"{case['times_step']:.2f}", f"{case['peak_mebibytes']:.0f}",
            f"{case['peak_first_mebibytes']:.0f}", f"{case['peak_step_mebibytes']:.0f}",
        ]
        for case in cases.get("vocabulary", [])
    ]  # fmt: skip
    return f"{markdown(rows)}\n\n{markdown(others)}"


main = study(
    "large_classes",
    __doc__,
    run,
    lambda options: [Config("exact"), Config("vocabulary")],
    table,
)

if __name__ == "__main__":
    sys.exit(main())
