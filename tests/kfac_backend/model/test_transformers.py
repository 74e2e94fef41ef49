"""Models of the transformers library itself, tiny ones with random weights."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from tests.kfac_backend.model.language import IGNORED, V, assert_same_loss_and_blocks, batch_of

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": V,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 6,
    "max_position_embeddings": 32,
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMES = {
    "GPT2": {"n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "DistilBert": {"dim": 4, "n_layers": 1, "n_heads": 2, "hidden_dim": 6},
}
CAUSAL = ["GPT2LMHeadModel", "LlamaForCausalLM"]
MASKED = ["BertForMaskedLM", "DistilBertForMaskedLM"]
ENCODERS = ["GPT2ForSequenceClassification"]


def tiny(name):
    """A model of that name in float64, in eval mode."""
    family = name.split("For")[0].removesuffix("LMHeadModel")
    config = getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    model = getattr(transformers, name)(config(**SMALL | NAMES.get(family, {})))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.double().eval()


def data_of(name, length):
    kind = "causal" if name in CAUSAL else "masked" if name in MASKED else "first"
    batch = batch_of(kind, length)
    return {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}


CASES = list(zip(CAUSAL + MASKED + ENCODERS, ["expand", "reduce"] * 3, strict=False))


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_loss_is_the_models_own_whatever_the_padding(name, mode):
    model = tiny(name)
    found = []
    for length in (5, 16):
        batch = data_of(name, length)
        of_length = kronecker_factors(model, [batch], "classification", kfac_approx=mode)
        mean = of_length.loss / of_length.num_loss_terms
        assert_close(mean, model(**batch).loss.item(), rtol=1e-5, atol=1e-6)
        found.append(of_length)
    assert_same_loss_and_blocks(*found)
    if name in MASKED:  # the bias of the logits, which one loss term each sees, is exact
        f = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        p = f.softmax(-1)[batch["labels"] != IGNORED].detach()
        expected = sum(torch.diag(q) - torch.outer(q, q) for q in p)
        (bias,) = {id(p): n for n, p in model.named_parameters() if p.shape == (V,)}.values()
        assert_close(of_length.to_dense(bias), expected)


def test_padding_on_the_left_is_as_on_the_right():
    model, right = tiny("GPT2LMHeadModel"), batch_of("causal")
    expected = kronecker_factors(model, [right], "classification")
    for length in (5, 9):
        left = batch_of("causal", length, left=True)
        assert_same_loss_and_blocks(kronecker_factors(model, [left], "classification"), expected)
