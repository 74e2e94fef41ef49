# %% [markdown]
# # Time series: forecasts by an LSTM, with intervals
#
# For forecasts from short series. An LSTM reads twelve values and predicts the next one. Its
# weights are shared over time, in the reduce mode of K-FAC. The evidence learns the noise and one
# weight decay per tensor. For comparison, we train the same LSTM with a default weight decay. Forty
# held-out days determine the width of the intervals of both. Seconds on one core.
#
# The series is artificial: a growing weekly rhythm with noise.

# %%
import torch
from matplotlib import pyplot
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from marglik import (
    OnlineTraining,
    PriorLearner,
    calibrate,
    compute_metrics,
    map_predictive,
    predict_all,
)

torch.manual_seed(0)
LENGTH, TRAIN = 12, 100
day = torch.arange(260.0)
series = torch.sin(2 * torch.pi * day / 7) * (0.5 + day / 400) + 0.3 * torch.sin(day / 20)
series = series + 0.2 * torch.randn(len(day))
windows = series.unfold(0, LENGTH + 1, 1)  # each with the value that follows it
x, y = windows[:, :-1, None], windows[:, -1:]
held_out, test = (
    (x[some], y[some]) for some in (slice(TRAIN, TRAIN + 40), slice(TRAIN + 40, None))
)
loader = DataLoader(TensorDataset(x[:TRAIN], y[:TRAIN]), batch_size=25, shuffle=True)
EPOCHS = 150


class Forecast(nn.Module):
    """The value that follows a sequence (N, R, 1), from an LSTM's last state."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 16, batch_first=True)
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        """Return (N, 1)."""
        return self.last(self.lstm(x)[0][:, -1])


# %% [markdown]
# ## Train both networks

# %%
model = Forecast()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
learner = PriorLearner("regression", epochs=EPOCHS)
posterior = OnlineTraining(model, optimizer, loader, learner).run().laplace

torch.manual_seed(0)
plain = Forecast()
optimizer = torch.optim.Adam(plain.parameters(), 1e-2)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
for _ in range(EPOCHS):
    for inputs, targets in loader:
        penalty = 0.5 * 1e-4 * sum(p.square().sum() for p in plain.parameters())
        optimizer.zero_grad()
        (0.5 * (plain(inputs) - targets).square().mean() + penalty).backward()
        optimizer.step()
        rate.step()
errors = [
    (plain(a) - b).square().mean().sqrt().item() for a, b in ((x[:TRAIN], y[:TRAIN]), held_out)
]
print(f"noise 0.2; learned {posterior.sigma_noise:.3f}; errors of the plain one, trained on "
      f"{errors[0]:.3f}, held out {errors[1]:.3f}")  # fmt: skip

# %% [markdown]
# ## Forecasts
#
# The plain network has fitted a part of the noise. Its errors on held-out days are nearly twice its
# errors on the training days, and its forecasts are worse. All its intervals have the same width.
# The intervals of the posterior are wider where the network is uncertain.

# %%
predictives = {
    "plain": map_predictive(plain, "regression", errors[1]),
    "Laplace": calibrate(posterior, [held_out]),
}
print(predictives["Laplace"].calibration.in_words)
figure, axes = pyplot.subplots(2, 1, figsize=(9, 4), sharex=True, sharey=True, layout="constrained")
for ax, (name, predict) in zip(axes, predictives.items(), strict=True):
    prediction, targets = predict_all(predict, [test])
    metrics = compute_metrics(prediction, targets, "regression")
    scores = f"NLL {metrics.nll:.3f} RMSE {metrics.rmse:.3f}"
    print(f"{name:8} {scores} coverage90 {metrics.coverage90:.3f}")
    days = day[-len(targets) :]
    mean, deviation = prediction.mean[:, 0], prediction.total_uncertainty[:, 0].sqrt()
    ax.fill_between(days, mean - 1.645 * deviation, mean + 1.645 * deviation, alpha=0.3)
    ax.plot(days, mean, label="forecast, 90 % interval")
    ax.plot(days, targets, "k.", markersize=3, label="value")
    ax.set(title=name)
axes[0].legend(loc="upper left")
axes[1].set(xlabel="day")
