"""Tensors from a file, sequences and graphs: held out, recorded; bad ones are named."""

import io
import json
from dataclasses import replace
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from marglik import load_posterior
from marglik.application.cli import main
from marglik.application.data.record import as_trained, data_record, is_held_out, num_seen
from marglik.application.data.splits import hold_out, split_batches, take
from marglik.data import Digits, Splits, TensorFile
from marglik.graphs import Graphs
from marglik.models import LeNet
from tests.marglik.application.runs.command_line import evaluated


def example_tensors(**changes):
    """Regression data with 2 features; a tensor that is changed to None is left out."""
    tensors = {
        f"{which}_{split}": torch.arange(float(n * width)).view(n, width)
        for split, n in (("train", 10), ("validation", 3), ("test", 4))
        for which, width in (("x", 2), ("y", 1))
    }
    return {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}


def test_splits_and_batches_are_the_tensors_of_the_file(tmp_path):
    save_file(example_tensors(), tmp_path / "energy.safetensors")
    splits, stored = TensorFile(tmp_path / "energy.safetensors").load(), example_tensors()
    assert splits.name == "energy"
    for split in ("train", "validation", "test"):
        for which, tensor in zip("xy", getattr(splits, split), strict=True):
            assert torch.equal(tensor, stored[f"{which}_{split}"])
    loader = split_batches(splits, "train", 4, shuffle=True)
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [4, 4, 2] and loader.num_examples == 10
    rows = [row for x, y in batches for row in torch.cat([x, y], 1).tolist()]
    assert rows != torch.cat(splits.train, 1).tolist() == sorted(rows)


def test_an_npz_holds_the_same_in_float32(tmp_path):
    arrays = {name: tensor.double().numpy() for name, tensor in example_tensors().items()}
    np.savez(tmp_path / "energy.npz", **arrays)
    splits = TensorFile(tmp_path / "energy.npz").load()
    assert torch.equal(splits.test[0], example_tensors()["x_test"])
    np.savez(tmp_path / "pickled.npz", **arrays | {"x_test": np.array([{}], dtype=object)})
    (tmp_path / "cut.npz").write_bytes((tmp_path / "energy.npz").read_bytes()[:100])
    for name in ("pickled", "cut"):
        with pytest.raises(ValueError, match=f"{name}.npz' is damaged, or not a"):
            TensorFile(tmp_path / f"{name}.npz").load()


def test_pixels_are_images(tmp_path):
    """As Digits are: normalised, cropped and flipped, for a LeNet, beside other images."""
    digits = Digits(validation=0.1).load()
    assert digits.validation is not None
    parts = {"train": digits.train, "validation": digits.validation, "test": digits.test}
    arrays = {
        f"{xy}_{s}": t.numpy() for s, p in parts.items() for xy, t in zip("xy", p, strict=True)
    }
    np.savez(tmp_path / "own.npz", **arrays)
    file = TensorFile(tmp_path / "own.npz")
    own = file.load()
    assert own.are_images and (own.mean, own.std) == (digits.mean, digits.std)
    options = {"shuffle": True, "augment": True, "seed": 1}
    pairs = zip(*(split_batches(s, "train", 50, **options) for s in (own, digits)), strict=True)
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)
    data = ["--data", "TensorFile", "--data.path", str(tmp_path / "own.npz"), "--ood", "Noise"]
    run = ["--augmentation", "standard", "--epochs", "1", "--no_baseline", "--no_progress"]
    folder = ["--output", str(tmp_path / "run")]
    assert main(["train", "--model", "LeNet", *data, *run, *folder]) == 0
    assert evaluated(tmp_path / "run").predictives["MAP"].metrics.auroc is not None
    network = load_posterior(tmp_path / "run").model  # built as the folder says
    assert isinstance(network, LeNet) and network.fc3.out_features == 10
    last_axis = {n: a.transpose(0, 2, 3, 1) if a.ndim == 4 else a for n, a in arrays.items()}
    np.savez(tmp_path / "last.npz", **last_axis)
    with pytest.raises(ValueError, match=r"channels last, but images are \(N, C, H, W\)"):
        TensorFile(tmp_path / "last.npz").load()


