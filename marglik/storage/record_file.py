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
    "POSTERIOR_VERSION",
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
POSTERIOR_FORMAT, POSTERIOR_VERSION = "marglik.posterior", 1


def write_record(path: Path, record: dict[str, Any], sums: dict[str, str]) -> str:
    """Write a record with its own sum and those of its files, by name; returns the file's sum."""
    record = json.loads(json.dumps(record))  # as it will be read back: tuples become lists
    own = {path.name: _sha256_of_record(record, sums)}
    return write_json(path, record | {"sha256": sums | own})


def write_json(path: Path, content: Any) -> str:
    """Write a JSON file atomically; returns its SHA-256 sum."""
    return write_file(path, as_json(content))


def as_json(content: Any) -> bytes:
    """Plain data as the content of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def read_record(path: Path, kind: str, version: int, *, what: str, remedy: str) -> dict[str, Any]:
    """Read a record, and verify it and the files that it names.

    Args:
        path: path of the record.
        kind: its "format".
        version: the newest version that can be read.
        what: name of what it describes, for errors.
        remedy: a sentence that says what a user can do, for errors.

    Raises:
        FileNotFoundError: a file that the record names is missing.
        ValueError: another format, a newer version, or a file that was truncated or altered.
    """
    try:
        record = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); it was altered. {remedy}") from error
    if not isinstance(record, dict) or record.get("format") != kind:
        raise ValueError(f"{path} describes no {what}. {remedy}")
    found, sums = record.get("version"), record.get("sha256") or {}
    if isinstance(found, int) and found > version:
        raise ValueError(
            f"{path} has format version {found}, this release reads up to {version}; update "
            "marglik."
        )
    own = sums.get(path.name) if isinstance(sums, dict) else None
    files = {n: s for n, s in sums.items() if n != path.name} if own else {}
    if own is None or own != _sha256_of_record(record, files):
        raise ValueError(f"{path} is not as it was written: it was altered. {remedy}")
    for name, expected in files.items():
        if Path(name).name != name:  # a record from elsewhere must not have any file read
            raise ValueError(f"{path} names '{name}', which is not beside it. {remedy}")
        file = path.parent / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing, which {path.name} lists. {remedy}")
        if file_sum(file) != expected:
            raise ValueError(
                f"{file} is not the one that {path.name} was written with: it was truncated or "
                f"altered, or is from another run. {remedy}"
            )
    return record


def _sha256_of_record(record: dict[str, Any], sums: dict[str, str]) -> str:
    """The SHA-256 sum of a record without its own sum."""
    text = json.dumps({k: v for k, v in record.items() if k != "sha256"} | {"sha256": sums})
    return sha256(text.encode())


def read_posterior(folder: str | Path) -> dict[str, Any]:
    """The content of ``posterior.json``, once it and the files that it names are verified.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another format, a newer version, or a file that was truncated or altered.
    """
    path = Path(folder) / POSTERIOR
    if not path.is_file():
        raise FileNotFoundError(
            f"No posterior in {folder} ({POSTERIOR} is missing); make one with marglik train or "
            "marglik fit."
        )
    record = read_record(
        path, POSTERIOR_FORMAT, POSTERIOR_VERSION, what="posterior", remedy="Fit again."
    )
    if not {FACTORS, MODEL} <= record["sha256"].keys():
        raise ValueError(f"{path} is not as it was written: it was altered. Fit again.")
    return record
