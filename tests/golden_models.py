"""About twenty small models with a batch each, whose numbers are frozen in `golden.json`.

Weights and data are sines of their index and not random numbers, which another torch draws
otherwise. To freeze the numbers anew, after a change that is meant to change them:
``python -m tests.golden_models``.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.models import GPT, GraphNetwork, VisionTransformer
from kfac_backend import CurvatureOptions, corrected_factors, kronecker_factors
from kfac_backend.options import KfacApprox
from marglik import Hyperparameters, Posterior, PredictiveConfig, PriorGroups, laplace_predictive
from marglik.graphs import Graphs
from marglik.models import MLP, WideResNetFixup
from tests.kfac_backend.networks import Model

FROZEN = Path(__file__).with_name("golden.json")
N, C = 5, 3


class Case(NamedTuple):
    """A model without random numbers, in eval mode and float64, and one batch."""

    model: nn.Module
    x: Any
    y: Tensor
    likelihood: str = "classification"


def waves(*shape: int, phase: float = 0.0) -> Tensor:
    """Numbers in (−1, 1), of which no two are alike."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (1.7 * i + 0.3 * i.sqrt() + phase).sin().view(shape)


def labels(*shape: int, classes: int = C) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 7 % classes).view(shape)


def pooled(features: nn.Module, channels: int) -> nn.Module:
    """Features of each position, their mean over the positions, and a head."""
    return Model(
        lambda m, x: m.head(m.features(x).tanh().flatten(2).mean(2)),
        features=features,
        head=nn.Linear(channels, C),
    )


def attending() -> nn.Module:
    """Torch's attention over positions, pooled."""
    return Model(
        lambda m, x: m.head(m.attention(x, x, x, need_weights=False)[0].mean(1)),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        head=nn.Linear(4, C),
    )


def tied() -> nn.Module:
    """One layer three times, and a head."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3):
            x = m.layer(x).tanh()
        return m.head(x)

    return Model(forward, layer=nn.Linear(4, 4), head=nn.Linear(4, C))


def tokens(*shape: int) -> Tensor:
    return labels(*shape, classes=7)


def graphs(num_nodes: Sequence[int], num_edges: Sequence[int]) -> Graphs:
    """Graphs with these numbers of nodes and edges."""
    nodes, edges = torch.tensor(num_nodes), torch.tensor(num_edges)
    first = (nodes.cumsum(0) - nodes).repeat_interleave(edges)
    within = torch.arange(int(edges.sum()))
    size = nodes.repeat_interleave(edges)
    return Graphs(
        waves(sum(num_nodes), 3), waves(sum(num_edges), 2, phase=1),
        first + within % size, first + within * 2 % size, nodes, edges,
    )  # fmt: skip


def images(channels: int = 2, size: int = 6) -> Tensor:
    return waves(N, channels, size, size, phase=2)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(MLP(4, (5,), C), waves(N, 4), labels(N)),
    "regression": lambda: Case(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
        waves(N, 4), waves(N, 2, phase=3), "regression",
    ),
    "bernoulli": lambda: Case(
        nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)),
        waves(N, 4), labels(N, 2, classes=2).double(), "bernoulli",
    ),
    "positions": lambda: Case(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)), waves(N, 3, 4), labels(N, 3)
    ),
    "conv": lambda: Case(pooled(nn.Conv2d(2, 4, 3, padding=1), 4), images(), labels(N)),
    "strided": lambda: Case(
        pooled(nn.Conv2d(2, 4, 3, stride=2, dilation=2, padding=2), 4), images(), labels(N)
    ),
    "grouped": lambda: Case(pooled(nn.Conv2d(4, 6, 3, groups=2), 6), images(4), labels(N)),
    "conv1d": lambda: Case(pooled(nn.Conv1d(2, 4, 3), 4), waves(N, 2, 7), labels(N)),
    "conv3d": lambda: Case(pooled(nn.Conv3d(1, 3, 2), 3), waves(N, 1, 3, 4, 3), labels(N)),
    "transposed": lambda: Case(
        pooled(nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1), 4), images(), labels(N)
    ),
    "batch norm": lambda: Case(
        pooled(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), 4), images(), labels(N)
    ),
    "group norm": lambda: Case(
        pooled(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), 4), images(), labels(N)
    ),
    "layer norm": lambda: Case(
        nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, C)),
        waves(N, 4), labels(N),
    ),
    "embedding": lambda: Case(
        nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, C)), tokens(N, 3), labels(N)
    ),
    "attention": lambda: Case(attending(), waves(N, 3, 4), labels(N)),
    "tied": lambda: Case(tied(), waves(N, 4), labels(N)),
    "wide resnet": lambda: Case(
        WideResNetFixup(num_classes=C, depth=10, widen_factor=1), images(3, 8), labels(N)
    ),
    "vision transformer": lambda: Case(
        VisionTransformer(C, image_size=8, patch_size=4, dim=8, depth=1, heads=2),
        images(3, 8), labels(N),
    ),
    "gpt": lambda: Case(
        GPT(vocab_size=7, context=4, dim=8, depth=1, heads=2), tokens(N, 4), tokens(N, 4)
    ),
    "graph network": lambda: Case(
        GraphNetwork(3, C, 2, dim=4, depth=1), graphs([3, 1, 4, 2, 2], [4, 1, 3, 2, 0]), labels(N)
    ),
}  # fmt: skip


def make(name: str) -> Case:
    """The case, with parameters and running statistics filled."""
    case = CASES[name]()
    model = case.model.double().eval()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            fan_in = p[0].numel() if p.dim() > 1 else 1
            p.copy_(waves(*p.shape, phase=i) / fan_in**0.5 + 0.1)
        for i, (key, buffer) in enumerate(model.named_buffers()):
            if key.endswith(("running_mean", "running_var")):
                buffer.copy_(waves(*buffer.shape, phase=i) + key.endswith("var") * 1.5)
    return case


def fingerprint(t: Tensor) -> list[float]:
    """The sum of a tensor's squares, and its product with waves: two numbers for any size."""
    t = t.detach().double()
    return [t.square().sum().item(), (t * waves(*t.shape, phase=0.5)).sum().item()]


