# %% [markdown]
# # Regression with the noise learned: yacht hydrodynamics
#
# For regression. A network with 50 tanh units learns the resistance of yachts. The evidence learns
# the noise σ and one weight decay per tensor, without validation data. The predictive is a Gaussian
# with the variance σ² + J Σ Jᵀ, the sum of the variances of the noise and of the posterior.
#
# The data are the yacht set of UCI, in the file `yacht.txt` in the folder that the environment
# variable `MARGLIK_DATA` names. Without this file, the data are a synthetic function of one
# variable. Seconds on one core.

# %%
import os
from pathlib import Path

import numpy
import torch
from matplotlib import pyplot
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from marglik import (
    OnlineTraining,
    PriorLearner,
    compute_metrics,
    laplace_predictive,
    map_predictive,
    predict_all,
)

torch.manual_seed(0)
file = Path(os.environ.get("MARGLIK_DATA", ""), "yacht.txt")
if file.is_file():
    rows = torch.from_numpy(numpy.loadtxt(file)).float()  # six features, then the target
    rows = ((rows - rows.mean(0)) / rows.std(0))[torch.randperm(len(rows))]
    (x, y), (x_test, y_test) = ((part[:, :-1], part[:, -1:]) for part in (rows[31:], rows[:31]))
    title = f"yacht: {len(x)} training examples, {x.shape[1]} features"
else:
    x, x_test = 4 * torch.rand(250, 1) - 2, 4 * torch.rand(50, 1) - 2
    y, y_test = (torch.sin(3 * t) + 0.1 * torch.randn(len(t), 1) for t in (x, x_test))
    title = "made up: sin(3x) with σ = 0.1"
print(title)

# %% [markdown]
# ## Training
#
# MacKay's fixed point sets δ = γ/‖θ‖², where γ is the effective number of parameters, and σ² to the
# remaining squared error. Start with a small σ. With a large σ, the first update explains the data
# as noise, and the network then does not fit them.

# %%
model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 1))
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
epochs = 400
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
learner = PriorLearner(
    "regression", weight_decay=1 / len(x), method="mackay", steps=1, epochs=epochs
)
training = OnlineTraining(model, optimizer, loader, learner)
posterior = training.run().laplace
print(f"σ = {posterior.sigma_noise.item():.3f} of the standardised targets")
print("weight decays:", *(f"{decay:.1e}" for decay in learner.weight_decays()))

# %% [markdown]
# ## What the posterior adds
#
# We compare the same network and noise without and with the uncertainty of the weights. 90 %
# intervals should contain 90 % of the test targets.

# %%
predictives = {
    "MAP": map_predictive(model, "regression", posterior.sigma_noise),
    "Laplace": laplace_predictive(posterior),
}
for name, predict in predictives.items():
    prediction, targets = predict_all(predict, [(x_test, y_test)])
    metrics = compute_metrics(prediction, targets, "regression")
    scores = f"NLL {metrics.nll:.3f} RMSE {metrics.rmse:.3f}"
    print(f"{name:8} {scores} coverage90 {metrics.coverage90:.3f}")

# %%
order = prediction.mean[:, 0].argsort()
mean, deviation = prediction.mean[order, 0], prediction.total_uncertainty[order, 0].sqrt()
figure, axes = pyplot.subplots(figsize=(8, 3), layout="constrained")
axes.fill_between(range(len(mean)), mean - 1.64 * deviation, mean + 1.64 * deviation, alpha=0.3)
axes.plot(mean, label="mean, 90 % interval")
axes.plot(targets[order, 0], "k.", label="target")
axes.set(xlabel="test examples, by predicted mean", ylabel="standardised target")
axes.legend()
