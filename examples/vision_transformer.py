# %% [markdown]
# # A vision transformer, with a mode for each layer
#
# For transformers, and for anyone who wants to mix modes. A vision transformer shares each weight
# over the patches of an image and averages the patches at the end, which is K-FAC's reduce
# setting. But reduce gives the keys' weight of softmax attention a block of zeros, because the
# same shift of all keys changes nothing. So here attention uses expand, and the rest reduce.
#
# Digits of 8×8 pixels in patches of 2×2; a quarter of a minute on one core.

# %%
import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import kronecker_factors
from marglik import calibrate, compute_metrics, map_predictive, marglik_training, predict_all
from marglik.models import VisionTransformer

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
y = torch.tensor(digits.target)
order = torch.randperm(len(x))
train, held_out, test = order[:600], order[600:800], order[800:]
loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=50, shuffle=True)
model = VisionTransformer(
    num_classes=10, in_channels=1, image_size=8, patch_size=2, dim=32, depth=2, heads=4
)

# %% [markdown]
# ## Two modes, two blocks
#
# The factors of one layer in both modes. With d_in inputs and d_out outputs, A is d_in × d_in and
# B is d_out × d_out, however many patches there are.

# %%
name = next(name for name, _ in model.named_parameters() if "qkv.weight" in name)
batch = [(x[train][:100], y[train][:100])]
for mode in ("expand", "reduce"):
    block = kronecker_factors(model, batch, "classification", kfac_approx=mode).blocks[name]
    B, d = block.B, len(block.B) // 3
    of_keys = B[d : 2 * d, d : 2 * d].trace() / B.trace()
    print(f"{mode}: {name}, B {tuple(B.shape)}, the keys' share of its trace {of_keys:.1e}")

# %% [markdown]
# ## Training

# %%
laplace, model, negative_evidences, losses = marglik_training(
    model, loader, n_epochs=30, marglik_frequency=10, n_hypersteps=50,
    optimizer_kwargs={"lr": 3e-3}, kfac_approx={"*qkv": "expand", "*": "reduce"},
)  # fmt: skip
decays = laplace.prior_precision / laplace.n_data
kinds = {"attention": "qkv.weight", "norms": "norm", "linear layers": "mlp"}
figure, axes = pyplot.subplots(figsize=(8, 2.5), layout="constrained")
names = [name for name, _ in model.named_parameters()]
axes.semilogy(decays, "o")
axes.axhline(1 / laplace.n_data, color="gray", lw=0.8, label="at the start")
axes.set(xlabel="parameter tensor, in the order of the network", ylabel="learned weight decay")
axes.legend()
for name, decay in sorted(zip(names, decays.tolist(), strict=True), key=lambda t: t[1])[:3]:
    print(f"{name:30} {decay:.1e}")

# %%
predict = calibrate(laplace, [(x[held_out], y[held_out])])
print(predict.calibration.in_words)
for name, predictive in {"MAP": map_predictive(model), "calibrated": predict}.items():
    metrics = compute_metrics(*predict_all(predictive, [(x[test], y[test])]), "classification")
    print(f"{name:10}", *(f"{key} {metrics[key]:.3f}" for key in ("cls/NLL", "cls/accuracy")))