def numbers(name: str, mode: KfacApprox) -> dict[str, list[float]]:
    """Factors, corrected factors, evidence, decays, covariances and predictions of a case."""
    model, x, y, likelihood = make(name)
    data = [(x, y)]
    factors = kronecker_factors(model, data, likelihood, kfac_approx=mode)
    v = {key: waves(*p.shape, phase=1.5) for key, p in model.named_parameters()}
    found = {f"block of {key}, times v": fingerprint(Hv) for key, Hv in factors.matvec(v).items()}
    corrected = corrected_factors(factors, model, data)
    # Where a factor has an eigenvalue several times, as zero in its null space, the vectors are as
    # LAPACK likes, and with them the corrected eigenvalues. In any basis the same: their sum, and
    # their sum weighted by the factors' own eigenvalues.
    own = factors.eigenvalues()
    found["corrected eigenvalues"] = [
        number
        for key, e in corrected.eigenvalues().items()
        for number in (e.sum().item(), (e @ own[key] / own[key].max()).item())
    ]
    found["log det"] = [factors.log_det(0.7).item()]
    laplace = Posterior(model, likelihood, CurvatureOptions(kfac_approx=mode), prior_precision=2.0)
    laplace.fit(data)
    hyper = Hyperparameters(PriorGroups.from_model(model, "per_tensor"), 2.0, method="adam", lr=0.1)
    found["evidences"] = hyper.update(laplace.evidence_terms, 3, laplace.temperature)
    laplace.prior_precision = hyper.prior_precision
    found["prior precisions"] = fingerprint(hyper.prior_precision)
    f, covariance = laplace.output_distribution(x)
    found["outputs"] = fingerprint(f)
    found["covariances"] = fingerprint(covariance)
    probit = laplace_predictive(laplace, PredictiveConfig(method="probit"))
    found["predictions"] = fingerprint(probit(x).mean)
    return found


def each() -> Iterator[tuple[str, KfacApprox]]:
    """All cases, in both modes."""
    for name in CASES:
        yield name, "expand"
        yield name, "reduce"


if __name__ == "__main__":
    frozen = {f"{name}, {mode}": numbers(name, mode) for name, mode in each()}
    FROZEN.write_text(json.dumps(frozen, indent=0) + "\n")
