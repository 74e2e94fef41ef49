"""The rivals of `regression`: networks with a fixed weight decay, trained side by side.

Networks of 50 units are so small that several take hardly longer than one. All are trained at once
on the same batches, as one network with a leading axis. Adam and the losses act on each alone, so
the result is that of separate trainings.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.utils.data import DataLoader, TensorDataset

from marglik.data import TensorBatches
from marglik.models import MLP

__all__ = ["DEFAULT_WEIGHT_DECAY", "GRID", "Gaussian", "Training", "grid_and_ensemble", "post_hoc"]

GRID = tuple(10 ** (-7 + 0.75 * k) for k in range(9))
"""Weight decays of the grid search, 1e-7 to 0.1."""
VALIDATION = 0.15
"""Share of the training examples held out for the grid search."""
MEMBERS = 5
"""Number of networks in the ensemble."""
DEFAULT_WEIGHT_DECAY = 1e-4
"""Weight decay of the network that laplace-torch gets."""
POST_HOC_STEPS = 500
"""Steps of Adam on laplace-torch's evidence."""

BATCH = 512
"""Batch size of laplace-torch's passes."""

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Training:
    """Settings that train each network, ours and the rivals'."""

    hidden: int
    steps: int
    batch_size: int
    lr: float

    def network(self, num_features: int, seed: int) -> MLP:
        """A new network in float64; at this size its steps cost no more than in float32."""
        torch.manual_seed(seed)
        return MLP(num_features, (self.hidden,), 1, "tanh").double()

    def batches(self, data: Pair, seed: int) -> TensorBatches:
        """Mini-batches of the training data, in a new order each epoch."""
        return TensorBatches(*data, min(self.batch_size, len(data[1])), shuffle=True, seed=seed)


@dataclass(frozen=True)
class Gaussian:
    """A method's predictions for the test inputs, standardised, and its cost."""

    mean: Tensor
    """Mean, (N, 1)."""
    variance: Tensor
    """Variance with the noise, (N, 1)."""
    seconds: float
    """Processor seconds of training and of choosing hyperparameters. Other work on the machine
    changes them less than wall-clock seconds."""
    trainings: int
    """Number of networks trained."""


def train_side_by_side(
    training: Training, data: Pair, weight_decays: Sequence[float], seeds: Sequence[int]
) -> list[MLP]:
    """Train one network per weight decay and seed, each with the loss ½ MSE + ½ wd ‖θ‖²."""
    x, _ = data
    networks = [training.network(x.shape[1], seed) for seed in seeds]
    state = stack_module_state(networks)[0]  # pyright: ignore[reportArgumentType]
    parameters = [p.detach().clone().requires_grad_() for p in state.values()]
    decays = torch.tensor(weight_decays, dtype=x.dtype)
    optimizer = torch.optim.Adam(parameters, training.lr, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    epochs = repeat(training.batches(data, seeds[0]))
    for x, y in islice(chain.from_iterable(epochs), training.steps):
        assert isinstance(x, Tensor)
        f = _outputs(parameters, x)  # (K, N, 1)
        norms = torch.stack([p.square().flatten(1).sum(1) for p in parameters]).sum(0)  # (K,)
        loss = 0.5 * ((f - y).square().mean((1, 2)) + decays * norms).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for k, network in enumerate(networks):
        named = zip(state, parameters, strict=True)
        network.load_state_dict({name: p.detach()[k] for name, p in named})
    return networks


def _outputs(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """Outputs of all networks, (K, N, 1)."""
    W1, b1, W2, b2 = parameters
    h = torch.baddbmm(b1[:, None], x.expand(len(W1), -1, -1), W1.mT).tanh()
    return torch.baddbmm(b2[:, None], h, W2.mT)


def grid_and_ensemble(
    training: Training, data: Pair, x_test: Tensor, seed: int
) -> tuple[dict[str, Gaussian], dict[str, float]]:
    """The grid search's network and an ensemble of five, by name, and the choice.

    The weight decay is the one with the lowest error on the validation part, and σ is the root of
    that mean squared error. Five networks with this weight decay are then trained on all training
    examples. The first is the grid search's result. The ensemble predicts the Gaussian with its
    mixture's mean and variance, as in Lakshminarayanan et al. 2017 (arXiv:1612.01474), with one σ
    for all inputs.
    """
    start = time.process_time()
    x, y = data
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    kept_out, rest = order.tensor_split([round(VALIDATION * len(y))])
    candidates = train_side_by_side(training, (x[rest], y[rest]), GRID, [seed] * len(GRID))
    with torch.no_grad():
        errors = [(n(x[kept_out]) - y[kept_out]).square().mean().item() for n in candidates]
    variance, weight_decay = min(zip(errors, GRID, strict=True))
    seeds = [seed + 100 * k for k in range(MEMBERS)]
    members = train_side_by_side(training, data, [weight_decay] * MEMBERS, seeds)
    seconds = time.process_time() - start
    f = torch.stack([network(x_test) for network in members]).detach()  # (members, N, 1)
    noise = torch.full_like(f[0], variance)
    found = {
        "grid search": Gaussian(f[0], noise, seconds, len(GRID) + 1),
        "ensemble of five": Gaussian(
            f.mean(0), noise + f.var(0, correction=0), seconds, len(GRID) + MEMBERS
        ),
    }
    return found, {"weight_decay": weight_decay, "sigma_noise": variance**0.5}


def post_hoc(training: Training, data: Pair, x_test: Tensor, seed: int) -> Gaussian:
    """laplace-torch with Kronecker factors, on a network with a default weight decay.

    Its own evidence then chooses one prior precision and σ, as in its regression example.
    """
    start = time.process_time()
    (network,) = train_side_by_side(training, data, [DEFAULT_WEIGHT_DECAY], [seed])
    laplace = Laplace(
        nn.Sequential(*network.layers), "regression", "all", "kron", prior_precision=1.0
    )
    laplace.fit(DataLoader(TensorDataset(*data), batch_size=BATCH))
    log_prior = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    log_sigma = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=0.1)
    for _ in range(POST_HOC_STEPS):
        optimizer.zero_grad()
        (-laplace.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).sum().backward()
        optimizer.step()
    laplace.prior_precision = log_prior.detach().exp()
    laplace.sigma_noise = log_sigma.detach().exp()
    seconds = time.process_time() - start
    parts = [
        laplace(x, pred_type="glm") for x in x_test.split(BATCH)
    ]  # it holds all Jacobians of a batch
    f, covariance = (torch.cat(part).detach() for part in zip(*parts, strict=True))
    return Gaussian(f, covariance[:, :, 0] + laplace.sigma_noise.square(), seconds, 1)
