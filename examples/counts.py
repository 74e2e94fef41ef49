# %% [markdown]
# # Counts: how many to keep in stock
#
# For demand, visits, defects or cases. The question is not the average demand, but the stock that
# suffices on 95 of 100 days. Counts vary more than Poisson's distribution predicts. The likelihood
# `negative_binomial` has a shape r for this variation. The evidence learns r together with the
# weight decays. For comparison, we train a plain network with Poisson's loss. Half a minute on one
# core.
#
# The data are artificial: the mean demand μ depends on x, and the variance is μ + μ²/2, so r is 2.

# %%
import torch
from matplotlib import pyplot
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend.likelihoods import likelihood_of
from marglik import (
    OnlineTraining,
    PriorLearner,
    compute_metrics,
    laplace_predictive,
    map_predictive,
    predict_all,
)

torch.manual_seed(0)


def draw(number):
    """Inputs and counts, (number, 1) each."""
    x = 4 * torch.rand(number, 1) - 2
    rate = torch.distributions.Gamma(2.0, 2.0).sample((number, 1))
    return x, torch.poisson(rate * (2 + torch.sin(1.5 * x)).exp())


(x, y), test = draw(300), draw(2000)
loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
EPOCHS = 150


def network():
    """The log mean of the counts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))


# %% [markdown]
# ## Train both networks
#
# We pass no value of r, so the evidence learns it. The plain network has no prior, and predicts
# only a rate.

# %%
model = network()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
learner = PriorLearner("negative_binomial", epochs=EPOCHS)
posterior = OnlineTraining(model, optimizer, loader, learner).run().laplace
learned = posterior.likelihood
print(f"{learned}; the data has r=2")

plain = network()
optimizer = torch.optim.Adam(plain.parameters(), 1e-2)
for _ in range(EPOCHS):
    for x_batch, y_batch in loader:
        optimizer.zero_grad()
        nn.functional.poisson_nll_loss(plain(x_batch), y_batch).backward()
        optimizer.step()

# %% [markdown]
# ## The necessary stock
#
# The stock is the smallest count that the demand exceeds on at most one day in twenty, by the
# predicted distribution. With Poisson's distribution, the stock runs out far more often than
# predicted.

# %%
counts = torch.arange(400.0)


def stock(likelihood, prediction):
    """The smallest count k with P(demand <= k) >= 0.95, for each prediction."""
    p = likelihood.cdf(counts, prediction.mean, prediction.total_uncertainty)  # (N, 400)
    return (p >= 0.95).int().argmax(1)


predictives = {
    "negative binomial, learned": (learned, laplace_predictive(posterior)),
    "Poisson, plain": (likelihood_of("poisson"), map_predictive(plain, "poisson")),
}
grid = torch.linspace(-2, 2, 200)[:, None]
figure, both = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
for axes, (name, (likelihood, predict)) in zip(both, predictives.items(), strict=True):
    prediction, demand = predict_all(predict, [test])
    enough = (demand[:, 0] <= stock(likelihood, prediction)).float().mean()
    nll = compute_metrics(prediction, demand, likelihood).nll
    print(f"{name}: the stock suffices on {enough:.0%} of days, NLL {nll:.2f}")
    axes.plot(x, y, "k.", markersize=2, label="demand")
    axes.plot(grid, predict(grid).mean, label="mean")
    axes.plot(grid, stock(likelihood, predict(grid)), label="stock for 95 %")
    axes.set(title=name, xlabel="x", ylim=(0, 90))
both[0].legend()
