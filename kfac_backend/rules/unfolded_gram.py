"""The Gram matrix of an image's patches by unfolding them: any number of axes, any groups."""

from jaxtyping import Float
from torch import Tensor

from kfac_backend.rules.window import Window, patches
from kfac_backend.weight_sharing import GramSum, at_least_float32

__all__ = ["UnfoldedGram"]

PATCH_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""How much is unfolded at once; one image at least.

On a CPU more leaves its cache: 32 volumes of 16×8×16×16 with kernels of 3³ take 0.61 s (one x86-64
core) where all is unfolded at once, 0.34 s with 16 MiB at a time.
"""


class UnfoldedGram(GramSum):
    """Σ of patch patchᵀ over images that were added, (G, d, d) in the order of `patches`."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self._groups = groups

    def add_images(self, image: Float[Tensor, "N C *sizes"], *axes: Window) -> None:
        """Add all patches of a batch, some images at a time."""
        image = at_least_float32(image)
        row = image.shape[1] * image.element_size()
        for window in axes:
            row *= window.positions * window.kernel
        size = max(1, PATCH_BYTES.get(image.device.type, PATCH_BYTES["cuda"]) // row)
        for some in image.split(size):
            self.add(patches(some, self._groups, *axes).flatten(1, 2))
