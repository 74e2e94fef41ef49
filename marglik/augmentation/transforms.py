"""Random transforms of inputs, differentiable in their ranges.

A transform maps inputs (M, ...), its ranges η (K,) and random numbers u (M, k) in [-1, 1] to inputs
(M, ...). A range η gives changes between −η and η. A range of zero does not change the input. The
matrix exponential of affine transforms is from Benton et al. 2020 (arXiv:2010.11882).
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


class Transform(ABC):
    """A random transform with K ranges. Derive your own transforms from this class.

    Args:
        names: ranges to use, from the keys of ``limits``; all by default.

    Raises:
        ValueError: the transform has no range with this name.
    """

    limits: ClassVar[dict[str, float]]
    """Name of a range -> its largest value. Learning starts at the share `START` of this value."""

    def __init__(self, *names: str) -> None:
        unknown = [name for name in names if name not in self.limits]
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no range {unknown[0]!r}. It has "
                f"{', '.join(map(repr, self.limits))}."
            )
        self.names = names or tuple(self.limits)
        """Names of the ranges of this transform."""

    @property
    def largest(self) -> list[float]:
        """Largest value of each range."""
        return [self.limits[name] for name in self.names]

    def numbers(self, x: Tensor) -> int:
        """Return k, the number of random numbers per row of x; by default one per range."""
        return len(self.names)

    def weights(self, eta: Float[Tensor, " K"], copies: int) -> Tensor | None:
        """Return the weight (S,) of each copy in the mean over S copies; None if all are 1."""
        return None

    @abstractmethod
    def __call__(
        self, x: Float[Tensor, "M ..."], eta: Float[Tensor, " K"], u: Float[Tensor, "M k"]
    ) -> Float[Tensor, "M ..."]:
        """Transform each row of x by its own random numbers."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.names))})"


class Affine(Transform):
    """Shifts, rotates, scales and shears images (M, C, H, W). New pixels repeat the border.

    x' = exp(Σ_k u_k η_k G_k) x in coordinates from -1 to 1. The units of the ranges are half images
    for shifts, radians for angles, and logarithms for scales and shears.
    """

    limits = {
        "move x": 1.0, "move y": 1.0, "rotate": math.pi, "scale x": 1.0, "scale y": 1.0,
        "shear": 1.0,
    }  # fmt: skip
    _entries = {  # (row, column, value) in the generator, a matrix (3, 3)
        "move x": [(0, 2, 1.0)],
        "move y": [(1, 2, 1.0)],
        "rotate": [(0, 1, -1.0), (1, 0, 1.0)],
        "scale x": [(0, 0, 1.0)],
        "scale y": [(1, 1, 1.0)],
        "shear": [(0, 1, 1.0), (1, 0, 1.0)],
    }

    def __call__(self, x: Tensor, eta: Tensor, u: Tensor) -> Tensor:
        """Return the images at their transformed coordinates, interpolated linearly."""
        if x.dim() != 4:
            raise ValueError(f"Affine needs images (N, C, H, W), not shape {tuple(x.shape)}.")
        generators = x.new_zeros(len(self.names), 3, 3)
        for k, name in enumerate(self.names):
            for row, column, value in self._entries[name]:
                generators[k, row, column] = value
        algebra = torch.einsum("mk,kij->mij", u * eta, generators)
        grid = F.affine_grid(torch.matrix_exp(algebra)[:, :2], list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


class TimeShift(Transform):
    """Shifts and stretches signals (M, C, L). A shift of 1 is half of the length."""

    limits = {"shift": 1.0, "stretch": 1.0}

    def __call__(self, x: Tensor, eta: Tensor, u: Tensor) -> Tensor:
        """Return the signals at their transformed times, interpolated linearly."""
        if x.dim() != 3:
            raise ValueError(f"TimeShift needs signals (N, C, L), not shape {tuple(x.shape)}.")
        changes = dict(zip(self.names, (u * eta).unbind(1), strict=True))
        zero = x.new_zeros(len(x))
        stretch, shift = changes.get("stretch", zero).exp(), changes.get("shift", zero)
        matrix = torch.stack([stretch, zero, shift, zero, torch.ones_like(zero), zero], 1)
        grid = F.affine_grid(matrix.view(-1, 2, 3), [*x.shape[:2], 1, x.shape[2]], False)
        return F.grid_sample(x[:, :, None], grid, padding_mode="border", align_corners=False)[
            :, :, 0
        ]


class Color(Transform):
    """Changes the colours of images (M, 3, H, W), or only brightness and contrast (M, C, H, W).

    Brightness is added. Contrast multiplies distances from the mean of the image, and saturation
    distances from grey. Their ranges are logarithms. Hue rotates colours around grey, in radians.
    """

    limits = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": math.pi}

    def __call__(self, x: Tensor, eta: Tensor, u: Tensor) -> Tensor:
        """Return the images in other colours."""
        changes = {
            name: value.view(-1, 1, 1, 1)
            for name, value in zip(self.names, (u * eta).unbind(1), strict=True)
        }
        if ("saturation" in changes or "hue" in changes) and (x.dim() != 4 or x.shape[1] != 3):
            raise ValueError(
                f"Saturation and hue need images (N, 3, H, W), not shape {tuple(x.shape)}. Pass "
                "Color('brightness', 'contrast')."
            )
        if "contrast" in changes:
            mean = x.mean((1, 2, 3), keepdim=True)
            x = mean + (x - mean) * changes["contrast"].exp()
        if "saturation" in changes or "hue" in changes:
            grey = x.mean(1, keepdim=True)
            chroma = x - grey
            if "hue" in changes:  # rotate about (1, 1, 1), which is orthogonal to the chroma
                across = (chroma.roll(1, 1) - chroma.roll(-1, 1)) / math.sqrt(3)
                chroma = chroma * changes["hue"].cos() + across * changes["hue"].sin()
            if "saturation" in changes:
                chroma = chroma * changes["saturation"].exp()
            x = grey + chroma
        return x + changes["brightness"] if "brightness" in changes else x


class Flip(Transform):
    """Mirrors every second copy of an image. The range is the weight p of the mirrored copies.

    In the mean over copies, mirrored copies have weight p and other copies 1 − p. Unlike a random
    flip, this is differentiable. p = 1/2 is the usual flip.
    """

    limits = {"flip": 0.5}

    def numbers(self, x: Tensor) -> int:
        """Return 0, because the mirrored copies are not random."""
        return 0

    def weights(self, eta: Tensor, copies: int) -> Tensor:
        """Return weights (S,) that alternate between 2(1 − p) and 2p."""
        if copies % 2:
            raise ValueError(f"Flip needs an even number of copies, not {copies}.")
        return torch.stack([2 - 2 * eta[0], 2 * eta[0]]).repeat(copies // 2)

    def __call__(self, x: Tensor, eta: Tensor, u: Tensor) -> Tensor:
        """Return x with rows 1, 3, ... mirrored along the last axis."""
        mirrored = torch.arange(len(x), device=x.device) % 2 == 1
        return torch.where(mirrored.view(-1, *[1] * (x.dim() - 1)), x.flip(-1), x)


class Noise(Transform):
    """Adds η times a random number of variance 1 to each feature of inputs (M, ...)."""

    limits = {"noise": 1.0}

    def numbers(self, x: Tensor) -> int:
        """Return the number of features, one random number for each."""
        return x[0].numel()

    def __call__(self, x: Tensor, eta: Tensor, u: Tensor) -> Tensor:
        """Return the inputs with uniform noise."""
        return x + math.sqrt(3) * eta[0] * u.view_as(x)
