"""Corrupted images: noise, blur, lower contrast and JPEG artefacts, of five severities each."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import adjust_contrast, gaussian_blur, gaussian_noise

SEVERITIES = (1, 2, 3, 4, 5)

# One for each severity, as in CIFAR-10-C (Hendrycks & Dietterich 2019; they are in the paper's
# code, not in its text).
STRENGTHS: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation, as a share of 255
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # standard deviation in pixels
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # factor
    "jpeg": (80, 65, 58, 50, 40),  # quality
}
BLUR_TRUNCATION = 4
"""Radius of the Gaussian kernel in standard deviations, as in CIFAR-10-C."""


def corrupt(
    images: UInt8[Tensor, "N C H W"], kind: str, severity: int, seed: int = 0
) -> UInt8[Tensor, "N C H W"]:
    """Return the images corrupted, as a test of how a classifier degrades.

    - noise: Gaussian noise of standard deviation .04, .06, .08, .09, .10 times 255, clipped;
    - blur: Gaussian blur of standard deviation .4, .6, .7, .8, 1 pixels, the image mirrored at
      its edges; of tiny images the kernel ends at the far edge;
    - contrast: m + f (x - m) with f = .75, .5, .4, .3, .15 and m the mean of the greyscale image;
    - jpeg: JPEG compression of quality 80, 65, 58, 50, 40.

    Four of the corruptions of CIFAR-10-C with its severities (Hendrycks & Dietterich 2019,
    "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations",
    arXiv:1903.12261), applied by torchvision, JPEG by Pillow. The images are not those of the
    published files: random numbers, edges, rounding (here to the nearest value) and m (there one
    per channel) differ.

    The global random state is left as it was.

    Args:
        images: undistorted pixels in 0..255, C = 1 or 3, on the CPU.
        kind: one of ``CORRUPTIONS``.
        severity: one of ``SEVERITIES``, 5 the worst.
        seed: seed of the noise; other kinds draw no random numbers. All severities use the same
            ones.

    Raises:
        ValueError: the images are no pixels.
    """
    if images.dtype != torch.uint8:
        raise ValueError(f"images of {images.dtype}: pass uint8 pixels before normalisation.")
    strength = STRENGTHS[kind][severity - 1]
    # Only the CPU's generator: torch.manual_seed would seed those of other devices, too.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # In parts, as floating point takes four times as much memory; contiguous, since pixels get
        # their random numbers in memory order.
        parts = images.contiguous().split(256)
        return torch.cat([CORRUPTIONS[kind](part, strength) for part in parts])


def _noise(images: Tensor, sigma: float) -> Tensor:
    return _in_float(images, lambda x: gaussian_noise(x, sigma=sigma))


def _blur(images: Tensor, sigma: float) -> Tensor:
    # torchvision takes an odd kernel size, and pads by its radius; reflection padding cannot be
    # wider than the image.
    radius = round(BLUR_TRUNCATION * sigma)
    height, width = images.shape[2:]
    size = [2 * min(radius, side - 1) + 1 for side in (width, height)]
    return gaussian_blur(images, kernel_size=size, sigma=[sigma])


def _contrast(images: Tensor, factor: float) -> Tensor:
    return _in_float(images, lambda x: adjust_contrast(x, contrast_factor=factor))


def _in_float(images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The function applied to pixels in 0..1, then rounded; torchvision would truncate uint8."""
    return function(images / 255).mul_(255).round_().to(torch.uint8)


def _jpeg(images: Tensor, quality: float) -> Tensor:
    """Compress each image; torchvision's own encoder is deprecated since its version 0.29."""
    compressed = np.empty_like(images.numpy())
    for image, result in zip(images.numpy(), compressed, strict=True):
        file = BytesIO()
        pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
        Image.fromarray(pixels).save(file, "JPEG", quality=int(quality))
        with Image.open(file) as decoded:
            result[...] = np.atleast_3d(np.asarray(decoded)).transpose(2, 0, 1)
    return torch.from_numpy(compressed)


CORRUPTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "jpeg": _jpeg,
}
"""Kind -> what it does to images, given its strength."""
