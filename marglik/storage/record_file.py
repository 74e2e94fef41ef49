"""A JSON record with the SHA-256 sums of itself and of files beside it.

It is written last and atomically: if it exists, the files that it names are complete.
"""

import json
from pathlib import Path
from typing import Any

from kfac_backend.files import file_sum, parse_json, sha256, write_file

__all__ = [
    "ENSEMBLE",
    "FACTORS",
    "MEMBERS",
    "MODEL",
    "POSTERIOR",
    "POSTERIOR_FORMAT",
    "as_json",
    "read_posterior",
    "read_record",
    "write_json",
    "write_record",
]

MODEL = "model.safetensors"
"""The network's parameters and buffers."""
FACTORS = "posterior.safetensors"
"""The curvature's Kronecker factors."""
POSTERIOR = "posterior.json"
"""Hyperparameters, and how the network is built."""
ENSEMBLE, MEMBERS = "ensemble.json", "ensemble.safetensors"
"""What all members of an ensemble share, and their parameters and buffers."""
POSTERIOR_FORMAT = "marglik.posterior"


def write_record(path: Path, record: dict[str, Any], sums: dict[str, str]) -> str:
    """Write a record with its own sum and those of its files, by name; returns the file's sum."""
    record = json.loads(json.dumps(record))  # as it will be read back: tuples become lists
    own = {path.name: _sum_of(record, sums)}
    return write_json(path, record | {"sha256": sums | own})


def write_json(path: Path, content: Any) -> str:
    """Write a JSON file atomically; returns its SHA-256 sum."""
    return write_file(path, as_json(content))


def as_json(content: Any) -> bytes:
    """Plain data as the content of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def read_record(path: Path, kind: str, remedy: str) -> dict[str, Any]:
    """Read a record, and verify it and the files that it names.

    Args:
        path: path of the record.
        kind: its "format".
        remedy: a sentence that says what a user can do, for errors.

    Raises:
        ValueError: another program's file; one that is damaged, or lacks a file that it names.
    """
    try:
        record = parse_json(path.read_bytes())
        sums = dict(record["sha256"])
        is_whole = sums.pop(path.name) == _sum_of(record, sums) and record["format"] == kind
    except (ValueError, TypeError, KeyError, AttributeError):
        is_whole, record, sums = False, {}, {}
    if not is_whole:
        raise ValueError(
            f"{path} is not as marglik wrote it: it was truncated or altered, or another program "
            f"wrote it. {remedy}"
        )
    for name, expected in sums.items():
        file = path.parent / name
        # A record from elsewhere must not have any file read: only those beside it.
        if Path(name).name != name or not file.is_file() or file_sum(file) != expected:
            raise ValueError(
                f"{file} is missing, or not the one that {path.name} was written with: it was "
                f"truncated or altered, or is from another run. {remedy}"
            )
    return record


def _sum_of(record: dict[str, Any], sums: dict[str, str]) -> str:
    """The SHA-256 sum of a record with its files' sums, but without its own."""
    text = json.dumps({k: v for k, v in record.items() if k != "sha256"} | {"sha256": sums})
    return sha256(text.encode())


def read_posterior(folder: str | Path) -> dict[str, Any]:
    """The content of ``posterior.json``, once it and the files that it names are verified.

    Raises:
        FileNotFoundError: there is no posterior.
        ValueError: a file is missing or damaged.
    """
    path = Path(folder) / POSTERIOR
    if not path.is_file():
        raise FileNotFoundError(
            f"No posterior in {folder} ({POSTERIOR} is missing); make one with marglik train or "
            "marglik fit."
        )
    return read_record(path, POSTERIOR_FORMAT, "Fit again.")
