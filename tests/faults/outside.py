"""What comes in from outside is only data: bad inputs, each refused in a line or read as text.

Each is given to a command in a copy of this process that may take a minute and some memory. None
may run code, reach beyond its own file, or leave anything behind: a command's folder and the
folders around it are afterwards as they were.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import resource
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from marglik.cli import main
from marglik.models import MLP
from marglik.storage.record_file import as_json
from marglik.storage.run_folder import RunFolder
from tests.faults.copies import Copy
from tests.faults.families import Case, Workplace
from tests.faults.runs import files_of
from tests.marglik.commands.command_line import DATA
from tests.marglik.data.image_helpers import encoded, image_files, write_folder
from tests.marglik.data.text_and_graphs import dart_entries, nci1_texts
from tests.marglik.report.fabricate import write_run

__all__ = ["INPUTS", "Input", "bad_inputs"]

SECONDS = 60
MEGABYTES = 600
"""Most memory that a refusal may cost; bombs would take thousands."""
MEBIBYTE = 2**20
NETWORK = [
    "--model", "marglik.models.MLP", "--model.in_features", "64", "--model.hidden", "[12]",
    "--model.num_classes", "8",
]  # fmt: skip
EVIL = "</script><img src=x onerror=alert(1)>"


@dataclass(frozen=True)
class Input:
    """A bad input."""

    write: Callable[[Path], list[str]]
    """Writes it into a folder; returns the command that reads it."""
    says: str
    """What the error's line must match; "" where it is read as data."""


# Archives and folders of images


def _tar(
    name: str, change: Callable[[tarfile.TarFile], object], mode: str = "w"
) -> Callable[[Path], list[str]]:
    """A whole archive of images and what the change adds."""

    def write(folder: Path) -> list[str]:
        with tarfile.open(folder / name, mode) as archive:  # type: ignore[call-overload]
            for path, content in image_files().items():
                add(archive, path, content)
            change(archive)
        return images(folder / name)

    return write


def images(path: Path) -> list[str]:
    """A command that trains on images."""
    sizes = ["--model.in_features", "90", "--model.num_classes", "3", "--epochs", "1"]
    return ["train", "--data", "marglik.data.ImageFolder", "--data.path", str(path), "--model",
            "marglik.models.MLP", *sizes, "--no_progress"]  # fmt: skip


def add(archive: tarfile.TarFile, name: str, content: bytes = b"", **fields: Any) -> None:
    """Add a member; fields are of its header."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(content))


def _member(name: str, says: str, **fields: Any) -> Input:
    content = encoded(np.zeros((6, 5, 3), dtype=np.uint8)) if not fields else b""
    return Input(_tar("pets.tar", lambda a: add(a, name, content, **fields)), says)


SYMLINK, HARDLINK = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}


def _loop(archive: tarfile.TarFile) -> None:
    add(archive, "train/cat/a.jpg", linkname="b.jpg", **SYMLINK)
    add(archive, "train/cat/b.jpg", linkname="a.jpg", **SYMLINK)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def _bomb(name: str, compress: Callable[[bytes], bytes], gibibytes: int = 16) -> Any:
    """An archive of one member of zeros, compressed piece by piece: each piece is a whole file."""

    def write(folder: Path) -> list[str]:
        piece = compress(bytes(8 * MEBIBYTE))
        with (folder / name).open("wb") as file:
            file.write(compress(_header("train/cat/0.jpg", gibibytes * 2**30)))
            for _ in range(gibibytes * 128):
                file.write(piece)
            file.write(compress(bytes(1024)))
        return images(folder / name)

    return write


def _many_members(folder: Path) -> list[str]:
    piece = gzip.compress(_header("train/cat/0.jpg", 0) * 100_000)
    (folder / "pets.tar.gz").write_bytes(piece * 300 + gzip.compress(bytes(1024)))
    return images(folder / "pets.tar.gz")


def _long_names(folder: Path) -> list[str]:
    """A header that says that the next member's name has four gibibytes."""
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, 4 * 2**30
    piece = gzip.compress(b"1" * (64 * MEBIBYTE))
    (folder / "pets.tar.gz").write_bytes(gzip.compress(info.tobuf()) + piece * 64)
    return images(folder / "pets.tar.gz")


