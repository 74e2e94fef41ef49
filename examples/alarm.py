# %% [markdown]
# # An alarm for inputs unlike the training data
#
# For classifiers in use, which get inputs that are unlike the training data. Held-out data
# determine the threshold of the alarm, such that one in twenty ordinary inputs raises it. We
# compare three scores: the entropy of the calibrated predictive, its epistemic part, and one minus
# the largest probability of a plain network with a single weight decay. Half a minute on one core.
#
# The network is trained on the digits 0 to 7 of scikit-learn. The digits 8 and 9, noise and
# upside-down digits are new. [What we found on larger data](../docs/out-of-distribution.md).

# %%
import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from marglik import calibrate, map_predictive, marglik_training
from marglik.models import LeNet
from marglik.prediction.metrics import out_of_distribution_metrics

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (1797, 1, 8, 8)
y = torch.tensor(digits.target)
known = (y < 8).nonzero()[:, 0][torch.randperm(int((y < 8).sum()))]
train, held_out, test = known[:700], known[700:1000], known[1000:]
loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=64, shuffle=True)
others = {
    "digits 8 and 9": x[y >= 8],
    "upside down": x[test].flip(2),
    "noise": torch.rand(400, 1, 8, 8),
}

# %% [markdown]
# ## Train both networks

# %%
laplace, model, _, _ = marglik_training(
    LeNet(num_classes=8, in_channels=1, image_size=8), loader, n_epochs=40, marglik_frequency=5,
    n_hypersteps=50, kfac_approx="expand", optimizer_kwargs={"lr": 2e-3},
)  # fmt: skip
predict = calibrate(laplace, [(x[held_out], y[held_out])])
print(predict.calibration.in_words)

torch.manual_seed(0)
plain = LeNet(num_classes=8, in_channels=1, image_size=8)
optimizer = torch.optim.AdamW(plain.parameters(), 2e-3, weight_decay=1e-2)
for _ in range(40):
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(images), labels).backward()
        optimizer.step()
of_plain = map_predictive(plain)
scores = {
    "largest probability": lambda images: 1 - of_plain(images).mean.amax(1),
    "entropy, calibrated": lambda images: predict(images).entropy,
    "epistemic, uncalibrated": lambda images: predict.uncalibrated(images).epistemic,
}

# %% [markdown]
# ## Share of alarms
#
# The table shows the share of inputs of each kind that raise an alarm. For the test digits it
# should be 5 %. All three scores detect new classes and upside-down digits about equally well. The
# epistemic part detects noise best. However, on larger data the epistemic part was mostly worse
# than the entropy. Try both on inputs that you expect.

# %%
figure, axes = pyplot.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
print(f"{'alarms':24}", *(f"{name:>15}" for name in ("own digits", *others)))
for ax, (title, score) in zip(axes, scores.items(), strict=True):
    threshold = score(x[held_out]).quantile(0.95)
    own, of_others = score(x[test]), {name: score(images) for name, images in others.items()}
    shares = [(of > threshold).float().mean().item() for of in (own, *of_others.values())]
    print(f"{title:24}", *(f"{share:15.0%}" for share in shares))
    areas = [out_of_distribution_metrics(own, of).auroc for of in of_others.values()]
    print(f"{'  AUROC':40}", *(f"{area:15.3f}" for area in areas))
    for name, of in {"own digits": own, **of_others}.items():
        ax.ecdf(of, label=name)
    ax.axvline(threshold, color="gray", lw=0.8)
    ax.set(title=title, xlabel="score", ylabel="share below")
axes[0].legend(fontsize="small")
