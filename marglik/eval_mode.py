"""Context managers that put a model in eval mode and restore the mode of every submodule."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from kfac_backend.engine.model_calls import preserve_state, state_restorer


@contextmanager
def preserve_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the mode (train or eval) of each submodule on exit.

    After an error it also restores hooks and parameter objects. Otherwise Ctrl-C during a forward
    pass would leave K-FAC's hooks, because torch then skips the hooks that remove them.
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
    """Context manager with a model in eval mode; as a decorator, for each call of a function.

    On exit, also after an error, it restores modes, hooks and parameter objects.
    """
    with preserve_state(model):
        if any(module.training for module in model.modules()):
            model.eval()
        yield
