# %% [markdown]
# # A last layer of 1,000 classes
#
# For a trained classifier with many classes. This example checks whether its probabilities are
# right, and shows the memory and time of a posterior of the last layer. For comparison, it shows
# the softmax and its temperature scaling on the same held-out data. Half a minute on one core.
#
# The data are artificial: inputs of 64 numbers, and 1,000 classes with eight training examples
# each.

# %%
import time

import torch
from matplotlib import pyplot
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from marglik import Laplace, Prediction, PredictiveConfig, calibrate
from marglik.prediction.links import probit_outputs
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
# ## A trained network
#
# We train a network as usual.

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
# The full covariance of the 129,000 parameters would have 17 billion entries. The factors have two
# million: B (1,000 × 1,000) of the weight and of the bias, and A (128 × 128). The exact Fisher
# would take 999 backward passes. `fisher="mc"` draws one label for each example, and takes one
# backward pass.

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
print(
    f"posterior: {time.perf_counter() - started:.1f} s, factors of {4 * entries / 2**20:.0f} MiB; "
    f"the full covariance would have {4 * posterior.n_params**2 / 2**30:.0f} GiB"
)

# %% [markdown]
# ## Calibration
#
# Held-out data determine the scale of the posterior's covariance and the temperature. They also
# determine the temperature for the softmax alone.

# %%
started = time.perf_counter()
fit = calibrate(posterior, [held_out], PredictiveConfig("probit", layers="last")).calibration_fit
s, tau = fit.calibration.covariance_scale, fit.calibration.output_temperature
print(f"calibration: {time.perf_counter() - started:.1f} s, s = {s:.3g}, τ = {tau:.3g}")

# %% [markdown]
# ## Are the probabilities right?
#
# On the diagonal of the plot, the probabilities are right. The covariance between classes would
# take a million numbers for each example, and 0.3 s. The probit approximation needs only the
# variances, which cost no more than the softmax (`variance_only`).

# %%
started = time.perf_counter()
f, v = posterior.output_distribution(test[0], layers="last", variance_only=True)
print(f"outputs and variances of {len(f):,} examples: {time.perf_counter() - started:.2f} s")
predictives = {
    "softmax": f,
    "softmax, temperature": f / fit.map_calibration.output_temperature,
    "Laplace": probit_outputs(f, v),
    "Laplace, calibrated": probit_outputs(f / tau, s / tau**2 * v),
}
figure, axes = pyplot.subplots(figsize=(4.5, 3.5), layout="constrained")
axes.plot([0, 1], [0, 1], "k--", linewidth=1)
for name, outputs in predictives.items():
    nll = nn.functional.cross_entropy(outputs, test[1]).item()
    p = outputs.softmax(1)
    accuracy = (p.argmax(1) == test[1]).float().mean().item()
    print(f"{name:22} NLL {nll:.3f}  accuracy {accuracy:.3f}")
    unknown = torch.zeros(len(p))
    curve = reliability_curve(Prediction(p, unknown, unknown), test[1], "classification")
    bins = [(c, a) for c, a in zip(curve.confidence, curve.accuracy, strict=True) if a]
    axes.plot(*zip(*bins, strict=True), "o-", markersize=3, label=name)
axes.set(xlabel="confidence", ylabel="share that is right")
axes.legend()

# %% [markdown]
# Without calibration, the posterior is far too wide. With calibration, it is as good as temperature
# scaling. For probabilities, the temperature is therefore sufficient. Use the variances for other
# questions, such as which inputs are unlike the training data.
