"""The image files of a folder or tar archive, listed and checked before any is decoded."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from marglik.data.archives import (
    BROKEN_ARCHIVE,
    first_line,
    open_archive,
    read_member,
    whole_members,
)

__all__ = ["SPLITS", "ImageFile", "Layout", "files_below", "open_layout"]

SPLITS = ("train", "test")

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
)

Read = Callable[[], bytes]
Entries = dict[PurePosixPath, Read | None]
"""Path -> function that reads the entry, or None if it is not a regular file (a pipe, a device)."""


@dataclass(frozen=True)
class ImageFile:
    """An image file: its split and position there, its class, and how to read it.

    Args:
        split: "train" or "test".
        index: position in its split, which is sorted by path.
        label: index of its class.
        path: path inside the folder or archive, for errors.
        read: returns the file's bytes.
    """

    split: str
    index: int
    label: int
    path: PurePosixPath
    read: Read


@dataclass(frozen=True)
class Layout:
    """All image files of a folder or archive.

    Args:
        classes: sorted class names.
        files: the files in the order of the folder or archive, which is the fastest to read.
    """

    classes: tuple[str, ...]
    files: list[ImageFile]

    def count(self, split: str) -> int:
        """Return the number of images of a split."""
        return sum(file.split == split for file in self.files)


@contextmanager
def open_layout(path: Path, needed: Sequence[str] = SPLITS) -> Iterator[Layout]:
    """Yield the layout of a folder or tar archive, whose files can be read inside the context.

    Args:
        path: the folder or archive.
        needed: the splits that must exist; ("test",) for out-of-distribution images.

    Raises:
        FileNotFoundError: if there is nothing at ``path``.
        ValueError: if it is neither folder nor tar archive, if the archive is damaged, or if it
            does not contain ``train/CLASS/IMAGE`` and ``test/CLASS/IMAGE`` with the same classes,
            as far as they are needed.
    """
    if path.is_dir():
        yield _layout(path, *_folder_contents(path), needed)
        return
    if not path.exists():
        raise FileNotFoundError(
            f"'{path}' does not exist. Give the path of a folder with train/CLASS/ and test/CLASS/ "
            "in it, or of a .tar, .tar.gz or .tgz archive of one."
        )
    if not path.is_file():  # opening a pipe would wait for its other end
        raise ValueError(
            f"'{path}' is neither a folder nor a regular file; pass a folder, or a .tar, .tar.gz "
            "or .tgz archive of one."
        )
    with ExitStack() as opened:
        try:
            archive = opened.enter_context(open_archive(path))
        except BROKEN_ARCHIVE as error:
            raise ValueError(
                f"'{path}' is neither a folder nor a readable tar archive ({first_line(error)}). "
                "Fetch it again if it should be an archive; unpack archives of another kind."
            ) from error
        try:
            members = whole_members(archive)
        except BROKEN_ARCHIVE as error:
            raise ValueError(
                f"The archive '{path}' is damaged or was not transferred completely "
                f"({first_line(error)}). Fetch it again."
            ) from error
        for name in (PurePosixPath(member.name) for member in members):
            if name.is_absolute() or ".." in name.parts:  # packing a folder makes none of these
                raise ValueError(
                    f"'{path}' has an entry '{name}' that leads out of the archive; nothing of it "
                    "is read. Fetch it from a source that you trust."
                )
        entries: Entries = {
            PurePosixPath(member.name): partial(read_member, path, archive, member)
            if member.isfile() or member.islnk() or member.issym()
            else None
            for member in members
            if not member.isdir()
        }
        directories = {PurePosixPath(member.name) for member in members if member.isdir()}
        yield _layout(path, entries, directories, needed)


def files_below(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Each folder below a folder, with the names of its subfolders and files.

    Links are followed, because data sets are often folders of links.

    Raises:
        ValueError: a link to a folder that contains it.
    """
    for parent, subfolders, names in os.walk(folder, followlinks=True):
        for name in subfolders:
            link = Path(parent, name)
            if link.is_symlink() and link.resolve() in [
                here := link.parent.resolve(),
                *here.parents,
            ]:
                raise ValueError(
                    f"'{folder}': '{link.relative_to(folder)}' links to a folder that contains it, "
                    "so that reading it would never end. Remove it."
                )
        yield Path(parent), subfolders, names


def _folder_contents(folder: Path) -> tuple[Entries, set[PurePosixPath]]:
    """Files and directories by their paths relative to the folder."""
    entries: Entries = {}
    directories: set[PurePosixPath] = set()
    for parent, subfolders, names in files_below(folder):
        relative = PurePosixPath(parent.relative_to(folder).as_posix())
        directories.update(relative / name for name in subfolders)
        for name in names:
            path = parent / name
            # Reading a pipe would wait forever. A dangling link is kept: reading it is an error.
            readable = path.is_file() or not path.exists()
            entries[relative / name] = path.read_bytes if readable else None
    return entries, directories


