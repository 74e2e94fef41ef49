"""Sources of images, from their own files; out-of-distribution images."""

import io
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from scipy.io import savemat
from torchvision.transforms import functional as transforms

from marglik.data import (
    CIFAR10,
    SVHN,
    ClassSubset,
    DataSource,
    Digits,
    ImageFolder,
    Splits,
    out_of_distribution_images,
)
from tests.marglik.application.data.image_helpers import encoded

CLASSES = ("cat", "dog", "test")  # a class may have a split's name
TRAIN, TEST = 10, 4  # images per class


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


FILES = image_files()
PIXELS = np.random.default_rng(0).integers(0, 256, (150, 3, 32, 32), dtype=np.uint8)
LABELS = np.arange(150) % 10
PARTS = {"train": slice(0, 120), "test": slice(120, 150)}


def digits(folder, monkeypatch):
    from sklearn.datasets import load_digits

    pixels = (load_digits().images * 255 / 16).round().astype(np.uint8)[:, None]
    return Digits, pixels, load_digits().target


def cifar10(folder, monkeypatch):
    (folder / "cifar-10-batches-py").mkdir()
    for name, part in {"data_batch_1": PARTS["train"], "test_batch": PARTS["test"]}.items():
        stored = {"data": PIXELS[part].reshape(-1, 3072), "labels": LABELS[part].tolist()}
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(stored))
    meta = pickle.dumps({"label_names": list("0123456789")})
    (folder / "cifar-10-batches-py" / "batches.meta").write_bytes(meta)
    # Without their MD5 sums.
    dataset = torchvision.datasets.CIFAR10
    monkeypatch.setattr(dataset, "train_list", [["data_batch_1", None]])
    monkeypatch.setattr(dataset, "test_list", [["test_batch", None]])
    meta = {"filename": "batches.meta", "key": "label_names", "md5": None}
    monkeypatch.setattr(dataset, "meta", meta)
    return partial(CIFAR10, folder, False), PIXELS, LABELS


def svhn(folder, monkeypatch):
    for split, part in PARTS.items():
        stored = np.where(LABELS[part] == 0, 10, LABELS[part])[:, None]  # zero is 10 there
        pixels = PIXELS[part].transpose(2, 3, 1, 0)
        savemat(folder / f"{split}_32x32.mat", {"X": pixels, "y": stored.astype(np.uint8)})
    files = {s: [f"http://nowhere/{s}", f"{s}_32x32.mat", None] for s in PARTS}
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", files)
    return partial(SVHN, folder, False), PIXELS, LABELS


def folder_of_images(folder, monkeypatch):
    files = image_files("png")
    parts = [decoded_by_pil(files, split) for split in PARTS]
    pixels, labels = (torch.cat(values).numpy() for values in zip(*parts, strict=True))
    return partial(ImageFolder, write_folder(folder / "pets", files)), pixels, labels


SOURCES = [digits, cifar10, svhn, folder_of_images]


def labelled(pixels, labels):
    return sorted((np.asarray(i).tobytes(), int(k)) for i, k in zip(pixels, labels, strict=True))


@pytest.mark.parametrize("source", SOURCES)
def test_all_images_with_their_labels_once(source, tmp_path, monkeypatch):
    make, pixels, labels = source(tmp_path, monkeypatch)
    splits = make(validation=0.25).load()
    parts = splits_of(splits)
    found = [pair for part in parts for pair in labelled(*part)]
    assert sorted(found) == labelled(pixels, labels)
    assert len(parts) == 3 and splits.image_shape == pixels.shape[1:]
    for part in parts:  # stratified
        shares = part[1].bincount(minlength=len(splits.classes)) / len(part[1])
        expected = torch.tensor(labels).bincount() / len(labels)
        assert (shares - expected).abs().max() <= 1 / len(part[1])
    same, other = (make(validation=0.25, seed=seed).load() for seed in (0, 1))
    assert_same(same.train, splits.train)
    assert keys(splits.train) != keys(other.train)
    # Mean and standard deviation are those of the training images alone.
    x = splits.train[0].double()
    if splits.name == "CIFAR-10":
        assert (splits.mean, splits.std) == ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
    else:
        assert splits.mean == pytest.approx(x.mean((0, 2, 3)).tolist())
        assert splits.std == pytest.approx(x.std((0, 2, 3), correction=0).tolist())
    if source is not digits:  # a part of the data; validation images come from it
        few = make(validation=0.5, max_train=20).load()
        assert [len(y) for _, y in splits_of(few)][:2] == [10, 10]
        assert keys(few.train) | keys(few.validation) == keys(make(max_train=20).load().train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_train": 2}, "max_train=2: .* 30 examples into 2 and 28"),
        ({"validation": 0.05}, "validation=0.05: .* 28.* at least 3"),
        ({"validation": float("nan")}, "validation=nan must be"),
    ],
)
def test_impossible_parts(tmp_path, arguments, message):
    write_folder(tmp_path / "pets", FILES)
    with pytest.raises(ValueError, match=message):
        ImageFolder(tmp_path / "pets", **arguments).load()
    with pytest.raises(ValueError, match="test_fraction=0"):
        Digits(test_fraction=0)


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3)])
def test_greyscale_images_have_one_channel_unless_one_is_coloured(tmp_path, shape):
    grey = image_files("png", shape=(6, 5))
    files = grey | {"test/dog/000.png": encoded(np.full(shape, 7, np.uint8), "png")}
    splits = ImageFolder(write_folder(tmp_path / "pets", files)).load()
    mode = "L" if len(shape) == 2 else "RGB"
    for part, name in ((splits.train, "train"), (splits.test, "test")):
        assert torch.equal(part[0], decoded_by_pil(files, name, mode)[0])


