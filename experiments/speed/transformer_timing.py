"""K-FAC of networks of sequences, expand against reduce, after Eschenhagen et al. 2023 (section 4).

In the paper (nanoGPT with GPT-2's shape on DART, on an A100) reduce takes 6.68 ± .04 minutes, 70 %
of expand's 9.55 ± .13.

Two transformers, each with two shapes: for a CPU a small one, for a GPU the real one. GPT on bytes
of DART, for several sequence lengths R and batch sizes N: nanoGPT's smallest shape (6 blocks of 384
features, 6 heads), or GPT-2's (12 blocks of 768, 12 heads). The vision transformer on noise:
CIFAR's shape (32² pixels in patches of 4, 6 blocks of 192 features), or ViT-S/16 (224² pixels in
patches of 16, 12 blocks of 384 features, 1,000 classes). For a CPU also an LSTM on random bytes (2
layers of 256 features), and transformers' Mixtral (2 blocks of 128 features, each position at two
of eight experts), and for a GPU torchvision's ResNet-50 at ImageNet's shape, in eval mode.

Two things are measured in float32, each in both modes: the factors alone (a forward pass, and a
backward pass to the inputs with one Monte Carlo sample for each loss term), which is what the paper
compares, and a step of training with new factors and a new preconditioner, beside a plain step of
AdamW. All take turns; a ratio is the median over rounds. On a CPU, seconds are processor seconds of
one thread.

``python -m experiments.speed.transformer_timing`` measures what is missing.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from experiments.data.dart import DART, IGNORED
from experiments.models import GPT, VisionTransformer
from experiments.speed.contenders import Work, one_batch_alone, training_step
from experiments.studies import Result, markdown, study
from experiments.timing import interleaved, median_ratios, medians
from kfac_backend.optimizer import KfacPreconditioner, PreconditionerOptions
from kfac_backend.options import Mode


@dataclass(frozen=True)
class Shape:
    """A network, and the sizes (R, N) of its batches: positions and examples."""

    sizes: tuple[tuple[int, int], ...]
    dim: int
    depth: int
    heads: int
    image_size: int = 0
    num_classes: int = 0


SHAPES = {
    "gpt_cpu": Shape(((64, 16), (128, 16), (256, 16), (256, 4)), dim=384, depth=6, heads=6),
    "gpt_cuda": Shape(((256, 32), (512, 16), (1024, 8)), dim=768, depth=12, heads=12),
    "vit_cpu": Shape(((64, 32), (64, 128)), 192, 6, 3, image_size=32, num_classes=10),
    "lstm_cpu": Shape(((64, 32),), 256, 2, 0),
    "mixtral_cpu": Shape(((64, 32),), 128, 2, 4),
    "vit_cuda": Shape(((196, 32), (196, 128)), 384, 12, 6, image_size=224, num_classes=1000),
    "resnet50_cuda": Shape(((1, 64), (1, 256)), 0, 0, 0, image_size=224, num_classes=1000),
}


@dataclass(frozen=True)
class Config:
    """A model on a device, its shape, and the number of measurements."""

    name: str
    shape: Shape
    repetitions: int = 3

    @property
    def device(self) -> torch.device:
        """Where it is measured."""
        return torch.device(self.name.partition("_")[2])


def run(config: Config) -> Result:
    """Seconds of all contenders at each size, and the ratios of the modes."""
    return {"sizes": [_size(config, R, N) for R, N in config.shape.sizes]}


def _size(config: Config, R: int, N: int) -> dict[str, Any]:
    x, y = (tensor.to(config.device) for tensor in _batch(config, R, N))
    work = {"AdamW": _step(_model(config, R), x, y, None)}
    modes: tuple[Mode, ...] = ("expand", "reduce")
    for mode in modes:
        options = {"kfac_approx": mode, "fisher": "mc"}
        work[f"factors, {mode}"] = one_batch_alone(_model(config, R), x, y, **options)
        work[f"K-FAC step, {mode}"] = _step(_model(config, R), x, y, mode)
    clock = "wall" if config.device.type == "cuda" else "processor"
    measured = interleaved(work, config.repetitions, config.device, clock)
    return {
        "R": R,
        "N": N,
        "times_adamw": median_ratios(measured, "AdamW"),
        "reduce_over_expand": {
            kind: median_ratios(measured, f"{kind}, expand")[f"{kind}, reduce"]
            for kind in ("factors", "K-FAC step")
        },
        "median_seconds": medians(measured),
        "seconds": measured,
    }


def _step(model: nn.Module, x: Tensor, y: Tensor, mode: Mode | None) -> Work:
    """A step of AdamW; with a mode, behind new factors and a new preconditioner."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    if mode is None:
        return training_step(model, x, y, optimizer)
    options = PreconditionerOptions(factor_every=1, update_every=1, ema_decay=0.0, kl_clip=None)
    preconditioner = KfacPreconditioner(
        model, "classification", options, kfac_approx=mode, fisher="mc"
    )
    return training_step(model, x, y, optimizer, preconditioner.step)


