# %% [markdown]
# # Digits: weight decays learned while a network trains
#
# This is the shortest complete example. A LeNet learns the 8×8 digits of scikit-learn. During
# training, marglik learns one weight decay for each of its ten tensors. Two hundred digits are held
# out for calibration.
#
# Half a minute on one core. Nothing is downloaded.

# %%
import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from marglik import calibrate, compute_metrics, map_predictive, marglik_training, predict_all
from marglik.models import LeNet

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (1797, 1, 8, 8)
y = torch.tensor(digits.target)
order = torch.randperm(len(x))
train, held_out, test = order[:700], order[700:900], order[900:]
loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=64, shuffle=True)

# %% [markdown]
# ## Training
#
# Every five epochs, marglik fits the Laplace approximation with K-FAC. A hundred gradient steps on
# the logarithms of the weight decays then increase the log marginal likelihood (the evidence).

# %%
model = LeNet(num_classes=10, in_channels=1, image_size=8)
laplace, model, negative_evidences, losses = marglik_training(
    model, loader, n_epochs=40, marglik_frequency=5, n_hypersteps=100, kfac_approx="expand",
    optimizer_kwargs={"lr": 2e-3},
)  # fmt: skip
names = [name for name, _ in model.named_parameters()]
decays = (laplace.prior_precision / laplace.n_data).tolist()
for name, decay in zip(names, decays, strict=True):
    print(f"{name:13} {decay:.1e}")

# %% [markdown]
# The evidence rises within each update. It mostly also rises from one update to the next, because
# the network fits the data better.

# %%
figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot([-value / laplace.n_data for value in negative_evidences])
left.set(xlabel="hyperparameter step", ylabel="log evidence per digit (nats)")
right.barh(names, decays, log=True)
right.invert_yaxis()
right.set(xlabel="learned weight decay")

# %% [markdown]
# ## Predictions
#
# Calibration scales the covariance of the outputs by s and the outputs by 1/τ. With s = 0 it is
# temperature scaling.

# %%
predict = calibrate(laplace, [(x[held_out], y[held_out])])
print(predict.calibration.in_words)
batches = [(x[test], y[test])]
for name, predictive in {"MAP": map_predictive(model), "calibrated": predict}.items():
    metrics = compute_metrics(*predict_all(predictive, batches), "classification")
    print(f"{name:10} NLL {metrics.nll:.3f} accuracy {metrics.accuracy:.3f}")

# %% [markdown]
# The digits with the most uncertain predictions, with their labels:

# %%
entropy = predict(x[test]).entropy
figure, panels = pyplot.subplots(1, 8, figsize=(9, 1.5), layout="constrained")
for axes, i in zip(panels, entropy.argsort(descending=True)[:8], strict=True):
    axes.imshow(x[test][i, 0], cmap="gray_r")
    axes.set_title(f"{y[test][i]}: {entropy[i]:.1f} nats", fontsize=8)
    axes.axis("off")
