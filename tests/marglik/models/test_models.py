"""The networks: sizes, initialisation, shapes, errors."""

import pytest
import torch
from torch import nn
from torch.nn.functional import avg_pool2d, conv2d, relu

from marglik.models import MLP, LeNet, WideResNetFixup
from marglik.models.wide_resnet_fixup import FixupBlock

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def wrn():
    torch.manual_seed(0)
    return WideResNetFixup()


def blocks(model):
    return [module for module in model.modules() if isinstance(module, FixupBlock)]


def test_wrn_16_4_has_the_papers_parameters(wrn):
    parameters = dict(wrn.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == 2_745_306
    assert len(parameters) == 50
    assert len(blocks(wrn)) == 6
    assert {"conv.weight", "bias.bias", "bias_out.bias", "fc.weight", "fc.bias"} <= set(parameters)
    assert {"stage1.0.shortcut.weight", "stage3.1.scale.scale"} <= set(parameters)
    scalars = [p for p in parameters.values() if p.numel() == 1]
    assert len(scalars) == 6 * 5 + 2
    assert all(p.shape == (1,) for p in scalars)  # 0-dimensional ones are rejected by laplace-torch


def test_wrn_and_its_residual_branches_are_zero_at_initialisation(wrn):
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(wrn(x), torch.zeros(4, 10))
    for block in blocks(wrn):
        h = torch.randn(2, block.conv1.in_channels, 8, 8)
        assert not block.residual(h).any()
        assert block(h).any()
    # Negative control: once it is trained, the branch is not zero.
    nn.init.normal_(blocks(wrn)[0].conv2.weight)
    assert blocks(wrn)[0].residual(torch.randn(2, 16, 8, 8)).any()


def test_wrn_initial_standard_deviations_follow_fixup(wrn):
    L = len(blocks(wrn))
    for block in blocks(wrn):
        c_out, _, k, _ = block.conv1.weight.shape
        expected = (2 / (k**2 * c_out)) ** 0.5 * L**-0.5
        assert block.conv1.weight.std().item() == pytest.approx(expected, rel=0.03)
        assert block.conv1.weight.mean().abs() < 0.05 * expected
        assert not block.conv2.weight.any()
        if block.shortcut is not None:
            expected = (2 / block.shortcut.out_channels) ** 0.5
            assert block.shortcut.weight.std().item() == pytest.approx(expected, rel=0.08)
            # Negative control: the shortcut is not scaled by the depth.
            assert block.shortcut.weight.std() > 2 * expected * L**-0.5


def test_wrn_equals_its_formula_written_out(wrn):
    """Every parameter random, so that each takes part; float64."""
    wrn.double()
    with torch.no_grad():
        for p in wrn.parameters():
            p.add_(0.1 * torch.randn_like(p))
    p = dict(wrn.named_parameters())
    inputs = torch.randn(2, 3, 16, 16, dtype=torch.float64)

    x = conv2d(inputs, p["conv.weight"], padding=1) + p["bias.bias"]
    for stage, stride in ((1, 1), (2, 2), (3, 2)):
        for i in range(2):
            w = {k.split(".", 2)[2]: v for k, v in p.items() if k.startswith(f"stage{stage}.{i}.")}
            stride_i = stride if i == 0 else 1
            h = relu(x + w["bias1.bias"])
            out = conv2d(h, w["conv1.weight"], stride=stride_i, padding=1)
            out = relu(out + w["bias2.bias"]) + w["bias3.bias"]
            out = conv2d(out, w["conv2.weight"], padding=1) * w["scale.scale"] + w["bias4.bias"]
            first = conv2d(h, w["shortcut.weight"], stride=stride_i) if i == 0 else x
            x = first + out
    x = avg_pool2d(relu(x), 4).flatten(1) + p["bias_out.bias"]
    torch.testing.assert_close(wrn(inputs), x @ p["fc.weight"].T + p["fc.bias"])


@pytest.mark.parametrize("image_size", [4, 8, 9, 28, 31, 32])
@pytest.mark.parametrize("in_channels", [1, 3])
def test_lenet_takes_images_of_any_size(image_size, in_channels):
    model = LeNet(num_classes=7, in_channels=in_channels, image_size=image_size)
    assert model(torch.randn(2, in_channels, image_size, image_size)).shape == (2, 7)
    assert model.fc1.in_features == 16 * (image_size // 4) ** 2


@pytest.mark.parametrize(
    ("activation", "function"), [("relu", relu), ("tanh", torch.tanh), ("gelu", nn.functional.gelu)]
)
def test_mlp_equals_its_formula(activation, function):
    model = MLP(12, hidden=(5, 4), num_classes=3, activation=activation).double()
    x = torch.randn(6, 3, 2, 2, dtype=torch.float64)
    first, second, last = [m for m in model.modules() if isinstance(m, nn.Linear)]
    hidden = function(second(function(first(x.flatten(1)))))
    torch.testing.assert_close(model(x), last(hidden))


BAD = [
    (WideResNetFixup, {"depth": 15}, "depth=15 .*6 n \\+ 4"),
    (WideResNetFixup, {"widen_factor": 0}, "widen_factor must be positive, not 0"),
    (LeNet, {"num_classes": 2}, "in_channels=None, image_size=None: pass all"),
    (LeNet, {"num_classes": 2, "in_channels": 1, "image_size": 3}, "=3 .* at least 4"),
    (
        LeNet,
        {"num_classes": 0, "in_channels": 1, "image_size": 8},
        "num_classes must be positive, not 0",
    ),
    (MLP, {"in_features": 4}, "in_features=4, num_classes=None: pass both"),
    (MLP, {"in_features": 4, "num_classes": 2, "hidden": (5, 0)}, r"hidden=\(5, 0\)"),
    (
        MLP,
        {"in_features": 4, "num_classes": 2, "activation": "sine"},
        "activation='sine'.*relu",
    ),
]


@pytest.mark.parametrize(("model", "arguments", "message"), BAD)
def test_what_does_not_fit_is_named(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(**arguments)
