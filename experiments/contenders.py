"""What the curvature benchmark times on one batch: a training step, the limit, ours, and the peers.

Each function returns one that does the work once. The model is a WideResNetFixup whose parameters
are all disturbed, as zero branches would make gradients zero. The peers' backends cannot take
Fixup's scalars; these are frozen for them alone.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from laplace.curvature import CurvlinopsGGN
from lightning.fabric import Fabric
from torch import Tensor, nn

from kfac_backend.factors import CurvaturePass
from kfac_backend.laplace.interface import KfacGGN
from marglik.models import WideResNetFixup
from marglik.training.loaders import Loader
from marglik.training.network import NetworkTraining
from marglik.training.optimizers import OptimizerConfig, build_optimizer

__all__ = [
    "PEERS",
    "Work",
    "limit",
    "network",
    "one_batch_alone",
    "online_epoch",
    "ours",
    "peer",
    "plain_epoch",
    "training_step",
]

Work = Callable[[], object]


def _backends() -> dict[str, Any]:
    try:
        import asdl  # noqa: F401  # pyright: ignore[reportMissingImports]
        from laplace.curvature import AsdlGGN
    except ImportError:
        return {"curvlinops": CurvlinopsGGN}
    return {"curvlinops": CurvlinopsGGN, "asdl": AsdlGGN}


PEERS = _backends()
"""laplace-torch's backends, of those that are installed."""


def network(
    device: torch.device, width: int = 4, num_classes: int = 10, channels_last: bool = False
) -> nn.Module:
    """WRN-16-width Fixup in eval mode, always the same."""
    torch.manual_seed(0)
    model = WideResNetFixup(widen_factor=width, num_classes=num_classes)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return model.to(device).to(memory_format=memory_format).eval()  # pyright: ignore


def training_step(model: nn.Module, x: Tensor, y: Tensor) -> Work:
    """Loss, backward pass and a step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def plain_epoch(model: nn.Module, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> Work:
    """An epoch as one would write it by hand: fused SGD with Nesterov's momentum and weight decay.

    Args:
        model: in channels_last.
        batches: makes an epoch's batches.
    """
    optimizer = torch.optim.SGD(
        model.parameters(), 1e-6, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )

    def epoch() -> None:
        model.train()
        for x, y in batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return epoch


def online_epoch(model: nn.Module, loader: Loader, batches: int) -> Work:
    """An epoch of the online loop between two updates, a weight decay for each tensor.

    Args:
        model: in channels_last.
        loader: of the batches.
        batches: how many there are in an epoch, for the schedule.
    """
    config = OptimizerConfig(lr=1e-6, min_lr=0.0)
    optimizer, scheduler = build_optimizer(model, config, 1000 * batches)
    fabric = Fabric(accelerator=next(model.parameters()).device.type, devices=1)
    training = NetworkTraining(
        model, optimizer, loader, "classification", fabric, scheduler=scheduler
    )
    decays = [5e-4] * len(list(model.parameters()))
    return lambda: training.epoch(1, decays, variance=1.0)


def limit(
    model: nn.Module,
    x: Tensor,
    vectors: int,
    batched: bool = False,
    start: nn.Module | None = None,
) -> Work:
    """A forward pass and backward passes to the inputs only, of images in channels_last.

    Args:
        model: the network, whose parameters become frozen.
        x: its input.
        vectors: how many backward passes.
        batched: whether they are one.
        start: a module whose output takes the input's place, for inputs that are tokens.
    """
    model.requires_grad_(False)
    if start is None:  # a copy, as it requires a gradient from here on
        layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
        x = x.clone(memory_format=layout).requires_grad_()
    seen: list[Tensor] = []
    if start is not None:
        start.register_forward_hook(lambda _, inputs, f: seen.append(f.requires_grad_()))

    def passes() -> None:
        seen.clear()
        f = model(x)
        to = seen[0] if seen else x
        vector = torch.randn_like(f)
        if batched:
            stacked = vector.expand(vectors, *f.shape)
            torch.autograd.grad(f, to, stacked, is_grads_batched=True)
            return
        for _ in range(vectors):
            torch.autograd.grad(f, to, vector, retain_graph=True)

    return passes


def ours(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Work:
    """One batch of a pass over the data, as `kronecker_factors` makes it."""
    # The proof that the model is covered belongs to the first batch, not to each.
    curvature = CurvaturePass(model, "classification", **options)
    return lambda: curvature.add(x, y)


def one_batch_alone(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Work:
    """A batch, and the factors of it alone, as laplace-torch asks for them."""
    curvature = CurvaturePass(model, "classification", **options)

    def work() -> None:
        curvature.add(x, y)
        curvature.factors()

    return work


def peer(
    backend: type, model: nn.Module, x: Tensor, y: Tensor, kfac_approx: str, fisher: str
) -> Work:
    """A batch's factors through laplace-torch's interface."""
    if backend is not KfacGGN:
        for p in model.parameters():
            p.requires_grad_(p.numel() > 1)
    curvature = backend(model, "classification", stochastic=fisher == "mc")
    # ASDL knows expand only, and takes no keyword for it.
    options: dict[str, Any] = {"kfac_approx": kfac_approx}
    if backend.__name__.startswith("Asdl"):
        options = {}
    return lambda: curvature.kron(x, y, N=len(x), **options)
