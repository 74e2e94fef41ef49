"""Records: JSON files with the SHA-256 sums of their own content and of other files in the folder.

A record is written after these files, in one step. If it exists, the files are complete.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfac_backend.atomic_files import file_sum, parse_json, sha256, write_file

POSTERIOR, FACTORS = "posterior.json", "posterior.safetensors"
"""Hyperparameters with the specification of the network, and the factors of the curvature."""
FINGERPRINTS = "fingerprints.safetensors"
"""A number of 64 bits for each example of the fit, see `marglik.posterior.fingerprints`."""
MODEL = "model.safetensors"
"""Parameters and buffers of the network."""
ENSEMBLE, MEMBERS = "ensemble.json", "ensemble.safetensors"
"""Data that the members of an ensemble share, and their parameters and buffers."""


def write_json(path: Path, content: Any) -> str:
    """Write a JSON file atomically, and return its SHA-256 sum."""
    return write_file(path, (json.dumps(content, indent=2) + "\n").encode())


def write_record(path: Path, record: dict[str, Any], sums: Mapping[str, str] | None = None) -> str:
    """Write a record with its own sum and ``sums`` (file name -> sum); return the file's sum."""
    # Sum the data in the form in which it is read back: tuples become lists.
    record = json.loads(json.dumps({"format": format_of(path)} | record))
    files = dict(sums or {})
    return write_json(path, record | {"sha256": files | {path.name: _sum_of(record, files)}})


def read_record(path: Path) -> dict[str, Any]:
    """Return the content of a record after verifying it and its files; {} if there is no record.

    Raises:
        ValueError: another program wrote the file, or the record or a file that it names is damaged
            or missing.
    """
    if not path.is_file():
        return {}
    try:
        record = parse_json(path.read_bytes())
        sums = dict(record.pop("sha256"))
        own, kind = sums.pop(path.name), record["format"]
        is_whole = own == _sum_of(record, sums) and kind == format_of(path)
    except (ValueError, TypeError, KeyError, AttributeError):
        is_whole, record, sums = False, {}, {}
    way_out = "Put the original back, or run the command that wrote it again."
    if not is_whole:
        raise ValueError(
            f"{path} is not a file that marglik wrote: it was truncated or altered, or another "
            f"program wrote it. {way_out}"
        )
    for name, expected in sums.items():
        file = path.parent / name
        # Read only files in the same folder, because the record may come from elsewhere.
        if Path(name).name != name or not file.is_file() or file_sum(file) != expected:
            raise ValueError(
                f"{file} is missing or does not belong to {path.name}: it was truncated or "
                f"altered, or is from another run. {way_out}"
            )
    return record


def format_of(path: Path) -> str:
    """Return the format field of a record."""
    return f"marglik.{path.stem}"


def _sum_of(record: dict[str, Any], sums: dict[str, str]) -> str:
    """Return the SHA-256 sum of a record that includes the sums of its files."""
    return sha256(json.dumps([record, sums]).encode())


def read_posterior(folder: str | Path) -> dict[str, Any]:
    """Return the content of ``posterior.json`` after verifying it and its files.

    Raises:
        FileNotFoundError: there is no posterior.
        ValueError: a file is missing or damaged.
    """
    record = read_record(Path(folder) / POSTERIOR)
    if not record:
        raise FileNotFoundError(
            f"No posterior in {folder} ({POSTERIOR} is missing). Create one with marglik train or "
            "save_posterior."
        )
    return record
