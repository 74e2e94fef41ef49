"""Linear layers: every axis between the first and the last is shared."""

from torch import Tensor

from kfac_backend.rules.matrix import WeightSharingRule

__all__ = ["LinearRule", "TransposedLinearRule"]


class LinearRule(WeightSharingRule):
    """nn.Linear on (N, ..., d_in), with any number of shared axes."""

    def inputs(self, a: Tensor) -> Tensor:
        """(N, ..., d_in) as (1, N, R, d_in)."""
        if a.dim() < 2:
            raise ValueError(
                f"{self.layer} got shape {tuple(a.shape)}; needs a batch (N, ..., d_in)."
            )
        return a.flatten(1, -2)[None] if a.dim() > 2 else a[None, :, None]


class TransposedLinearRule(LinearRule):
    """A layer y = x W + b whose weight is stored (d_in, d_out), as GPT-2's Conv1D."""

    transposed = True
