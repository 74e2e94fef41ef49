"""Images in a tar archive, decoded once and then read from a cache."""

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from experiments.data.archives import members
from kfac_backend.atomic_files import read_tensors, sha256, write_tensors
from marglik.application.data.images import MEAN, STD, Part, TwoPartData, decode_images


@dataclass(eq=False)
class ImageArchive(TwoPartData):
    """Images of a tar archive, arranged as ``train/CLASS/IMAGE`` and ``test/CLASS/IMAGE``.

    The decoded images are kept in ``$XDG_CACHE_HOME/marglik`` or ``~/.cache/marglik``, under the
    sum of the archive's path, size and time of change.

    Args:
        path: the .tar.gz archive.
        validation: share of the training images that become the validation set, in [0, 1).
        max_train: number of training images to use, including validation; all if not given.
        max_test: number of test images to use; all if not given.
        seed: seed of the subsets and of the validation split.
        name: name of the data in tables and figures; the file's name if not given.
    """

    path: str | Path
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.archive = Path(self.path).expanduser()
        self.name = self.name or self.archive.name.partition(".")[0]

    def read(self, part: str) -> Part:
        """All images of the part.

        Raises:
            FileNotFoundError: if there is no such archive.
            ValueError: if it is damaged or has no such images, or one cannot be decoded.
        """
        cached = self._cached(part)
        if not cached.is_file():
            self._decode(part, cached)
        tensors, metadata = read_tensors(cached, kind="decoded images")
        return (tensors["images"], tensors["labels"]), tuple(json.loads(metadata["classes"]))

    def _cached(self, part: str) -> Path:
        stat = self.archive.stat() if self.archive.is_file() else os.stat_result(range(10))
        key = json.dumps([str(self.archive.resolve()), stat.st_size, stat.st_mtime_ns, part])
        folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(folder, "marglik", f"{sha256(key.encode())}.safetensors")

    def _decode(self, part: str, cached: Path) -> None:
        files = members(self.archive, self.archive.name, "the archive of images")
        contents = {PurePosixPath(name): data for name, data in files.items()}
        names = sorted(name for name in contents if name.parts[-3:-2] == (part,))
        if not names:
            raise ValueError(f"'{self.archive}' has no images {part}/CLASS/IMAGE.")
        classes = sorted({name.parts[-2] for name in names})
        images = decode_images({str(name): io.BytesIO(contents[name]) for name in names})
        labels = torch.tensor([classes.index(name.parts[-2]) for name in names])
        tensors = {"images": images, "labels": labels}
        write_tensors(cached, tensors, {"classes": json.dumps(classes)})


class CIFAR10Archive(ImageArchive):
    """CIFAR-10 in an archive of re-encoded images, normalised as the original is."""

    scale = MEAN, STD
