# %% [markdown]
# # Images: a posterior for a torchvision network, after training
#
# For anyone with a trained image classifier. We train a MobileNetV3 of torchvision as usual, here
# for a few epochs on few images. Then we compute a posterior. This takes one pass over the data, a
# maximisation of the evidence, and a calibration of two numbers. No layer needs a declaration.
# BatchNorm is in eval mode, where it is a fixed affine map.
#
# The data are 1,000 images of CIFAR-10. The script reads the folder `cifar-10-batches-py` in the
# folder that the environment variable `MARGLIK_DATA` names. **Without this folder, it uses grey
# digits, enlarged three times.** Half a minute on one core.

# %%
import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, interpolate
from torchvision.models import mobilenet_v3_small

from kfac_backend import CurvatureOptions
from marglik import (
    Posterior,
    PredictiveConfig,
    calibrate,
    compute_metrics,
    laplace_predictive,
    map_predictive,
    maximize_evidence,
    predict_all,
)
from marglik.data import CIFAR10, Digits

torch.manual_seed(0)
folder = Path(os.environ.get("MARGLIK_DATA", ""))
if (folder / "cifar-10-batches-py").is_dir():
    splits = CIFAR10(folder, download=False, max_train=1000, max_test=500).load()
else:
    splits = Digits().load()
print(splits.name)


def tensors(images, labels):
    """Images (N, 3, 32, 32) in 0..1, and labels."""
    x = images.float() / 255
    x = x.expand(-1, 3, -1, -1)
    return interpolate(x, (32, 32)), labels


(x, y), (x_test, y_test) = tensors(*splits.train), tensors(*splits.test)
x, y, held_out = x[200:], y[200:], (x[:200], y[:200])

# %% [markdown]
# ## Training as usual

# %%
model = mobilenet_v3_small(num_classes=10)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model.train()
for _ in range(8):
    for rows in torch.randperm(len(x)).split(50):
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
model.eval()

# %% [markdown]
# ## The posterior
#
# `fisher="mc"` takes one backward pass per batch instead of nine. We compare two predictives: all
# layers, and only the last layer, which costs no more than a forward pass.

# %%
batches = list(zip(x.split(100), y.split(100), strict=True))
options = CurvatureOptions(kfac_approx="reduce", fisher="mc")
posterior = Posterior(model, "classification", options)
posterior.fit(batches)
maximize_evidence(posterior, "per_type")  # weights, biases and scalars: three precisions
print(f"{posterior.n_layers} tensors, log evidence per image", end=" ")
print(f"{posterior.log_marginal_likelihood().item() / len(x):.2f}")

# %%
last = PredictiveConfig(layers="last")
calibrated = calibrate(posterior, [held_out], last)
print(calibrated.calibration.in_words)
tau = calibrated.calibration_fit.map_calibration.output_temperature
found = {
    "MAP": map_predictive(model),
    "MAP, temperature-scaled": map_predictive(model, output_temperature=tau),
    "Laplace, last layer, as it is": laplace_predictive(
        posterior, PredictiveConfig(layers="last", calibration="none")
    ),
    "Laplace, last layer, calibrated": calibrated,
}
for name, predict in found.items():
    metrics = compute_metrics(*predict_all(predict, [(x_test, y_test)]), "classification")
    print(
        f"{name:32} NLL {metrics.nll:.3f}, accuracy {metrics.accuracy:.3f}, ECE {metrics.ece:.3f}"
    )
