"""Splits of sequences and graphs: labels, classes, what does not count, what does not fit."""

from dataclasses import replace

import pytest
import torch

from marglik.data import TensorSplits
from marglik.data.batches import split_batches
from marglik.graphs import Graphs


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


def test_terms_that_count():
    assert of_sequences().num_terms == 4
    assert of_graphs().num_terms == 4
    everything = of_sequences(ignore_index=None, classes=None)
    assert everything.num_terms == 6


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
