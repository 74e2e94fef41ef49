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
def test_no_images_stay_no_images(kind):
    assert corrupt(torch.empty(0, 3, 8, 8, dtype=torch.uint8), kind, 1).shape == (0, 3, 8, 8)


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


@pytest.mark.parametrize(
    ("severity", "expected"),
    # 100 + f (x - 100) with f = .75, .5, .4, .3, .15
    [
        (1, [40, 85, 115, 160]),
        (2, [60, 90, 110, 140]),
        (3, [68, 92, 108, 132]),
        (4, [76, 94, 106, 124]),
        (5, [88, 97, 103, 112]),
    ],
)
def test_contrast_by_hand(severity, expected):
    """Pixels 20, 80, 120, 180 have mean 100; a factor brings them that much closer to it."""
    pixels = torch.tensor([20, 80, 120, 180], dtype=torch.uint8).reshape(1, 1, 2, 2)
    assert corrupt(pixels, "contrast", severity).flatten().tolist() == expected


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


# The JPEG standard's quantisation step of a block's sum, 16 at quality 50, as libjpeg scales it:
# (16 s + 50) // 100 with s = 200 - 2 quality from 50 on, and 5000 / quality below.
STEPS = {80: 6, 65: 11, 58: 13, 50: 16, 40: 20}


@EVERY_SEVERITY
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_quantises_flat_images_in_the_steps_of_its_quality(severity, channels):
    """A flat block has one coefficient, 8 (x - 128), which becomes a multiple of the step."""
    quality = (80, 65, 58, 50, 40)[severity - 1]
    grey = torch.arange(256, dtype=torch.uint8)
    images = grey[:, None, None, None].expand(-1, channels, 16, 16)
    result = corrupt(images, "jpeg", severity).double()
    assert (result == result[:, :1, :1, :1]).all()

    def error(step, ties=True):
        coefficient = 8 * (grey.double() - 128) / step
        expected = (128 + coefficient.round() * step / 8).clamp(0, 255)
        counted = ties | ((coefficient.abs() % 1 - 0.5).abs() > 1e-6)
        return (result[:, 0, 0, 0] - expected)[counted].abs().max()

    assert error(STEPS[quality], ties=False) <= 0.5  # which way ties go is the codec's choice
    # Negative control: the steps of all other qualities do not explain the result.
    assert all(error(step) > 0.5 for q, step in STEPS.items() if q != quality)


@EVERY_SEVERITY
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_keeps_pixels_and_channels_in_place(photographs, severity, channels):
    images = photographs[:, :channels]
    result = corrupt(images, "jpeg", severity)

    def distance(other):
        return (result.double() - other.double()).abs().mean()

    assert 0.5 < distance(images) < 10
    for other in (images.flip(0), images.flip(2), images.flip(3), images.mT):
        assert distance(other) > 2 * distance(images)


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
