"""Windows of DART's texts: each byte a target once, no triples in two splits, bad files named."""

import gzip
import os
from pathlib import Path

import pytest
import torch

from experiments.data.dart import DART
from tests.experiments.data.text_and_graphs import dart_entries, write_dart

R = 32


@pytest.fixture
def path(tmp_path):
    return write_dart(tmp_path / "dart.json.gz", dart_entries(60))


def text_of(entry):
    triples = " && ".join(" | ".join(triple) for triple in entry["tripleset"])
    return f"\n{triples} => {entry['annotations'][0]['text']}\n".encode()


def texts_of(x, y):
    """The texts of windows, put together again from their targets."""
    texts = []
    for inputs, targets in zip(x.tolist(), y.tolist(), strict=True):
        new = bytes(target for target in targets if target != -100)
        if inputs[0] == ord("\n") and targets[0] != -100:
            texts.append(b"\n" + new)
        else:
            texts[-1] += new
    return texts


def subjects(x, y):
    """Which entries, by the number of their first subject."""
    return {text.split(b" | ")[0] for text in texts_of(x, y)}


def test_each_byte_is_a_target_once(path):
    splits = DART(path, context=R, num_test=20).load()
    found = texts_of(*splits.test) + texts_of(*splits.train)
    cut_off = texts_of(*splits.test)[-1]  # by num_test, with what else is about its triples
    expected = [text_of(entry) for entry in dart_entries(60)]
    assert len(set(found)) == len(found) >= 58
    assert set(found) - {cut_off} <= set(expected)
    assert any(text.startswith(cut_off) for text in expected)
    assert min(map(len, found)) > R  # the windows were put together


def test_windows(path):
    splits = DART(path, context=R, num_test=20).load()
    (x, y), (x_test, y_test) = splits.train, splits.test
    assert x.shape == y.shape == (len(x), R) and len(x_test) == len(y_test) == 20
    assert x.dtype == y.dtype == torch.int64
    assert (splits.name, splits.ignore_index, splits.validation) == ("DART", -100, None)
    assert len(splits.classes) == 256
    assert (splits.classes[65], splits.classes[10], splits.classes[255]) == ("A", "\\n", "\\xff")
    shifted = y[:, :-1] == x[:, 1:]
    assert (shifted | (y[:, :-1] == -100)).all() and shifted.float().mean() > 0.7
    assert (y != -100).any(1).all()
    assert splits.num_terms == int((y_test != -100).sum())


def test_no_triples_are_in_two_splits(path):
    splits = DART(path, context=R, num_test=30, validation=0.2).load()
    sets = [subjects(*pair) for pair in (splits.train, splits.validation, splits.test)]
    assert all(len(s) > 5 for s in sets)
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])
    # Some entries are about the same triples, in another order.
    twice = [entry["tripleset"][0][0] for entry in dart_entries(60)]
    assert len(set(twice)) < len(twice)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context=0: must be at least 1"),
        ({"num_test": 0}, "num_test=0: must be at least 1"),
        ({"validation": 1.0}, "validation=1.0: must be a fraction"),
        ({"seed": -1}, "seed=-1"),
        ({"num_test": 10_000}, "num_test: there are .* windows of 32 bytes left .*, not 10000"),
        ({"num_train": 10_000, "num_test": 5}, "num_train: there are"),
        ({"num_train": 3, "num_test": 5, "validation": 0.1}, "divided into 3 and 0"),
    ],
)
def test_impossible_sizes(path, options, message):
    with pytest.raises(ValueError, match=message):
        DART(path, **({"context": R} | options)).load()


BROKEN = {
    "no JSON": (gzip.compress(b"{entries}"), "is no JSON of DART"),
    "a hundred thousand brackets": (gzip.compress(b"[" * 100_000), "nested"),
    "half a character": (
        gzip.compress(b'[{"tripleset": [["a"]], "annotations": [{"text": "\\ud800"}]}]'),
        "Entry 0 of .* no annotation",
    ),
    "no list": (gzip.compress(b"{}"), "it holds dict, not a list of entries"),
    "no entries": (gzip.compress(b"[1]"), "Entry 0 of .* has no triples or no annotation"),
    "no text": (
        gzip.compress(b'[{"tripleset": [["a", "b", "c"]], "annotations": []}]'),
        "Entry 0 of .* no annotation",
    ),
    "other triples": (
        gzip.compress(b'[{"tripleset": [[1, "b", "c"]], "annotations": [{"text": "a"}]}]'),
        "Entry 0 of .* no triples",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(case, tmp_path):
    content, message = BROKEN[case]
    (tmp_path / "dart.json.gz").write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        DART(tmp_path / "dart.json.gz").load()
    assert "dart.json.gz" in str(raised.value)


def test_the_real_file():
    default = Path(__file__).parents[3] / "../shared/data"
    place = Path(os.environ.get("MARGLIK_DATA", default)) / "dart-v1.1.1-full-dev.json.gz"
    if not place.is_file():
        pytest.skip(f"no {place}: put DART's development split there, or set MARGLIK_DATA")
    splits = DART(place, num_test=500).load()
    assert len(splits.train[0]) > 12_000 and len(splits.test[0]) == 500
    texts = texts_of(*splits.test)
    assert all(b" | " in text and b" => " in text for text in texts[:-1])
    assert not subjects(*splits.train) >= subjects(*splits.test)
