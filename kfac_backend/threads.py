"""What belongs to the whole process, or to a model, and how passes in several threads share it.

A pass hangs hooks on a model's layers and lends them other tensors, so that no other thread may run
them, or read their parameters, meanwhile. Settings of PyTorch, such as the precision of float32,
are of the process: any number of passes share one value, and one that changes it runs alone.
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
    """The function of each item, as many at once as torch has threads, each on one core.

    For LAPACK, whose routines gain little from a second thread: the eigenvalues of 2304×2304 a
    sixth of the time. With another process on the same cores they even lose, as threads wait for
    each other: the inverse of such a matrix took 2.9 s with two threads, 0.07 s with one.
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
    """A setting of the process that threads hold at one value; the last restores what was there.

    Args:
        read: returns the present value.
        write: sets it.
        value: what it is held at.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], None], value: T) -> None:
        self._read, self._write, self._value = read, write, value
        self._lock = threading.Lock()
        self._holders = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the setting for a while."""
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
                    except BaseException:  # Ctrl-C as it begins: else the setting would stay
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
    """Wait until no other thread runs a layer of the model in a turn, or, if ``alone``, any at all.

    First come, first served. Within a turn its thread may take others, at once: it would hold up
    what it waits for.

    Raises:
        RuntimeError: a turn within another would have to wait.
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
