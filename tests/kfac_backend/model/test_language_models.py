"""Models that compute a loss of labels and take masks of padding, in the style of Hugging Face."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.laplace_torch.interface import KfacGGN
from marglik import KronLaplace, map_predictive, marglik_training, predict_all
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.model.language import (
    IGNORED,
    Plain,
    Transformer,
    alone,
    assert_same_loss_and_blocks,
    batch_of,
    factors,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["causal", "masked", "first", "mean"])
def test_a_batch_with_padding_is_its_examples_alone(kind, mode):
    model = Transformer(kind)
    expected = factors(
        Plain(model),
        alone(kind),
        mode,
        ignore_index=IGNORED if kind in ("causal", "masked") else None,
    )
    for batch in (batch_of(kind), batch_of(kind, 9), batch_of(kind, 9, pad=3)):
        assert_same_loss_and_blocks(factors(model, [batch], mode), expected, "model.")
    # Negative control: padding that counts.
    counted = factors(model, [batch_of(kind, 9)], mode, dict_key_mask=None)
    wrong = counted.to_dense("block.qkv.weight")
    right = expected.to_dense("model.block.qkv.weight")
    assert (wrong - right).norm() > 0.1 * right.norm()


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_a_causal_model_is_its_own(mode):
    model, batch = Transformer("causal"), batch_of("causal")
    found = factors(model, [batch], mode)
    own = model(**batch).loss
    assert_close(found.loss / found.num_loss_terms, own.item())
    # Negative control, what labels against outputs at the same position give.
    unshifted = factors(model, [batch], mode, shift_labels=False, ignore_index=IGNORED)
    assert abs(unshifted.loss / unshifted.num_loss_terms - own.item()) > 0.1
    said = factors(model, [batch], mode, shift_labels=True)
    assert_same_loss_and_blocks(found, said)


@pytest.mark.parametrize("mode", MODES)
def test_left_padding(mode):
    model = Transformer("causal")
    expected = factors(model, [batch_of("causal")], mode)
    with pytest.warns(UserWarning, match="Labels at positions that 'attention_mask' hides do not"):
        labels = batch_of("causal", 8, left=True)
        labels["labels"] = labels["input_ids"]  # padding is marked nowhere
        assert_same_loss_and_blocks(factors(model, [labels], mode), expected)
    for length in (5, 8):
        left = batch_of("causal", length, left=True)
        assert_same_loss_and_blocks(factors(model, [left], mode), expected)


@pytest.mark.parametrize("kind", ["causal", "first"])
def test_another_loss_is_a_named_error(kind):
    model, batch = Transformer(kind, label_smoothing=0.1), batch_of(kind)
    two = {k: v[:2] for k, v in batch.items()}
    calls = [
        lambda **o: factors(model, [batch], **o),
        lambda **o: KronLaplace(model, "classification", **o).fit([batch]),
        lambda **o: marglik_training(model, [batch], n_epochs=1, n_hypersteps=1, **o),
        lambda **o: predict_all(map_predictive(model), [batch], **o),
        lambda **o: KfacGGN(model, "classification", **o).kron(batch, batch["labels"], 4),
    ]
    for call in calls:
        own = f"{model(**two).loss.item():.6g}"  # training changes it
        with pytest.raises(ValueError, match=f"itself, {own} .*label smoothing.*shift_labels="):
            call()
        call(shift_labels=kind == "causal")


def test_a_loss_that_does_not_tell_is_a_named_error():
    model = Transformer("causal")
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    with pytest.raises(ValueError, match="both fit.*shift_labels=False if.*, True if"):
        factors(model, [batch_of("causal")])
    assert factors(model, [batch_of("causal")], shift_labels=True).num_loss_terms == 10


def test_options_that_are_not_supported():
    model, batch = Transformer("first"), batch_of("first")
    with pytest.raises(ValueError, match="shift_labels='yes' is not supported"):
        factors(model, [batch], shift_labels="yes")
    with pytest.raises(ValueError, match=r"shift_labels=True needs labels \(N, R\)"):
        factors(model, [batch], shift_labels=True)
    with pytest.raises(ValueError, match="shift_labels=True is for .*'classification'"):
        kronecker_factors(model, [batch], "regression", shift_labels=True)
    half = batch | {"attention_mask": batch["attention_mask"] * 0.5}
    with pytest.raises(ValueError, match="'attention_mask' has entries other than 0"):
        factors(model, [half], shift_labels=False)


@pytest.mark.parametrize("mode", MODES)
def test_padding_that_reaches_the_output_is_a_named_error(mode):
    model, batch = Transformer("all"), batch_of("all")
    full = {k: v[:1] for k, v in batch.items()}  # it hides nothing
    for batches in ([batch], [full, batch]):
        with pytest.raises(NotImplementedError, match="do not count reach .*dict_key_mask=None"):
            factors(model, batches, mode)
    factors(model, [full], mode)
    factors(model, [batch], mode, dict_key_mask=None)


class Expert(nn.Module):
    """A layer that sees some of all examples' positions, one behind the other."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        chosen = x[..., 0] > 0
        return x.masked_fill(chosen[..., None], 0).index_put((chosen,), self.layer(x[chosen]))


def test_rows_of_which_a_mask_does_not_tell_are_a_named_error():
    model, batch = Transformer("mean"), batch_of("mean")
    model.block.hidden = Expert(model.block.hidden)
    with pytest.raises(NotImplementedError, match="hidden.layer' .*dict_key_mask=None"):
        factors(model, [batch])
    factors(model, [batch], dict_key_mask=None)


def test_labels_of_models_without_a_loss_are_taken_as_they_are():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, (pair, *_) = Plain(Transformer("causal")), alone("causal")
        ids = pair[0]
        f = factors(model, [(ids, ids)])
    own = F.cross_entropy(model(ids)[0], ids[0], reduction="sum")
    assert_close(f.loss, own.item())
