"""Write and read files atomically: whole, or not at all.

A file is written under a hidden name, forced to the disk, and renamed. So a killed process or a
power failure leaves either the old file or the new one. A SHA-256 sum detects later damage. A file
of tensors has its own sum, in its metadata (`write_tensors`, `read_tensors`). The sum of any other
file is in the record that names it (`write_file` returns it, `file_sum` computes it again).
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a quota, and a limit on the size of files."""
PREFIX = ".partial-"
OWN = "marglik"
"""The only key of a file's metadata, with JSON: safetensors writes several keys in random order."""


class DiskFullError(OSError):
    """Error for a file without room. An earlier file is unchanged."""


def write_file(path: str | Path, content: bytes) -> str:
    """Write a file atomically, with its folder; return the SHA-256 sum of its content.

    The sum is computed from ``content``, not from the file: another process may have replaced the
    file in between.

    Raises:
        DiskFullError: there is no room; the message says how many bytes are needed.
        OSError: it cannot be written for another reason.
    """
    path = Path(path)
    temporary = temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a crash could leave an empty file
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # the folder may be read-only by now; see `remove_leftovers`
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise DiskFullError(
                error.errno,
                f"{path} cannot be written ({error.strerror}): it needs {len(content):,} bytes. "
                "Free some space. An earlier file there is unchanged.",
            ) from error
        raise
    return sha256(content)


def temporary_path(path: Path) -> Path:
    """Return the hidden name under which this thread writes a file before the rename."""
    return path.with_name(f"{PREFIX}{os.getpid()}-{get_ident()}-{path.name}")


def remove_leftovers(folder: Path) -> None:
    """Remove incomplete files of killed processes in a folder, but not in its subfolders.

    No other process may write there.
    """
    for path in [*folder.glob(f"{PREFIX}*-*-*")]:
        path.unlink(missing_ok=True)


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file with a checksum atomically; return the file's own SHA-256 sum.

    The checksum covers all names, dtypes, shapes, values and metadata. It is a part of the
    metadata, so any program that supports safetensors can read the file.
    """
    metadata = dict(metadata or {})
    header = {"checksum": _checksum(tensors, metadata), "metadata": metadata}
    # safetensors' own save_file makes files that other users cannot read, for any umask.
    return write_file(path, save(dict(tensors), {OWN: json.dumps(header, sort_keys=True)}))


def read_tensors(
    path: str | Path,
    device: torch.device | str = "cpu",
    *,
    kind: str = "tensors",
    of_others: bool = False,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of `write_tensors`, after verifying the checksum.

    ``kind`` describes the content in errors. With ``of_others`` files of other programs, which have
    no checksum, are read, too.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a damaged or truncated file, or one without a checksum.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"No file of {kind} at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, kind, str(error)) from error
    if OWN in metadata:
        try:
            header = parse_json(metadata[OWN])
            metadata, expected = dict(header["metadata"]), header["checksum"]
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(path, kind, "its metadata was altered") from error
        if expected != _checksum(tensors, metadata):
            raise _damaged(path, kind, "its checksum differs")
    elif not of_others:
        raise _damaged(path, kind, "it has no checksum")
    # Copies, because the tensors are views of the file in memory. The file may change, and its
    # addresses are not aligned. BLAS rounds differently there, and a loaded posterior would not be
    # the same.
    return {key: tensor.to(device, copy=True) for key, tensor in tensors.items()}, metadata


def _damaged(path: str | Path, kind: str, reason: str) -> ValueError:
    return ValueError(
        f"{path} is not an intact file of {kind} ({reason}). It was truncated or altered, or "
        "another program wrote it. Write it again, or restore a copy."
    )


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    names = sorted(tensors)  # a file keeps them in its own order
    text = json.dumps([names, sorted(metadata.items())])
    return sha256((text + sha256_of_tensors(tensors[name] for name in names)).encode())


def sha256(content: bytes) -> str:
    """Return the SHA-256 sum in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def file_sum(path: Path) -> str:
    """Return the SHA-256 sum of a file's content, as returned by `write_file`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_tensors(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 sum of tensors' dtypes, shapes and values, in hexadecimal digits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        values: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(values)
    return digest.hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document of any origin.

    Raises:
        ValueError: not JSON, or numbers or nesting that Python does not parse.
    """
    try:
        return json.loads(text)  # integers of thousands of digits are a ValueError
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