@pytest.mark.parametrize("dataset", [CIFAR10, SVHN])
def test_data_that_cannot_be_downloaded(tmp_path, monkeypatch, dataset):
    def no_network(self):
        raise OSError("<urlopen error no route to host>\nsecond line")

    monkeypatch.setattr(getattr(torchvision.datasets, dataset.__name__), "download", no_network)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}.*no route.*ImageFolder") as caught:
        dataset(tmp_path).load()
    assert "\n" not in str(caught.value)


SMALL = encoded(np.zeros((3, 4, 3), dtype=np.uint8))
DEEP = encoded(np.zeros((6, 5), dtype=np.uint16), "png")


def test_files_that_begin_with_a_dot_are_left_out(tmp_path):
    plain = ImageFolder(write_folder(tmp_path / "pets", FILES)).load()
    hidden = FILES | {"train/cat/.hidden.png": b"no image", "test/cat/.DS_Store": b"x"}
    for one, other in zip(
        splits_of(ImageFolder(write_folder(tmp_path / "dots", hidden)).load()),
        splits_of(plain), strict=True,
    ):  # fmt: skip
        assert torch.equal(one[0], other[0])


def test_indices_are_those_of_all_images(tmp_path):
    folder = write_folder(tmp_path / "pets", FILES)
    every = ImageFolder(folder).load().train[0]
    some = ImageFolder(folder, max_train=len(every) - 6, validation=0.4).load()
    assert len(some.train[0]) < len(every) - 6
    assert torch.equal(every[some.indices_in_source], some.train[0])


