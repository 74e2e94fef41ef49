"""Small fitted posteriors of every kind, and what they predict."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from marglik import KronLaplace, Posterior
from marglik.prediction.links import Prediction
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive

LIKELIHOODS = ("classification", "regression", "bernoulli")
METHODS = ("probit", "mc", "linearised")
DELTAS = torch.linspace(0.5, 3.0, 6)
"""Prior precisions of the network's six tensors."""
CASES = {
    "classification": {},
    "regression": {"likelihood": "regression", "sigma_noise": 0.4},
    "bernoulli": {"likelihood": "bernoulli"},
    "reduce": {"kfac_approx": "reduce"},
    "empirical Fisher": {"fisher": "empirical"},
    "Monte Carlo Fisher": {"fisher": "mc"},
    "temperature": {"temperature": 0.3},
    "one prior for all": {"prior_precision": 0.7},
    "frozen parameters": {"frozen": True, "prior_precision": 0.7},
    "float32": {"dtype": torch.float32},
    "corrected": {"corrected": True},
}


class TakesMapping(nn.Module):
    """A network of batches that are mappings."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Of the batch's "pixels"."""
        return self.net(batch["pixels"])


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """A network of images (2, 4, 4) with dropout and three outputs."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Dropout(0.5), nn.Conv2d(4, 4, 1),
        nn.Tanh(), nn.Flatten(), nn.Linear(16, 3),
    ).to(dtype)  # fmt: skip


def data(
    likelihood: str = "classification", dtype: torch.dtype = torch.float64, n: int = 8
) -> tuple[Tensor, Tensor]:
    """Examples for `network`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, 4, 4, dtype=torch.float64, generator=generator).to(dtype)
    y = torch.randn(n, 3, dtype=torch.float64, generator=generator).to(dtype)
    if "classification" in likelihood:
        return x, y.argmax(1)
    return x, (y > 0).to(y) if likelihood == "bernoulli" else y


def fitted(
    likelihood: str = "classification",
    *,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float64,
    frozen: bool = False,
    corrected: bool = False,
    seed: int = 0,
    **options: object,
) -> tuple[KronLaplace, Tensor]:
    """A posterior, and the inputs that it was fitted to; the first layer is known if ``frozen``."""
    if model is None:
        model = network(dtype, seed)
        model[0].requires_grad_(not frozen)
    laplace = KronLaplace(model, likelihood, **{"prior_precision": DELTAS} | options)
    torch.manual_seed(seed)
    laplace.fit([data(likelihood, dtype)], corrected=corrected)
    return laplace, data(likelihood, dtype)[0]


def jacobians(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Trainable parameter -> J (N, C, P_b) of the outputs, in eval mode, by `torch.func`."""
    learned = {n: p.detach() for n, p in model.eval().named_parameters() if p.requires_grad}
    found = jacrev(lambda p: functional_call(model, p, (x,)))(learned)
    return {name: J.flatten(2).detach() for name, J in found.items()}


def by_jacobians(
    laplace: Posterior,
    x: Tensor,
    blocks: dict[str, Tensor] | None = None,
    *,
    joint: bool = False,
) -> Tensor:
    """The outputs' covariance J Σ Jᵀ from dense matrices: the oracle.

    Args:
        laplace: fitted.
        x: inputs (N, ...).
        blocks: H of each parameter; by default those of the fitted factors.
        joint: (N·C, N·C) of all examples together, in place of (N, C, C).
    """
    total = torch.zeros(())
    J_of = jacobians(laplace.model, x)
    deltas = laplace.prior_precision.expand(len(J_of))
    for (name, J), delta in zip(J_of.items(), deltas, strict=True):
        H = laplace.fitted_factors().blocks[name].to_dense() if blocks is None else blocks[name]
        precision = H / (laplace.sigma_noise**2 * laplace.temperature)
        precision = precision + delta * torch.eye(len(H)).to(H)
        J = J.flatten(0, 1) if joint else J
        total = total + J @ torch.linalg.solve(precision, J.mT)
    return total


def predictions(
    laplace: KronLaplace, x: Tensor, methods: Iterable[str] = METHODS
) -> dict[str, Prediction]:
    """What the posterior predicts by each method, from the same random numbers."""
    found = {}
    for method in methods:
        config = PredictiveConfig(method, samples=20, networks=3)  # pyright: ignore
        generator = torch.Generator().manual_seed(3)
        found[method] = laplace_predictive(laplace, config, generator)(x)
    return found
