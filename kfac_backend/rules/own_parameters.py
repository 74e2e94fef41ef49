"""A module's own parameters, used elementwise: each example has a copy with its own gradient."""

from torch import Tensor, nn

from kfac_backend.rules.elementwise import ExactRule
from kfac_backend.rules.rule import Use
from kfac_backend.weight_sharing import PositionSums, at_least_float32

__all__ = ["OwnParameter", "OwnParameterRule", "default_view"]


class OwnParameter(nn.Module):
    """One parameter of a module, declared by `register_parameters`; never run.

    Args:
        module: whose it is.
        name: what it is called there.
        view: the shape, beginning with 1, as which it is broadcast.
    """

    def __init__(self, module: nn.Module, name: str, view: tuple[int, ...]) -> None:
        super().__init__()
        self._module, self.name, self.view = [module], name, view

    @property
    def value(self) -> nn.Parameter:
        """The parameter."""
        return getattr(self._module[0], self.name)

    def copies(self, value: Tensor, N: int) -> Tensor:
        """A copy (N, ...) for each example, in one place of memory."""
        one = value.reshape(self.view)
        return one.expand(N, *one.shape[1:])

    def extra_repr(self) -> str:
        """Whose it is."""
        return f"{type(self._module[0]).__name__}.{self.name}"


class OwnParameterRule(ExactRule):
    """The exact block of such a parameter."""

    def parameter(self, name: str) -> Tensor:
        """The parameter."""
        return self.layer.value

    def gradients(self, use: Use, b: Tensor, sums: PositionSums) -> dict[str, Tensor]:
        """The copies' gradients."""
        (name,) = self.names
        return {name: at_least_float32(b).flatten(1)}


def default_view(p: Tensor) -> tuple[int, ...] | None:
    """The parameter's own shape if its first axis has one entry."""
    return tuple(p.shape) if p.dim() > 1 and p.shape[0] == 1 else None
