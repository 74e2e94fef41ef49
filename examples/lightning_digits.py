# %% [markdown]
# # Weight decays learned inside Lightning's Trainer
#
# For users of Lightning. Your module, dataloaders and trainer do not change. A callback adds the
# gradient of the prior before each step, maximises the marginal likelihood every few epochs, and
# fits a posterior at the end. The three added lines end with `# (1)`, `# (2)` and `# (3)`.
#
# Less than a minute on one core. Nothing is downloaded.

# %%
import logging
import warnings

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from marglik import Posterior, calibrate, compute_metrics, map_predictive, predict_all
from marglik.callbacks.lightning import MarginalLikelihood  # (1)

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

# %% [markdown]
# ## The data
# 300 handwritten digits are for training, 200 for calibration and 500 for the test. A fifth of the
# labels for training and calibration are random, so the network can overfit. The test labels are
# right.

# %%
L.seed_everything(0, verbose=False)
digits = load_digits()
order = torch.randperm(len(digits.target))
x = torch.from_numpy(digits.images).float()[order, None] / 16
y = torch.from_numpy(digits.target).long()[order]
wrong = (torch.rand(len(y)) < 0.2) & (torch.arange(len(y)) < 500)
y = torch.where(wrong, torch.randint(10, y.shape), y)
train, held_out, test = (
    TensorDataset(x[part], y[part]) for part in (slice(300), slice(300, 500), slice(500, 1000))
)


# %% [markdown]
# ## The module
# This is a usual module with one difference: the optimiser has no weight decay of its own.


# %%
class Digits(L.LightningModule):
    """A small convolutional network."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def training_step(self, batch, index):
        """Cross-entropy, the mean over the batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        """Adam without weight decay."""
        return torch.optim.Adam(self.parameters(), 3e-3)


# %% [markdown]
# ## The training
# We train once with the callback, and once without the callback for comparison.

# %%
prior = MarginalLikelihood("classification", network="net", every=6)  # (2)


def trained(callbacks):
    """The network after 24 epochs."""
    L.seed_everything(0, verbose=False)
    module = Digits()
    trainer = L.Trainer(
        max_epochs=24,
        callbacks=callbacks,
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(train, 50, shuffle=True))
    return module.net


network = trained([prior])  # (3)
plain = trained([])

# %% [markdown]
# ## What was learned
# The output shows one weight decay per parameter tensor, and the log marginal likelihood after each
# update.

# %%
names = [name for name, _ in network.named_parameters()]
for name, decay in zip(names, prior.learner.weight_decays().tolist(), strict=True):
    print(f"{name:10} {decay:.2e}")
print("log evidence per example:", *(f"{e / len(train):.3f}" for e in prior.learner.evidences))

# %% [markdown]
# ## What it brings
# The predictions are from the posterior. Held-out images determine the scale of its covariance (s),
# the temperature of the outputs (τ) and the share of random labels (ε). If s is 0, the predictive
# is temperature scaling, and the last two rows are the same. The network without weight decay gets
# a temperature, too. On these data, scaling alone is about as good as learned weight decays.


# %%
def temperature(predict):
    """The temperature of the network alone."""
    return predict.calibration_fit.map_calibration.output_temperature


laplace = calibrate(prior.posterior, DataLoader(held_out, 100))
of_plain = Posterior(plain, "classification")
of_plain.fit(DataLoader(train, 100))
tau_plain = temperature(calibrate(of_plain, DataLoader(held_out, 100)))
predictives = {
    "without weight decay": map_predictive(plain),
    "... temperature-scaled": map_predictive(plain, output_temperature=tau_plain),
    "MAP": map_predictive(network),
    "temperature-scaled MAP": map_predictive(network, output_temperature=temperature(laplace)),
    "calibrated Laplace": laplace,
}
found = {
    name: compute_metrics(*predict_all(predict, DataLoader(test, 256)), "classification")
    for name, predict in predictives.items()
}
print(laplace.calibration.in_words)
for name, metrics in found.items():
    print(
        f"{name:23} test NLL {metrics.nll:.4f}, accuracy {metrics.accuracy:.3f}, "
        f"ECE {metrics.ece:.3f}"
    )
