"""Linear layers with any number of shared axes between batch and features."""

from torch import Tensor, nn

from kfac_backend.rules.rule import WeightSharingRule

__all__ = ["LinearRule"]


class LinearRule(WeightSharingRule):
    """nn.Linear: input (N, ..., d_in), output (N, ..., d_out); R is the product of the dots."""

    layer_type = nn.Linear

    def inputs(self, a: Tensor) -> Tensor:
        """(N, ..., d_in) as (1, N, R, d_in), R = 1 without a shared axis."""
        if a.dim() < 2:
            raise ValueError(
                f"{self.layer} got shape {tuple(a.shape)}; needs a batch (N, ..., d_in)."
            )
        return a.reshape(1, len(a), -1, a.shape[-1])