BAD = {
    "no test": (without(FILES, "test/"), "test' is not a folder.*train/CLASS/IMAGE"),
    "an empty class": (FILES | {"train/cow/notes.txt": b""}, "cow"),
    "a class of train alone": (without(FILES, "test/dog"), "'dog' is in only one of .*--ood"),
    "another size": (
        FILES | {"train/dog/004.jpg": SMALL},
        "'train/dog/004.jpg' has 4×3 pixels, but 'train/cat/000.jpg' has 5×6.*Resize",
    ),
    "no image": (FILES | {"train/dog/4.jpg": b"no image"}, "'train/dog/4.jpg' cannot be decoded"),
    "half an image": (
        FILES | {"test/dog/1.jpg": FILES["test/dog/001.jpg"][:-150]},
        "'test/dog/1.jpg' cannot be decoded",
    ),
    "16 bits": (FILES | {"test/dog/1.png": DEEP}, r"'test/dog/1.png' has more than 8 bits.*I;16"),
    "PostScript": (
        FILES | {"train/cat/x.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 6\n"},
        "'train/cat/x.png' cannot be decoded",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case, tmp_path):
    files, message = BAD[case]
    folder = write_folder(tmp_path / "pets", files)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        ImageFolder(folder).load()
    assert "\n" not in str(caught.value)


# Classes of a source


def test_wrong_labels_are_as_many_as_asked_for_and_in_the_training_data_alone():
    right = Digits(test_fraction=0.5, validation=0.2).load()
    wrong = Digits(test_fraction=0.5, validation=0.2, wrong_labels=0.1).load()
    assert torch.equal(right.test[1], wrong.test[1])
    for part, other in ((right.train, wrong.train), (right.validation, wrong.validation)):
        assert torch.equal(part[0], other[0])
        assert (part[1] != other[1]).sum() == round(0.1 * len(part[1]))
    assert 0 <= wrong.train[1].min() and wrong.train[1].max() <= 9
    again = Digits(test_fraction=0.5, validation=0.2, wrong_labels=0.1).load()
    assert torch.equal(again.train[1], wrong.train[1])
    with pytest.raises(ValueError, match="wrong_labels"):
        Digits(wrong_labels=1.0)


@pytest.mark.parametrize("classes", [["3", "1", "7"], [9]])
def test_images_of_classes_keep_their_order_and_get_new_numbers(classes):
    digits = Digits(validation=0.2)
    everything, some = digits.load(), ClassSubset(digits, classes).load()
    names = tuple(map(str, classes))
    assert some.classes == names and some.name == f"digits ({', '.join(names)})"
    assert (some.mean, some.std) == (everything.mean, everything.std)
    for whole, kept in zip(splits_of(everything), splits_of(some), strict=True):
        expected = [
            (image, names.index(str(int(label))))
            for image, label in zip(*whole, strict=True)
            if str(int(label)) in names
        ]
        assert torch.equal(kept[0], torch.stack([image for image, _ in expected]))
        assert kept[1].tolist() == [label for _, label in expected]
    assert torch.equal(digits.load_undivided().train[0][some.indices_in_source], some.train[0])
    for wrong in ([], ["1", "1"], "12"):
        with pytest.raises(ValueError, match="is not a list of different names"):
            ClassSubset(digits, wrong)


# Out-of-distribution images


class Given(DataSource):
    """A source of given images."""

    def __init__(self, images, name="given"):
        part = images, torch.zeros(len(images), dtype=torch.int64)
        mean, std = (0.0,) * images.shape[1], (1.0,) * images.shape[1]
        self.splits = Splits(part, None, part, name, ("a",), mean=mean, std=std)

    def load(self):
        return self.splits


def like(*shape):
    return Given(torch.randint(256, (2, *shape), dtype=torch.uint8), "known").load()


def test_grey_images_are_resized_one_by_one_and_repeated():
    images, _, note = out_of_distribution_images(Digits(), like(3, 32, 32))
    assert note == "resized from 8x8x1 to 32x32x3"
    digits = Digits().load()
    assert images.shape == (len(digits.test[1]), 3, 32, 32)
    for original, result in zip(digits.test[0][:20], images[:20], strict=True):
        expected = transforms.resize(original.double(), [32, 32], antialias=True)
        # torchvision resizes uint8 in fixed-point arithmetic, which may round the other way.
        assert (result.double() - expected).abs().max() < 1
        assert torch.equal(result[0], result[1]) and torch.equal(result[0], result[2])
    images, _, note = out_of_distribution_images(Digits(seed=1), digits)  # of the right shape
    assert note is None and torch.equal(images, Digits(seed=1).load().test[0])


def test_colours_become_grey_by_their_luma():
    colours = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255] * 3, [0] * 3])
    pixels = colours.to(torch.uint8)[:, :, None, None].expand(-1, -1, 8, 8).contiguous()
    images, _, note = out_of_distribution_images(Given(pixels), like(1, 8, 8))
    assert note == "converted from 8x8x3 to 8x8x1"
    # 255 times .2989, .587, .114, 1, 0; rounded.
    assert images[:, 0, 0, 0].tolist() == [76, 150, 29, 255, 0]


def test_other_sources_that_cannot_be(tmp_path):
    files = without(image_files(), "train/")
    folder = ImageFolder(write_folder(tmp_path / "pets", files), max_test=6, name="elsewhere")
    images, name, note = out_of_distribution_images(folder, like(3, 6, 5))  # test images alone
    assert (len(images), name, note) == (6, "elsewhere", None)
    rows = Given(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "rows")
    part = torch.zeros(2, 3), torch.zeros(2)
    rows.splits = Splits(part, None, part, "rows")
    with pytest.raises(ValueError, match="rows contains no images"):
        out_of_distribution_images(rows, like(3, 8, 8))
    four = Given(torch.zeros(2, 4, 8, 8, dtype=torch.uint8), "satellite")
    with pytest.raises(ValueError, match="satellite has images with 4 channels, and known with 3"):
        out_of_distribution_images(four, like(3, 8, 8))
