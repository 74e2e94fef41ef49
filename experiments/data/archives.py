"""Files in the archives of the experiments' data: read whole, or refused."""

import gzip
import io
import tarfile
import zlib
from pathlib import Path

from experiments.data import VARIABLE, data_file


def unpacked(path: str | Path | None, name: str, origin: str) -> bytes:
    """The content of a file that gzip has compressed.

    Args:
        path: the path that the user gave, or None for the file ``name`` in the folder of the data.
        name: name of the file, as it is published.
        origin: where it is published.

    Raises:
        FileNotFoundError: there is no such file; the message says where to get it.
        ValueError: it is damaged.
    """
    path = data_file(name) if path is None else Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"'{path}' is not a file. Get {name} ({origin}), and pass its path (--data.path), or "
            f"set the environment variable {VARIABLE} to its folder."
        )
    try:
        with gzip.open(path) as stream:
            return stream.read()  # to the end, where gzip verifies its sum
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"'{path}' is damaged ({error}). Fetch it again.") from error


def members(path: str | Path | None, name: str, origin: str) -> dict[str, bytes]:
    """Name -> content of the regular files of a tar archive, found as by `unpacked`."""
    with tarfile.open(fileobj=io.BytesIO(unpacked(path, name, origin))) as archive:
        streams = {one.name: archive.extractfile(one) for one in archive if one.isreg()}
        return {name: stream.read() for name, stream in streams.items() if stream is not None}
