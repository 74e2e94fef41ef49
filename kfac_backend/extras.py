"""Import optional dependencies. The core needs torch, numpy, safetensors, tqdm and jaxtyping.

`pip install 'marglik[all]'` installs all extras. Packages of an extra are imported where they are
used, inside `extra`. If one is missing, a one-line error says how to install it.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Context around imports that need ``pip install 'marglik[name]'``.

    Raises:
        ModuleNotFoundError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'marglik[{name}]'.", name=error.name
        ) from error
