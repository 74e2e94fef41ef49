"""K-FAC of a GPT over a data set, expand against reduce: the paper's table of the GPT-2 timing.

The paper: nanoGPT with GPT-2's shape on the full DART data set. Expand takes 9.55 ± .13 minutes and
reduce 6.68 ± .04, which is 70 %; mean and standard error of three runs.

Here: the texts of DART's development split, one after the other, in windows of R tokens. GPT-2's
tokenizer is replaced by random merges: each text is cut into tokens of one to seven bytes, at
random, and each different token has a number. With the 256 single bytes these are about as many as
GPT-2's 50,257, which is the number of outputs. For a CPU: nanoGPT's smallest shape (6 blocks of 384
features, 6 heads) and the first 32 windows of 256 tokens, in batches of four. For a GPU: GPT-2's
shape (12 blocks of 768, 12 heads) and all windows of 1,024 tokens, in batches of eight.

A pass is a whole call of `kronecker_factors` with one Monte Carlo sample for each token, the check
of the model included, in float32. The output layer's B would be a matrix of 50,257 rows; its
diagonal is kept (``diagonal_above``). The modes take turns. On a CPU, seconds are processor seconds
of one thread.

``python -m experiments.speed.language_model_pass`` takes five minutes of one core.
"""

import random
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.data.archives import unpacked
from experiments.data.dart import FILE, ORIGIN, texts_by_triples
from experiments.models import GPT
from experiments.studies import Result, markdown, mean_with_error, study
from experiments.timing import interleaved
from kfac_backend import kronecker_factors
from kfac_backend.options import Mode

MODES: tuple[Mode, ...] = ("expand", "reduce")
PAPER = {"expand": ("9.55 ± 0.13", "100"), "reduce": ("6.68 ± 0.04", "70")}
"""The paper's minutes, and percent of expand's time."""


@dataclass(frozen=True)
class Config:
    """A device, the network's shape and the data's size."""

    name: str
    positions: int = 256
    batch_size: int = 4
    windows: int | None = 32
    """Number of windows; None for all."""
    dim: int = 384
    depth: int = 6
    heads: int = 6
    vocabulary: int = 50_257
    diagonal_above: int = 8192
    repetitions: int = 3

    @property
    def device(self) -> torch.device:
        """Where it is measured."""
        return torch.device(self.name.partition("_")[2])


CONFIGS = {
    "gpt_cpu": Config("gpt_cpu"),
    "gpt_cuda": Config("gpt_cuda", 1024, 8, None, dim=768, depth=12, heads=12),
}


def tokens_of(texts: list[bytes], vocabulary: int, seed: int = 0) -> list[int]:
    """Numbers of the tokens of all texts: single bytes, and random merges of up to seven bytes.

    A merge that the vocabulary has no number left for is its single bytes.
    """
    generator = random.Random(seed)
    numbers = {bytes([byte]): byte for byte in range(256)}
    tokens = []
    for text in texts:
        start = 0
        while start < len(text):
            merge = text[start : start + generator.randint(1, 7)]
            start += len(merge)
            if merge not in numbers and len(numbers) < vocabulary:
                numbers[merge] = len(numbers)
            tokens += [numbers[merge]] if merge in numbers else list(merge)
    return tokens


def batches(config: Config) -> list[tuple[Tensor, Tensor]]:
    """Batches of tokens (N, R) and of the tokens that follow them."""
    texts = [text for group in texts_by_triples(unpacked(None, FILE, ORIGIN)) for text in group]
    tokens = torch.tensor(tokens_of(texts, config.vocabulary))
    R = config.positions
    number = (len(tokens) - 1) // R
    x, y = (tokens[shift : shift + number * R].view(number, R) for shift in (0, 1))
    x, y = x[: config.windows], y[: config.windows]
    return list(zip(x.split(config.batch_size), y.split(config.batch_size), strict=True))


def run(config: Config) -> Result:
    """Seconds of each pass over the data, and reduce's in percent of expand's."""
    data = batches(config)
    torch.manual_seed(0)
    model = GPT(config.vocabulary, config.positions, config.dim, config.depth, config.heads)
    model.to(config.device)

    def one_pass(mode: Mode, data: list[Any]) -> object:
        return kronecker_factors(
            model, data, "classification", kfac_approx=mode, fisher="mc",
            diagonal_above=config.diagonal_above,
        )  # fmt: skip

    clock = "wall" if config.device.type == "cuda" else "processor"
    for mode in MODES:  # warms up
        one_pass(mode, data[:1])
    work = {mode: partial(one_pass, mode, data) for mode in MODES}
    seconds = interleaved(work, config.repetitions, config.device, clock, warm_up=False)
    pairs = zip(seconds["reduce"], seconds["expand"], strict=True)
    return {
        "windows": sum(len(x) for x, _ in data),
        "tokens": sum(x.numel() for x, _ in data),
        "different_tokens": len(torch.cat([x.flatten() for x, _ in data]).unique()),
        "seconds": seconds,
        "percent": [100 * reduce / expand for reduce, expand in pairs],
    }


def table(results: list[Result]) -> str:
    """A table for each device, with a row for each mode."""
    text = []
    for result in results:
        config = result["config"]
        rows = [["", "seconds of a pass", "%", "paper: minutes", "%"]]
        for mode in MODES:
            percent = mean_with_error(result["percent"], "{:.1f}") if mode == "reduce" else "100"
            rows.append(
                [mode, mean_with_error(result["seconds"][mode], "{:.2f}"), percent, *PAPER[mode]]
            )
        text += [
            f"## {result['name']}",
            f"{result['windows']:,} windows of {config['positions']:,} tokens in batches of "
            f"{config['batch_size']}, a vocabulary of {config['vocabulary']:,}; "
            f"{config['depth']} blocks of {config['dim']} features. {result['device']}, torch "
            f"{result['versions']['torch']}. Mean ± standard error of {config['repetitions']} "
            "passes.",
            markdown(rows),
        ]
    return "\n\n".join(text)


main = study(
    "language_model_pass",
    __doc__,
    run,
    lambda options: [CONFIGS[name] for name in options.data],
    table,
    problems=CONFIGS,
    default=["gpt_cpu"],
)

if __name__ == "__main__":
    sys.exit(main())
