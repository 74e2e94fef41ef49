"""A posterior of peft's adapters: the batches of a tokenizer, their padding, and two dtypes."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from marglik import KronLaplace

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# peft 0.21 reads a property that transformers 5 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


WORDS, CLASSES, WIDTH = 40, 4, 16


def classifier(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A Llama that classifies, with adapters; peft makes these in float32 on a bfloat16 model."""
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
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config).to(dtype)
    adapters = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
    )
    model = peft.get_peft_model(model, adapters)
    with torch.no_grad():  # as if they were trained: peft starts with B = 0
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    return (model.double() if dtype == torch.float64 else model).eval()


def batch(N: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """Sentences of different lengths, with their mask and labels."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (N, 7), generator=generator)
    mask = (torch.arange(7) < torch.randint(3, 8, (N, 1), generator=generator)).long()
    labels = torch.randint(CLASSES, (N,), generator=generator)
    return {"input_ids": words * mask, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("mode", ["expand", "auto"])
def test_a_tokenizers_batches_and_padding_on_either_side(mode):
    """BatchEncoding is a mapping, but no dict; words under the mask count nowhere."""
    model, data = classifier(), batch(8)
    model.gradient_checkpointing_enable()
    laplace = KronLaplace(model, "classification", kfac_approx=mode)
    laplace.fit([transformers.BatchEncoding(data)])
    longer = {
        "input_ids": nn.functional.pad(data["input_ids"], (0, 3)),
        "attention_mask": nn.functional.pad(data["attention_mask"], (0, 3)),
        "labels": data["labels"],
    }
    again = KronLaplace(model, "classification", kfac_approx=mode)
    again.fit([longer])
    for name, block in laplace.factors.blocks.items():
        assert_close(again.factors.to_dense(name), block.to_dense())
    assert_close(again.log_marginal_likelihood(), laplace.log_marginal_likelihood())


def test_adapters_of_a_model_that_takes_the_mapping_whole():
    """Its wrapper takes any arguments; those of the model in it count, as in laplace-torch."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, data):
            a = self.linear(self.embedding(data["input_ids"])).tanh()
            return self.head((a * data["attention_mask"][..., None]).mean(1))

    torch.manual_seed(0)
    model = peft.get_peft_model(Whole(), peft.LoraConfig(r=2, target_modules=["linear"]))
    evidences = []
    for network in (model.double().eval(), model.get_base_model()):
        laplace = KronLaplace(network, "classification")
        laplace.fit([batch(8)])
        evidences.append(laplace.log_marginal_likelihood())
    assert torch.equal(*evidences)
