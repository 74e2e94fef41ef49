"""Batches of curvature passes, with the inputs that a trainer's steps pass to the network.

A pass reads the batches of one epoch from the trainer's current loader. For each batch, the
training step runs up to its call of the network. The arguments of this call are the inputs.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import Arguments, SplitBatch, map_entries, split_batch
from kfac_backend.engine.task import Task

MOST_DEVIATIONS = 6.0
"""Number of standard errors by which the means of two batches of the same kind may differ."""


class StepInputs:
    """Reader of batches, with the inputs that the training step passes to the network.

    Args:
        network: the network: ``module`` or a part of it.
        module: the module that the trainer trains.
        task: determines the targets of a batch.
        prepare: function that moves and converts a batch like the trainer; returns the argument of
            the training step, and the object with the targets.
        step: function that runs the training step with a prepared batch and its number.
    """

    def __init__(
        self,
        network: nn.Module,
        module: nn.Module,
        task: Task,
        prepare: Callable[[Any], tuple[Any, Any]],
        step: Callable[[Any, int], object],
    ) -> None:
        self._network, self._task, self._prepare, self._step = network, task, prepare, step
        self._modes = {m: m.training for m in module.modules()}  # as in the first training step
        inside = set(network.modules())
        self._outside = [m for m in self._modes if m not in inside]
        self._first: Any = None
        self._handle: Any = None
        self._is_watching = False

    def read(self, batch: Any, number: int) -> SplitBatch:
        """Return the network's inputs in a training step with this batch, and its targets."""
        batch, labelled = self._prepare(batch)
        with self._as_in_training(), torch.no_grad():
            call = _arguments_of(self._network, lambda: self._step(batch, number))
        x, y = self.split(labelled)
        x = x if call is None else self._input_of(*call)
        x = _in_dtype(x, next(self._network.parameters()).dtype)
        self._first = x if self._first is None else self._first
        return SplitBatch(x, y)

    def _input_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a call as an input, without the labels."""
        names = {"labels", self._task.options.dict_key_y}
        kwargs = {name: value for name, value in kwargs.items() if name not in names}
        is_alone = len(args) == 1 and not kwargs
        return args[0] if is_alone else Arguments({**dict(enumerate(args)), **kwargs})

    def split(self, labelled: Any) -> tuple[Any, Any]:
        """Return the input and the targets in a batch; numeric targets (N,) become (N, 1)."""
        x, y = split_batch(labelled, self._task.options)
        is_column = isinstance(y, Tensor) and y.dim() == 1 and not self._task.likelihood.has_labels
        return x, y[:, None] if is_column else y

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """Set the modes of training in a context; restore modes, buffers and gradients after it."""
        modes = {m: m.training for m in self._modes}
        buffers = [(b, b.clone()) for m in self._outside for b in m.buffers(recurse=False)]
        gradients = [(p, p.grad) for m in self._modes for p in m.parameters(recurse=False)]
        for m, is_training in self._modes.items():
            m.training = is_training
        for p, _ in gradients:
            p.grad = None
        try:
            yield
        finally:
            for m, is_training in modes.items():
                m.training = is_training
            for p, gradient in gradients:
                p.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def watch(self) -> None:
        """Warn if inputs of the next training step differ from the first pass beyond chance."""
        self._handle = self._network.register_forward_pre_hook(self._compare, with_kwargs=True)
        self._is_watching = True

    def _compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            is_first = self._is_watching
            self.close()  # K-FAC as an optimiser restores the hooks after a call
            if not is_first:
                return
            ours, theirs = _numbers(self._first), _numbers(self._input_of(args, kwargs))
            if difference := _difference(ours, theirs):
                warnings.warn(
                    f"The network's inputs in the first training batch {difference}. The "
                    "curvature and the evidence therefore use other inputs than the training. "
                    "Change batches in the data set, in the trainer's transfer hooks, or in the "
                    "training step before it calls the network. Other hooks and callbacks have "
                    "no effect on curvature passes.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def check_called(self, name: str) -> None:
        """Warn if the first training step has not called the network."""
        was_called = not self._is_watching
        self.close()
        if not was_called:
            warnings.warn(
                f"The training step did not call {name}. Curvature passes call it with the inputs "
                "of the batches, which may differ from the inputs of the training. Pass the "
                "network that the training step calls.",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
        self._is_watching = False


class _Called(BaseException):
    """Ends a training step at its call of the network, even within ``except Exception``."""


def _arguments_of(network: nn.Module, step: Callable[[], object]) -> Any:
    """Return the arguments of the first call of a network; None if there is none."""
    calls: list[Any] = []

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _Called

    # Register it before other hooks, such as hooks that gather a sharded network's parameters.
    handle = network.register_forward_pre_hook(end, prepend=True, with_kwargs=True)
    try:
        step()
    except _Called:
        pass
    finally:
        handle.remove()
    return calls[0] if calls else None


def _in_dtype(x: Any, dtype: torch.dtype) -> Any:
    """Return float16 or bfloat16 inputs, as autocast makes them, in the network's dtype."""
    if isinstance(x, Mapping):
        return map_entries(lambda value: _in_dtype(value, dtype), x)
    is_coarse = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return x.to(dtype) if is_coarse else x


def _numbers(x: Any) -> list[Tensor]:
    """Return the floating-point tensors of an input, in the order of its arguments."""
    if isinstance(x, Tensor):
        return [x.detach()] if x.is_floating_point() and x.dim() else []
    values = x.values() if isinstance(x, Mapping) else ()
    return [tensor for value in values for tensor in _numbers(value)]


def _difference(ours: list[Tensor], theirs: list[Tensor]) -> str | None:
    """Return a description of how two input batches differ beyond chance, or None."""
    if [t.dim() for t in ours] != [t.dim() for t in theirs]:
        shapes = [" and ".join(str((*t.shape,)) for t in ts) or "none" for ts in (ours, theirs)]
        return f"have axes {shapes[1]}, and the curvature passes use {shapes[0]}"
    for a, b in zip(ours, theirs, strict=True):
        a, b = (t.double().reshape(len(t), -1) for t in (a, b))
        if (a.shape == b.shape and torch.allclose(a, b, 1e-2, 1e-3)) or min(len(a), len(b)) < 4:
            continue
        # Compare each example's mean, and the logarithm of its mean square, whose tails are short.
        means, squares = ([t.mean(1) for t in (a, b)], [t.square().mean(1) for t in (a, b)])
        total = torch.cat(squares).mean()
        sizes = [(square + 1e-3 * total).log() for square in squares]
        cases = [("mean", means, total.sqrt()), ("mean square", sizes, 1.0)]
        for name, (ours_n, theirs_n), unit in cases:
            errors = (ours_n.var() / len(a) + theirs_n.var() / len(b)).sqrt()
            difference = (ours_n.mean() - theirs_n.mean()).abs()
            if difference > MOST_DEVIATIONS * errors + 0.05 * unit:
                values = [t.mean() for t in (means if name == "mean" else squares)]
                return (
                    f"differ from the inputs of the curvature passes: their {name} is "
                    f"{values[1]:.4g} instead of {values[0]:.4g}"
                )
    return None
