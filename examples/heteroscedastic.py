# %% [markdown]
# # Intervals as wide as the noise: heteroscedastic regression
#
# For regression with a noise that depends on the input. The network has a second output, the log
# variance of the noise. It learns one weight decay per tensor. For comparison, a second network has
# one noise σ for all inputs, learned by the evidence. Half a minute on one core.
#
# The data are artificial: sin(3x), with a noise that grows from 0.05 to 0.5.

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


def draw(number):
    """Inputs and noisy targets."""
    x = 4 * torch.rand(number, 1) - 2
    noise = 0.05 + 0.45 * (x + 2) / 4
    return x, torch.sin(3 * x) + noise * torch.randn(number, 1)


data, test = draw(400), draw(1000)
loader = DataLoader(TensorDataset(*data), batch_size=50, shuffle=True)

# %% [markdown]
# ## Train both networks
#
# Only the name of the likelihood and the number of outputs differ. `regression` learns σ.
# `heteroscedastic` starts with the same noise for all inputs, and learns how much the noise depends
# on the input.


# %%
def trained(likelihood, outputs):
    """The posterior of a network with 50 units."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, outputs))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    learner = PriorLearner(likelihood, epochs=200)
    return OnlineTraining(model, optimizer, loader, learner).run().laplace


posteriors = {
    "regression": trained("regression", 1),
    "heteroscedastic": trained("heteroscedastic", 2),
}
for name, posterior in posteriors.items():
    prediction, targets = predict_all(laplace_predictive(posterior), [test])
    metrics = compute_metrics(prediction, targets, name)
    evidence = posterior.log_marginal_likelihood().item() / len(data[0])
    scores = f"NLL {metrics.nll:.3f} RMSE {metrics.rmse:.3f} coverage90 {metrics.coverage90:.3f}"
    print(f"{name:16} {scores} evidence {evidence:.3f}")

# %% [markdown]
# ## Which intervals fit
#
# The intervals of both networks contain nine tenths of all targets. With one σ, the intervals are
# too wide on the left and too narrow on the right.

# %%
x = torch.linspace(-2, 2, 200)[:, None]
figure, both = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
for axes, (name, posterior) in zip(both, posteriors.items(), strict=True):
    prediction = laplace_predictive(posterior)(x)
    mean, deviation = prediction.mean[:, 0], prediction.total_uncertainty[:, 0].sqrt()
    axes.fill_between(x[:, 0], mean - 1.64 * deviation, mean + 1.64 * deviation, alpha=0.3)
    axes.plot(x[:, 0], mean, label="mean, 90 % interval")
    axes.plot(*data, "k.", markersize=2, label="training data")
    axes.set(title=name, xlabel="x")
    inside = {}
    for side, some in {"left": test[0][:, 0] < 0, "right": test[0][:, 0] >= 0}.items():
        p = laplace_predictive(posterior)(test[0][some])
        within = (test[1][some] - p.mean).abs() <= 1.645 * p.total_uncertainty.sqrt()
        inside[side] = within.float().mean().item()
    print(f"{name}: intervals cover {inside['left']:.0%} on the left, {inside['right']:.0%} right")
both[0].legend()