def _model(config: Config, R: int) -> nn.Module:
    torch.manual_seed(0)
    shape = config.shape
    if config.name == "lstm_cpu":
        return Recurrent(shape.dim, shape.depth)
    if config.name == "mixtral_cpu":
        return mixtral(shape)
    if config.name.startswith("resnet50"):
        return torchvision.models.resnet50(num_classes=shape.num_classes).eval().to(config.device)
    size: dict[str, Any] = {"dim": shape.dim, "depth": shape.depth, "heads": shape.heads}
    if not shape.image_size:
        return GPT(context=R, **size).to(config.device)
    model = VisionTransformer(
        shape.num_classes,
        image_size=shape.image_size,
        patch_size=round(shape.image_size / R**0.5),
        mlp_ratio=4.0,
        **size,
    )
    return model.to(config.device)


class Recurrent(nn.Module):
    """A language model of bytes by an LSTM."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.lstm = nn.LSTM(dim, dim, depth, batch_first=True)
        self.head = nn.Linear(dim, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, R, 256) of tokens (N, R)."""
        return self.head(self.lstm(self.embedding(x))[0])


def mixtral(shape: Shape) -> nn.Module:
    """A language model of bytes by transformers, whose experts' weights are stacked."""
    from transformers import MixtralConfig, MixtralForCausalLM  # which takes seconds

    config = MixtralConfig(
        vocab_size=256,
        hidden_size=shape.dim,
        intermediate_size=2 * shape.dim,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        pad_token_id=None,
    )
    return MixtralForCausalLM(config)


def _batch(config: Config, R: int, N: int) -> tuple[Tensor, Tensor]:
    shape = config.shape
    if shape.image_size:
        torch.manual_seed(0)
        x = torch.randn(N, 3, shape.image_size, shape.image_size)
        return x, torch.randint(shape.num_classes, (N,))
    if config.name in ("lstm_cpu", "mixtral_cpu"):
        x = torch.randint(256, (N, R + 1), generator=torch.Generator().manual_seed(0))
        return x[:, :-1], x[:, 1:]
    x, y = DART(context=R, num_train=N, num_test=1).load().train
    assert isinstance(x, Tensor)
    # Labels behind a text's end would be ignored; for the timing all positions count.
    return x, torch.where(y == IGNORED, x, y)


def table(results: list[Result]) -> str:
    """A table for each model and device, with a row for each size."""
    kinds = [
        f"{kind}, {mode}" for kind in ("factors", "K-FAC step") for mode in ("expand", "reduce")
    ]
    text = []
    for result in results:
        head = ["R", "N", "AdamW step, s", *kinds, "reduce / expand, factors", "..., step"]
        rows = [head]
        for size in result["sizes"]:
            modes = size["reduce_over_expand"]
            rows.append(
                [
                    str(size["R"]),
                    str(size["N"]),
                    f"{size['median_seconds']['AdamW']:.2f}",
                    *(f"{size['times_adamw'][kind]:.2f}" for kind in kinds),
                    f"{modes['factors']:.2f}",
                    f"{modes['K-FAC step']:.2f}",
                ]
            )
        text += [f"## {result['name']}, times a step of AdamW", markdown(rows)]
    return "\n\n".join(text)


main = study(
    "transformer_timing",
    __doc__,
    run,
    lambda options: [Config(name, SHAPES[name]) for name in options.data],
    table,
    problems=SHAPES,
    default=["gpt_cpu", "vit_cpu"],
)

if __name__ == "__main__":
    sys.exit(main())
