"""Corrupted images, by their definitions."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from experiments.data.corruptions import SEVERITIES, corrupt
from tests.marglik.data.image_helpers import decoded_by_pil, encoded


@pytest.fixture(scope="module")
def photographs():
    """60 patches of a photograph, 3×32×32; noise would have no structure to lose."""
    from sklearn.datasets import load_sample_image

    pixels = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    patches = pixels.unfold(1, 32, 64).unfold(2, 32, 64).flatten(1, 2)  # (3, N, 32, 32)
    return patches.transpose(0, 1)[:60].contiguous()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_corruptions_have_the_stated_strengths(photographs, severity):
    i = severity - 1
    # Grey 128 is five standard deviations of the strongest noise away from black and white.
    stated = 255 * (0.04, 0.06, 0.08, 0.09, 0.10)[i]
    grey = torch.full((100, 3, 32, 32), 128, dtype=torch.uint8)
    noise = corrupt(grey, "noise", severity).double() - 128
    assert noise.std().item() == pytest.approx((stated**2 + 1 / 12) ** 0.5, rel=0.01)
    assert noise.mean().item() == pytest.approx(0, abs=0.25)
    x = photographs.double()
    weights = torch.tensor([0.2989, 0.587, 0.114], dtype=torch.float64)
    mean = torch.einsum("nchw,c->nhw", x, weights).mean((1, 2))[:, None, None, None]
    expected = mean + (0.75, 0.5, 0.4, 0.3, 0.15)[i] * (x - mean)
    result = corrupt(photographs, "contrast", severity).double()
    assert (result - expected).abs().max() <= 0.5 + 1e-4  # rounded, not truncated
    sigma = (0.4, 0.6, 0.7, 0.8, 1.0)[i]
    blurred = gaussian_filter(x[:5].numpy(), sigma, axes=(2, 3), mode="mirror", truncate=4)
    result = corrupt(photographs[:5], "blur", severity).double().numpy()
    assert np.abs(result - blurred).max() <= 0.5 + 1e-3
    quality = (80, 65, 58, 50, 40)[i]
    stored = encoded(photographs[0].permute(1, 2, 0).numpy(), quality=quality)
    expected, _ = decoded_by_pil({"test/cat/0.jpg": stored}, "test")
    assert torch.equal(corrupt(photographs[:1], "jpeg", severity), expected)
