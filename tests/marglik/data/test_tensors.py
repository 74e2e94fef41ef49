"""Tensors from a file, sequences and graphs: as they were saved, in batches; bad ones named."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from marglik.data import TensorFile, TensorSplits
from marglik.data.batches import split_batches
from marglik.graphs import Graphs
from marglik.training.loaders import count_examples

TRAIN, VALIDATION, TEST = 10, 3, 4


def example_tensors(**changes):
    """Regression data with 2 features; a tensor that is changed to None is left out."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{which}_{split}": torch.randn(n, width, generator=generator, dtype=torch.float64)
        for split, n in (("train", TRAIN), ("validation", VALIDATION), ("test", TEST))
        for which, width in (("x", 2), ("y", 1))
    }
    tensors |= changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


NO_VALIDATION = {"x_validation": None, "y_validation": None}


def saved(path, **changes):
    save_file(example_tensors(**changes), path)
    return TensorFile(path)


def concatenated(loader):
    x, y = zip(*loader, strict=True)
    return torch.cat(x), torch.cat(y)


def test_splits_are_the_tensors_of_the_file(tmp_path):
    splits = saved(tmp_path / "energy.safetensors").load()
    stored = example_tensors()
    assert isinstance(splits, TensorSplits)
    assert splits.name == "energy"
    for split in ("train", "validation", "test"):
        for which, tensor in zip("xy", getattr(splits, split), strict=True):
            assert torch.equal(tensor, stored[f"{which}_{split}"])
            assert tensor.dtype == torch.float64


@pytest.mark.parametrize(("batch_size", "sizes"), [(4, [4, 4, 2]), (5, [5, 5]), (64, [10])])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_the_examples_each_once(tmp_path, batch_size, sizes, shuffle):
    splits = saved(tmp_path / "energy.safetensors").load()
    loader = splits.batches("train", batch_size, shuffle=shuffle)
    assert [len(x) for x, _ in loader] == [len(y) for _, y in loader] == sizes
    assert len(loader) == len(sizes)
    assert loader.num_examples == count_examples(loader) == len(loader.dataset) == TRAIN
    x, y = concatenated(loader)
    assert torch.equal(x, splits.train[0]) != shuffle
    rows = torch.cat([x, y], 1).tolist()  # targets stay with their inputs
    assert sorted(rows) == sorted(torch.cat(splits.train, 1).tolist())
    assert torch.equal(concatenated(splits.batches("test", batch_size))[0], splits.test[0])


