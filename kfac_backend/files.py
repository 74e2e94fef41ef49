"""Files that are either whole or not there, and the SHA-256 sums of what was written into them."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

__all__ = ["parse_json", "sha256", "sha256_of_tensors", "write_file", "write_tensors"]


def write_file(path: str | Path, content: bytes) -> str:
    """Write a file atomically; returns the sum of its content.

    The content is on the disk before the name is, so that a crash of the machine leaves the old
    file or the new one. The sum is made of what was handed over: one of what lies at the path
    afterwards would vouch for whatever another process put there.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return sha256(content)


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
