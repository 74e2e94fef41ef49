"""K-FAC-reduce of convolutions with unfolded inputs, and without.

The paper unfolds the input of a convolution into its patches and then takes their mean. It cites a
speed-up of about 4.5 times for an implementation that never unfolds (section 4.1; Dangel 2023). Our
rule never unfolds: a sum of patches is a sum over boxes of the image (`patch_sums`).

Here: one batch of random images of CIFAR-10's shape and WRN-16-4 Fixup, in float32. "factors" is
the mean over each example's patches and the factor A of these means, for the inputs of all
convolutions. "pass" is a whole call of `kronecker_factors` with one Monte Carlo sample, the check
of the model included. The ways take turns. Seconds are processor seconds of one thread.

``python -m experiments.unfolded_reduce`` takes a minute or two.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.studies import Result, markdown, study
from experiments.timing import interleaved, median_ratios, medians, peak_memory
from kfac_backend import kronecker_factors
from kfac_backend.layers.convolution import ConvolutionRule
from kfac_backend.layers.gram import gram_matrix
from marglik.models import WideResNetFixup

WAYS = ("without unfolded inputs", "with unfolded inputs")


@dataclass(frozen=True)
class Config:
    """The network's size, the batch and the number of repetitions."""

    name: str = "cpu"
    depth: int = 16
    width: int = 4
    batch_size: int = 128
    repetitions: int = 5


def unfolded_sums(rule: ConvolutionRule, a: Tensor) -> tuple[Tensor, int]:
    """Sums of patches (1, N, d_in) over all positions, and R, from all patches (N, d_in, R)."""
    layer: Any = rule.layer
    columns = F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return columns.sum(2)[None], columns.shape[2]


def way(name: str) -> AbstractContextManager[object]:
    """A context in which the rule of convolutions has one of the `WAYS`."""
    if name == WAYS[0]:
        return nullcontext()
    return patch.object(ConvolutionRule, "input_sums", unfolded_sums)


def inputs_of_convolutions(model: nn.Module, x: Tensor) -> list[tuple[ConvolutionRule, Tensor]]:
    """The rule and the input of each convolution in a forward pass on x."""
    convolutions: list[tuple[ConvolutionRule, Tensor]] = []

    def keep(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        convolutions.append((ConvolutionRule(layer, "reduce", {"weight"}), args[0]))

    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return convolutions


def run(config: Config) -> Result:
    """Seconds, their ratio, and peak memory of the factors and of a pass, for both ways."""
    torch.manual_seed(0)
    model = WideResNetFixup(config.depth, config.width, 10)
    x = torch.randn(config.batch_size, 3, 32, 32)
    data = [(x, torch.randint(10, (config.batch_size,)))]
    layers = inputs_of_convolutions(model, x)

    def factors(name: str) -> list[Tensor]:
        with way(name):
            sums = [rule.input_sums(a) for rule, a in layers]
            return [gram_matrix(s / R) / config.batch_size for s, R in sums]

    def one_pass(name: str) -> dict[str, Tensor]:
        with way(name):
            factors = kronecker_factors(
                model, data, "classification", kfac_approx="reduce", fisher="mc"
            )
        return {name: block.A for name, block in factors.blocks.items() if block.A is not None}

    result: Result = {}
    works: dict[str, Callable[[str], object]] = {"factors": factors, "pass": one_pass}
    for kind, work in works.items():
        by_way = {name: partial(work, name) for name in WAYS}
        seconds = interleaved(by_way, config.repetitions, torch.device("cpu"), "processor")
        result[kind] = {
            "median_seconds": medians(seconds),
            "times": median_ratios(seconds, WAYS[0])[WAYS[1]],
            "peak_mebibytes": {
                name: peak_memory(one, torch.device("cpu")) / 2**20 for name, one in by_way.items()
            },
        }
    # Both ways compute the same numbers.
    pairs = zip(factors(WAYS[0]), factors(WAYS[1]), strict=True)
    difference = max(float((a - b).norm() / a.norm()) for a, b in pairs)
    return {**result, "largest_relative_difference": difference}


def table(results: list[Result]) -> str:
    """A row for each kind of work and way."""
    text = []
    for result in results:
        config = result["config"]
        rows = [["", "", "seconds", "times", "peak memory, MiB"]]
        for kind in ("factors", "pass"):
            of_kind = result[kind]
            for name in WAYS:
                rows.append(
                    [
                        kind,
                        name,
                        f"{of_kind['median_seconds'][name]:.3f}",
                        f"{of_kind['times']:.2f}" if name == WAYS[1] else "1",
                        f"{of_kind['peak_mebibytes'][name]:.0f}",
                    ]
                )
        text += [
            f"WRN-{config['depth']}-{config['width']}, {config['batch_size']} images of CIFAR-10's "
            f"shape, {result['device']}, torch {result['versions']['torch']}. Medians of "
            f"{config['repetitions']} repetitions. The paper cites about 4.5 times.",
            markdown(rows),
        ]
    return "\n\n".join(text)


main = study("unfolded_reduce", __doc__, run, lambda options: [Config()], table)

if __name__ == "__main__":
    sys.exit(main())
