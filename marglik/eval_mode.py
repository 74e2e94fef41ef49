"""Eval mode for a while, and then every module back in the mode it was in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import nn

from kfac_backend.model.calls import restoration
from kfac_backend.threads import turn_of

__all__ = ["eval_mode", "in_eval_mode", "kept_mode"]

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def kept_mode(model: nn.Module) -> Iterator[None]:
    """Restore each submodule's mode (train or eval) afterwards, whatever happens to it.

    After an error, also its hooks and parameters (the objects): Ctrl-C in a forward pass leaves
    those of K-FAC, as torch then calls no hook.
    """
    training = [(module, module.training) for module in model.modules()]
    restore = restoration(model)
    try:
        yield
    except BaseException:
        restore()
        raise
    finally:
        for module, mode in training:
            module.training = mode


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and restore each submodule's own mode afterwards."""
    with kept_mode(model):
        model.eval()
        yield


def in_eval_mode(model: nn.Module, function: Callable[P, T]) -> Callable[P, T]:
    """The function, with the model in eval mode, in one thread; then, come what may, as it was.

    Not only its mode: laplace-torch's functions, too, leave no hook and no other parameter in it.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with turn_of(model):
            restore = restoration(model)
            try:
                model.eval()
                return function(*args, **kwargs)
            finally:
                restore()

    return run
