"""Networks, the blocks of their posterior's precision, and J Σ Jᵀ with dense J and Σ."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from experiments.models import GPT
from kfac_backend import KroneckerFactors, kronecker_factors
from tests.kfac_backend.block_checks import batch_of, targets_of
from tests.kfac_backend.networks import Model, OwnNorm
from tests.marglik.networks import randomised
from tests.oracles import jacobian_of, packs
from tests.random_numbers import normal

VOCABULARY = 5


def pixels(kernel_size=1, groups=1):
    """A convolutional network with three outputs at each pixel, features last."""
    return Model(
        lambda m, x: m.last(m.first(x).tanh()).movedim(1, -1),
        first=nn.Conv2d(2, 6, 3, padding=1),
        last=nn.Conv2d(6, 3, kernel_size, padding="same", groups=groups),
    )


def mixing(scale=1.0):
    """A transformer's layer over patches, a layer without a rule, and outputs that are scaled."""
    return Model(
        lambda m, x: scale * m.head(m.encoder(m.norm(m.embed(x)))),
        embed=nn.Linear(3, 4),
        norm=OwnNorm(4),
        encoder=nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
        head=nn.Linear(4, 3),
    ).eval()


def tokens(N=4, R=4):
    return torch.randint(VOCABULARY, (N, R), generator=torch.Generator().manual_seed(0))


SEQUENCES = {
    # name: (network with outputs (N, ..., C), inputs, its last layer)
    "gpt": lambda: (GPT(VOCABULARY, 4, 4, 1, 2), tokens(), "head"),
    "gpt, not tied": lambda: (GPT(VOCABULARY, 4, 4, 1, 2, tied=False), tokens(), "head"),
    "pixels": lambda: (pixels(), normal(3, 2, 3, 4), "last"),
    "pixels, wide": lambda: (pixels(3), normal(3, 2, 3, 4), "last"),
    "pixels, groups": lambda: (pixels(3, groups=3), normal(3, 2, 3, 4), "last"),
    "mixing": lambda: (mixing(), normal(3, 5, 3), "head"),
    "scaled": lambda: (mixing(2.0), normal(3, 5, 3), "head"),
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
    batch = batch_of(x, targets_of(f, likelihood))
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


def assert_choices(covariance, x, f: Tensor, expected: Tensor) -> None:
    """Chosen positions and classes, and variances alone, are those of the whole (N, ..., C, C)."""

    def same(found, f, covariance):
        assert_close(found, (f, covariance), rtol=1e-9, atol=1e-11)

    C = f.shape[-1]
    same(covariance(x), f, expected)
    mask = torch.rand(f.shape[:-1], generator=torch.Generator().manual_seed(2)) < 0.4
    same(covariance(x, mask), f[mask], expected[mask])
    variances = expected.diagonal(dim1=-2, dim2=-1)
    same(covariance(x, mask, variance_only=True), f[mask], variances[mask])
    order = torch.arange(C).flip(0)[:2]
    of_order = expected[mask][:, order][:, :, order]
    same(covariance(x, mask, order), f[mask][:, order], of_order)
    top = f.topk(min(2, C)).indices
    rows = expected.gather(-2, top[..., None].expand(*top.shape, C))
    wanted = f.gather(-1, top), rows.gather(-1, top[..., None, :].expand(*top.shape, top.shape[-1]))
    same(covariance(x, classes=top), *wanted)
    same(covariance(x, mask, top[mask]), *(t[mask] for t in wanted))
    variances = wanted[1].diagonal(dim1=-2, dim2=-1)
    same(covariance(x, mask, top[mask], variance_only=True), wanted[0][mask], variances[mask])
