"""UCI's sets as the archive has them, standardised by the training part; bad files named."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from experiments.data.uci import UCI

DATA = np.array(
    [[1.0, 7.0, 10.0, 4.0], [2.0, 7.0, 20.0, 3.0], [4.0, 7.0, 60.0, 9.0], [9.0, 8.0, 90.0, 1.0]]
)  # the second column is constant over the first three rows, the third is the target
TEXTS = {
    "data": "\n".join(" ".join(map(str, row)) for row in DATA),
    "index_features": "0\n1\n3\n",
    "index_target": "2\n",
    "n_splits": "1\n",
    "index_train_0": "0.0\n2.0\n1.0\n",
    "index_test_0": "3.0\n",
}


def write(path, texts, name="tiny"):
    with tarfile.open(path, "w:gz") as archive:
        for part, text in texts.items():
            info = tarfile.TarInfo(f"uci/{name}/{part}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "uci.tar.gz", TEXTS)


def test_standardised_by_the_training_part(path):
    splits = UCI("tiny", path=path).load()
    (x, y), (x_test, y_test) = splits.train, splits.test
    assert x.dtype == y.dtype == torch.float32 and splits.validation is None
    # By hand: rows 0, 2, 1; targets 10, 60, 20 with mean 30 and variance (400 + 900 + 100) / 3.
    std = (1400 / 3) ** 0.5
    assert (splits.target_mean, splits.target_std) == pytest.approx((30, std))
    assert_close(y, torch.tensor([[-20.0], [30.0], [-10.0]]) / std)
    assert_close(y_test, torch.tensor([[60.0]]) / std)
    first = (torch.tensor([1.0, 4.0, 2.0]) - 7 / 3) / (14 / 9) ** 0.5
    assert_close(x[:, 0], first)
    assert_close(x[:, 1], torch.zeros(3))
    assert_close(x_test[0, 1], torch.tensor(1.0))  # its scale is not known
    # Negative control: with the test example the mean would be another.
    assert abs(splits.target_mean - DATA[:, 2].mean()) > 1


BAD = {
    "no test examples": ({"index_test_0": ""}, "empty"),
    "a row that is not there": ({"index_test_0": "9.0"}, "9 in .* is not one of 0 to 3"),
    "a row from the end": ({"index_test_0": "-1"}, "-1 in .* is not one of 0 to 3"),
    "half a row": ({"index_test_0": "2.5"}, "2.5 in .* is not one of"),
    "in both parts": ({"index_test_0": "2.0"}, "2 is twice in index_train_0 and index_test_0"),
    "a row twice": ({"index_train_0": "0.0\n2.0\n2.0\n1.0\n"}, "2 is twice in index_train_0"),
    "a feature twice": ({"index_features": "0\n1\n1\n"}, "1 is twice in index_features"),
    "the target as a feature": ({"index_features": "0\n1\n2\n"}, "2 is twice in .*index_target"),
    "a column that is not there": ({"index_features": "0\n99999999999\n"}, "1e.11 in"),
    "no number": ({"data": TEXTS["data"].replace("9.0", "nine")}, "could not convert.*nine"),
    "a null byte": ({"data": TEXTS["data"].replace("9.0", "9.0\0")}, "could not convert"),
    "not finite": ({"data": TEXTS["data"].replace("9.0", "nan")}, "not finite"),
    "rows of several lengths": ({"data": TEXTS["data"] + "\n1 2"}, "inhomogeneous"),
    "constant targets": ({"data": "\n".join(["1 7 5 4"] * 4)}, "training targets are constant"),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_do_not_fit(tmp_path, case):
    change, message = BAD[case]
    with pytest.raises(ValueError, match=f"uci.tar.gz', set 'tiny': .*{message}"):
        UCI("tiny", path=write(tmp_path / "uci.tar.gz", TEXTS | change)).load()


def test_unknown_sets_and_splits(path):
    with pytest.raises(ValueError, match="no set 'large', but tiny"):
        UCI("large", path=path).load()
    for split in (1, -1):
        with pytest.raises(ValueError, match=f"there is no 'index_train_{split}'"):
            UCI("tiny", split, path=path).load()


def test_the_published_sets():
    default = Path(__file__).parents[3] / "../shared/data"
    archive = Path(os.environ.get("MARGLIK_DATA", default)) / "uci.tar.gz"
    if not archive.exists():
        pytest.skip(f"no {archive}: put the UCI sets there, or set MARGLIK_DATA")
    splits = UCI("yacht", 19, archive).load()
    assert splits.train[0].shape == (277, 6) and splits.test[1].shape == (31, 1)
    assert_close(splits.train[0].mean(0), torch.zeros(6), atol=1e-6, rtol=0)
    assert_close(splits.train[1].std(correction=0), torch.tensor(1.0))
