"""Corruptions: stated strengths, hand-worked contrast, seeds, and severities that do get worse."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from marglik.data import CORRUPTIONS, SEVERITIES, corrupt

EVERY_KIND = pytest.mark.parametrize("kind", CORRUPTIONS)
EVERY_SEVERITY = pytest.mark.parametrize("severity", SEVERITIES)


@pytest.fixture(scope="module")
def photographs():
    """60 patches of a photograph, 3×32×32; noise would have no structure to lose."""
    from sklearn.datasets import load_sample_image

    pixels = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    patches = pixels.unfold(1, 32, 64).unfold(2, 32, 64).flatten(1, 2)  # (3, N, 32, 32)
    return patches.transpose(0, 1)[:60].contiguous()


@EVERY_KIND
@pytest.mark.parametrize("channels", [1, 3])
def test_distance_from_the_clean_images_grows_with_severity(photographs, kind, channels):
    images = photographs[:, :channels]
    distances = []
    for severity in SEVERITIES:
        corrupted = corrupt(images, kind, severity)
        assert corrupted.dtype == torch.uint8
        assert corrupted.shape == images.shape
        distances.append((corrupted.double() - images.double()).square().mean().item())
    assert distances[0] > 0
    assert distances == sorted(set(distances))


@EVERY_KIND
def test_same_seed_same_images(photographs, kind):
    first = corrupt(photographs, kind, 3, seed=1)
    assert torch.equal(corrupt(photographs, kind, 3, seed=1), first)
    # Negative control: only noise has anything to draw.
    other = corrupt(photographs, kind, 3, seed=2)
    assert torch.equal(other, first) == (kind != "noise")


@EVERY_KIND
def test_images_and_random_state_are_left_as_they_were(photographs, kind):
    images, state = photographs.clone(), torch.get_rng_state()
    corrupt(images, kind, 5, seed=3)
    assert torch.equal(images, photographs)
    assert torch.equal(torch.get_rng_state(), state)


@EVERY_KIND
def test_chunks_and_memory_layout_change_nothing(photographs, kind, monkeypatch):
    """Chunks of two images: no chunk is lost or mixed up, and the noise does not begin anew."""
    whole = corrupt(photographs, kind, 2)
    laid_out = photographs.to(memory_format=torch.channels_last)
    assert torch.equal(corrupt(laid_out, kind, 2), whole)
    monkeypatch.setattr("marglik.data.images.image_set.CHUNK", 2 * photographs[0].numel())
    chunked = corrupt(photographs, kind, 2)
    assert torch.equal(chunked, whole)
    noise = chunked.double() - photographs.double()
    assert not torch.equal(noise[:2], noise[2:4])


@pytest.mark.parametrize("kind", ["noise", "blur"])
def test_two_channels_have_noise_and_blur(photographs, kind):
    assert corrupt(photographs[:, :2], kind, 1).shape == (len(photographs), 2, 32, 32)


@EVERY_SEVERITY
def test_noise_has_the_stated_standard_deviation(severity):
    """Grey 128 is five standard deviations of the strongest noise away from black and white."""
    stated = 255 * (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    images = torch.full((100, 3, 32, 32), 128, dtype=torch.uint8)
    noise = corrupt(images, "noise", severity).double() - 128
    rounding = 1 / 12  # the variance that rounding adds
    assert noise.std().item() == pytest.approx((stated**2 + rounding) ** 0.5, rel=0.01)
    assert noise.mean().item() == pytest.approx(0, abs=0.25)
    # Each pixel has its own.
    assert torch.corrcoef(torch.stack([noise[:50].flatten(), noise[50:].flatten()]))[0, 1] < 0.01


def test_noise_is_clipped_and_does_not_wrap():
    black = torch.zeros(10, 1, 32, 32, dtype=torch.uint8)
    noisy = corrupt(black, "noise", 5)
    assert noisy.max() < 150
    assert (noisy == 0).double().mean().item() == pytest.approx(0.5, abs=0.03)


@EVERY_SEVERITY
def test_contrast_of_colours_is_about_the_grey_mean_of_each_image(photographs, severity):
    x = photographs.double()
    weights = torch.tensor([0.2989, 0.587, 0.114], dtype=torch.float64)
    mean = torch.einsum("nchw,c->nhw", x, weights).mean((1, 2))[:, None, None, None]
    factor = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    expected = mean + factor * (x - mean)
    result = corrupt(photographs, "contrast", severity).double()
    assert (result - expected).abs().max() <= 0.5 + 1e-4  # rounded, not truncated
    assert (result - expected).mean().abs() < 0.02


@EVERY_SEVERITY
@pytest.mark.parametrize("shape", [(32, 32), (9, 20)])
def test_blur_equals_scipys_gaussian_filter(photographs, severity, shape):
    sigma = (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1]
    images = photographs[:5, :, : shape[0], : shape[1]]
    expected = gaussian_filter(
        images.numpy().astype(np.float64), sigma, axes=(2, 3), mode="mirror", truncate=4
    )
    result = corrupt(images, "blur", severity).double().numpy()
    assert np.abs(result - expected).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 8)])
def test_tiny_images_are_blurred_as_far_as_they_reach(shape):
    images = torch.randint(256, (2, 3, *shape), dtype=torch.uint8)
    result = corrupt(images, "blur", 5)
    assert result.shape == images.shape
    assert torch.equal(result, images) == (shape == (1, 1))


@EVERY_SEVERITY
def test_jpeg_equals_that_of_pillow_one_file_after_the_other(photographs, severity):
    quality = (80, 65, 58, 50, 40)[severity - 1]
    for image, result in zip(photographs, corrupt(photographs, "jpeg", severity), strict=True):
        file = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
        expected = torch.from_numpy(np.array(Image.open(file)))
        assert torch.equal(result, expected.permute(2, 0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "fog"}, "kind='fog'.* noise, blur, contrast, jpeg"),
        ({"severity": 6}, "severity=6"),
        ({"seed": -1}, "seed=-1"),
        ({"images": torch.zeros(2, 3, 8, 8)}, "torch.float32 .*before normalisation"),
        ({"images": torch.zeros(3, 8, 8, dtype=torch.uint8)}, r"shape \(3, 8, 8\)"),
        ({"images": torch.zeros(2, 4, 8, 8, dtype=torch.uint8)}, "'jpeg'.* C = 1 or 3"),
    ],
)
def test_what_cannot_be_corrupted_is_named(change, message):
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    fitting = {"images": images, "kind": "jpeg", "severity": 1, "seed": 0}
    assert corrupt(**fitting).shape == (2, 3, 8, 8)
    with pytest.raises(ValueError, match=message):
        corrupt(**(fitting | change))
