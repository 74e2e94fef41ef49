# %% [markdown]
# # A vision transformer, with a mode for each layer
#
# For transformers, and for anyone who wants to use both modes in one network. A vision transformer
# shares each weight over the patches of an image, and classifies the whole image once. This is the
# reduce setting of K-FAC. However, the reduce block of the keys' weight in softmax attention is
# zero, because adding the same vector to all keys changes nothing. Attention therefore uses expand
# here, and all other layers use reduce.
#
# The network is torchvision's, without changes. The data are digits of 8×8 pixels, in patches of
# 2×2. A quarter of a minute on one core.

# %%
import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import VisionTransformer

from kfac_backend import kronecker_factors
from marglik import calibrate, compute_metrics, map_predictive, marglik_training, predict_all

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 8 - 1
y = torch.tensor(digits.target)
order = torch.randperm(len(x))
train, held_out, test = order[:600], order[600:800], order[800:]
loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=50, shuffle=True)
model = VisionTransformer(
    image_size=8, patch_size=2, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10
)

# %% [markdown]
# ## Training

# %%
laplace, model, negative_evidences, losses = marglik_training(
    model, loader, n_epochs=30, marglik_frequency=10, n_hypersteps=50,
    optimizer_kwargs={"lr": 3e-3}, kfac_approx={"*self_attention*": "expand", "*": "reduce"},
)  # fmt: skip
decays = laplace.prior_precision / laplace.n_data
figure, axes = pyplot.subplots(figsize=(8, 2.5), layout="constrained")
names = [name for name, _ in model.named_parameters()]
axes.semilogy(decays, "o")
axes.axhline(1 / laplace.n_data, color="gray", lw=0.8, label="at the start")
axes.set(xlabel="parameter tensor, in the order of the network", ylabel="learned weight decay")
axes.legend()
for name, decay in sorted(zip(names, decays.tolist(), strict=True), key=lambda t: t[1])[:3]:
    print(f"{name:42} {decay:.1e}")

# %% [markdown]
# ## Two modes, two blocks
#
# We compare the factors of the first attention layer in both modes. Its queries, keys and values
# are packed in one weight. Each of them has a d_out × d_out factor B, for any number of patches.

# %%
name = next(name for name in names if "in_proj_weight" in name)
batch = [(x[train][:100], y[train][:100])]
for mode in ("expand", "reduce"):
    block = kronecker_factors(model, batch, "classification", kfac_approx=mode).blocks[name]
    traces = block.B.diagonal(dim1=1, dim2=2).sum(1)  # of queries, keys, values
    print(f"{mode}: {name}, B {tuple(block.B.shape)}, of keys {traces[1] / traces.sum():.1e}")

# %%
predict = calibrate(laplace, [(x[held_out], y[held_out])])
print(predict.calibration.in_words)
for name, predictive in {"MAP": map_predictive(model), "calibrated": predict}.items():
    metrics = compute_metrics(*predict_all(predictive, [(x[test], y[test])]), "classification")
    print(f"{name:10} NLL {metrics.nll:.3f} accuracy {metrics.accuracy:.3f}")
