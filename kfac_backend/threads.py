"""Passes in several threads: turns on a model, settings of the process, work on several cores.

A pass registers hooks on a model's layers and exchanges their tensors. Meanwhile no other thread
may run these layers or read their parameters: `turn_of`. Settings of PyTorch, such as the precision
of float32, belong to the process: passes that need the same value share it (`SharedSetting`), and a
pass that needs another one runs alone.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import nn

__all__ = ["SharedSetting", "map_on_cores", "turn_of"]

T = TypeVar("T")
S = TypeVar("S")


def map_on_cores(function: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """[function(item) for each item], with as many at once as torch has threads, each on one core.

    Use it for LAPACK, whose routines gain little from a second thread: it saves a sixth of the time
    of the eigenvalues of a 2304×2304 matrix. If another process uses the same cores they even lose,
    because threads wait for each other: the inverse of such a matrix took 2.9 s with two threads
    and 0.07 s with one.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return [function(item) for item in items]

    def on_one_core(item: S) -> T:
        torch.set_num_threads(1)
        return function(item)

    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(on_one_core, items))
    finally:
        torch.set_num_threads(threads)


class SharedSetting(Generic[T]):
    """A setting of the process that several threads hold at one value.

    The first to hold it remembers the former value, the last restores that.

    Args:
        read: returns the present value.
        write: sets it.
        value: the value to hold.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], None], value: T) -> None:
        self._read, self._write, self._value = read, write, value
        self._lock = threading.Lock()
        self._holders = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which the setting has the value."""
        with self._lock:
            if self._holders == 0:
                self._before = self._read()
                self._write(self._value)
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    try:
                        self._write(self._before)
                    except BaseException:  # Ctrl-C before it was written: the setting would stay
                        self._write(self._before)
                        raise


@dataclass(eq=False)
class _Turn:
    layers: set[int]
    alone: bool
    thread: int = field(default_factory=threading.get_ident)

    def conflicts(self, other: "_Turn") -> bool:
        if self.thread == other.thread:
            return False
        return self.alone or other.alone or not self.layers.isdisjoint(other.layers)


_changed = threading.Condition()
_waiting: list[_Turn] = []
_running: list[_Turn] = []


@contextmanager
def turn_of(model: nn.Module, alone: bool = False) -> Iterator[None]:
    """A context in which no other thread has a turn on a layer of the model; it waits for that.

    Threads are served in the order in which they ask. A thread that has a turn may take another one
    inside, for which it does not wait: the thread that it would wait for may wait for it.

    Args:
        model: the model.
        alone: whether to wait until no other thread has any turn, on whatever model.

    Raises:
        RuntimeError: an inner turn would have to wait.
    """
    turn = _Turn({id(module) for module in model.modules()}, alone)
    with _changed:
        if any(other.thread == turn.thread for other in _running):
            if any(map(turn.conflicts, _running)):
                raise RuntimeError(
                    f"{type(model).__name__} is run by another thread, which may wait for this "
                    "one. Let one finish first, or give each thread a copy (copy.deepcopy)."
                )
            _running.append(turn)
        else:
            _waiting.append(turn)
            try:
                # Not only for running turns, but for those that were asked for earlier: otherwise a
                # turn ``alone`` might never come while others begin and end.
                while any(map(turn.conflicts, _running + _waiting[: _waiting.index(turn)])):
                    _changed.wait()
                _running.append(turn)
            finally:
                _waiting.remove(turn)
                _changed.notify_all()
    try:
        yield
    finally:
        with _changed:
            _running.remove(turn)
            _changed.notify_all()