def _sparse(folder: Path) -> list[str]:
    """One member of a tebibyte, of which no byte is stored."""
    info = tarfile.TarInfo("train/cat/0.jpg")
    info.pax_headers = {
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "train/cat/0.jpg",
        "GNU.sparse.size": str(2**40), "GNU.sparse.map": f"{2**40},0",
    }  # fmt: skip
    with tarfile.open(folder / "pets.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO())
        for path, content in image_files().items():
            add(archive, path, content)
    return images(folder / "pets.tar")


def _bytes(name: str, content: Callable[[], bytes]) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / name).write_bytes(content())
        return images(folder / name)

    return write


def _folder(change: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        path = write_folder(folder / "pets", image_files())
        change(path)
        return images(path)

    return write


def _links_in_circles(path: Path) -> None:
    for name in "abc":
        (path / "train" / "cat" / name).symlink_to("..", target_is_directory=True)


ARCHIVES = {
    "archive, a path out of it": _member("../../escaped/train/cat/0.jpg", "leads out of"),
    "archive, a path out of a class": _member("train/cat/../../../x.jpg", "leads out of"),
    "archive, an absolute path": _member("/tmp/escaped/train/cat/0.jpg", "leads out of"),
    "archive, a link out of it": _member(
        "train/cat/x.jpg", "damaged", linkname="../../../../../etc/hostname", **SYMLINK
    ),
    "archive, a link to an absolute path": _member(
        "train/cat/x.jpg", "damaged", linkname="/etc/hostname", **SYMLINK
    ),
    "archive, a link to itself": _member(
        "train/cat/x.jpg", "damaged", linkname="x.jpg", **SYMLINK
    ),
    "archive, links in a circle": Input(_tar("pets.tar", _loop), "damaged"),
    "archive, a hard link out of it": _member(
        "train/cat/x.jpg", "damaged", linkname="../../etc/hostname", **HARDLINK
    ),
    "archive, a hard link to an absolute path": _member(
        "train/cat/x.jpg", "damaged", linkname="/etc/hostname", **HARDLINK
    ),
    "archive, a device of characters": _member(
        "train/cat/x.jpg", "", type=tarfile.CHRTYPE, devmajor=1, devminor=5
    ),
    "archive, a device of blocks": _member(
        "train/cat/x.jpg", "", type=tarfile.BLKTYPE, devmajor=7, devminor=0
    ),
    "archive, a pipe": _member("train/cat/x.jpg", "", type=tarfile.FIFOTYPE),
    "archive, a sparse tebibyte": Input(_sparse, "has 1,099,511,627,776 bytes"),
    "archive, a gzip bomb": Input(_bomb("pets.tar.gz", gzip.compress), "times its size"),
    "archive, a bzip2 bomb": Input(_bomb("pets.tar.bz2", bz2.compress), "times its size"),
    "archive, an xz bomb": Input(_bomb("pets.tar.xz", lzma.compress), "times its size"),
    "archive, thirty million members": Input(_many_members, "times its size"),
    "archive, a name of gibibytes": Input(_long_names, "has 4,294,967,296 bytes"),
    "archive, cut off": Input(
        lambda f: _cut(_tar("pets.tar.gz", lambda _: None, "w:gz")(f)), "is damaged"
    ),
    "archive, a size below zero": Input(
        _bytes("pets.tar", lambda: _with_size(b"-0000000001\0")), "damaged|readable tar"
    ),
    "archive, a size of exabytes": Input(
        _bytes("pets.tar", lambda: _with_size(b"\x80" + bytes(3) + b"\x7f" * 8)),
        "damaged|readable tar|bytes",
    ),
    "archive, of another kind": Input(
        _bytes("pets.tar", lambda: _zip({"train/cat/../../../x.jpg": b"x"})), "readable tar"
    ),
    "folder, links in circles": Input(
        _folder(_links_in_circles), "links to a folder that contains it"
    ),
    "folder, a link to a device": Input(
        _folder(lambda path: (path / "train/cat/x.jpg").symlink_to("/dev/zero")), ""
    ),
    "folder, a pipe": Input(_folder(lambda path: os.mkfifo(path / "train/cat/x.jpg")), ""),
    "folder, a device in its place": Input(
        lambda folder: images(Path("/dev/zero")), "neither a folder nor a regular file"
    ),
}  # fmt: skip


def _with_size(size: bytes) -> bytes:
    header = bytearray(_header("train/cat/0.jpg", 0))
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def _zip(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def _cut(command: list[str]) -> list[str]:
    path = Path(command[command.index("--data.path") + 1])
    path.write_bytes(path.read_bytes()[:-40])
    return command


# Images


def _image(content: Callable[[], bytes], name: str = "x.png") -> Callable[[Path], list[str]]:
    return _folder(lambda path: (path / "train" / "cat" / name).write_bytes(content()))


def _png(width: int, height: int, *chunks: tuple[bytes, bytes], rows: int = 0) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(rows * (1 + 3 * width)), 9))
    extra = b"".join(chunk(*one) for one in chunks)
    return b"\x89PNG\r\n\x1a\n" + header + extra + pixels + chunk(b"IEND", b"")


