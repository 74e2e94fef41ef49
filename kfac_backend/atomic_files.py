"""The one way in which files are written and read back: whole, or not at all.

A file is written under a hidden name, forced to the disk, and renamed. So a process killed at any
moment, and a machine that loses its power, leave either the old file or the new one. What may be
damaged later carries a SHA-256 sum: a file of tensors its own, in its metadata (`write_tensors`,
`read_tensors`); any other file in the record that names it (`write_file` returns it, `file_sum`
computes it again).
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
"""A full disk, a quota, a limit on the size of files."""
PREFIX = ".partial-"
OWN = "marglik"
"""The one key of a file's metadata, of JSON: safetensors writes several in an order by chance."""


class DiskFullError(OSError):
    """A file has no room; what was there before is as it was."""


def write_file(path: str | Path, content: bytes) -> str:
    """Write a file atomically, with its folder; returns the SHA-256 sum of its content.

    The sum is computed from ``content``, not from the file: another process may have replaced the
    file in between.

    Raises:
        DiskFullError: there is no room; it names the bytes that are needed.
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
    """The hidden name under which this thread writes a file before it gets its own name."""
    return path.with_name(f"{PREFIX}{os.getpid()}-{get_ident()}-{path.name}")


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes have left half-written in a folder, but not in those below it.

    No other process may be writing there.
    """
    for path in [*folder.glob(f"{PREFIX}*-*-*")]:
        path.unlink(missing_ok=True)


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file with a checksum atomically; returns the file's own SHA-256 sum.

    The checksum is that of all names, dtypes, shapes, values and metadata. It lies in the metadata,
    so that any program that knows safetensors can still read the file.
    """
    metadata = dict(metadata or {})
    header = {"checksum": _checksum(tensors, metadata), "metadata": metadata}
    # safetensors' own save_file makes files that other users cannot read, whatever the umask is.
    return write_file(path, save(dict(tensors), {OWN: json.dumps(header, sort_keys=True)}))


def read_tensors(
    path: str | Path,
    device: torch.device | str = "cpu",
    *,
    kind: str = "tensors",
    of_others: bool = False,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata that `write_tensors` wrote, once the checksum is verified.

    Args:
        path: the file.
        device: where the tensors go.
        kind: what the file holds, for errors.
        of_others: also read files that other programs wrote, which have no checksum.

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
    # Copies: the tensors are views of the file in memory, which may change, at addresses that are
    # not aligned. BLAS rounds differently there, and a loaded posterior would not be the same.
    return {key: tensor.to(device, copy=True) for key, tensor in tensors.items()}, metadata


def _damaged(path: str | Path, kind: str, reason: str) -> ValueError:
    return ValueError(
        f"{path} is not an intact file of {kind} ({reason}). It was truncated or altered, or "
        "another program wrote it. Write it again, or restore a copy."
    )


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    names = sorted(tensors)  # a file keeps them in an order of its own
    text = json.dumps([names, sorted(metadata.items())])
    return sha256((text + sha256_of_tensors(tensors[name] for name in names)).encode())


def sha256(content: bytes) -> str:
    """The SHA-256 sum in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def file_sum(path: Path) -> str:
    """The SHA-256 sum of a file's content, as `write_file` returned it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
