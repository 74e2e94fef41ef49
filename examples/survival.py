# %% [markdown]
# # Survival: times until an event that not everyone has had yet
#
# For lifetimes, churn, or time to failure. If a study ends before the event, only a lower bound of
# the time is known. The time is then censored. The likelihood `weibull` supports both kinds of
# times. For comparison, we fit a regression of log t that treats all times as times of events. A
# minute on one core.
#
# The data are artificial. The times have a Weibull distribution of shape 2, with a scale that
# depends on x. The study ends after one to three years.

# %%
import torch
from matplotlib import pyplot
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from marglik import (
    OnlineTraining,
    PriorLearner,
    compute_metrics,
    laplace_predictive,
    predict_all,
)

torch.manual_seed(0)


def scale(x):
    """The scale of the times at x: 63 % of events have happened by then."""
    return torch.exp(0.4 + torch.sin(1.5 * x))


def draw(number):
    """Inputs, and targets [t, d] with d = 1 for an event."""
    x = 4 * torch.rand(number, 1) - 2
    t = scale(x) * (-torch.rand_like(x).log()) ** 0.5
    end = 1 + 2 * torch.rand_like(x)
    return x, torch.cat([torch.minimum(t, end), (t <= end).float()], 1)


(x, y), test = draw(500), draw(1000)
print(f"{1 - y[:, 1].mean():.0%} of the times are censored")

# %% [markdown]
# ## Training
#
# We pass no shape of `weibull`, so the evidence learns it together with the weight decays.


# %%
def trained(likelihood, targets):
    """The posterior of a network with 30 units."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
    loader = DataLoader(TensorDataset(x, targets), batch_size=100, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    learner = PriorLearner(likelihood, epochs=100)
    return OnlineTraining(model, optimizer, loader, learner).run().laplace


posterior, plain = trained("weibull", y), trained("regression", y[:, :1].log())
likelihood = posterior.likelihood
print(f"{likelihood}; the data has shape 2")

# %% [markdown]
# ## Predictions
#
# The predictions are for log t. For a censored time, metrics use the predicted probability that the
# event happens later. About half of all times lie inside 50 % intervals, as far as this can be
# known. The plot shows medians and survival curves, with the uncertainty of the network. The
# regression treats the end of the study as an event, so it predicts too short lives.

# %%
found = compute_metrics(*predict_all(laplace_predictive(posterior), [test]), likelihood)
shares = f"coverage50 {found.coverage50:.3f} coverage90 {found.coverage90:.3f}"
print(f"NLL {found.nll:.3f} {shares}")

grid = torch.linspace(-2, 2, 100)[:, None]
true = (scale(grid) * torch.log(torch.tensor(2.0)) ** 0.5)[:, 0]
euler, spread = 0.5772, torch.pi / 6**0.5  # mean and deviation of Gumbel's distribution at scale 1
of = laplace_predictive(posterior)(grid)
width = of.total_uncertainty.sqrt() / spread
medians = {
    "weibull": (of.mean + width * (euler + torch.log(torch.log(torch.tensor(2.0)))))[:, 0].exp(),
    "regression": laplace_predictive(plain)(grid).mean[:, 0].exp(),
}
figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(grid, true, "k--", label="true median")
for name, median in medians.items():
    left.plot(grid, median, label=name)
    error = (median.log() - true.log()).square().mean().sqrt()
    print(f"{name}: medians wrong by {error:.0%} on average")
left.set(xlabel="x", ylabel="t")
left.legend()
times = torch.linspace(0.01, 6, 100)[:, None]
for at in (-1.0, 0.0, 1.0):
    p = laplace_predictive(posterior)(torch.tensor([[at]]))
    curve = 1 - likelihood.cdf(times.log(), p.mean, p.total_uncertainty)
    (line,) = right.plot(times, curve, label=f"x = {at:.0f}")
    right.plot(
        times, torch.exp(-((times / scale(torch.tensor(at))) ** 2)), "--", c=line.get_color()
    )
right.set(xlabel="t", ylabel="share without the event (dashed: true)")
right.legend()