def _layout(
    source: Path, entries: Entries, directories: set[PurePosixPath], needed: Sequence[str]
) -> Layout:
    """Sort files into splits and classes, and check that nothing is missing."""
    entries = {path: read for path, read in entries.items() if not _is_hidden(path)}
    directories = {path for path in directories if not _is_hidden(path)}
    root, splits = _root(source, entries.keys() | directories, needed)
    images = _images(source, root, entries)
    split_at, class_at = len(root.parts), len(root.parts) + 1
    filled = {s: {path.parts[class_at] for path in images[s]} for s in splits}
    empty = {s: {d.name for d in directories if d.parent == root / s} - filled[s] for s in splits}
    _check_classes(source, filled, empty)
    classes = tuple(sorted(filled["test"]))
    label = {name: k for k, name in enumerate(classes)}
    # Sorted, so that a folder and an archive of the same files give the same order.
    position = {path: i for split in SPLITS for i, path in enumerate(sorted(images[split]))}
    files = [
        ImageFile(path.parts[split_at], i, label[path.parts[class_at]], path, read)
        for path, read in entries.items()
        if read is not None and (i := position.get(path)) is not None
    ]
    return Layout(classes, files)


def _images(source: Path, root: PurePosixPath, entries: Entries) -> dict[str, list[PurePosixPath]]:
    """The image files of each split; warns about other files there."""
    images: dict[str, list[PurePosixPath]] = {}
    others = []
    for split in SPLITS:
        folder = (root / split).parts
        inside = [path for path in entries if path.parts[: len(folder)] == folder]
        is_image = {p: entries[p] is not None and p.suffix.lower() in SUFFIXES for p in inside}
        images[split] = [path for path in inside if is_image[path]]
        others += [path for path in inside if not is_image[path]]
        for path in images[split]:
            if len(path.parts) == len(folder) + 1:
                raise ValueError(
                    f"'{source}': image '{path}' is not in a class folder. Move it to "
                    f"'{root / split}/CLASS/{path.name}', or remove it."
                )
    if others:
        warnings.warn(
            f"'{source}': {len(others)} file(s) that are not images are left out, first "
            f"'{min(others)}'. Images are regular files whose names end with "
            f"{', '.join(sorted(SUFFIXES))}.",
            stacklevel=2,
        )
    return images


def _is_hidden(path: PurePosixPath) -> bool:
    """Whether a path is not data, but made by a desktop (.DS_Store, __MACOSX/, ._0001.jpg)."""
    return any(part.startswith((".", "__MACOSX")) for part in path.parts)


def _root(
    source: Path, paths: set[PurePosixPath], needed: Sequence[str]
) -> tuple[PurePosixPath, list[str]]:
    """The folder with train/ and test/, the top or one below it, and which of the two it has."""
    found: dict[PurePosixPath, set[str]] = {}
    for path in paths:
        for depth, part in enumerate(path.parts[:2]):
            if part in SPLITS:
                found.setdefault(PurePosixPath(*path.parts[:depth]), set()).add(part)
    top = PurePosixPath()
    roots = [top] if top in found else sorted(found)  # a class may be called "test", too
    there_are = [split for split in SPLITS if any(split in found[root] for root in roots)]
    lacking = [f"{split}/" for split in needed if split not in there_are]
    if lacking or len(roots) > 1:
        problem = f"lacks {' and '.join(lacking)}" if lacking else "has several train/ or test/"
        there = ", ".join(sorted({path.parts[0] for path in paths})[:5]) or "nothing"
        alone = " Test images alone can be out-of-distribution data (--ood)."
        hint = alone if lacking == ["train/"] else ""
        raise ValueError(
            f"'{source}' {problem} (it holds {there}). Arrange the images as train/CLASS/IMAGE and "
            f"test/CLASS/IMAGE, with at most one folder above.{hint}"
        )
    return roots[0], there_are


def _check_classes(source: Path, filled: dict[str, set[str]], empty: dict[str, set[str]]) -> None:
    """Raise a ValueError unless all splits have the same class folders, and none is empty."""
    for split in filled:
        if empty[split]:
            raise ValueError(
                f"'{source}': class folder '{split}/{min(empty[split])}' holds no images "
                f"({len(empty[split])} such folders). Add images, or remove the class from both "
                "train/ and test/."
            )
        if not filled[split]:
            raise ValueError(
                f"'{source}': {split}/ holds no class folders. Arrange the images as "
                f"{split}/CLASS/IMAGE."
            )
    differing = filled.get("train", filled["test"]) ^ filled["test"]
    if differing:
        name = min(differing)
        where, lacking = ("train", "test") if name in filled["train"] else ("test", "train")
        raise ValueError(
            f"'{source}': class '{name}' is in {where}/ but not in {lacking}/ "
            f"({len(differing)} such classes). Both need the same class folders."
        )