def _gif(width: int, height: int) -> bytes:
    screen = struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return b"GIF89a" + screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\2\2D\1\0;"


def _bmp(width: int, height: int) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info


def _many_large(folder: Path) -> list[str]:
    """Links to one image of 48 megabytes, which is decoded a hundred thousand times."""
    with tarfile.open(folder / "pets.tar", "w") as archive:
        add(archive, "train/cat/0.png", _png(4000, 4000, rows=4000))
        for i in range(1, 20_000):
            add(archive, f"train/cat/{i}.png", linkname="train/cat/0.png", **HARDLINK)
        add(archive, "test/cat/0.png", linkname="train/cat/0.png", **HARDLINK)
    return images(folder / "pets.tar")


def _large_first(path: Path) -> None:
    """The first image is a bomb, and the rest has its size by their headers."""
    for file in path.rglob("*.jpg"):
        file.unlink()
        file.with_suffix(".png").write_bytes(_png(60_000, 60_000))


def _text_bomb() -> bytes:
    text = b"Comment\0\0" + zlib.compress(bytes(256 * MEBIBYTE))
    return _png(5, 6, (b"zTXt", text), rows=6)


IMAGES = {
    "image, 16 gigapixels in PNG": Input(_image(lambda: _png(2**17, 2**17)), "x.png.*pixels"),
    "image, 169 megapixels in PNG": Input(
        _image(lambda: _png(13_000, 13_000, rows=13_000)), "x.png.*169000000 pixels"
    ),
    "image, 4 gigapixels in GIF": Input(
        _image(lambda: _gif(65_535, 65_535), "x.gif"), "x.gif.*pixels"
    ),
    "image, 10¹⁸ pixels in BMP": Input(
        _image(lambda: _bmp(2**30, 2**30), "x.bmp"), "x.bmp.*(decoded|pixels)"
    ),
    "image, all of gigapixels": Input(_folder(_large_first), "3600000000 pixels"),
    "image, twenty thousand of 48 megabytes": Input(_many_large, "need .* of memory"),
    "image, a text that unpacks to 256 megabytes": Input(_image(_text_bomb), "x.png.*decoded"),
    "image, PostScript": Input(
        _image(
            lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 6\n(%pipe%touch ran) (w) file\n"
        ),
        "x.png.*cannot be decoded",
    ),
    "image, SVG": Input(
        _image(lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"),
        "x.png.*cannot be decoded",
    ),
    "image, PDF": Input(_image(lambda: b"%PDF-1.4\n1 0 obj"), "x.png.*cannot be decoded"),
    "image, no pixels": Input(_image(lambda: _png(0, 6)), "x.png.*cannot be decoded"),
    "image, cut off": Input(
        _image(lambda: image_files()["train/cat/000.jpg"][:-150], "x.jpg"), "x.jpg.*decoded"
    ),
}

# Tensors


def _tensors(content: Callable[[], bytes]) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "data.safetensors").write_bytes(content())
        return ["train", "--data", "marglik.data.TensorFile", "--data.path",
                str(folder / "data.safetensors"), *NETWORK, "--no_progress"]  # fmt: skip

    return write


