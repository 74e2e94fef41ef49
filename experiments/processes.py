"""Several runs at once, each in a process of its own: on the cores of a CPU, or sharing a GPU."""

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import TypeVar

import torch

from marglik.runs.terminal import progress_lines

__all__ = ["as_they_finish", "default_jobs"]

Task = TypeVar("Task")
Result = TypeVar("Result")


def default_jobs(device: str) -> int:
    """One process per core on a CPU, where one thread each is fastest for small networks; else one.

    A GPU has room for several runs of WRN-16-4.
    """
    return (os.cpu_count() or 1) if device == "cpu" else 1


def as_they_finish(
    function: Callable[[Task], Result], tasks: Sequence[Task], jobs: int
) -> Generator[tuple[Task, Result | Exception], None, None]:
    """Yield each task with its result, or with the error that ended it; runs ``jobs`` at a time.

    What the tasks log goes to stderr, each line after the task's name if it has one.
    The processes share the cores evenly. If one dies, the others go on; all end when this
    generator is closed.
    """
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def in_a_process(task: Task) -> Result:
        with ProcessPoolExecutor(
            1, get_context("spawn"), torch.set_num_threads, (threads,)
        ) as process:
            return process.submit(_with_progress, function, task).result()

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(in_a_process, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error  # the process was interrupted
                yield futures[future], future.result() if error is None else error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()


def _with_progress(function: Callable[[Task], Result], task: Task) -> Result:
    name = getattr(task, "name", None)
    with progress_lines(f"{name}: " if name else ""):
        return function(task)
