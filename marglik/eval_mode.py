"""Contexts that put a model in eval mode and restore the mode of every submodule afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from kfac_backend.engine.model_calls import preserve_state, state_restorer


@contextmanager
def preserve_mode(model: nn.Module) -> Iterator[None]:
    """A context after which each submodule is in its former mode (train or eval) again.

    After an error, hooks and parameters (the objects) are restored, too: Ctrl-C during a forward
    pass would otherwise leave K-FAC's hooks behind, since torch then skips those that remove them.
    """
    training = [(module, module.training) for module in model.modules()]
    restore = state_restorer(model)
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
    """A context in which a model is in eval mode; as a decorator, for each call of a function.

    Afterwards, also after an error, it is what it was: its modes, hooks and parameter objects.
    """
    with preserve_state(model):
        model.eval()
        yield
