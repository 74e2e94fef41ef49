# %% [markdown]
# # A last layer of 1,000 classes
#
# For a classifier that is trained already, with many classes: are its probabilities honest, and
# what do memory and time of a posterior cost? Here the posterior is of the last layer alone. Beside
# it are the plain alternatives, the softmax and its temperature scaling, by the same held-out data.
# Half a minute on one core.
#
# The data is made up: 1,000 classes with eight training examples each, among 64 numbers.

# %%
import time

import torch
from matplotlib import pyplot
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from marglik import (
    Laplace,
    PredictiveConfig,
    calibrate,
    compute_metrics,
    map_predictive,
    predict_all,
)
from marglik.prediction.metrics import reliability_curve

CLASSES, FEATURES, HIDDEN = 1000, 64, 128
torch.manual_seed(0)
centres = torch.randn(CLASSES, FEATURES)


def draw(per_class):
    """Noisy examples of each class, in a random order."""
    y = torch.arange(CLASSES).repeat(per_class)[torch.randperm(per_class * CLASSES)]
    return centres[y] + 1.2 * torch.randn(len(y), FEATURES), y


train, held_out, test = draw(8), draw(1), draw(2)
loader = DataLoader(TensorDataset(*train), batch_size=250, shuffle=True)

# %% [markdown]
# ## A network as it is found
#
# Trained without a posterior in mind.

# %%
model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
optimizer = torch.optim.Adam(model.parameters(), 2e-3)
started = time.perf_counter()
for _ in range(20):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
print(f"training: {time.perf_counter() - started:.1f} s")

# %% [markdown]
# ## The last layer's posterior
#
# The full covariance of its 129,000 parameters would have 17 billion entries. The factors have one
# million: B (1,000 × 1,000) and A (128 × 128). The exact Fisher would propagate 999 vectors back;
# with `fisher="mc"` one label is drawn for each example.

# %%
started = time.perf_counter()
posterior = Laplace(model, "classification", "last_layer", "kron", fisher="mc")
posterior.fit(loader)
posterior.optimize_prior_precision()
entries = sum(
    factor.numel()
    for block in posterior.fitted_factors().blocks.values()
    for factor in (block.A, block.B)
    if factor is not None
)
seconds = time.perf_counter() - started
full = posterior.n_params**2
print(
    f"posterior: {seconds:.1f} s, factors of {4 * entries / 2**20:.0f} MiB; "
    f"the full covariance would have {4 * full / 2**30:.0f} GiB"
)

# %% [markdown]
# ## Are the probabilities honest?
#
# On a diagonal, probabilities are what they say. "Laplace" is the predictive as it is, "calibrated"
# has seen the same held-out examples as temperature scaling.

# %%
started = time.perf_counter()
calibrated = calibrate(posterior, [held_out], PredictiveConfig(layers="last"))
tau = calibrated.fit.map_calibration.output_temperature
predictives = {
    "softmax": map_predictive(model),
    "softmax, temperature": map_predictive(model, output_temperature=tau),
    "Laplace": calibrated.uncalibrated,
    "Laplace, calibrated": calibrated,
}
print(f"calibration: {time.perf_counter() - started:.1f} s, {calibrated.calibration}")
figure, axes = pyplot.subplots(figsize=(4.5, 3.5), layout="constrained")
axes.plot([0, 1], [0, 1], "k--", linewidth=1)
batches = list(DataLoader(TensorDataset(*test), batch_size=250))
for name, predict in predictives.items():
    prediction, labels = predict_all(predict, batches)
    found = compute_metrics(prediction, labels, "classification")
    shown = ("cls/NLL", "cls/accuracy", "cal/ECE")
    print(f"{name:22}", *(f"{key} {found[key]:.3f}" for key in shown))
    curve = reliability_curve(prediction, labels, "classification")
    bins = [(c, a) for c, a in zip(curve["confidence"], curve["accuracy"], strict=True) if a]
    axes.plot(*zip(*bins, strict=True), "o-", markersize=3, label=name)
axes.set(xlabel="confidence", ylabel="share that is right")
axes.legend()
