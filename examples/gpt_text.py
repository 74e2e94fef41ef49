# %% [markdown]
# # Text: a small GPT, byte by byte
#
# For language models: weight decays learned during training, and predictions for each position. A
# language model has a loss term at every position, which is the expand setting of K-FAC. The exact
# curvature would take 255 backward passes per term. `fisher="mc"` draws one label per position from
# the model, and takes a single pass.
#
# The text is the development split of DART (Nan et al. 2021), in the folder that the environment
# variable `MARGLIK_DATA` names. Without this folder, the script makes sentences from a template.
# Half a minute on one core.

# %%
import gzip
import json
import os
import random
from pathlib import Path

import torch
from torch import nn
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

torch.manual_seed(0)
random.seed(0)
R = 48  # bytes that the network sees at once


def real_text():
    """DART's sentences, one after the other."""
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        return " ".join(entry["annotations"][0]["text"] for entry in json.load(file))


def made_text():
    """Sentences about who likes what."""
    who, what = ("Ada", "Bo", "Cy", "Dee"), ("tea", "chess", "snow", "old maps", "the sea")
    return " ".join(f"{random.choice(who)} likes {random.choice(what)}." for _ in range(5000))


def windows(data, number):
    """Random windows of bytes, and the bytes that follow each of theirs."""
    starts = torch.randint(len(data) - R - 1, (number,))
    found = torch.stack([data[s : s + R + 1] for s in starts])
    return found[:, :-1], found[:, 1:]


FILE = Path(os.environ.get("MARGLIK_DATA", ""), "dart-v1.1.1-full-dev.json.gz")
text = real_text() if FILE.is_file() else made_text()
data = torch.tensor(list(text.encode()))
first, last = data[: len(data) * 4 // 5], data[len(data) * 4 // 5 :]  # no byte is in both
x, y = windows(first, 700)
test = windows(last, 200)
held_out = (x[600:], y[600:])
x, y = x[:600], y[:600]
print(bytes(x[0].tolist()).decode(errors="replace"))

# %% [markdown]
# ## The network
#
# The network has torch's own layers. The output layer and the embedding share their weight. A
# shared tensor has one block and one weight decay.


# %%
class GPT(nn.Module):
    """Logits (N, R, 256) of the byte after each of R; no position sees what follows it."""

    def __init__(self, d=48, depth=2, heads=4):
        super().__init__()
        self.byte, self.position = nn.Embedding(256, d), nn.Embedding(R, d)
        layer = nn.TransformerEncoderLayer(
            d, heads, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, depth, nn.LayerNorm(d), enable_nested_tensor=False
        )
        self.head = nn.Linear(d, 256, bias=False)
        self.head.weight = self.byte.weight
        for p in self.parameters():
            if p.dim() > 1:  # as in GPT-2
                nn.init.normal_(p, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(R))

    def forward(self, x):
        """Bytes (N, R) as logits."""
        positions = torch.arange(R).expand(x.shape)  # a row for each example
        x = self.byte(x) + self.position(positions)
        return self.head(self.blocks(x, self.mask, is_causal=True))


model = GPT()

# %% [markdown]
# ## Training

# %%
loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
options = CurvatureOptions(kfac_approx="expand", fisher="mc")
training = OnlineTraining(
    model,
    torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0),
    loader,
    PriorLearner("classification", options, epochs=12),
)
laplace = training.run().laplace
names = [name for name, _ in model.named_parameters()]
decays = training.learner.weight_decays().tolist()
for decay, name in sorted(zip(decays, names, strict=True))[:5]:
    print(f"{name:28} {decay:.1e}")

# %% [markdown]
# ## Predicting the next byte
#
# The covariances of 48 positions with 256 outputs each would take R·C backward passes per window.
# `method="linearised"` samples linearised networks instead, at about a backward pass each.

# %%
config = PredictiveConfig(method="linearised", networks=10)
predict = calibrate(laplace, [held_out], config)
print(predict.calibration.in_words)
for name, predictive in {"MAP": map_predictive(model), "calibrated": predict}.items():
    prediction, labels = predict_all(predictive, [test])
    metrics = compute_metrics(prediction, labels, "classification")
    print(f"{name:10} {metrics.nll:.3f} nats per byte, {metrics.accuracy:.3f} right")
