"""Answers of multiple choice: covariances of chosen tokens at chosen positions, under LoRA."""

import pytest
import torch
from torch.func import functional_call, jacrev
from torch.testing import assert_close

from marglik import KronLaplace

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
R = 6


def language_model(words: int):
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=R,
        pad_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters).eval()


def questions(words: int, N: int = 4):
    """Padded questions, the mask of their last words, and an answer where one is asked for."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, words, (N, R), generator=generator)
    mask = (torch.arange(R) < torch.tensor([6, 4, 5, 3])[:N, None]).long()
    last = torch.arange(R) == mask.sum(1, keepdim=True) - 1
    x = {"input_ids": tokens * mask, "attention_mask": mask}
    # Labels stand where their outputs are: shift_labels=False.
    labels = torch.full((N, R), -100).masked_scatter(last, torch.arange(N) % 3 + 1)
    return x, last, labels


def fitted(model, x, labels):
    options = {"ignore_index": -100, "shift_labels": False, "kfac_approx": "expand"}
    laplace = KronLaplace(
        model,
        "classification",
        prior_precision=0.5,
        backend_kwargs=options | {"stochastic": True, "num_samples": 2},
    )
    laplace.fit([x | {"labels": labels}])
    return laplace


def test_chosen_tokens_have_the_dense_covariance():
    words, answers = 11, torch.tensor([7, 2, 5])
    model = language_model(words).double()
    x, last, labels = questions(words)
    laplace = fitted(model, x, labels)
    f, covariance = laplace.output_distribution(x, positions=last, classes=answers)
    assert f.shape == (4, 3) and covariance.shape == (4, 3, 3)
    parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    assert set(parameters) == set(laplace.factors.blocks)

    def outputs(p):
        return functional_call(model, p, kwargs=x).logits[last]

    expected = torch.zeros(4, words, words).double()
    for name, J in jacrev(outputs)(parameters).items():
        J = J.flatten(2)
        precision = laplace.factors.to_dense(name) + 0.5 * torch.eye(J.shape[-1]).double()
        expected += J @ precision.inverse() @ J.mT
    chosen = expected[:, answers][:, :, answers]
    assert_close(f, outputs(parameters)[:, answers])
    assert_close(covariance, chosen)
    # Negative control: other tokens, and other positions, have another one.
    assert (expected[:, :3, :3] - chosen).norm() > 0.1 * chosen.norm()
    first = torch.zeros_like(last).index_fill(1, torch.tensor(0), True)
    other = laplace.output_distribution(x, positions=first, classes=answers)[1]
    assert (other - chosen).norm() > 0.1 * chosen.norm()
    # Each question may have answers of its own.
    own = torch.stack([answers, answers, answers.flip(0), answers])
    assert_close(
        laplace.output_distribution(x, positions=last, classes=own)[1][2], chosen[2].flip(0, 1)
    )
