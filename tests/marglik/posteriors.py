"""Small fitted posteriors of every kind, and what they predict."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from marglik import KronLaplace
from marglik.prediction.links import Prediction
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive

LIKELIHOODS = ("classification", "regression", "bernoulli")
METHODS = ("probit", "mc", "linearised")
CASES = {
    "classification": {},
    "regression": {"likelihood": "regression", "sigma_noise": 0.4},
    "bernoulli": {"likelihood": "bernoulli"},
    "expand": {"kfac_approx": "expand"},
    "empirical Fisher": {"fisher": "empirical"},
    "Monte Carlo Fisher": {"fisher": "mc"},
    "temperature": {"temperature": 0.3},
    "a prior for each tensor": {"prior_precision": torch.tensor([0.1, 3.0, 1 / 3, 70.0])},
    "frozen parameters": {"frozen": True},
    "float64": {"dtype": torch.float64},
}


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """A network of images (1, 4, 4) with dropout and three outputs."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 3)
    )
    return model.to(dtype)


def data(likelihood: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Ten examples for `network`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, 1, 4, 4, generator=generator, dtype=dtype)
    if likelihood == "classification":
        return x, torch.randint(3, (10,), generator=generator)
    y = torch.randn(10, 3, generator=generator, dtype=dtype)
    return x, y if likelihood == "regression" else (y > 0).to(dtype)


def fitted(
    likelihood: str = "classification",
    *,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    seed: int = 2,
    **options: object,
) -> KronLaplace:
    """A fitted posterior; the convolution is known if ``frozen``; other factors by the seed."""
    model = network(dtype, seed - 2)
    model[0].requires_grad_(not frozen)
    defaults = {"prior_precision": 0.7, "kfac_approx": "reduce"}
    laplace = KronLaplace(model, likelihood, **(defaults | options))
    torch.manual_seed(seed)
    laplace.fit([data(likelihood, dtype)])
    return laplace


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
