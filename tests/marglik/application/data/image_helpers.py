"""Small image sets, as tensors and as files, and ways to compare them."""

import io
import tarfile

import numpy as np
import torch
from PIL import Image

CLASSES = ("cat", "dog", "test")  # a class may have a split's name
TRAIN, TEST = 10, 4  # images per class


def encoded(pixels, suffix="jpg", **options):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, {"jpg": "JPEG", "png": "PNG"}[suffix], **options)
    return stream.getvalue()


def image_files(suffix="jpg", *, shape=(6, 5, 3), seed=0):
    """Relative path -> bytes of a small data set."""
    generator = np.random.default_rng(seed)
    return {
        f"{split}/{name}/{i:03}.{suffix}": encoded(
            generator.integers(0, 256, shape, dtype=np.uint8), suffix
        )
        for split, count in (("train", TRAIN), ("test", TEST))
        for name in CLASSES
        for i in range(count)
    }


def without(files, prefix):
    return {path: data for path, data in files.items() if not path.startswith(prefix)}


def write_folder(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_archive(path, files):
    """A tar archive, compressed as its name says."""
    mode = "w:gz" if path.suffix in {".gz", ".tgz"} else "w"
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def decoded_by_pil(files, split, mode="RGB"):
    """Oracle: PIL, one file after the other, in the order of the paths."""
    names = sorted(name for name in files if name.startswith(f"{split}/"))
    images = [np.array(Image.open(io.BytesIO(files[n])).convert(mode)) for n in names]
    pixels = np.stack(images)
    pixels = pixels[:, None] if mode == "L" else pixels.transpose(0, 3, 1, 2)
    labels = [CLASSES.index(name.split("/")[1]) for name in names]
    return torch.from_numpy(pixels), torch.tensor(labels)


def splits_of(splits):
    return [s for s in (splits.train, splits.validation, splits.test) if s is not None]


def keys(images):
    """The images as a set of byte strings."""
    return {image.numpy().tobytes() for image in images[0]}


def assert_same(images, other):
    assert torch.equal(images[0], other[0]) and torch.equal(images[1], other[1])
