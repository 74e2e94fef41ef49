"""Regression and yes-or-no targets in a file."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SIGMA = 0.2
"""Noise of the regression data."""


@dataclass(frozen=True)
class Problem:
    """A file of data."""

    likelihood: str
    data: Path

    @property
    def options(self) -> list[str]:
        """Of the command line: data, network, likelihood."""
        return [
            "--data", "marglik.data.TensorFile", "--data.path", str(self.data),
            "--model", "marglik.models.MLP", "--model.in_features", "3", "--model.hidden", "[4]",
            "--model.num_classes", "2", "--model.activation", "tanh",
            "--likelihood", self.likelihood,
        ]  # fmt: skip


def regression(folder: Path) -> Problem:
    """Two targets with noise of standard deviation `SIGMA`."""
    x, f, noise = _functions()
    return _problem(folder, "regression", x, f + SIGMA * noise)


def bernoulli(folder: Path) -> Problem:
    """Two independent labels."""
    x, f, noise = _functions()
    return _problem(folder, "bernoulli", x, (f + 0.1 * noise > 0).float())


def _functions() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w, noise = (torch.randn(n, d, generator=generator) for n, d in ((160, 3), (3, 2), (160, 2)))
    return x, (x @ w * 0.5).tanh(), noise


def _problem(folder: Path, likelihood: str, x: Tensor, y: Tensor) -> Problem:
    parts = {"train": slice(100), "validation": slice(100, 130), "test": slice(130, None)}
    tensors = {f"x_{name}": x[part].clone() for name, part in parts.items()}
    tensors |= {f"y_{name}": y[part].clone() for name, part in parts.items()}
    save_file(tensors, folder / f"{likelihood}_data.safetensors")
    return Problem(likelihood, folder / f"{likelihood}_data.safetensors")
