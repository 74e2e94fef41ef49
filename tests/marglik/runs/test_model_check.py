"""Networks that do not fit the data are refused before any work."""

import pytest
import torch
from torch import nn

from marglik.data import ImageSet, ImageSplits, TensorSplits
from marglik.runs.build import check_model
from marglik.runs.config import CurvatureConfig
from tests.marglik.networks import ReturnsTuple, RowLSTM, TwiceLinear, WithBatchNorm

pixels = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8)
PART = ImageSet(pixels, torch.arange(6))
IMAGES = ImageSplits(PART, None, PART, tuple("0123456789"), (9.0,), (3.0,), "digits")


def tensors(x=None, y=None, width=1):
    pair = torch.randn(5, 3) if x is None else x, torch.randn(5, width) if y is None else y
    return TensorSplits(pair, None, pair, "waves")


def mlp(inputs=64, outputs=10):
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(inputs, outputs))


class Lambda(nn.Module):
    """A linear layer of three features, and a function of its output."""

    def __init__(self, function):
        super().__init__()
        self.fc, self.function = nn.Linear(3, 1), function

    def forward(self, x):
        return self.function(self.fc(x))


@pytest.mark.parametrize("curvature", [None, CurvatureConfig(), CurvatureConfig(fisher="mc")])
def test_a_network_that_fits_is_left_as_it_was(curvature):
    model = mlp().train()
    before = [p.clone() for p in model.parameters()]
    check_model(model, IMAGES, curvature)
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("likelihood", ["regression", "bernoulli"])
def test_other_likelihoods(likelihood):
    y = torch.tensor([[0.0, 1.0]] * 5)
    check_model(nn.Linear(3, 2), tensors(y=y), CurvatureConfig(), likelihood)
    check_model(nn.Linear(3, 2), tensors(y=y), None, likelihood)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (mlp(inputs=63), "Sequential cannot take inputs of shape \\(1, 8, 8\\): .*mat1 and mat2"),
        (mlp(outputs=7), "shape \\(2, 7\\) .*has 10 classes; set --model.num_classes 10"),
        (ReturnsTuple(), "ReturnsTuple returns tuple; logits are needed"),
        (nn.Conv2d(1, 10, 8), "returns shape \\(2, 10, 1, 1\\) for 2 examples"),
    ],
)
@pytest.mark.parametrize("curvature", [None, CurvatureConfig()])
def test_networks_of_images_that_do_not_fit(model, message, curvature):
    model.train()
    with pytest.raises(ValueError, match=message):
        check_model(model, IMAGES, curvature)
    assert model.training


@pytest.mark.parametrize(
    ("model", "splits", "message"),
    [
        (
            Lambda(lambda f: f[:, 0]),
            tensors(),
            "Lambda returns shape \\(2,\\) for 2 examples; \\(N, C",
        ),
        (Lambda(lambda f: f.sum()), tensors(), "Lambda returns shape \\(\\) for 2 examples"),
        (Lambda(lambda f: f[:1]), tensors(), "Lambda returns shape \\(1, 1\\) for 2 examples"),
        (nn.Linear(4, 1), tensors(), "Linear cannot take inputs of shape \\(3,\\)"),
        (nn.Linear(3, 1), tensors(torch.randn(5, 3).double()), "must have the same dtype"),
        (
            nn.Linear(3, 2),
            tensors(),
            "Targets have shape \\(2, 1\\), the model's output \\(2, 2\\)",
        ),
        (nn.Linear(3, 1), tensors(y=torch.randn(5)), "Targets have shape \\(2,\\)"),
    ],
)
@pytest.mark.parametrize("curvature", [None, CurvatureConfig()])
def test_networks_of_tensors_that_do_not_fit(model, splits, message, curvature):
    with pytest.raises(ValueError, match=message):
        check_model(model, splits, curvature, "regression")


def test_networks_without_a_curvature():
    with pytest.raises(NotImplementedError, match="\\(LSTM\\) has no K-FAC rule"):
        check_model(RowLSTM(), IMAGES, CurvatureConfig())
    check_model(RowLSTM(), IMAGES, None)  # its MAP can be evaluated


@pytest.mark.parametrize("network", [WithBatchNorm, TwiceLinear])
def test_networks_whose_layers_are_special(network):
    """BatchNorm is a fixed map in eval mode; a layer that runs twice shares its weight."""
    model = network()
    check_model(model, IMAGES, CurvatureConfig())
    assert model.training
