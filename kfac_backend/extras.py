"""The core needs torch, numpy, safetensors, tqdm and jaxtyping; the rest are extras.

`pip install 'marglik[all]'` brings all extras. What an extra brings is imported where it is used,
inside `extra`, so that its absence is one line that says how to install it.
"""

from collections.abc import Iterator
from contextlib import contextmanager


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
