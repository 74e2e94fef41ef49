"""The data of experiments: what is for training stays apart from what is for tests."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from experiments.data.dart import DART
from experiments.data.uci import UCI
from tests.experiments.data.text_and_graphs import (
    dart_entries,
    write_dart,
    write_uci,
)


def texts_of(x, y):
    """The texts of DART's windows, put together again from their targets."""
    texts = []
    for inputs, targets in zip(x.tolist(), y.tolist(), strict=True):
        new = bytes(target for target in targets if target != -100)
        if inputs[0] == ord("\n") and targets[0] != -100:
            texts.append(b"\n" + new)
        else:
            texts[-1] += new
    return texts


def test_each_byte_of_dart_is_a_target_once_and_no_triples_are_in_two_splits(tmp_path):
    path, R = write_dart(tmp_path / "dart.json.gz", dart_entries(60)), 32
    splits = DART(path, R, num_test=30, validation=0.2).load()
    pairs = (splits.train, splits.validation, splits.test)
    expected = {
        f"\n{' && '.join(' | '.join(t) for t in e['tripleset'])} => {e['annotations'][0]['text']}\n"
        .encode()
        for e in dart_entries(60)
    }  # fmt: skip
    found = [texts_of(*pair) for pair in pairs]
    for texts in found:
        assert set(texts[:-1]) <= expected  # the last may be cut off by the number of windows
        assert any(text.startswith(texts[-1]) for text in expected)
    assert sum(map(len, found)) == len(set().union(*found)) >= 56
    subjects = [{text.split(b" | ")[0] for text in texts} for texts in found]
    assert all(len(of) > 5 for of in subjects)
    assert sum(map(len, subjects)) == len(set().union(*subjects))
    for x, y in pairs:
        assert x.shape == y.shape == (len(x), R) and x.dtype == y.dtype == torch.int64
        assert ((y[:, :-1] == x[:, 1:]) | (y[:, :-1] == -100)).all() and (y != -100).any(1).all()
    assert (splits.name, splits.ignore_index, len(splits.classes)) == ("DART", -100, 256)


ROWS = np.array(
    [[1.0, 7.0, 10.0, 4.0], [2.0, 7.0, 20.0, 3.0], [4.0, 7.0, 60.0, 9.0], [9.0, 8.0, 90.0, 1.0]]
)  # the second column is constant over the first three rows, the third is the target
UCI_TEXTS = {
    "data": "\n".join(" ".join(map(str, row)) for row in ROWS),
    "index_features": "0\n1\n3\n",
    "index_target": "2\n",
    "index_train_0": "0.0\n2.0\n1.0\n",
    "index_test_0": "3.0\n",
}


def test_uci_is_standardised_by_the_training_part(tmp_path):
    splits = UCI("tiny", path=write_uci(tmp_path / "uci.tar.gz", "tiny", UCI_TEXTS)).load()
    (x, y), (x_test, y_test) = splits.train, splits.test
    # By hand: rows 0, 2, 1; targets 10, 60, 20 with mean 30 and variance (400 + 900 + 100) / 3.
    std = (1400 / 3) ** 0.5
    assert splits.target_scale == pytest.approx((30, std))
    assert_close(y, torch.tensor([[-20.0], [30.0], [-10.0]]) / std)
    assert_close(y_test, torch.tensor([[60.0]]) / std)
    assert_close(x[:, 0], (torch.tensor([1.0, 4.0, 2.0]) - 7 / 3) / (14 / 9) ** 0.5)
    assert not x[:, 1].any() and x_test[0, 1] == 1  # its scale is not known
    # Negative control: with the test example the mean would be another.
    assert abs(splits.target_scale[0] - ROWS[:, 2].mean()) > 1
