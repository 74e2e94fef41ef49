"""Files in archives of unknown origin: read whole, within a bound on memory, or refused."""

import gzip
import io
import tarfile
import zlib
from pathlib import Path

from experiments.data import VARIABLE, data_file

__all__ = ["members", "unpacked"]

LARGEST = 2**29
"""Most bytes that are unpacked. A few kilobytes can unpack to terabytes."""


def unpacked(path: str | Path | None, name: str, origin: str) -> tuple[Path, bytes]:
    """The path of a file, and its content, unpacked if it is compressed by gzip.

    Args:
        path: the path that the user gave, or None for the file ``name`` in the folder of the data.
        name: name of the file, as it is published.
        origin: where it is published.

    Raises:
        FileNotFoundError: there is no such file; the message says where to get it.
        ValueError: it is damaged, or unpacks to more than `LARGEST` bytes.
    """
    path = data_file(name) if path is None else Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"'{path}' is not a file. Get {name} ({origin}), and pass its path (--data.path), or "
            f"set the environment variable {VARIABLE} to its folder."
        )
    try:
        with path.open("rb") as start:
            is_packed = start.read(2) == b"\x1f\x8b"
        # Read to the end, where gzip verifies its sum.
        with gzip.open(path) if is_packed else path.open("rb") as stream:
            content = stream.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"'{path}' is damaged ({error}). Fetch it again.") from error
    if len(content) > LARGEST:
        raise ValueError(f"'{path}' unpacks to more than {LARGEST:,} bytes, which are not read.")
    return path, content


def members(path: Path, content: bytes) -> dict[str, bytes]:
    """Name -> content of the regular files of a tar archive; ``path`` is named in errors."""
    try:
        # tarfile takes an archive that was cut between two files for a whole one.
        if content[-1024:] != bytes(1024):
            raise tarfile.ReadError("no end mark")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            # Not links; and a sparse file has its size without a byte of it in the archive.
            files = [member for member in archive if member.isreg() and not member.issparse()]
            streams = {member.name: archive.extractfile(member) for member in files}
            return {name: stream.read() for name, stream in streams.items() if stream is not None}
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise ValueError(
            f"'{path}' is damaged, or no tar archive compressed by gzip ({error}). Fetch it again."
        ) from error
