"""Tiny networks of transformers with peft's LoRA, and padded batches for them."""

import torch
from torch import Tensor, nn

WORDS, CLASSES, WIDTH, RANK = 40, 4, 16, 2


def classifier(seed: int = 0, base: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Llama that classifies; ``seed`` is of adapters and head, ``base`` of all that is frozen."""
    import peft
    import transformers

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
