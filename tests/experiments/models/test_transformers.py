"""Vision transformer and language model: sizes and formulas written out."""

import math

import pytest
import torch
from torch.nn.functional import gelu, layer_norm
from torch.testing import assert_close

from experiments.models import GPT, VisionTransformer
from tests.marglik.networks import randomised


def written_out(p, x, heads, causal):
    """A block for one example x (R, d), head by head and position by position."""
    R, d = x.shape
    size = d // heads

    def linear(name, a):
        return a @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(name, a):
        return layer_norm(a, (d,), p[f"{name}.weight"], p[f"{name}.bias"])

    q, k, v = linear("attention.qkv", norm("norm1", x)).split(d, dim=1)
    attended = torch.zeros_like(x)
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        for r in range(R):
            seen = r + 1 if causal else R
            scores = torch.stack([q[r, part] @ k[s, part] / math.sqrt(size) for s in range(seen)])
            weights = scores.exp() / scores.exp().sum()
            attended[r, part] = sum(weights[s] * v[s, part] for s in range(seen))
    x = x + linear("attention.projection", attended)
    return x + linear("fc2", gelu(linear("fc1", norm("norm2", x))))


def blocks_written_out(model, x, heads, causal):
    p = dict(model.named_parameters())
    for i in range(len(model.blocks)):
        start = f"blocks.{i}."
        block = {k.removeprefix(start): v for k, v in p.items() if k.startswith(start)}
        x = written_out(block, x, heads, causal)
    return layer_norm(x, x.shape[1:], p["norm.weight"], p["norm.bias"])


def test_vision_transformer_equals_its_formula_written_out():
    sizes = dict(num_classes=3, in_channels=2, image_size=8, patch_size=4, dim=6, depth=2, heads=2)
    model = randomised(VisionTransformer(**sizes))
    p = dict(model.named_parameters())
    images = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    for image, logits in zip(images, model(images), strict=True):
        rows = []
        for top in (0, 4):
            for left in (0, 4):
                patch = image[:, top : top + 4, left : left + 4]
                weighted = (p["patch_embedding.weight"] * patch).sum((1, 2, 3))
                rows.append(weighted + p["patch_embedding.bias"])
        x = torch.stack(rows) + p["position_embedding"][0]
        x = blocks_written_out(model, x, heads=2, causal=False).mean(0)
        assert_close(logits, p["head.weight"] @ x + p["head.bias"])


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_equals_its_formula_written_out(tied):
    model = randomised(GPT(vocab_size=7, context=6, dim=6, depth=2, heads=3, tied=tied))
    p = dict(model.named_parameters())
    tokens = torch.randint(7, (3, 5))
    head = p["token_embedding.weight" if tied else "head.weight"]
    for sequence, logits in zip(tokens, model(tokens), strict=True):
        x = torch.stack([p["token_embedding.weight"][t] for t in sequence])
        x = x + p["position_embedding.weight"][:5]
        assert_close(logits, blocks_written_out(model, x, heads=3, causal=True) @ head.T)


def test_gpt_2_has_the_published_parameters():
    with torch.device("meta"):
        model = GPT(50257, 1024, 768, depth=12, heads=12)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_gpt_initial_standard_deviations():
    torch.manual_seed(0)
    model = GPT(dim=96, depth=8)
    residual = 0
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        elif "norm" in name:
            assert (p == 1).all()
        else:
            last = name.endswith(("projection.weight", "fc2.weight"))
            residual += last
            expected = 0.02 / 4 if last else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.05)
    assert residual == 16
