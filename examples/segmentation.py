# %% [markdown]
# # Segmentation: which pixels a U-Net is unsure of
#
# For networks with an output at each pixel. A small U-Net marks discs in noisy images. The
# posterior divides the uncertainty of each pixel into two parts: noise, because the image is
# ambiguous, and uncertainty of the network, because it has too few data. For comparison, we show
# the softmax of a network that was trained with a single weight decay. A minute on one core.
#
# The images are artificial. In half of them, noise hides a square region.

# %%
import torch
from matplotlib import pyplot
from torch import nn
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import CurvatureOptions
from marglik import (
    OnlineTraining,
    PredictiveConfig,
    PriorLearner,
    calibrate,
    compute_metrics,
    map_predictive,
    predict_all,
)

SIZE = 24
torch.manual_seed(0)


def draw(number):
    """Images (N, 1, 24, 24) and the class of each pixel, (N, 24, 24): 1 inside a disc."""
    rows = torch.arange(SIZE).float()
    centre, radius = 6 + 12 * torch.rand(number, 2, 1, 1), 3 + 3 * torch.rand(number, 1, 1)
    distance = (rows[:, None] - centre[:, 0]) ** 2 + (rows - centre[:, 1]) ** 2
    y = (distance < radius**2).long()
    x = 2.0 * y + 0.8 * torch.randn(y.shape)
    for image in x[::2]:  # hidden
        i, j = torch.randint(SIZE - 8, (2,)).tolist()
        image[i : i + 8, j : j + 8] = 1 + torch.randn(8, 8)
    return x[:, None], y


class UNet(nn.Module):
    """One level down and up again, with a connection past it."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.inside = nn.Sequential(
            nn.AvgPool2d(4), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.up = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, x):
        """Logits of both classes, which come last: (N, 24, 24, 2)."""
        fine = self.down(x)
        coarse = interpolate(self.inside(fine), scale_factor=4)
        return self.up(torch.cat([fine, coarse], 1)).movedim(1, -1)


(x, y), held_out, test = draw(60), draw(30), draw(100)
loader = DataLoader(TensorDataset(x, y), batch_size=15, shuffle=True)
EPOCHS = 150

# %% [markdown]
# ## Training
#
# A pass with the exact Fisher would take two backward passes for each of the 576 pixels.
# `fisher="mc"` draws a label at each pixel, and takes one backward pass for all pixels.

# %%
model = UNet()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
learner = PriorLearner("classification", CurvatureOptions(fisher="mc"), epochs=EPOCHS, updates=4)
training = OnlineTraining(model, optimizer, loader, learner)
posterior = training.run().laplace
for name, decay in zip(
    dict(model.named_parameters()), training.learner.weight_decays(), strict=True
):
    print(f"{name:16} {decay:.1e}")

torch.manual_seed(0)
plain = UNet()
optimizer = torch.optim.Adam(plain.parameters(), 1e-2)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
for _ in range(EPOCHS):
    for images, labels in loader:
        penalty = 0.5 * 1e-4 * sum(p.square().sum() for p in plain.parameters())
        loss = nn.functional.cross_entropy(plain(images).movedim(-1, 1), labels) + penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()

# %% [markdown]
# ## Probabilities of pixels
#
# The method `linearised` samples networks instead of computing the covariances of all pixels. Each
# sample takes about three forward passes. The metrics are means over pixels.

# %%
config = PredictiveConfig("linearised", networks=30)
predict = calibrate(posterior, [held_out], config)
predictives = {"plain": map_predictive(plain), "Laplace, calibrated": predict}
for name, predictive in predictives.items():
    metrics = compute_metrics(*predict_all(predictive, [test]), "classification")
    scores = f"NLL {metrics.nll:.4f} accuracy {metrics.accuracy:.4f}"
    print(f"{name:20} {scores} ECE {metrics.ece:.4f}")

images, labels = (part[:2] for part in test)
found, of_plain = predict(images), predictives["plain"](images)
print(predict.calibration.in_words)
figure, axes = pyplot.subplots(2, 5, figsize=(9, 3.7), layout="constrained")
columns = {
    "image": images[:, 0],
    "plain: probability": of_plain.mean[..., 1],
    "Laplace: probability": found.mean[..., 1],
    "aleatoric": found.aleatoric,
    "epistemic": found.epistemic,
}
for row, of_row in enumerate(axes):
    for ax, (title, values) in zip(of_row, columns.items(), strict=True):
        largest = 1 if "probability" in title else values.max()
        ax.imshow(values[row], cmap="gray" if title == "image" else "viridis", vmin=0, vmax=largest)
        ax.contour(labels[row], [0.5], colors="red", linewidths=0.8)
        ax.set(xticks=[], yticks=[], title=title if row == 0 else "")
