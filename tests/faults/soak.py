"""What a process holds, and whether that grows as it does the same again and again."""

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Held", "held", "soak"]

SLACK_KIB = 2048
"""How much the resident memory of a process that leaks nothing moves by itself."""


RESULTS = "MARGLIK_SOAK_JSON"
"""Names the file to which each test adds what it held."""


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    kib: int
    """Resident memory."""
    files: int
    threads: int
    objects: int
    """That Python's garbage collector looks at, after a collection."""


def held() -> Held:
    """What this process holds now, once all that is garbage has been given back."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(gc.get_objects()),
    )


def soak(work: Callable[[int], object], times: int) -> list[Held]:
    """Do work so many times; what is held after each fifth of it, once the first is done.

    Raises:
        AssertionError: files, threads or objects have become more, or memory with each fifth.
    """
    found = []
    gc.collect()
    gc.freeze()  # the packages' own objects, which take a second to look through
    try:
        for i in range(times):
            work(i)
            if (i + 1) % (times // 5) == 0:
                found.append(held())
    finally:
        gc.unfreeze()
    first, last = found[0], found[-1]
    print(*found, sep="\n", file=sys.stderr)
    if path := os.environ.get(RESULTS):
        _write(Path(path), found, times)
    assert last.files <= first.files, found
    assert last.threads <= first.threads, found
    # What was found is some, and a cache that fills up for good is no leak.
    assert last.objects - first.objects < len(found) + times / 5, found
    assert last.kib - first.kib < SLACK_KIB, found
    return found


def _write(path: Path, found: list[Held], times: int) -> None:
    """Add a test's numbers to a file, before they are judged."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "soak").partition("::")[2].partition("[")[0]
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = {"times": times, "held": [asdict(one) for one in found]}
    path.write_text(json.dumps(known, indent=1) + "\n")
