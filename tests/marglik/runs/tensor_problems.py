"""Regression and yes-or-no targets in a file, with a network that was trained on them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from marglik.models import MLP

SIGMA = 0.2
"""Noise of the regression data."""


@dataclass(frozen=True)
class Problem:
    """A file of data, and a checkpoint."""

    likelihood: str
    data: Path
    checkpoint: Path

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
    torch.manual_seed(0)
    model = MLP(3, (4,), 2, "tanh")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-3)
    loss = F.mse_loss if likelihood == "regression" else F.binary_cross_entropy_with_logits
    for _ in range(150):
        optimizer.zero_grad()
        loss(model(tensors["x_train"]), tensors["y_train"]).backward()
        optimizer.step()
    wrapped = nn.DataParallel(model)  # its names begin with "module."
    torch.save({"state_dict": wrapped.state_dict(), "epoch": 150}, folder / f"{likelihood}.ckpt")
    return Problem(
        likelihood, folder / f"{likelihood}_data.safetensors", folder / f"{likelihood}.ckpt"
    )
