"""Linear layers with any number of shared axes between batch and features."""

from torch import Tensor, nn

from kfac_backend.rules.rule import WeightSharingRule

__all__ = ["LinearRule"]


class LinearRule(WeightSharingRule):
    """nn.Linear: input (N, ..., d_in), output (N, ..., d_out); R is the product of the dots."""

    layer_type = nn.Linear

    def inputs(self, layer: nn.Linear, a: Tensor) -> Tensor:
        """(N, ..., d_in) as (1, N, R, d_in)."""
        if a.dim() < 2:
            raise ValueError(f"{layer} got shape {tuple(a.shape)}; needs a batch (N, ..., d_in).")
        return _flatten_shared(a)[None]

    def output_gradients(self, layer: nn.Linear, b: Tensor) -> Tensor:
        """(N, ..., d_out) as (N, R, d_out)."""
        return _flatten_shared(b)


def _flatten_shared(x: Tensor) -> Tensor:
    """(N, ..., d) as (N, R, d), R = 1 without a shared axis."""
    return x.reshape(len(x), -1, x.shape[-1])
