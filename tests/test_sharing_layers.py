"""Oracles of convolutions and embeddings against the layers and the dense GGN."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from tests import oracles
from tests.random_numbers import error, normal
from tests.sharing_convolutions import layer_blocks, positions_of
from tests.sharing_oracles import ggn_blocks

close = torch.testing.assert_close
OTHER = {"expand": "reduce", "reduce": "expand"}
MODES = list(OTHER)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Pixels(nn.Module):
    """(N, C, *spatial) as (N, *spatial, C): one loss term per pixel."""

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return x.movedim(1, -1)


class Pool(nn.Module):
    """Mean over all axes but the first two."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, *spatial) to (N, C)."""
        return x.flatten(2).mean(-1)


# --- convolutions ---

SIZES = (5, 6, 4)


def test_convolution_positions_reproduce_the_layer_in_one_two_and_three_dimensions():
    # Compared inside, against the layer's own output.
    for dimensions, layer_class in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1):
        options = itertools.product(
            [1, 2],
            [0, "same", (1, 2, 1)[:dimensions]],
            ["zeros", "reflect", "replicate", "circular"],
            [1, (2, 1, 1)[:dimensions]],
        )
        for groups, padding, mode, dilation in list(options)[:: 2 * dimensions - 1]:
            stride = 1 if padding == "same" else (2, 1, 2)[:dimensions]
            kernel = (2, 3, 1)[:dimensions]
            layer = layer_class(
                2, 4, kernel, stride, padding, dilation, groups, True, mode, dtype=torch.float64
            )
            x = normal(2, *SIZES[:dimensions])
            b = normal(1, 1, *layer(x[None])[0].shape)
            found = dict((key, (a_nr, b_nr)) for key, a_nr, b_nr in positions_of(layer, x, b))
            assert list(found) == [*(("weight", g) for g in range(groups)), ("bias", 0)]
            a_nr, b_nr = found["weight", groups - 1]
            assert a_nr.shape == (b[0, 0, 0].numel(), 2 // groups * math.prod(kernel))
            close(b_nr[0, :, 0], b[0, 0, -4 // groups :].flatten(1).T)


@pytest.mark.parametrize("approx", MODES)
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_blocks_are_those_of_the_other_oracle(approx, groups):
    layer = nn.Conv2d(2, 4, (2, 3), (2, 1), (1, 0), groups=groups)
    model, x = nn.Sequential(layer, nn.Tanh(), Pool()).double(), normal(3, 2, 4, 4)
    found = layer_blocks(model, "0", x, "classification", approx)
    close(found, oracles.kfac_blocks(model, x, "classification", approx))
    other = layer_blocks(model, "0", x, "classification", OTHER[approx])
    assert error(found["0.weight"], other["0.weight"]) > 0.1


TRANSPOSED_OPTIONS = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
    {"stride": 3, "dilation": 2, "output_padding": 2, "bias": False},
    {"padding": 2, "dilation": 2, "groups": 2},
]


def test_transposed_convolution_positions_reproduce_the_layer():
    classes = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    for dimensions, layer_class in enumerate(classes, 1):
        for options in TRANSPOSED_OPTIONS:
            kernel = (3, 2, 2)[:dimensions]
            layer = layer_class(2, 4, kernel, **options, dtype=torch.float64)
            x = normal(2, *(4, 3, 3)[:dimensions])
            b = normal(1, 1, *layer(x[None])[0].shape)
            G = layer.groups
            for (name, _), a_nr, b_nr in positions_of(layer, x, b):
                shape = (x[0].numel(), 2 // G) if name == "weight" else (b[0, 0, 0].numel(), 1)
                assert a_nr.shape == shape
                assert b_nr.shape[-1] == (4 // G * math.prod(kernel) if name == "weight" else 4)


@pytest.mark.parametrize(
    ("layers", "exact_mode"),
    [
        # Every input pixel writes all of its patch, and every output pixel weighs the same.
        ([nn.ConvTranspose1d(2, 4, 3, 2, output_padding=1), Pool(), nn.Linear(4, 3)], "reduce"),
        ([nn.ConvTranspose2d(2, 2, (2, 3), groups=2), Pool()], "reduce"),
        # Patches do not overlap: every output pixel is written by one input pixel.
        ([nn.ConvTranspose2d(2, 2, 2, stride=2), Pixels()], "expand"),
        ([nn.ConvTranspose1d(2, 4, 2, stride=3, groups=2, bias=False), Pixels()], "expand"),
    ],
)
def test_transposed_convolution_is_exact_in_its_setting(layers, exact_mode):
    model = nn.Sequential(*layers).double()
    x = normal(3, 2, *(3, 2)[: layers[0].weight.dim() - 2])
    exact = ggn_blocks(model, lambda run: run(x), "regression")
    found = layer_blocks(model, "0", x, "regression", exact_mode)
    for name, block in found.items():
        close(block, exact[name])
    other = layer_blocks(model, "0", x, "regression", OTHER[exact_mode])
    assert error(other["0.weight"], exact["0.weight"]) > 0.1


def test_overlapping_patches_and_cropping_are_not_exact():
    layer = nn.ConvTranspose1d(2, 2, 3, padding=1)
    for last, mode in ((Pool(), "reduce"), (Pixels(), "expand")):
        model, x = nn.Sequential(layer, last).double(), normal(3, 2, 3)
        exact = ggn_blocks(model, lambda run, x=x: run(x), "regression")
        found = layer_blocks(model, "0", x, "regression", mode)
        assert error(found["0.weight"], exact["0.weight"]) > 0.05
        close(found["0.bias"], exact["0.bias"])


# --- embedding ---


class Sum(nn.Module):
    """Σ_r over the second axis."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, R, d) to (N, d)."""
        return x.sum(1)


def test_embedding_by_hand():
    model = nn.Sequential(nn.Embedding(3, 2), Sum())
    tokens = torch.tensor([[0, 1, 1], [2, 1, 0]])
    one = torch.eye(2).double()
    counts = torch.tensor([2.0, 3.0, 1.0]).double()
    found = layer_blocks(model, "0", tokens, "regression", "expand")["0.weight"]
    close(found, torch.kron(counts.diag() / 6, 6 * one))
    per_example = torch.tensor([[1.0, 2, 0], [1, 1, 1]]).double()
    found = layer_blocks(model, "0", tokens, "regression", "reduce")["0.weight"]
    close(found, torch.kron(per_example.T @ per_example, one))
    exact = ggn_blocks(model, lambda run: run(tokens), "regression")["0.weight"]
    close(found, exact)


def test_embedding_with_padding():
    layer = nn.Embedding(4, 2, padding_idx=1)
    tokens = torch.tensor([[0, 1, 1], [2, 3, 0]])
    model = nn.Sequential(layer, nn.Linear(2, 3)).double()
    exact = ggn_blocks(model, lambda run: run(tokens), "regression")["0.weight"]
    found = layer_blocks(model, "0", tokens, "regression", "expand")["0.weight"]
    frozen = torch.arange(8).reshape(4, 2)[
        1
    ]  # of the padding; PyTorch itself has no gradient there
    assert not found[frozen].any()
    kept = [i for i in range(8) if i not in frozen.tolist()]
    close(found[kept][:, kept], exact[kept][:, kept])
    reduced = layer_blocks(model, "0", tokens, "regression", "reduce")["0.weight"]
    assert error(reduced, found) > 0.1
