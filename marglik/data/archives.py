"""Compressed files and tar archives from untrusted sources: read in bounded memory, or refused.

A few kilobytes can unpack to terabytes. So bytes are counted while they are unpacked, and the sizes
in headers are not trusted.
"""

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "BROKEN_ARCHIVE",
    "first_line",
    "open_archive",
    "read_gzip",
    "read_member",
    "whole_members",
]

# What tarfile raises on archives that are damaged or end too early, by kind of compression.
BROKEN_ARCHIVE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, KeyError)

LARGEST_FILE = 2**29
"""Most bytes in one member: twice those of the largest image that is decoded, in the largest
format."""
FREE = 2**26
"""Bytes that may be unpacked whatever the ratio."""
LARGEST_RATIO = 200
"""Largest ratio of unpacked to packed bytes. Text has about 10, gzip reaches 1,030."""
STEP = 2**20
KINDS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x5d\0\0": lzma.open,
}
"""First bytes -> what unpacks it."""


class _Unpacked:
    """The content of a compressed file, as a file for tarfile; raises a ValueError for a bomb.

    Seeking forward unpacks all that it skips, so it is done in steps, too, with a check after each.
    """

    def __init__(self, path: Path, stored: Any) -> None:
        start = stored.read(max(map(len, KINDS)))
        stored.seek(0)
        kind = next((kind for magic, kind in KINDS.items() if start.startswith(magic)), None)
        self._path, self._stored = path, stored
        self._content = stored if kind is None else kind(stored)
        self._is_packed = kind is not None

    def read(self, size: int) -> bytes:
        if size > LARGEST_FILE:
            raise _too_large(self._path, "a file in it", size)
        if not self._is_packed:
            return self._content.read(size)
        parts = []
        while size > 0 and (part := self._content.read(min(size, STEP))):
            parts.append(part)
            size -= len(part)
            self._check()
        return b"".join(parts)

    def seek(self, position: int, whence: int = 0) -> int:
        if not self._is_packed:
            return self._content.seek(position, whence)
        if position < self._content.tell():
            return self._content.seek(position)
        while (left := position - self._content.tell()) > 0:
            if not self._content.read(min(left, STEP)):
                break  # beyond the end, where reads return nothing
            self._check()
        return self._content.tell()

    def tell(self) -> int:
        return self._content.tell()

    def _check(self) -> None:
        position = self._content.tell()
        if position > FREE and position > LARGEST_RATIO * self._stored.tell():
            raise ValueError(
                f"'{self._path}' unpacks to more than {LARGEST_RATIO} times its size, as no file "
                "of data does. If you trust it, unpack it yourself and compress it anew."
            )


@contextmanager
def open_archive(path: Path) -> Iterator[tarfile.TarFile]:
    """A context with a tar archive, compressed or not, to be read from start to end.

    Raises:
        `BROKEN_ARCHIVE`: the file is not an archive, or is damaged.
        ValueError: it unpacks to more than `LARGEST_RATIO` times its size.
    """
    with path.open("rb") as stored:
        unpacked: Any = _Unpacked(path, stored)
        with tarfile.open(fileobj=unpacked, mode="r:") as archive:
            yield archive


def whole_members(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """All members of an archive, in order, once it is verified to be complete.

    tarfile does not notice when an archive was cut between two members, or a later header is
    damaged; here the block of zeros that ends an archive must follow the last member. tarfile also
    stops before the end of the file, where gzip, bzip2 and xz verify their checksums; here the file
    is read to its end.

    Raises:
        `BROKEN_ARCHIVE`: the archive is damaged, or ends too early.
    """
    members, content = archive.getmembers(), archive.fileobj
    assert content is not None
    for member in members:
        if member.size < 0:
            raise tarfile.ReadError(f"'{member.name}' has a size below zero")
    if members and not members[-1].issparse():
        last = members[-1]
        size = last.size if last.isreg() else 0
        content.seek(last.offset_data + -(-size // 512) * 512)
        if content.read(512) != bytes(512):
            raise EOFError(f"no end mark after '{last.name}'")
    while content.read(STEP):
        pass
    return members


def read_member(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """The content of an archive's member; links are followed only inside the archive.

    Raises:
        ValueError: the member is damaged or too large; the error names ``path``.
    """
    try:
        # Also here, since a sparse file has this size without a byte of it in the archive.
        if member.size > LARGEST_FILE:
            raise _too_large(path, f"'{member.name}'", member.size)
        stream = archive.extractfile(member)
        return b"" if stream is None else stream.read()
    except RecursionError as error:
        raise ValueError(
            f"The archive '{path}' is damaged ('{member.name}' links to itself). Fetch it again."
        ) from error
    except BROKEN_ARCHIVE as error:
        raise ValueError(
            f"The archive '{path}' is damaged or was not transferred completely "
            f"({first_line(error)}). Fetch it again."
        ) from error


def read_gzip(path: Path) -> bytes:
    """The content of a gzip file.

    Raises:
        OSError, EOFError, zlib.error: the file is damaged, or not a gzip file.
        ValueError: it unpacks to more than `LARGEST_RATIO` times its size.
    """
    with path.open("rb") as stored:
        if stored.read(2) != b"\x1f\x8b":
            raise gzip.BadGzipFile("not a gzipped file")
        stored.seek(0)
        unpacked, parts = _Unpacked(path, stored), []
        while part := unpacked.read(STEP):
            parts.append(part)
        return b"".join(parts)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return str(error).partition("\n")[0] or type(error).__name__


def _too_large(path: Path, what: str, size: int) -> ValueError:
    return ValueError(
        f"'{path}': {what} has {size:,} bytes by its header; at most {LARGEST_FILE:,} are read. "
        "Remove it, or fetch the archive again if it should be smaller."
    )
