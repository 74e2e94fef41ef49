"""What comes in from outside is only data: bad inputs, each refused in a line or read as text.

Each is given to a command in a process that may take a minute and some memory. None may run code,
reach beyond its own file, or leave anything behind: a command's folder and the folders around it
are afterwards as they were.
"""

import io
import json
import os
import pickle
import re
import resource
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from marglik.models import MLP
from marglik.storage.record_file import as_json
from marglik.storage.run_folder import RunFolder
from tests.marglik.data.image_helpers import image_files, write_folder
from tests.marglik.report.fabricate import write_run
from tests.marglik.runs.command_line import DATA
from tests.marglik.runs.commands_on_ranks import command

SECONDS = 60
MEGABYTES = 1800
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


# Folders of images


def images(path: Path) -> list[str]:
    """A command that trains on images."""
    sizes = ["--model.in_features", "90", "--model.num_classes", "3", "--epochs", "1"]
    return ["train", "--data", "marglik.data.ImageFolder", "--data.path", str(path), "--model",
            "marglik.models.MLP", *sizes, "--no_progress"]  # fmt: skip


def _folder(change: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        path = write_folder(folder / "pets", image_files())
        change(path)
        return images(path)

    return write


def _links_in_circles(path: Path) -> None:
    for name in "abc":
        (path / "train" / "cat" / name).symlink_to("..", target_is_directory=True)


FOLDERS = {
    "folder, links in circles": Input(_folder(_links_in_circles), "is a link to a folder"),
    "folder, a link to a device": Input(
        _folder(lambda path: (path / "train/cat/x.jpg").symlink_to("/dev/zero")),
        "is no regular file",
    ),
    "folder, a pipe": Input(
        _folder(lambda path: os.mkfifo(path / "train/cat/x.jpg")), "is no regular file"
    ),
    "folder, a device in its place": Input(
        lambda folder: images(Path("/dev/zero")), "zero/train' is not a folder"
    ),
}  # fmt: skip


def _zip(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


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
        "is not a whole file of weights",
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

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)

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
}

INPUTS: dict[str, Input] = {
    **FOLDERS, **IMAGES, **TENSORS, **CHECKPOINTS, **RUNS,
}  # fmt: skip
"""All of them, by name."""


def files_of(folder: Path) -> dict[str, bytes]:
    """Name -> content of all files in a folder and those below it."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def given(arguments: list[str], here: str) -> tuple[int, str, str]:
    """A command in a process that may take some time and memory, and works in ``here``."""
    os.chdir(here)
    os.environ["XDG_CACHE_HOME"] = str(Path(here) / "cache")
    held = int(re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    most = held + MEGABYTES * MEBIBYTE  # a bomb that goes off is to be the command's alone
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))
    return command(*arguments)


FIRST = {next(iter(group)) for group in (FOLDERS, IMAGES, TENSORS, CHECKPOINTS, RUNS)}
CASES = [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in INPUTS]


@pytest.mark.parametrize("name", CASES)
def test_what_comes_from_outside_is_only_data(name, worlds, tmp_path):
    one, here = INPUTS[name], tmp_path / "a" / "b"
    here.mkdir(parents=True)
    arguments = one.write(here)
    if arguments[0] in ("train", "fit"):
        arguments += ["--output", str(here / "run")]
    before = files_of(tmp_path)
    ((status, _, said),) = worlds.all(1, f"{__name__}:given", arguments, str(here))
    after = files_of(tmp_path)
    assert not list(tmp_path.rglob("ran"))
    changed = {path for path in after if after[path] != before.get(path)}
    assert before.keys() <= after.keys()
    if one.says:
        assert status == 2 and re.search(one.says, said.splitlines()[-1]), said
        assert not changed
        return
    assert status == 0, said
    page = after.get("a/b/run/report.html", b"").decode()
    assert EVIL not in page and "<img src=x" not in page
    assert all(path.startswith(("a/b/run/", "a/b/cache/")) for path in changed), changed
