"""A share of the training examples becomes the validation set: which ones, and of what data."""

from dataclasses import replace

import pytest
import torch

from marglik.data import Digits, TensorSplits
from marglik.data.splits import hold_out
from marglik.graphs import Graphs


def test_images_keep_their_shares_and_their_normalisation():
    whole = Digits().load()
    parts = hold_out(whole, 0.1, seed=3)
    assert parts.validation is not None
    assert (len(parts.train), len(parts.validation)) == (1294, 144)
    assert (parts.mean, parts.std, parts.test) == (whole.mean, whole.std, whole.test)
    counts = parts.validation.labels.bincount()
    assert (counts - whole.train.labels.bincount() / 10).abs().max() < 1
    together = torch.cat([parts.train.images, parts.validation.images]).flatten(1)
    assert torch.equal(together.unique(dim=0), whole.train.images.flatten(1).unique(dim=0))
    again, other = hold_out(whole, 0.1, seed=3), hold_out(whole, 0.1, seed=4)
    assert again.validation is not None and other.validation is not None
    assert torch.equal(again.validation.labels, parts.validation.labels)
    assert not torch.equal(other.validation.images, parts.validation.images)


@pytest.mark.parametrize("classes", [None, ("no", "yes")])
def test_tensors_are_divided_without_loss(classes):
    x = torch.arange(40.0)[:, None]
    y = (x[:, 0] >= 30).long() if classes else x.clone()
    splits = TensorSplits((x, y), None, (x, y), "numbers", classes)
    parts = hold_out(splits, 0.2, seed=0)
    assert parts.validation is not None
    (x_train, y_train), (x_held, y_held) = parts.train, parts.validation
    assert isinstance(x_train, torch.Tensor) and isinstance(x_held, torch.Tensor)
    assert len(x_held) == 8 and sorted([*x_train[:, 0], *x_held[:, 0]]) == x[:, 0].tolist()
    assert torch.equal(y_held, y[x_held[:, 0].long()])
    assert torch.equal(y_train, y[x_train[:, 0].long()])
    if classes:
        assert y_held.sum() == 2  # a quarter, as of all


def test_graphs_are_held_out_whole():
    counts = torch.arange(1, 41)
    none = torch.zeros(0, dtype=torch.int64)
    x = Graphs(torch.randn(int(counts.sum()), 2), torch.zeros(0, 1), none, none, counts, 0 * counts)
    splits = TensorSplits((x, counts % 2), None, (x, counts % 2), "graphs", ("even", "odd"))
    parts = hold_out(splits, 0.25, seed=0)
    assert parts.validation is not None and parts.validation[1].sum() == 5
    found = [int(n) for part, _ in (parts.train, parts.validation) for n in part.node_counts]
    assert sorted(found) == counts.tolist()


def test_a_share_that_leaves_a_part_empty_is_named():
    x = torch.arange(4.0)[:, None]
    splits = TensorSplits((x, x), None, (x, x), "numbers")
    with pytest.raises(ValueError, match=r"held_out=0.1: 4 .* into 0 and 4"):
        hold_out(splits, 0.1, seed=0)
    digits = Digits().load()
    few = replace(digits, train=digits.train.select(torch.arange(30)))
    with pytest.raises(ValueError, match=r"30 .* into 3 and 27.* With held_out 0 "):
        hold_out(few, 0.1, seed=0)
    y = torch.arange(50) % 10
    splits = TensorSplits(
        (y[:, None].float(), y), None, (y[:, None].float(), y), "ten", tuple("0123456789")
    )
    with pytest.raises(ValueError, match=r"into 5 and 45; both parts need at least 10"):
        hold_out(splits, 0.1, seed=0)
    ignored = replace(splits, train=(splits.train[0], y.where(y > 0, -100)), ignore_index=-100)
    assert len(hold_out(ignored, 0.1, seed=0).train[1]) == 45