def _safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _numbers(**changed: torch.Tensor) -> bytes:
    tensors = {f"x_{split}": torch.rand(8, 64) for split in ("train", "test")}
    tensors |= {f"y_{split}": torch.arange(8) for split in ("train", "test")}
    return save(tensors | changed)


BROKEN = "is not a safetensors file, or damaged"
TENSORS = {
    "tensors, a header of exabytes": Input(
        _tensors(lambda: struct.pack("<Q", 2**63) + b"{}"), BROKEN
    ),
    "tensors, a header of 400 megabytes": Input(
        _tensors(lambda: struct.pack("<Q", 400 * MEBIBYTE) + b" " * 1024), BROKEN
    ),
    "tensors, a header that is not JSON": Input(_tensors(lambda: _safetensors(b"{x")), BROKEN),
    "tensors, a header of a hundred thousand brackets": Input(
        _tensors(lambda: _safetensors(b"[" * 100_000)), BROKEN
    ),
    "tensors, bytes that two share": Input(
        _tensors(
            lambda: _safetensors({"a": _entry([4], 0, 16), "b": _entry([4], 8, 24)}, bytes(24))
        ),
        BROKEN,
    ),
    "tensors, bytes beyond the end": Input(
        _tensors(lambda: _safetensors({"x_train": _entry([2**30], 0, 2**32)}, bytes(16))), BROKEN
    ),
    "tensors, a shape of 2¹²⁰ numbers": Input(
        _tensors(lambda: _safetensors({"x_train": _entry([2**60, 2**60], 0, 16)}, bytes(16))),
        BROKEN,
    ),
    "tensors, a shape below zero": Input(
        _tensors(lambda: _safetensors({"x_train": _entry([-4], 0, 16)}, bytes(16))), BROKEN
    ),
    "tensors, an unknown dtype": Input(
        _tensors(lambda: _safetensors({"x_train": _entry([4], 0, 16, "PICKLE")}, bytes(16))), BROKEN
    ),
    "tensors, numbers that are none": Input(
        _tensors(lambda: _numbers(x_train=torch.full((8, 64), torch.nan))),
        "x_train holds 512 .*NaN",
    ),
    "tensors, names that nobody reads": Input(
        _tensors(lambda: _numbers(**{"__reduce__": torch.zeros(1)})), "__reduce__, which nothing"
    ),
}

# Checkpoints


class Malicious:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def _checkpoint(name: str, content: Callable[[], Any], zipped: bool = True) -> Any:
    def write(folder: Path) -> list[str]:
        found = content()
        if isinstance(found, bytes):
            (folder / name).write_bytes(found)
        else:
            torch.save(found, folder / name, _use_new_zipfile_serialization=zipped)
        return ["fit", *DATA, *NETWORK, "--checkpoint", str(folder / name), "--no_progress"]

    return write


def _state(**more: Any) -> dict[str, Any]:
    return dict(MLP(64, hidden=(12,), num_classes=8).state_dict()) | more


