# %% [markdown]
# # Bayesian optimisation with a network's Laplace posterior
#
# For users of BoTorch who want a neural network as the surrogate. BoTorch needs the joint
# distribution of the outputs of a model at several points, and its gradients with respect to the
# points. `marglik.adapters.botorch.LaplaceModel` provides both: it is the linearised network with a
# Kronecker-factored posterior. The evidence determines the prior precisions.
#
# Needs: `pip install -e ".[all,adapters]"` in the clone. Less than a minute on one core per seed
# (`SEEDS`).

# %%
import os
import warnings

import torch
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.optim import optimize_acqf
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.test_functions import Branin
from torch import nn

from marglik import Posterior, maximize_evidence
from marglik.adapters.botorch import LaplaceModel

warnings.filterwarnings("ignore", module="botorch|linear_operator|gpytorch")
SEEDS = int(os.environ.get("SEEDS", "1"))
FIRST, ROUNDS, TOGETHER = 8, 8, 2  # 8 points at random, then 8 times 2 that are chosen together
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)

# %% [markdown]
# ## The problem
# Branin's function on the unit square, negated because BoTorch maximises. Its three maxima have the
# value −0.398.

# %%
branin = Branin(negate=True).to(torch.float64)
low, high = branin.bounds


def value(points):
    """The function at points (n, 2) of the unit square, (n, 1)."""
    return branin(low + (high - low) * points)[:, None]


# %% [markdown]
# ## The surrogate
# Each round trains a network from scratch, in float64. Then it computes the curvature and chooses
# the prior precision with the highest evidence. The noise stays fixed. With only eight points, the
# evidence would explain all variation by noise.


# %%
def surrogate(x, y):
    """BoTorch's model of standardised observations."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    net.to(torch.float64)
    optimizer = torch.optim.Adam(net.parameters(), 0.01, weight_decay=1e-4)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    posterior = Posterior(net, "regression", sigma_noise=0.1)
    posterior.fit([(x, y)])
    maximize_evidence(posterior, "scalar", learn_sigma_noise=False)
    return LaplaceModel(posterior)


# %% [markdown]
# ## The search
# Each round chooses two points. Their joint covariance prevents them from being the same.


# %%
def next_points(x, y, seed):
    """The points that promise the largest improvement together."""
    y = (y - y.mean()) / y.std()
    acquisition = qLogExpectedImprovement(
        surrogate(x, y), y.max(), SobolQMCNormalSampler(torch.Size([128]), seed=seed)
    )
    candidates, _ = optimize_acqf(
        acquisition, BOUNDS, TOGETHER, num_restarts=4, raw_samples=64, options={"maxiter": 50}
    )
    return candidates


def search(seed):
    """The best value after each round, and the best of as many random points."""
    at_random = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed)
    every = at_random.draw(FIRST + ROUNDS * TOGETHER, dtype=torch.float64)
    x, best, random_best = every[:FIRST], [], []
    y = value(x)
    for i in range(ROUNDS + 1):
        best.append(y.max().item())
        random_best.append(value(every[: FIRST + i * TOGETHER]).max().item())
        if i < ROUNDS:
            torch.manual_seed(100 * seed + i)
            new = next_points(x, y, seed)
            x, y = torch.cat([x, new]), torch.cat([y, value(new)])
    return best, random_best


runs = [search(seed) for seed in range(SEEDS)]

# %% [markdown]
# ## What it brings
# The regret is the distance of the best value so far from the maximum. The random points are Sobol
# points, which are spread more evenly than independent ones.

# %%
print("evaluations      Laplace       random")
regrets = torch.tensor(runs).sub(branin.optimal_value).neg()  # (seeds, 2, rounds + 1)
for i, (ours, others) in enumerate(regrets.mean(0).T.tolist()):
    print(f"{FIRST + i * TOGETHER:11d} {ours:12.3f} {others:12.3f}")
