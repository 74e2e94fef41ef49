"""Files that are written whole or not at all, and their SHA-256 sums."""

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
    """Write a file atomically; returns the SHA-256 sum of its content.

    The content is on the disk before the file gets its name, so that a crash of the machine leaves
    either the old file or the new one. The sum is computed from ``content``, not from the file:
    another process may have replaced the file in between.

    Raises:
        DiskFullError: there is no room; it names the bytes that are needed and those that are free.
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
        temporary.unlink(missing_ok=True)  # so that the error counts its bytes as free
        raise _disk_full(path, len(content), error) from error
    finally:
        # The folder may be read-only by now; `remove_leftovers` tries again.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        _in_work.discard(temporary)
    return sha256(content)


def temporary_path(path: Path) -> Path:
    """The hidden name under which this thread writes a file before it gets its own name."""
    return path.with_name(f"{PREFIX}{os.getpid()}-{get_ident()}-{path.name}")


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed processes from a folder and from the folders below it.

    Temporary files of processes that still run on this machine stay. Processes of other machines
    cannot be seen, so the caller must hold the folder's lock.
    """
    for path in [*folder.rglob(f"{PREFIX}*")]:
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if not owner.isdigit() or path in _in_work:
            continue
        # In a container a killed process may have had the same number as this one.
        if int(owner) == os.getpid() or not _is_alive(int(owner)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    if os.name != "posix":  # elsewhere os.kill would end the process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
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
    """The same type of error, which names the file instead of the temporary one."""
    found = type(error)(
        f"{path} cannot be written ({error.strerror or error}). Change the permissions there, or "
        "write to another place."
    )
    found.errno = error.errno
    return found


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file atomically; returns the SHA-256 sum of its content.

    safetensors' own ``save_file`` makes files that other users cannot read, whatever the umask is.
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
    """The value of a JSON document of any origin.

    Raises:
        ValueError: not JSON, or with numbers or nesting that Python does not parse.
    """
    try:
        return json.loads(text)  # integers of thousands of digits are a ValueError
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
