"""The posterior of peft's adapters alone: no line but KronLaplace, files without the base."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from marglik import (
    KronLaplace,
    load_posterior,
    maximize_evidence,
    save_posterior,
)

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# peft 0.21 reads a property that transformers 5 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


WORDS, CLASSES, WIDTH, RANK = 40, 4, 16, 2


def classifier(seed: int = 0, base: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Llama that classifies; ``seed`` is of adapters and head, ``base`` of all that is frozen."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=CLASSES,
        pad_token_id=0,
    )
    torch.manual_seed(base)
    pretrained = transformers.LlamaModel(config).state_dict()
    torch.manual_seed(1000 + seed)
    model = transformers.LlamaForSequenceClassification(config)
    model.model.load_state_dict(pretrained)
    model.to(dtype)
    adapters = peft.LoraConfig(
        task_type="SEQ_CLS", r=RANK, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
    )
    model = peft.get_peft_model(model, adapters)
    with torch.no_grad():  # as if they were trained: peft starts with B = 0
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    return model.eval()


def batch(N: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """Sentences of different lengths, with their mask and labels."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (N, 7), generator=generator)
    mask = (torch.arange(7) < torch.randint(3, 8, (N, 1), generator=generator)).long()
    labels = torch.randint(CLASSES, (N,), generator=generator)
    return {"input_ids": words * mask, "attention_mask": mask, "labels": labels}


def fitted(model: nn.Module) -> KronLaplace:
    laplace = KronLaplace(model, "classification", kfac_approx="expand")
    laplace.fit([batch(8), batch(5, seed=1)])
    maximize_evidence(laplace)
    return laplace


@pytest.fixture(scope="module")
def laplace() -> KronLaplace:
    """In float64, with learned precisions."""
    return fitted(classifier().double())


def test_adapters_and_head_alone_have_a_posterior(laplace):
    names = list(laplace.factors.blocks)
    adapters = [
        f"layers.{i}.self_attn.{m}_proj.lora_{f}" for i in (0, 1) for m in "qv" for f in "AB"
    ]
    assert len(names) == 9 and names[-1].endswith("score.modules_to_save.default.weight")
    for name, expected in zip(names, adapters, strict=False):
        assert expected in name
    assert laplace.n_params == 4 * 2 * RANK * WIDTH + CLASSES * WIDTH


def test_another_base_is_refused_but_another_head_is_none(tmp_path):
    laplace = fitted(classifier())
    save_posterior(laplace, tmp_path)
    other_head = classifier(seed=3)
    heads = [m.base_model.model.score.original_module.weight for m in (laplace.model, other_head)]
    assert not torch.equal(*heads)
    loaded = load_posterior(tmp_path, other_head)
    for found, expected in zip(
        loaded.output_distribution(batch()), laplace.output_distribution(batch()), strict=True
    ):
        assert_close(found, expected)
    with pytest.raises(ValueError, match="saved without the frozen parameters"):
        load_posterior(tmp_path, classifier(base=1))
    changed = classifier()
    changed.base_model.model.model.norm.weight.data[0] += 1e-6
    with pytest.raises(ValueError, match="their SHA-256 sums differ"):
        load_posterior(tmp_path, changed)


def test_a_tokenizers_batches_and_padding_on_either_side():
    """BatchEncoding is a mapping, but no dict; words under the mask count nowhere."""
    model, data = classifier().double(), batch(8)
    laplace = KronLaplace(model, "classification")
    laplace.fit([transformers.BatchEncoding(data)])
    longer = {
        "input_ids": nn.functional.pad(data["input_ids"], (0, 3)),
        "attention_mask": nn.functional.pad(data["attention_mask"], (0, 3)),
        "labels": data["labels"],
    }
    again = KronLaplace(model, "classification")
    again.fit([longer])
    for name, block in laplace.factors.blocks.items():
        assert_close(again.factors.to_dense(name), block.to_dense())
    assert_close(again.log_marginal_likelihood(), laplace.log_marginal_likelihood())