def zipped(path, *content):
    """An npz file with one member of this content."""
    with ZipFile(path, "w") as file:
        file.writestr("x_train.npy", b"".join(content))


def header(*shape):
    stream = io.BytesIO()
    what = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, what)
    return stream.getvalue()


BAD_ARCHIVES = {
    "more numbers than there are addresses": lambda path: zipped(path, header(2**60), bytes(64)),
    "more numbers than fit the memory": lambda path: zipped(path, header(2**49), bytes(64)),
    "more than 64 bits": lambda path: zipped(path, header(2**70), bytes(64)),
    "a size that overflows": lambda path: zipped(path, header(2**62, 8), bytes(64)),
    "fewer numbers than it says": lambda path: zipped(path, header(100), bytes(64)),
    "no array": lambda path: zipped(path, b"text"),
}


@pytest.mark.parametrize("case", BAD_ARCHIVES)
def test_archives_that_lie_are_named(case, tmp_path):
    BAD_ARCHIVES[case](tmp_path / "lie.npz")
    with pytest.raises(ValueError, match="lie.npz' is damaged, or not a safetensors or npz file"):
        TensorFile(tmp_path / "lie.npz").load()


def test_an_archive_that_was_damaged_is_named(tmp_path):
    path = tmp_path / "cut.npz"
    np.savez_compressed(path, x_train=np.random.default_rng(0).random(1000))
    content = bytearray(path.read_bytes())
    content[500:520] = b"\xff" * 20
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cut.npz' is damaged, or not a safetensors or npz file"):
        TensorFile(path).load()


@pytest.mark.parametrize("scale", [1e160, 1e-170])
def test_numbers_that_float32_loses_are_named(scale, tmp_path):
    arrays = {name: tensor.double().numpy() for name, tensor in example_tensors().items()}
    np.savez(tmp_path / "energy.npz", **arrays | {"y_train": scale * arrays["y_train"]})
    with pytest.raises(ValueError, match="y_train has values from 0 to 9e.*divide the values"):
        TensorFile(tmp_path / "energy.npz").load()


