"""Networks, the blocks of their posterior's precision, and J Σ Jᵀ with dense J and Σ."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.models import GPT
from kfac_backend import KroneckerFactors, kronecker_factors
from tests.kfac_backend.networks import OwnNorm, data, network
from tests.marglik.networks import randomised
from tests.oracles import jacobian_of, packs
from tests.random_numbers import normal


class OverTokens(nn.Module):
    """A linear layer over tokens, then their mean."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)).mean(1))


def mlp(outputs=3):
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)), normal(5, 6)


NETWORKS = {
    "mlp": mlp,
    "tokens": lambda: (OverTokens(), normal(5, 7, 4)),
    "all layers": lambda: (network(), data(5)[0]),
    "no rule": lambda: (
        nn.Sequential(nn.Linear(6, 5), OwnNorm(5), nn.Tanh(), nn.Linear(5, 3)), normal(5, 6),
    ),
}  # fmt: skip


def case(name):
    """A network of `NETWORKS` in float64, with its inputs."""
    torch.manual_seed(1)
    model, x = NETWORKS[name]()
    return model.double(), x


VOCABULARY = 5


class Pixels(nn.Sequential):
    """A convolutional network with three outputs at each pixel, features last."""

    def __init__(self, kernel_size=1, groups=1):
        last = nn.Conv2d(6, 3, kernel_size, padding="same", groups=groups)
        super().__init__(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), last)

    def forward(self, x):
        return super().forward(x).movedim(1, -1)


class Mixing(nn.Module):
    """A transformer's layer over patches, a layer without a rule, and outputs that are scaled."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.embed, self.norm = nn.Linear(3, 4), OwnNorm(4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head, self.scale = nn.Linear(4, 3), scale

    def forward(self, x):
        return self.scale * self.head(self.encoder(self.norm(self.embed(x))))


def tokens(N=4, R=4):
    return torch.randint(VOCABULARY, (N, R), generator=torch.Generator().manual_seed(0))


SEQUENCES = {
    # name: (network with outputs (N, ..., C), inputs, its last layer)
    "gpt": lambda: (GPT(VOCABULARY, 4, 4, 1, 2), tokens(), "head"),
    "gpt, not tied": lambda: (GPT(VOCABULARY, 4, 4, 1, 2, tied=False), tokens(), "head"),
    "pixels": lambda: (Pixels(), normal(3, 2, 3, 4), "2"),
    "pixels, wide": lambda: (Pixels(3), normal(3, 2, 3, 4), "2"),
    "pixels, groups": lambda: (Pixels(3, groups=3), normal(3, 2, 3, 4), "2"),
    "mixing": lambda: (Mixing().eval(), normal(3, 5, 3), "head"),
    "scaled": lambda: (Mixing(2.0).eval(), normal(3, 5, 3), "head"),
    "linear": lambda: (nn.Linear(3, 4), normal(3, 5, 3), ""),
    "one output": lambda: (nn.Linear(3, 1), normal(3, 5, 3), ""),
}


def sequences(name):
    """A network of `SEQUENCES` with random parameters, its inputs, and its last layer's name."""
    torch.manual_seed(1)
    model, x, last = SEQUENCES[name]()
    return randomised(model), x, last


def of_layer(blocks, model, layer):
    """The blocks of a layer's own parameters, which may have another layer's name."""
    own = {id(p) for p in model.get_submodule(layer).parameters()}
    return {name: blocks[name] for name, p in model.named_parameters() if id(p) in own}


def precision_of(factors: KroneckerFactors, deltas=1.0):
    """Eigenvectors, and eigenvalues with the prior's precision, of each parameter."""
    precision = {}
    for i, (name, block) in enumerate(factors.blocks.items()):
        eigen = block.decompose()
        delta = deltas if isinstance(deltas, float) else deltas[i]
        precision[name] = eigen, eigen.spectrum(delta)
    return precision


def dense_precision(factors: KroneckerFactors, deltas=1.0) -> dict[str, Tensor]:
    """The same as dense matrices."""
    dense = {}
    for i, (name, block) in enumerate(factors.blocks.items()):
        delta = deltas if isinstance(deltas, float) else deltas[i]
        dense[name] = factors.to_dense(name) + delta * torch.eye(block.numel).double()
    return dense


def posterior(model: nn.Module, x, kfac_approx="expand", **options):
    """Blocks of the posterior precision, and the same densely, by parameter.

    Each parameter has a prior of its own, so that none can be taken for another's.
    """
    f = model(x)
    likelihood = "classification" if f.shape[-1] > 1 else "regression"
    y = torch.arange(f[..., 0].numel()).view(f.shape[:-1]) % 2
    y = y if f.shape[-1] > 1 else torch.zeros_like(f)
    batch = {**x, "labels": y} if isinstance(x, Mapping) else (x, y)
    factors = kronecker_factors(
        model, [batch], likelihood, kfac_approx=kfac_approx, unsupported="diagonal", **options
    )
    deltas = [0.1 + 0.05 * i for i in range(len(factors.blocks))]
    return precision_of(factors, deltas), dense_precision(factors, deltas)


def jacobians(model: nn.Module, x, names) -> dict[str, Tensor]:
    """The outputs' Jacobian (N, ..., C, P) of each parameter."""
    parameters = {name: model.get_parameter(name).detach() for name in names}
    with sdpa_kernel(SDPBackend.MATH):  # the only one that can be differentiated by vmap
        found = jacobian_of(
            lambda p: functional_call(model, p, (x,), tie_weights=True), parameters, packs(model)
        )
    return {name: J.flatten(model(x).dim()).detach() for name, J in found.items()}


def covariance_parts(model: nn.Module, x, dense: dict[str, Tensor]) -> dict[str, Tensor]:
    """J (precision)⁻¹ Jᵀ, (N, ..., C, C), of each parameter."""
    J = jacobians(model, x, dense)
    return {name: J[name] @ torch.linalg.solve(dense[name], J[name].mT) for name in dense}


def brute_force(model: nn.Module, x, dense: dict[str, Tensor]) -> Tensor:
    """Their sum, the covariance of the outputs."""
    return torch.stack(list(covariance_parts(model, x, dense).values())).sum(0)
