"""Contenders of the curvature benchmark: a training step, the limit, ours, and the peers.

Each function returns a function that does the work once. The model is a WideResNetFixup; noise is
added to all its parameters, since branches of zeros would make gradients zero. The peers' backends
cannot take Fixup's scalars, which are frozen only for them.
"""

from collections.abc import Callable
from typing import Any

import torch
from laplace.curvature import CurvlinopsGGN
from torch import Tensor, nn

from experiments.models import GPT
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.engine.model_calls import logits_of
from kfac_backend.laplace_torch.interface import KfacGGN
from marglik.models import WideResNetFixup

Work = Callable[[], object]


def _backends() -> dict[str, Any]:
    try:
        import asdl  # noqa: F401  # pyright: ignore[reportMissingImports]
        from laplace.curvature import AsdlGGN
    except ImportError:
        return {"curvlinops": CurvlinopsGGN}
    return {"curvlinops": CurvlinopsGGN, "asdl": AsdlGGN}


PEERS = _backends()
"""The installed backends of laplace-torch."""


def network(
    device: torch.device,
    width: int = 4,
    num_classes: int = 10,
    channels_last: bool = False,
    depth: int = 16,
) -> nn.Module:
    """WRN-depth-width Fixup in eval mode, always with the same parameters."""
    torch.manual_seed(0)
    model = WideResNetFixup(depth, width, num_classes)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return model.to(device).to(memory_format=memory_format).eval()  # pyright: ignore


def training_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    precondition: Work = lambda: None,
) -> Work:
    """A training step: loss, backward pass, preconditioning, and a step of SGD if not of another.

    With labels for each position, the loss is their mean.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-6)

    def step() -> None:
        optimizer.zero_grad()
        logits = logits_of(model(x))
        nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        precondition()
        optimizer.step()

    return step


def limit(model: nn.Module, x: Tensor, vectors: int) -> Work:
    """A forward pass and backward passes to the inputs only, in channels_last."""
    model.requires_grad_(False)
    # A copy, as it requires a gradient from here on.
    x = x.clone(memory_format=torch.channels_last).requires_grad_()

    def passes() -> None:
        f = model(x)
        vector = torch.randn_like(f)
        for _ in range(vectors):
            torch.autograd.grad(f, x, vector, retain_graph=True)

    return passes


def language_limit(model: GPT, x: Tensor, part: int) -> Work:
    """A forward pass and one backward pass to the first features, ``part`` sequences at a time."""
    model.requires_grad_(False)
    sources: list[Tensor] = []

    def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        sources.append(output.detach().requires_grad_())
        return sources[-1]

    model.token_embedding.register_forward_hook(hook)

    def passes() -> None:
        for sequences in x.split(part):
            f = model(sequences)
            torch.autograd.grad(f, sources, torch.ones_like(f))
            sources.clear()

    return passes


def ours(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Work:
    """One batch of a pass over the data, as `kronecker_factors` makes it."""
    # The proof that the model is covered belongs to the first batch, not to each.
    curvature = CurvaturePass(model, "classification", **options)
    return lambda: curvature.add(x, y)


def one_batch_alone(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Work:
    """A batch with its own factors, as laplace-torch asks for them."""
    curvature = CurvaturePass(model, "classification", **options)

    def work() -> KroneckerFactors:
        curvature.add(x, y)
        return curvature.factors()

    return work


def peer(
    backend: type, model: nn.Module, x: Tensor, y: Tensor, kfac_approx: str, fisher: str
) -> Work:
    """Factors of a batch through laplace-torch's interface."""
    if backend is not KfacGGN:
        for p in model.parameters():
            p.requires_grad_(p.requires_grad and p.numel() > 1)
    mode: dict[str, Any] = {"kfac_approx": kfac_approx}
    if backend is KfacGGN:  # whose mode is an option of the backend
        curvature = backend(model, "classification", stochastic=fisher == "mc", **mode)
        return lambda: curvature.kron(x, y, N=len(x))
    curvature = backend(model, "classification", stochastic=fisher == "mc")
    # ASDL knows expand only, and takes no keyword for it.
    options = {} if backend.__name__.startswith("Asdl") else mode
    return lambda: curvature.kron(x, y, N=len(x), **options)
