# %% [markdown]
# # K-FAC as an optimiser
#
# For anyone who wants to train with natural gradients. K-FAC multiplies each gradient g by the
# inverse of the damped curvature: g becomes (F + λI)⁻¹ g. Use `KFAC` like any optimiser of torch.
# The training loop does not change. In every fifth step by default, K-FAC computes new factors from
# the forward pass of training and one more backward pass to the outputs of the layers.
#
# The problem is an autoencoder of digits. Plain gradients fit it slowly. A quarter of a minute on
# one core.

# %%
import time

import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from torch import nn

from kfac_backend.optimizer import KFAC

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16  # (1797, 64)


def autoencoder():
    """64 pixels through 6 numbers, and back to 64 logits."""
    torch.manual_seed(0)
    widths = (64, 100, 50, 6, 50, 100, 64)
    layers = [
        layer for pair in zip(widths, widths[1:], strict=False)
        for layer in (nn.Linear(*pair), nn.Tanh())
    ]  # fmt: skip
    return nn.Sequential(*layers[:-1])


def train(make_optimizer, epochs=15):
    """Losses (nats per image), seconds."""
    model = autoencoder()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18 * epochs)
    losses, start = [], time.process_time()
    for _ in range(epochs):
        for batch in x[torch.randperm(len(x))].split(100):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(batch), batch, reduction="sum"
            ) / len(batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return losses, time.process_time() - start


# %% [markdown]
# ## Comparison with SGD and Adam
#
# SGD has the best of four learning rates for this seed. Adam has a learning rate of 0.01, and K-FAC
# has its defaults. All have a cosine schedule. The likelihood is "bernoulli", because each pixel is
# a separate output.

# %%
optimizers = {
    "SGD, Nesterov": lambda m: torch.optim.SGD(m.parameters(), 0.03, 0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 1e-2),
    "K-FAC": lambda m: KFAC(m, "bernoulli"),
}
figure, axes = pyplot.subplots(figsize=(8, 3), layout="constrained")
for name, make_optimizer in optimizers.items():
    losses, seconds = train(make_optimizer)
    last = sum(losses[-18:]) / 18
    print(f"{name:14} last epoch {last:.2f} nats, {seconds:.1f} s")
    smooth = torch.tensor(losses).unfold(0, 9, 1).mean(-1)
    axes.plot(smooth, label=name)
axes.set(xlabel="step", ylabel="loss (nats per image)", ylim=(15, 30))
axes.legend()

# %% [markdown]
# The cost depends on the network: K-FAC inverts a d × d factor for each width d.
# `experiments/optimizers` compares optimisers on larger problems. With reduce, a graph network
# needed 54 % of the steps of tuned SGD. A small vision transformer needed 50 % of the steps of
# tuned NAdamW.
