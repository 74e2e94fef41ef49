"""A function of images, applied to a few of them at a time."""

from collections.abc import Callable

import torch
from jaxtyping import UInt8
from torch import Tensor

__all__ = ["map_in_chunks"]

CHUNK = 2**20
"""Most pixel values at a time: 4 MiB where a function turns them into float32."""


def map_in_chunks(
    function: Callable[[Tensor], Tensor], images: UInt8[Tensor, "N C H W"]
) -> UInt8[Tensor, "N D I J"]:
    """Return the function of the images, computed from a part of them at a time.

    For functions that take each image by itself and need much more memory than the uint8 images.
    How many images a part has depends on their shape alone, and the parts come in order, so that
    a function that draws random numbers gives the same result each time. No image is one part, so
    that the function says which shape it would have.

    Args:
        function: from images (M, C, H, W) to images (M, D, I, J).
        images: the images.
    """
    size = max(1, CHUNK // max(1, images[:1].numel()))
    return torch.cat([function(part) for part in images.split(size)])
