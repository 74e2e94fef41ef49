"""A vision transformer: self-attention among the patches of an image."""

from typing import Literal

import torch
from torch import Tensor, nn

from kfac_backend import register_parameters
from kfac_backend.options import check_option
from marglik.models.transformer import SelfAttention, TransformerBlock, check_heads
from marglik.sizes import check_sizes

__all__ = ["VisionTransformer"]

Pool = Literal["mean", "class_token"]


@register_parameters("class_token", "position_embedding")
class VisionTransformer(nn.Module):
    """Logits of a vision transformer for small images.

    Each patch becomes a position with d features, to which a learned position embedding is added.
    Transformer blocks mix the positions, and the normalised class token, or the mean of all
    normalised positions, is classified. K-FAC sees the paper's reduce setting: the R positions of
    an example share the weights, and have one loss term together.

    Source: Dosovitskiy et al. 2021, "An Image Is Worth 16x16 Words". Weights are initialised
    uniformly as in Glorot & Bengio 2010, biases and the class token to zero, the position embedding
    from N(0, 0.02²).

    Args:
        num_classes: C, the number of classes.
        in_channels: channels of the images.
        image_size: height and width of the images in pixels.
        patch_size: height and width of a patch in pixels, a divisor of ``image_size``.
        dim: d, the features of a position.
        depth: number of transformer blocks.
        heads: attention heads in a block, a divisor of ``dim``.
        mlp_ratio: width of the blocks' hidden layer, in units of ``dim``.
        pool: what is classified: the "mean" of the positions, or an additional "class_token".

    Raises:
        ValueError: if a size is below 1, ``patch_size`` does not divide ``image_size``, ``heads``
            does not divide ``dim``, or ``pool`` is unknown.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        patch_size: int = 4,
        dim: int = 64,
        depth: int = 4,
        heads: int = 4,
        mlp_ratio: float = 2.0,
        pool: Pool = "mean",
    ) -> None:
        super().__init__()
        check_heads(dim, heads)
        check_sizes(
            num_classes=num_classes,
            in_channels=in_channels,
            image_size=image_size,
            patch_size=patch_size,
            depth=depth,
        )
        if image_size % patch_size:
            raise ValueError(
                f"patch_size={patch_size} does not divide image_size={image_size}; choose a "
                "divisor, or resize or pad the images."
            )
        mlp_dim = round(mlp_ratio * dim)
        if mlp_dim < 1:
            raise ValueError(
                f"mlp_ratio={mlp_ratio} gives {mlp_dim} hidden features with dim={dim}; at least 1 "
                "is needed: customary ratios are 2 to 4."
            )
        check_option("pool", pool, Pool)
        self.in_channels = in_channels
        self.image_size = image_size
        self.patch_embedding = nn.Conv2d(in_channels, dim, patch_size, patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim)) if pool == "class_token" else None
        # One position per patch, and one for the class token.
        R = (image_size // patch_size) ** 2 + (pool == "class_token")
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, R, dim))
        self.blocks = nn.Sequential(*[TransformerBlock(dim, heads, mlp_dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, C) of images (N, in_channels, image_size, image_size)."""
        expected = (self.in_channels, self.image_size, self.image_size)
        if tuple(x.shape[1:]) != expected:
            raise ValueError(
                f"VisionTransformer got images of shape {tuple(x.shape[1:])} and was built for "
                f"{expected}; set in_channels and image_size to those of the data."
            )
        x = self.patch_embedding(x).flatten(2).mT.contiguous()  # (N, R, d), patches row by row
        if self.class_token is not None:
            # A copy for each example, as curvature takes bare parameters to be used per example.
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        x = self.norm(self.blocks(x + self.position_embedding))  # (N, R, d)
        return self.head(x.mean(dim=1) if self.class_token is None else x[:, 0])


def _initialise(module: nn.Module) -> None:
    """Glorot's initialisation for linear maps; queries, keys and values are three of them."""
    if isinstance(module, SelfAttention):
        for weight in module.qkv.weight.detach().chunk(3):
            nn.init.xavier_uniform_(weight)
    elif isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_uniform_(module.weight.detach().flatten(1))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