def _deflated() -> bytes:
    """A checkpoint whose tensor is 256 mebibytes of zeros, in a part of the file."""
    stream = io.BytesIO()
    torch.save({"layers.1.weight": torch.zeros(4)}, stream)
    with zipfile.ZipFile(stream) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    for name in files:
        if name.endswith("data/0"):
            files[name] = bytes(2**28)
    return _zip(files, zipfile.ZIP_DEFLATED)


def _nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def _of_one_number() -> Any:
    """A tensor of 2⁴⁰ numbers on a storage of one."""
    return _state(**{"layers.1.weight": torch.zeros(1).expand(2**20, 2**20)})


ALONE = "could not be read as a file of tensors"
CHECKPOINTS = {
    "pickle, os.system in a zip file": Input(
        _checkpoint("net.pt", lambda: _state(x=Malicious())), "objects can run code"
    ),
    "pickle, os.system in the old form": Input(
        _checkpoint("net.pth", lambda: _state(x=Malicious()), zipped=False), "objects can run code"
    ),
    "pickle, bare": Input(_checkpoint("net.bin", lambda: pickle.dumps(Malicious())), ALONE),
    "pickle, of protocol 0": Input(
        _checkpoint("net.ckpt", lambda: b"cos\nsystem\n(S'touch ran'\ntR."), ALONE
    ),
    "pickle, under a name of tensors": Input(
        _checkpoint("net.safetensors", lambda: pickle.dumps(Malicious())),
        "not a complete safetensors",
    ),
    "pickle, a network": Input(_checkpoint("net.pt", lambda: MLP(64)), "objects can run code"),
    "pickle, a hundred thousand lists": Input(
        _checkpoint("net.pt", lambda: _nested(100_000)), f"{ALONE}|holds no state dict"
    ),
    "pickle, a zip bomb": Input(_checkpoint("net.pt", _deflated), "compressed"),
    "checkpoint, 2⁴⁰ numbers in one": Input(
        _checkpoint("net.pt", _of_one_number), "of another network: 'layers.1.weight' has shape"
    ),
    "checkpoint, no tensors": Input(
        _checkpoint("net.pt", lambda: {"epoch": 3}), "holds no state dict"
    ),
    "checkpoint, of another kind": Input(
        _checkpoint("net.pkl", lambda: pickle.dumps(Malicious())), "has suffix '.pkl'"
    ),
}

# Options


def _yaml(text: str | bytes) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "options.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["train", "--config", str(folder / "options.yaml"), "--output", str(folder / "run")]

    return write


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
YAML = "--config takes a YAML file"
OPTIONS = {
    "YAML, a tag that calls": Input(
        _yaml('epochs: !!python/object/apply:os.system ["touch ran"]\n'), YAML
    ),
    "YAML, a tag that makes an object": Input(
        _yaml('model: !!python/object/new:os.system ["touch ran"]\n'), YAML
    ),
    "YAML, a tag that names": Input(_yaml("epochs: !!python/name:os.system\n"), YAML),
    "YAML, a tag that imports": Input(_yaml("epochs: !!python/module:antigravity\n"), YAML),
    "YAML, nine to the twelfth": Input(_yaml(LAUGHS), YAML),
    "YAML, an alias of itself": Input(_yaml("model: &m {class_path: *m}\n"), YAML),
    "YAML, a hundred thousand brackets": Input(_yaml("epochs: " + "[" * 100_000), YAML),
    "YAML, a number of a million digits": Input(
        _yaml("epochs: " + "9" * 10**6), f"{YAML}.*1,000,000 digits"
    ),
    "YAML, a class that is a function": Input(
        _yaml("model: {class_path: os.system, init_args: {command: touch ran}}\n"), "no such class"
    ),
    "YAML, a class of processes": Input(
        _yaml("model: {class_path: subprocess.Popen, init_args: {args: [touch, ran]}}\n"),
        "no such class",
    ),
    "YAML, bytes": Input(_yaml(b"\xff\xfe\x00\x01"), "not a text file"),
}

# Text and graphs


