"""`marglik acquire` writes the rows that `marglik.acquire` chooses."""

import pandas
import pytest

from marglik import acquire, load_posterior
from marglik.application.cli import main
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
