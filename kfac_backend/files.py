"""Files that are either whole or not there, and the SHA-256 sums of what was written into them."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

__all__ = [
    "DiskFullError",
    "parse_json",
    "remove_leftovers",
    "sha256",
    "sha256_of_tensors",
    "temporary_path",
    "write_file",
    "write_tensors",
]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a quota, a limit on the size of files."""
PREFIX = ".partial-"

_in_work: set[Path] = set()
"""Temporary files that this process is writing."""


class DiskFullError(OSError):
    """A file has no room; what was there before is as it was."""


def write_file(path: str | Path, content: bytes) -> str:
    """Write a file atomically; returns the sum of its content.

    The content is on the disk before the name is, so that a crash of the machine leaves the old
    file or the new one. The sum is made of what was handed over: one of what lies at the path
    afterwards would vouch for whatever another process put there.

    Raises:
        DiskFullError: there is no room for it; it names the bytes that are wanted, and those that
            are free.
        OSError: it cannot be written for another reason, which it names with the file.
    """
    path = Path(path)
    temporary = temporary_path(path)
    _in_work.add(temporary)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise _not_written(path, error) from error
        temporary.unlink(missing_ok=True)  # what is free then counts
        raise _disk_full(path, len(content), error) from error
    finally:
        with suppress(OSError):  # in a folder that has become read-only; the next command tries
            temporary.unlink(missing_ok=True)
        _in_work.discard(temporary)
    return sha256(content)


def temporary_path(path: Path) -> Path:
    """A hidden name beside a path, for what this process has in work; see `remove_leftovers`."""
    return path.with_name(f"{PREFIX}{os.getpid()}-{get_ident()}-{path.name}")


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed had in work in a folder and in those below it.

    What processes of this machine that live have in work stays. Processes of other machines are
    not seen: whoever calls this holds the folder's lock.
    """
    for path in [*folder.rglob(f"{PREFIX}*")]:
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if not owner.isdigit() or path in _in_work:
            continue
        # In a container all processes may have had one number, that of this one.
        if int(owner) == os.getpid() or not _is_alive(int(owner)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    if os.name != "posix":  # where asking would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of someone else
        return True
    return True


def _disk_full(path: Path, wanted: int, error: OSError) -> DiskFullError:
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    found = DiskFullError(
        f"{path} cannot be written ({os.strerror(error.errno or 0)}): {wanted:,} bytes are wanted, "
        f"{free:,} are free. Nothing half-written is left, and what was there before is whole. "
        "Make room there."
    )
    found.errno = error.errno
    return found


def _not_written(path: Path, error: OSError) -> OSError:
    """The same kind of error, of the file in place of the temporary one."""
    found = type(error)(
        f"{path} cannot be written ({error.strerror or error}). Change the permissions there, or "
        "write to another place."
    )
    found.errno = error.errno
    return found


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file atomically; returns the sum of its content.

    safetensors' own ``save_file`` makes files that nobody else can read, whatever the umask says.
    """
    return write_file(path, save(dict(tensors), None if metadata is None else dict(metadata)))


def sha256(content: bytes) -> str:
    """The SHA-256 sum in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_tensors(tensors: Iterable[Tensor]) -> str:
    """The SHA-256 sum of tensors' dtypes, shapes and values, in hexadecimal digits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        values: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(values)
    return digest.hexdigest()


def parse_json(text: str | bytes) -> Any:
    """What a JSON document of any origin says.

    Raises:
        ValueError: it is no JSON, or has numbers or nesting that Python does not take.
    """
    try:
        return json.loads(text)  # integers of thousands of digits are a ValueError
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