def _dart(content: Callable[[], bytes]) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "dart.json.gz").write_bytes(content())
        return ["train", "--data", "marglik.data.DART", "--data.path",
                str(folder / "dart.json.gz"), *NETWORK, "--no_progress"]  # fmt: skip

    return write


def _in_gzip(content: Any) -> bytes:
    return gzip.compress(content if isinstance(content, bytes) else json.dumps(content).encode())


def _entry_with(text: str) -> list[dict[str, Any]]:
    entries = dart_entries(40)
    entries[3]["annotations"][0]["text"] = text
    return entries


def _texts(folder: Path, name: str, data: list[str], files: dict[str, str]) -> list[str]:
    with tarfile.open(folder / name, "w:gz") as archive:
        for file, text in files.items():
            add(archive, file, text.encode())
    return ["train", *data, "--data.path", str(folder / name), *NETWORK, "--no_progress"]


def _nci1(**changed: str) -> Callable[[Path], list[str]]:
    files = {f"NCI1/NCI1_{part}.txt": text for part, text in (nci1_texts(40) | changed).items()}
    return lambda folder: _texts(folder, "nci1.tar.gz", ["--data", "marglik.data.NCI1"], files)


def _uci(**changed: str) -> Callable[[Path], list[str]]:
    rows = "".join(f"{i} {i * i % 7} {i % 5}\n" for i in range(20))
    texts = {
        "data": rows, "index_features": "0\n1\n", "index_target": "2\n",
        "index_train_0": "".join(f"{i}\n" for i in range(18)), "index_test_0": "18\n19\n",
    } | changed  # fmt: skip
    files = {f"uci/yacht/{part}.txt": text for part, text in texts.items()}
    data = ["--data", "marglik.data.UCI", "--data.name", "yacht"]
    return lambda folder: _texts(folder, "uci.tar.gz", data, files)


TEXTS = {
    "text, a gzip bomb": Input(
        _dart(lambda: gzip.compress(b"[" + bytes(64 * MEBIBYTE)) * 256), "times its size"
    ),
    "text, a hundred thousand brackets": Input(_dart(lambda: _in_gzip(b"[" * 100_000)), "nested"),
    "text, half a character": Input(
        _dart(lambda: _in_gzip(_entry_with("\ud800"))), "Entry 3 of .*dart.json.gz"
    ),
    "text, a number of a million digits": Input(
        _dart(lambda: _in_gzip(b"[" + b"9" * 10**6 + b"]")), "dart.json.gz' is damaged"
    ),
    "text, no list": Input(_dart(lambda: _in_gzip({"a": 1})), "not a list of entries"),
    "graphs, a billion of them": Input(
        _nci1(graph_indicator=nci1_texts(40)["graph_indicator"][:-3] + f"{10**9}\n"),
        "do not fit together",
    ),
    "graphs, an edge into nowhere": Input(
        _nci1(A=nci1_texts(40)["A"] + f"{10**12}, 1\n1, {10**12}\n"), "do not fit together"
    ),
    "graphs, numbers that are none": Input(_nci1(node_labels="nan\n" * 9), "no archive of NCI1"),
    "rows, numbers that are none": Input(
        _uci(data="".join(f"{i} nan {i % 5}\n" for i in range(20))), "yacht.*finite"
    ),
    "rows, a row counted from the end": Input(
        _uci(index_test_0="-1\n-2\n"), "yacht.*index -1 is out of bounds"
    ),
    "rows, half a row": Input(_uci(index_test_0="18.5\n19\n"), "yacht.*18.5"),
    "rows, a column that is not there": Input(
        _uci(index_features="0\n99999999999\n"), "yacht.*index 1e.11 is out of bounds"
    ),
    "rows, a gzip bomb": Input(
        lambda folder: _as_uci(_bomb("uci.tar.gz", gzip.compress)(folder)), "times its size"
    ),
}


