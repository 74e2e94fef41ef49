"""The core needs torch, numpy, safetensors and tqdm; everything else is an extra of the package.

`pip install 'marglik[all]'` brings all extras. What an extra brings is imported where it is used,
inside `extra`, so that its absence is one line that says how to install it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

__all__ = ["Bool", "Float", "Int", "Int64", "UInt8", "extra"]


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports that ``pip install 'marglik[name]'`` makes possible.

    Raises:
        ModuleNotFoundError: a package that is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'marglik[{name}]'.", name=error.name
        ) from error


# Shapes in annotations are jaxtyping's, which tests check; without it they say only the type.
if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Int64, UInt8
else:
    try:
        from jaxtyping import Bool, Float, Int, Int64, UInt8
    except ModuleNotFoundError:

        class Shaped:
            """``Float[Tensor, "N C"]`` as ``Tensor``."""

            def __class_getitem__(cls, array_and_shape: tuple[Any, str]) -> Any:
                return array_and_shape[0]

        Bool = Float = Int = Int64 = UInt8 = Shaped