BAD_FILES = {
    "missing": ({"y_test": None}, "Required are x_train, y_train, x_test, y_test"),
    "half a validation": ({"y_validation": None}, "optional are x_validation and y_validation"),
    "unknown": ({"x_val": torch.zeros(2)}, "contains x_test, x_train, x_val, .*rename or"),
    "lengths": ({"y_train": torch.zeros(9, 1)}, "x_train has 10 examples, but y_train has 9"),
    "empty": ({"x_test": torch.zeros(0, 2), "y_test": torch.zeros(0, 1)}, "x_test is empty"),
    "NaN": ({"x_train": torch.full((10, 2), torch.nan)}, r"x_train contains 20 value\(s\)"),
    "other shape": ({"x_test": torch.zeros(4, 3)}, r"shape \(3,\) .* x_train has shape \(2,\)"),
    "other dtype": ({"y_test": torch.zeros(4, 1).double()}, "float64, but y_train .*float32"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_named(tmp_path, case):
    changes, message = BAD_FILES[case]
    save_file(example_tensors(**changes), tmp_path / "energy.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        TensorFile(tmp_path / "energy.safetensors").load()
    assert "energy" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="nowhere.*No such file"):
        TensorFile(tmp_path / "nowhere").load()


def graphs(number, features=2):
    """Pairs of nodes, joined in both directions."""
    nodes = torch.arange(2 * number)
    other = nodes + 1 - 2 * (nodes % 2)
    counts = torch.full((number,), 2)
    ones = torch.ones(2 * number, 1)
    return Graphs(torch.randn(2 * number, features), ones, nodes, other, counts, counts)


def of_graphs(number=6, features=2, **changes):
    pair = graphs(number, features), torch.arange(number) % 2
    options = {"train": pair, "validation": None, "test": pair, "name": "pairs"}
    return Splits(**options | {"classes": ("a", "b")} | changes)


def of_words(**changes):
    pair = torch.randint(5, (6, 3)), torch.tensor([[0, 1, -1]] * 6)
    options = {"train": pair, "validation": None, "test": pair, "name": "words"}
    return Splits(**options | {"classes": ("a", "b"), "ignore_index": -1} | changes)


def of_images(name="pets", classes=("cat", "dog"), shape=(1, 4, 4), mean=9.0):
    part = torch.randint(256, (6, *shape), dtype=torch.uint8), torch.arange(6) % 2
    scale = {"mean": (mean,) * shape[0], "std": (3.0,) * shape[0]}
    return Splits(part, None, part, name, classes, **scale)


def test_batches_of_graphs():
    splits = of_graphs()
    batches = list(split_batches(splits, "train", 4, shuffle=True))
    assert [len(x) for x, _ in batches] == [4, 2]
    nodes = torch.cat([x.nodes for x, _ in batches])
    order = [int(((splits.train[0].nodes - n) ** 2).sum(1).argmin()) // 2 for n in nodes[::2]]
    assert sorted(order) == list(range(6)) != order
    assert torch.equal(splits.train[1][order], torch.cat([y for _, y in batches]))


WRONG = {
    "images of floating point": (
        lambda: replace(of_images(), train=(torch.zeros(2, 1, 4, 4), torch.arange(2)),
                        test=(torch.zeros(2, 1, 4, 4), torch.arange(2))),
        r"pets has examples of shape \(1, 4, 4\) and dtype torch.float32. Images must be uint8",
    ),
    "a channel of equal pixels": (
        lambda: replace(of_images(), std=(0.0,)), r"std=\(0.0,\). Each of the 1 channels needs",
    ),
    "a label without a class": (
        lambda: of_graphs(classes=("a",)), "labels of y_train range from 0 to 1. With 1 classes",
    ),
    "a label that should be ignored": (
        lambda: of_words(ignore_index=None), "words: labels of y_train range from -1 to 1",
    ),
    "no label that counts": (
        lambda: of_words(test=(torch.zeros(1, 3).long(), torch.full((1, 3), -1))),
        "words: all labels of y_test are -1, the label that does not count",
    ),
    "features of graphs": (
        lambda: of_graphs(test=of_graphs(features=3).test),
        "x_test has examples of graphs with 3 features per node and 1 per edge, but x_train",
    ),
    "edges to nowhere": (
        lambda: of_graphs(train=(replace(graphs(6), senders=torch.full((12,), 99)),
                                 torch.arange(6) % 2)),
        "pairs: x_train: senders has node 99",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit(case):
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        make()


# What is held out for calibration


def test_held_out_examples_keep_the_shares_of_classes():
    whole = Digits().load()
    parts = hold_out(whole, 0.1, seed=3)
    everything = Digits().load_undivided().train[0]  # of which a part was for testing, too
    assert torch.equal(parts.train[0], everything[parts.indices_in_source])
    assert parts.validation is not None
    assert (len(parts.train[1]), len(parts.validation[1])) == (1294, 144)
    assert (parts.mean, parts.std, parts.test) == (whole.mean, whole.std, whole.test)
    counts = parts.validation[1].bincount()
    assert (counts - whole.train[1].bincount() / 10).abs().max() < 1
    together = torch.cat([parts.train[0], parts.validation[0]]).flatten(1)
    assert torch.equal(together.unique(dim=0), whole.train[0].flatten(1).unique(dim=0))
    other = hold_out(whole, 0.1, seed=4)
    assert other.validation is not None
    assert not torch.equal(other.validation[0], parts.validation[0])


def test_held_out_tensors_and_graphs():
    x = torch.arange(40.0)[:, None]
    for classes in (None, ("no", "yes")):
        y = (x[:, 0] >= 30).long() if classes else x.clone()
        whole = Splits((x, y), None, (x, y), "numbers", classes)
        parts = hold_out(whole, 0.2, seed=0)
        (x_train, y_train), (x_held, y_held) = parts.train, parts.validation
        assert len(x_held) == 8 and sorted([*x_train[:, 0], *x_held[:, 0]]) == x[:, 0].tolist()
        assert torch.equal(x_train, x[parts.indices_in_source])
        assert torch.equal(y_held, y[x_held[:, 0].long()]) and len(y_train) == 32
        assert not classes or y_held.sum() == 2  # a quarter, as of all
    parts = hold_out(of_graphs(number=20), 0.2, seed=0)
    assert parts.validation is not None
    assert len(parts.validation[0]) == 4 and len(parts.train[0].nodes) == 32
    few = Splits((x[:4], x[:4]), None, (x, x), "numbers")
    with pytest.raises(ValueError, match=r"held_out=0.1: .* 4 .* into 0 and 4.*0 for none"):
        hold_out(few, 0.1, seed=0)


# What is remembered of data


def recorded(splits, source=None):
    """The record after its way through a file."""
    return json.loads(json.dumps(data_record(splits, source)))


@pytest.mark.parametrize("kind", ["images", "graphs", "numbers"])
def test_examples_that_a_run_has_seen_are_counted(kind):
    def parts(*sizes):
        if kind == "numbers":
            return [(torch.randn(n, 3), torch.randn(n, 1)) for n in sizes]
        make = of_images if kind == "images" else of_graphs
        return [take(make().train, torch.arange(n)) for n in sizes]

    like = of_images() if kind == "images" else of_graphs() if kind == "graphs" else None
    train, held_out, test, new = parts(6, 4, 3, 5)
    like = like or Splits(train, None, test, "numbers")
    splits = replace(like, train=train, validation=held_out, test=test)
    record = recorded(splits)
    assert num_seen(splits, None) is None and num_seen(splits, record) == 0
    assert num_seen(replace(splits, test=new), record) == 0
    assert num_seen(replace(splits, test=take(train, torch.tensor([5, 0]))), record) == 2
    assert num_seen(replace(splits, test=take(held_out, torch.tensor([1, 3, 1]))), record) == 3
    # With another target, an input was seen all the same; part of the run's own test set was not.
    assert num_seen(replace(splits, test=(train[0], train[1] * 0)), record) == 6
    assert num_seen(replace(splits, test=take(test, torch.arange(2))), record) == 0
    assert (
        num_seen(replace(splits, train=test, test=test), recorded(replace(splits, train=test))) == 0
    )


def test_records():
    source = {"class_path": "marglik.data.Digits", "init_args": {"seed": 1}}
    found = recorded(of_images(), source)
    assert found.pop("train_sha256") and found.pop("test_sha256") and found.pop("seen")
    assert found == {
        "name": "pets", "source": source, "classes": ["cat", "dog"],
        "form": "images of shape (1, 4, 4)", "mean": [9.0], "std": [3.0],
    }  # fmt: skip
    assert recorded(of_graphs())["form"] == "graphs with 2 features per node and 1 per edge"
    sums = {"train_sha256", "test_sha256", "seen"}
    assert {*recorded(of_words())} == {"name", "source", "classes", "form"} | sums
    pets = of_images()
    with_some = replace(pets, validation=pets.test)
    assert is_held_out(with_some, recorded(pets)) and not is_held_out(pets, recorded(pets))
    other = pets.train[0], 1 - pets.train[1]
    assert not is_held_out(replace(with_some, train=other), recorded(pets))
    assert not is_held_out(with_some, None)


def test_other_data_is_normalised_as_in_training():
    trained = of_images(mean=77.98472270514604)
    other = of_images("other pets")
    adapted = as_trained(other, recorded(trained))
    assert adapted.mean == trained.mean and adapted.test is other.test  # to the bit
    for make in (of_graphs, of_words):
        splits = make(name="other")
        assert as_trained(splits, recorded(make())) is splits
    # What a file's labels are called, nobody knows.
    assert as_trained(of_words(classes=None), recorded(of_words())).classes is None


@pytest.mark.parametrize(
    ("splits", "trained", "message"),
    [
        (
            of_words(),
            of_images(),
            "words has no images, graphs or columns, but .* pets with images of shape .*--data",
        ),
        (of_images(), of_words(), r"pets has images of shape \(1, 4, 4\), but .* words"),
        (of_images("zoo", ("cat", "emu")), of_images(), r"zoo has 2 classes \(cat, emu\), .* pets"),
        (of_graphs(features=4), of_graphs(), "graphs with 4 features per node.* with 2 features"),
        (
            of_images(shape=(3, 4, 4)),
            of_images(),
            r"images of shape \(3, 4, 4\), but .* \(1, 4, 4\)",
        ),
    ],
)
def test_data_of_another_form(splits, trained, message):
    with pytest.raises(ValueError, match=message):
        as_trained(splits, recorded(trained))