BAD_TENSORS = {
    "missing": ({"y_test": None, **NO_VALIDATION}, r"lacks y_test \(it holds x_test, x_train, y_t"),
    "half a validation": ({"y_validation": None}, "lacks y_validation .*validation set is opt"),
    "unknown": ({"x_val": torch.zeros(2)}, "holds x_val, which would be ignored; supported are"),
    "lengths": ({"y_train": torch.zeros(9, 1)}, "x_train has 10 examples and y_train 9"),
    "empty": ({"x_test": torch.zeros(0, 2)}, r"x_test is empty \(shape \(0, 2\)\)"),
    "no axis": ({"y_test": torch.tensor(1.0)}, r"y_test is empty \(shape \(\)\)"),
    "NaN": (
        {"x_train": torch.tensor([[0.0, 0.0]] * 8 + [[0.0, float("nan")]] * 2)},
        r"x_train holds 2 value\(s\) that are NaN or infinite, the first in example 8",
    ),
    "infinite": (
        {"y_validation": torch.tensor([[0.0], [-float("inf")], [0.0]])},
        r"y_validation holds 1 value\(s\) .* the first in example 1",
    ),
    "other shape": (
        {"x_test": torch.zeros(TEST, 3, dtype=torch.float64)},
        r"x_test has examples of shape \(3,\) .* x_train of shape \(2,\)",
    ),
    "other dtype": ({"y_test": torch.zeros(TEST, 1)}, "float32, but y_train .*float64"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_named_in_one_line(tmp_path, case):
    changes, message = BAD_TENSORS[case]
    data = saved(tmp_path / "energy.safetensors", **changes)
    with pytest.raises(ValueError, match=message) as caught:
        data.load()
    assert "energy" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["nowhere.safetensors", "."])
def test_what_is_no_file_is_named(tmp_path, place):
    with pytest.raises(FileNotFoundError, match="is not a file. Give the path .* x_train, y_train"):
        TensorFile(tmp_path / place).load()


def graphs(number, features=2):
    """Pairs of nodes, joined in both directions."""
    V = 2 * number
    nodes = torch.arange(V)
    other = nodes + 1 - 2 * (nodes % 2)
    counts = torch.full((number,), 2)
    return Graphs(torch.randn(V, features), torch.ones(V, 1), nodes, other, counts, counts)


def of_graphs(**changes):
    options = {
        "train": (graphs(6), torch.tensor([0, 1] * 3)),
        "validation": None,
        "test": (graphs(4), torch.tensor([0, 1] * 2)),
        "name": "pairs",
        "classes": ("a", "b"),
    }
    return TensorSplits(**(options | changes))


def of_sequences(**changes):
    x = torch.randint(5, (6, 3))
    y = torch.tensor([[0, 1, -1]] * 6)
    options = {
        "train": (x, y),
        "validation": None,
        "test": (x[:2], y[:2]),
        "name": "words",
        "classes": ("a", "b"),
        "ignore_index": -1,
    }
    return TensorSplits(**(options | changes))


def test_batches_of_graphs():
    splits = of_graphs()
    batches = list(split_batches(splits, "train", 4))
    assert [len(x) for x, _ in batches] == [len(y) for _, y in batches] == [4, 2]
    x = torch.cat([x.nodes for x, _ in batches])
    assert torch.equal(x, splits.train[0].nodes)
    shuffled = split_batches(splits, "train", 6, shuffle=True, seed=3)
    (x, y), (x_again, _) = next(iter(shuffled)), next(iter(shuffled))
    assert not torch.equal(x.nodes, x_again.nodes)
    order = [int(((splits.train[0].nodes - n) ** 2).sum(1).argmin()) // 2 for n in x.nodes[::2]]
    assert torch.equal(splits.train[1][order], y)


@pytest.mark.parametrize("option", ["augment", "channels_last"])
@pytest.mark.parametrize("splits", [of_graphs(), of_sequences()])
def test_what_is_for_images(splits, option):
    with pytest.raises(ValueError, match=f"{splits.name} holds no images; .* is for images"):
        split_batches(splits, "train", 2, **{option: True})


def replaced(values, **changes):
    return replace(values, **changes), torch.tensor([0, 1] * 3)


BAD = {
    "a label without a class": (
        lambda: of_graphs(classes=("a",)),
        r"pairs: labels of y_train reach from 0 to 1; with 1 classes they must lie in 0..0",
    ),
    "a label that should be ignored": (
        lambda: of_sequences(ignore_index=None),
        "words: labels of y_train reach from -1 to 1",
    ),
    "no label that counts": (
        lambda: of_sequences(test=(torch.zeros(1, 3).long(), torch.full((1, 3), -1))),
        "words: all labels of y_test are -1, which do not count",
    ),
    "numbers of graphs": (
        lambda: of_graphs(test=(graphs(4), torch.zeros(3).long())),
        "pairs: x_test has 4 examples and y_test 3; each input needs one target",
    ),
    "features of graphs": (
        lambda: of_graphs(test=(graphs(2, 3), torch.zeros(2).long())),
        "x_test has examples of graphs with 3 features per node and 1 per edge, but x_train of "
        "graphs with 2",
    ),
    "graphs and tensors": (
        lambda: of_graphs(test=(torch.zeros(2, 3), torch.zeros(2).long())),
        r"x_test has examples of shape \(3,\) .*, but x_train of graphs with 2 features",
    ),
    "NaN in a node": (
        lambda: of_graphs(train=replaced(graphs(6), nodes=torch.full((12, 2), float("nan")))),
        r"pairs: nodes of x_train holds 24 value\(s\) that are NaN or infinite, .* in node 0",
    ),
    "edges to nowhere": (
        lambda: of_graphs(train=replaced(graphs(6), senders=torch.full((12,), 99))),
        "pairs: x_train: senders has node 99",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()
