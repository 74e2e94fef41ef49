"""`marglik acquire` writes the rows that `marglik.acquire` chooses."""

import pandas
import pytest
import torch

from marglik import acquire, load_posterior
from marglik.application.cli import main
from marglik.application.data.splits import hold_out
from marglik.data import TableFile
from tests.marglik.application.runs.command_line import refusal
from tests.marglik.application.runs.test_predict import houses, rows, trained


@pytest.mark.parametrize(
    ("target", "likelihood", "options"),
    [("price", "regression", ["--joint"]), ("town", "classification", ["--method", "entropy"])],
)
def test_rows_are_those_of_the_function(target, likelihood, options, tmp_path, capsys):
    run = trained(tmp_path, target, likelihood)
    pool = houses()[:5].drop(columns=target).assign(id=list("abcde"))
    pool.to_csv(tmp_path / "pool.csv", index=False)
    arguments = ["acquire", run, str(tmp_path / "pool.csv"), "-o", str(tmp_path / "out.csv")]
    assert main([*arguments, "-n", "3", *options]) == 0
    method = "epig" if target == "price" else "entropy"
    assert f"3 of 5 rows chosen ({method})" in capsys.readouterr().out
    columns = ("size", "town_A", "town_B") if target == "price" else ("size", "price")
    x = rows(*columns)
    if target == "price":
        expected = acquire(load_posterior(run), x, 3, joint=True)
    else:
        expected = acquire(load_posterior(run), x, 3, "entropy")
    written = pandas.read_csv(tmp_path / "out.csv")
    assert list(written.columns) == ["row", "score", *pool.columns]
    assert written["row"].tolist() == expected.index.tolist()
    assert written["score"].tolist() == pytest.approx(expected.gain.tolist(), rel=1e-5)
    chosen = pool.iloc[expected.index.tolist()].reset_index(drop=True)
    pandas.testing.assert_frame_equal(written[list(pool.columns)], chosen)
    assert "Pass --overwrite" in refusal(capsys, *arguments, "-n", "3")
    few = refusal(capsys, *arguments, "-n", "6", "--overwrite")
    assert "number=6 is too large: the pool has 5 unlabelled inputs" in few
    assert pandas.read_csv(tmp_path / "out.csv").equals(written)


def test_numbers_are_chosen_by_the_distance_from_the_training_rows(tmp_path, capsys):
    run = trained(tmp_path, "price", "regression")
    pool = houses()[:5].drop(columns="price")
    pool["size"] += [10.0, 0.0, 60.0, -40.0, 50.0]
    pool.to_csv(tmp_path / "pool.csv", index=False)
    arguments = ["acquire", run, str(tmp_path / "pool.csv"), "-o", str(tmp_path / "out.csv")]
    assert main([*arguments, "-n", "3", "--train", str(tmp_path / "houses.csv")]) == 0
    assert "3 of 5 rows chosen (lcmd)" in capsys.readouterr().out
    splits = hold_out(TableFile(tmp_path / "houses.csv", target="price").load(), 0.1, 0)
    x = rows("size", "town_A", "town_B")
    x[:, 0] = torch.tensor(pool["size"].to_numpy("float32"))
    x = torch.cat([x, splits.train[0], splits.validation[0]])
    expected = acquire(load_posterior(run), x, 3, labelled=range(5, len(x)))
    written = pandas.read_csv(tmp_path / "out.csv")
    assert written["row"].tolist() == expected.index.tolist()
    assert written["score"].tolist() == pytest.approx(expected.gain.tolist(), rel=1e-5)
    assert 1 not in expected.index and expected.method == "lcmd"  # row 1 is a training row
