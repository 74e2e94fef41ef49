# %% [markdown]
# # A layer of your own
#
# For anyone whose model has a layer that marglik does not support. The example is a causal filter,
# which applies one weight to each window of a sequence. K-FAC needs the inputs of such a layer at
# each position. A rule returns these inputs. From them, marglik computes both modes, the evidence,
# the predictive and the steps of the optimiser. The first batch of each pass compares the rule with
# autograd.
#
# Seconds on one core.

# %%
import torch
from torch import nn
from torch.func import functional_call, jacrev

from kfac_backend import kronecker_factors, register_rule
from kfac_backend.layers import WeightSharingRule
from marglik import Posterior, maximize_evidence

torch.manual_seed(0)


class CausalFilter(nn.Module):
    """y_r = W [x_{r-1}, x_r] for sequences (N, R, d), with zeros before the first."""

    def __init__(self, features, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, 2 * features) / features**0.5)

    def windows(self, x):
        """What the weight is applied to, (N, R, 2d)."""
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return torch.cat([before, x], -1)

    def forward(self, x):
        """Return (N, R, out)."""
        return torch.einsum("nrd,od->nro", self.windows(x), self.weight)


@register_rule(CausalFilter)
class CausalFilterRule(WeightSharingRule):
    """The weight is applied to each window."""

    def inputs(self, a):
        """Return (1 group, N, R, d_in)."""
        return self.layer.windows(a)[None]


# %% [markdown]
# ## Comparison with brute force
#
# For a linear network that averages the positions, with a Gaussian likelihood, reduce is exact and
# expand is not. The exact block is Σ_n Jᵀ J.


# %%
class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x):
        """Return (N, d)."""
        return x.mean(1)


model = nn.Sequential(CausalFilter(3, 4), Mean(), nn.Linear(4, 2)).double()
x, y = torch.randn(6, 5, 3).double(), torch.randn(6, 2).double()
weight = {"0.weight": model[0].weight.detach()}
J = jacrev(lambda w: functional_call(model, w, x))(weight)["0.weight"].flatten(2)  # (N, C, P)
exact = torch.einsum("ncp,ncq->pq", J, J)
for mode in ("reduce", "expand"):
    factors = kronecker_factors(model, [(x, y)], "regression", kfac_approx=mode)
    error = (factors.to_dense("0.weight") - exact).norm() / exact.norm()
    print(f"{mode}: relative error {error:.1e}")

# %% [markdown]
# ## A wrong rule
#
# This rule returns the wrong inputs. The comparison in the first batch detects this.


# %%
class WrongRule(CausalFilterRule):
    """Forgets to look back."""

    def inputs(self, a):
        """Return twice the present input."""
        return torch.cat([a, a], -1)[None]


register_rule(CausalFilter)(WrongRule)
try:
    kronecker_factors(model, [(x, y)], "regression", kfac_approx="reduce")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
register_rule(CausalFilter)(CausalFilterRule)

# %% [markdown]
# ## A posterior

# %%
model = nn.Sequential(CausalFilter(3, 8), nn.Tanh(), Mean(), nn.Linear(8, 2))
x = torch.randn(200, 5, 3)
y = (x[:, 1:, 0] * x[:, :-1, 0]).mean(1).gt(0).long()  # whether neighbours agree
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(200):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
posterior = Posterior(model, "classification")
posterior.fit([(x, y)])
maximize_evidence(posterior)
names = [name for name, _ in model.named_parameters()]
for name, delta, gamma in zip(
    names, posterior.prior_precision, posterior.effective_parameters(), strict=True
):
    print(f"{name:10} prior precision {delta:.2f}, effective parameters {gamma:.1f}")
