"""The last layer: the one that runs last, whatever the order of definition."""

import pytest
import torch
from torch import nn

from marglik.posterior.subset import freeze_all_but, last_layer


class Reversed(nn.Module):
    """Runs its layers from the last to the first; one only in training."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5))
        self.auxiliary = nn.Linear(3, 3)
        self.spare = nn.Linear(3, 3)  # never runs

    def forward(self, x):
        f = self.head(self.body(x))
        return self.auxiliary(f) if self.training else f


class OwnParameters(nn.Module):
    """Holds parameters of its own beside its layers, as vision transformers do."""

    def __init__(self):
        super().__init__()
        self.token, self.inner, self.head = nn.Parameter(torch.ones(6)), Reversed(), nn.Linear(3, 2)

    def forward(self, batch):
        return self.head(self.inner(batch["a"] + batch["b"] + self.token))


X = torch.randn(4, 6)
MAPPING = {"a": X, "b": X}


@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2), nn.Softplus()), X, "2"),
        (nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3)), X, "1"),
        (nn.Linear(6, 3), X, ""),
        (Reversed(), X, "head"),
        (OwnParameters(), MAPPING, "head"),
        (nn.Sequential(nn.Linear(6, 6), Reversed()), X, "1.head"),
    ],
)
def test_runs_last(model, x, expected):
    assert last_layer(model.train(), x) == expected


def test_frozen_layers_do_not_count():
    model = Reversed()
    model.head.requires_grad_(False)
    assert last_layer(model, X) == "body.0"
    model.body.requires_grad_(False)
    with pytest.raises(
        ValueError, match="Reversed runs no layer with trainable parameters; it has"
    ):
        last_layer(model, X)


def test_model_stays_as_it_was():
    model = Reversed().train()
    model.body.eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    last_layer(model, X)
    with pytest.raises(RuntimeError):
        last_layer(model, X[:, :2])
    assert [module.training for module in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("layer", ["head", "body", "body.0"])
def test_one_layer_is_left(layer):
    model = Reversed()
    model.head.weight.requires_grad_(False)
    freeze_all_but(model, layer)
    left = {name for name, p in model.named_parameters() if p.requires_grad}
    prefix = "body.0" if layer == "body" else layer
    assert left == {f"{prefix}.weight", f"{prefix}.bias"}
