"""Weights that are used more than once: the uses are one more axis that shares the weight."""

import pytest
import torch
from torch import Tensor, nn

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import (
    MODES,
    OTHER,
    assert_blocks,
    assert_reference,
    randomize,
)
from tests.kfac_backend.layers import tied_models
from tests.kfac_backend.layers.tied_models import LanguageModel, Pooled
from tests.oracles import ggn_blocks, kfac_blocks_from_uses, loss_hessians
from tests.random_numbers import error, normal
from tests.taps import reference_blocks, uses_of

IGNORED = -100


MODELS = {
    # name: (model, a parameter that it uses several times)
    "layer called twice": (tied_models.CalledTwice, "layer.weight"),
    "two layers with one weight": (tied_models.TwoLayers, "first.weight"),
    "two layers with one bias": (tied_models.TiedBias, "first.bias"),
    "one layer, two names": (tied_models.TwoNames, "first.weight"),
    "recurrent": (tied_models.Recurrent, "state.weight"),
    "positions, then their mean": (tied_models.PositionsThenMean, "layer.weight"),
    "convolution with groups called twice": (tied_models.GroupsTwice, "layer.weight"),
    "encoder layer called twice": (tied_models.EncoderTwice, "layer.linear1.weight"),
    "language model": (tied_models.LanguageModel, "embed.weight"),
    "language model with padding": (tied_models.PaddedLanguageModel, "embed.weight"),
    "embedded twice, read out twice": (tied_models.EmbeddedTwice, "embed.weight"),
    "autoencoder": (tied_models.Autoencoder, "encode.weight"),
}


def setting(name: str, pool: bool, N: int = 3) -> tuple[Pooled, Tensor, Tensor]:
    """Model, inputs and labels."""
    model_class, _ = MODELS[name]
    torch.manual_seed(0)
    model = randomize(model_class())
    model.pool = pool
    generator = torch.Generator().manual_seed(1)
    if issubclass(model_class, LanguageModel):
        x = torch.randint(5, (N, 3), generator=generator)
    else:
        x = normal(N, 4 if "conv" in name or name == "autoencoder" else 3, 3)
    f = model(x)
    return model, x, torch.randint(f.shape[-1], f.shape[:-1], generator=generator)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_uses_are_one_more_sharing_axis(name, pool):
    model, x, y = setting(name, pool)
    examples, tied = [(x_n,) for x_n in x], MODELS[name][1]
    assert_reference(model.reference, examples, model(x))
    uses, outputs = uses_of(model.reference, examples)
    hessians = loss_hessians(outputs, "classification")
    expected = {mode: kfac_blocks_from_uses(uses, hessians, mode) for mode in MODES}
    assert error(expected["expand"][tied], expected["reduce"][tied]) > 0.02
    for mode in MODES:
        factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=mode)
        assert all("norm" in parameter for parameter in set(factors.blocks) - set(expected[mode]))
        assert_blocks(factors, expected[mode])
        # Negative control: one use alone is not enough.
        keys = [key for key in uses if key[0] == tied]
        assert len(uses[keys[0]]) > 1
        for use in range(len(uses[keys[0]])):
            one_use = {key: [uses[key][use]] for key in keys}
            alone = kfac_blocks_from_uses(one_use, hessians, mode)[tied]
            assert error(alone, expected[mode][tied]) > 0.02


@pytest.mark.parametrize(("mode", "pool"), [("expand", False), ("reduce", True)])
def test_parallel_uses_are_exact_in_their_setting(mode, pool):
    # As if it were one call with all positions; the modes differ.
    model, x, _ = setting("layer called twice", pool)
    y = torch.zeros_like(model(x))
    exact = ggn_blocks(model, lambda run: run(x), "regression")
    assert_blocks(kronecker_factors(model, [(x, y)], "regression", kfac_approx=mode), exact)
    other = kronecker_factors(model, [(x, y)], "regression", kfac_approx=OTHER[mode])
    assert error(other.to_dense("layer.weight"), exact["layer.weight"]) > 0.1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["two layers with one weight", "language model"])
def test_ignored_loss_terms_have_inputs_but_no_gradients(name, mode):
    model, x, y = setting(name, pool=False)
    y[:, 0] = IGNORED
    y[1] = IGNORED
    ignored = list(y == IGNORED)
    examples = [(x_n,) for x_n in x]
    expected = reference_blocks(model.reference, examples, "classification", mode, ignored)
    factors = kronecker_factors(
        model, [(x, y)], "classification", kfac_approx=mode, ignore_index=IGNORED
    )
    assert_blocks(factors, expected)


@pytest.mark.parametrize("name", ["encoder layer called twice", "language model"])
@pytest.mark.parametrize("pool", [False, True])
def test_empirical_fisher(name, pool):
    # The loss Hessian's place is taken by the label's own gradient, of each loss term apart.
    model, x, y = setting(name, pool)
    uses, outputs = uses_of(model.reference, [(x_n,) for x_n in x])
    squares = []
    for f_n, y_n in zip(outputs, y, strict=True):
        gradients = f_n.softmax(-1) - torch.eye(f_n.shape[-1]).double()[y_n.reshape(-1)]
        squares.append([torch.outer(g, g) for g in gradients])
    for mode in MODES:
        factors = kronecker_factors(
            model, [(x, y)], "classification", kfac_approx=mode, fisher="empirical"
        )
        assert_blocks(factors, kfac_blocks_from_uses(uses, squares, mode))


class MaskedHead(nn.Module):
    """Holds its output layer's bias under a name of its own, as BERT's does."""

    def __init__(self, adds_it: bool = False):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))
        self.embed, self.decoder = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.decoder.weight, self.decoder.bias = self.embed.weight, self.bias
        self.adds_it = adds_it

    def forward(self, tokens: Tensor) -> Tensor:
        f = self.decoder(self.embed(tokens))
        return f + self.bias if self.adds_it else f


def test_a_second_name_of_a_layers_tensor_is_no_use():
    model = randomize(MaskedHead())
    x = torch.tensor([[0, 1, 2], [4, 4, 3]])
    factors = kronecker_factors(model, [(x, x)], "classification")
    exact = ggn_blocks(model, lambda run: run(x), "classification")
    assert list(factors.blocks) == ["bias", "embed.weight"]
    assert_blocks(factors, {"bias": exact["bias"]})
    # Negative control: a second use is an error, and would be another block.
    used = randomize(MaskedHead(adds_it=True))
    twice = ggn_blocks(used, lambda run: run(x), "classification")["bias"]
    assert error(exact["bias"], twice) > 0.1
    with pytest.raises(NotImplementedError, match="'bias' reached the model's output outside of"):
        kronecker_factors(used, [(x, x)], "classification")
