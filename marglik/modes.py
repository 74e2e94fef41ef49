"""Eval mode for a while, and then every module back in the mode it was in."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["eval_mode", "kept_mode"]


@contextmanager
def kept_mode(model: nn.Module) -> Iterator[None]:
    """Restore each submodule's mode (train or eval) afterwards, whatever happens to it."""
    training = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and restore each submodule's own mode afterwards."""
    with kept_mode(model):
        model.eval()
        yield