def _as_uci(command: list[str]) -> list[str]:
    path = command[command.index("--data.path") + 1]
    return ["train", "--data", "marglik.data.UCI", "--data.name", "yacht", "--data.path", path,
            *NETWORK, "--no_progress"]  # fmt: skip


# Folders of runs that someone else made, whose sums are right


def _run(change: Callable[[Path], object], *command: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        run = write_run(folder / "run")
        change(run)
        return [*(command or ("report",)), str(run)]

    return write


def _file(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: RunFolder(run).write(name, content)


def _names(run: Path) -> None:
    for name in ("results.json", "evaluation.json"):
        text = (run / name).read_text()
        RunFolder(run).write(name, as_json(_with_names(json.loads(text))))


def _with_names(value: Any) -> Any:
    if isinstance(value, dict):
        named = {("data", "name", "model"): EVIL}
        return {
            k: next((v for keys, v in named.items() if k in keys and isinstance(inner, str)), None)
            or _with_names(inner)
            for k, inner in value.items()
        }
    return [_with_names(v) for v in value] if isinstance(value, list) else value


RUNS = {
    "report, HTML in names": Input(_run(_names), ""),
    "report, HTML in options": Input(
        _run(_file("config.yaml", json.dumps({EVIL: EVIL}).encode())), ""
    ),
    "report, options nine to the twelfth": Input(
        _run(_file("config.yaml", LAUGHS.encode())), "config.yaml is not valid YAML"
    ),
    "report, options with a tag": Input(
        _run(_file("config.yaml", b'a: !!python/object/apply:os.system ["touch ran"]\n')),
        "config.yaml is not valid YAML",
    ),
    "report, a log of a hundred thousand brackets": Input(
        _run(_file("log.jsonl", b"[" * 100_000)), "log.jsonl, line 1 is not valid JSON"
    ),
    "report, results without numbers": Input(
        _run(_file("results.json", b'{"evidence": NaN}')), "results.json: .* cannot read this file"
    ),
}

INPUTS: dict[str, Input] = {
    **ARCHIVES, **IMAGES, **TENSORS, **CHECKPOINTS, **OPTIONS, **TEXTS, **RUNS,
}  # fmt: skip
"""All of them, by name."""


def bad_inputs(place: Workplace) -> Iterator[Case]:
    """Each of the table."""
    for name, one in INPUTS.items():
        yield Case(name, lambda folder, one=one: _given(one, folder))


def _given(one: Input, folder: Path) -> str:
    """Give it to its command, in a folder below others that must stay as they are."""
    here = folder / "a" / "b"
    here.mkdir(parents=True)
    arguments = one.write(here)
    if "--output" not in arguments and arguments[0] in ("train", "fit"):
        arguments += ["--output", str(here / "run")]
    before = files_of(folder)

    def run() -> int:
        os.chdir(here)
        os.environ["XDG_CACHE_HOME"] = str(here / "cache")
        held = int(re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
        most = held + 3 * MEGABYTES * MEBIBYTE  # a bomb that goes off is to be ours alone
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))
        return main(arguments)

    ended = Copy(run, folder.with_name(f"{folder.name} printed")).wait(2 * SECONDS)
    after = files_of(folder)
    assert not list(folder.rglob("ran")), "it ran"
    assert ended.megabytes < MEGABYTES, f"{ended.megabytes:.0f} megabytes: {ended}"
    left = {name for name in after if after[name] != before.get(name)}
    assert before.keys() <= after.keys()
    if not one.says:
        assert ended.status == 0, ended
        page = after.get("a/b/run/report.html", b"").decode()
        assert EVIL not in page and "<img src=x" not in page
        assert all(name.startswith(("a/b/run/", "a/b/cache/")) for name in left), left
        return "read as data"
    assert ended.status == 2 and ended.error, ended
    assert re.search(one.says, ended.error), f"it says: {ended.error[:300]}"
    assert not left, f"left: {left}"
    return f"refused: {ended.error.removeprefix('marglik: error: ')[:200]}"
