"""Predictions for new rows, by hand: the network on the rows' own numbers, in the file's units."""

import numpy as np
import pandas
import pytest
import torch

from marglik import influence, laplace_predictive, load_posterior
from marglik.application.cli import main
from marglik.application.data.splits import hold_out
from marglik.application.runs.predict import _no_formula
from marglik.data import TableFile
from tests.marglik.application.runs.command_line import content, refusal

N = 80
TRAIN = ["--model", "MLP", "--model.hidden", "[4]", "--epochs", "2", "--no_baseline"]


def houses():
    random = np.random.default_rng(0)
    size, town = random.normal(100, 20, N), random.choice(["A", "B"], N)
    price = 1000 * size + 50_000 * (town == "A")
    return pandas.DataFrame({"size": size, "town": town, "price": price})


def trained(folder, target, likelihood):
    houses().to_csv(folder / "houses.csv", index=False)
    data = ["--data", "TableFile", "--data.path", str(folder / "houses.csv"), "--no_progress"]
    options = ["--data.target", target, "--likelihood", likelihood, "--output", str(folder / "run")]
    assert main(["train", *TRAIN, *data, *options]) == 0
    return str(folder / "run")


def predicted(run, rows, folder):
    rows.to_csv(folder / "new.csv", index=False)
    arguments = [run, str(folder / "new.csv"), "-o", str(folder / "out.csv"), "--no_progress"]
    assert main(["predict", *arguments, "--overwrite"]) == 0
    return pandas.read_csv(folder / "out.csv")


def rows(*columns):
    """The first rows as the network takes them."""
    table = houses()[:5]
    dummies = {"town_A": table.town == "A", "town_B": table.town == "B"}
    table = table.assign(**dummies)[list(columns)]
    return torch.tensor(table.to_numpy("float32"))


def test_numbers_are_in_the_targets_units(tmp_path, capsys):
    run = trained(tmp_path, "price", "regression")
    new = houses()[:5][["town", "size"]]
    found = predicted(run, new, tmp_path)
    assert "5 rows predicted (Laplace, probit, calibrated)" in capsys.readouterr().out
    posterior = load_posterior(run)  # a class of ours needs no network
    with torch.no_grad():
        f = posterior.model(rows("size", "town_A", "town_B")).double()[:, 0]
    prediction = laplace_predictive(posterior)(rows("size", "town_A", "town_B"))
    spread = prediction.total_uncertainty[:, 0].double()
    mean, std = TableFile(tmp_path / "houses.csv").load().target_scale or (0.0, 1.0)
    expected = (f * std + mean).numpy()
    assert found["mean"].to_numpy() == pytest.approx(expected, rel=1e-6)
    assert found["std"].to_numpy() == pytest.approx((spread.sqrt() * std).numpy(), rel=1e-5)
    half = (found["high"] - found["low"]).to_numpy() / 2
    assert half == pytest.approx(1.6448536 * found["std"].to_numpy(), rel=1e-6)
    # The same rows in another order of columns, among others; and what cannot be.
    again = predicted(run, houses()[:5].assign(id=1)[["id", "price", "size", "town"]], tmp_path)
    pandas.testing.assert_frame_equal(again, found)
    arguments = ("predict", run, str(tmp_path / "new.csv"), "-o", str(tmp_path / "out.csv"))
    assert "out.csv exists. Pass --overwrite" in refusal(capsys, *arguments)
    new.assign(town="C").to_csv(tmp_path / "new.csv", index=False)
    assert "'town' has 'C' (in 5 row(s))" in refusal(capsys, *arguments, "--overwrite")
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / "out.csv"), found)
    itself = (*arguments[:4], str(tmp_path / "." / "new.csv"), "--overwrite")
    assert "the file of the rows, and the output would replace it" in refusal(capsys, *itself)


@pytest.mark.parametrize("target", ["price", "town"])
def test_values_that_overflow_are_named(target, tmp_path, capsys):
    run = trained(tmp_path, target, "regression" if target == "price" else "classification")
    rows = houses()[:5]
    rows.loc[3, "size"] = 1e30
    rows.to_csv(tmp_path / "new.csv", index=False)
    arguments = ("predict", run, str(tmp_path / "new.csv"), "-o", str(tmp_path / "out.csv"))
    assert "The value of column 'size' in row 3 (counted from 0)" in refusal(capsys, *arguments)
    assert not (tmp_path / "out.csv").exists()


def test_no_command_writes_over_a_runs_files(run, tmp_path, capsys):
    """Wherever in the folder, by whatever path, a prediction or a page."""
    before = content(run)
    (tmp_path / "link").symlink_to(run)
    for output in (run / "posterior.json", run / "new.csv", run / "sub" / "new.csv",
                   run / "checkpoint" / "new.csv", tmp_path / "link" / "log.jsonl"):  # fmt: skip
        arguments = ("predict", str(run), "new.csv", "-o", str(output), "--overwrite")
        assert f"is in {run.resolve()}, the folder of a run" in refusal(capsys, *arguments)
    page = ("report", str(run), "--output", str(run / "posterior.json"))
    assert "a file of a run, which a report never replaces" in refusal(capsys, *page)
    assert content(run) == before
    (tmp_path / "checkpoint").mkdir()  # anyone's: the control, which comes to the rows
    arguments = ("predict", str(run), "new.csv", "-o", str(tmp_path / "out.csv"))
    assert "not a TableFile" in refusal(capsys, *arguments)


def test_names_of_classes_are_no_formulas(tmp_path):
    """Spreadsheets run a cell that begins with = + - @; a number may."""
    cells = {"=1+1": "'=1+1", "@SUM(A2)": "'@SUM(A2)", "-5": "-5"}
    table = pandas.DataFrame({"x": [k % 3 + k / 1000 for k in range(90)], "name": [*cells] * 30})
    table.to_csv(tmp_path / "names.csv", index=False)
    data = ["--data", "TableFile", "--data.path", str(tmp_path / "names.csv"), "--epochs", "30"]
    model = ["--model", "MLP", "--model.hidden", "[30]", "--no_baseline", "--no_progress"]
    run, output = tmp_path / "run", tmp_path / "out.csv"
    options = ["--likelihood", "classification", "--output", str(run), "--held_out", "0"]
    assert main(["train", *model, *data, *options, "--batch_size", "8"]) == 0
    assert main(["predict", str(run), str(tmp_path / "names.csv"), "-o", str(output)]) == 0
    rows = pandas.read_csv(output, dtype={"predicted": "str"})
    assert [*rows.columns[1:]] == [f"p({name})" for name in sorted(cells)]
    predicted = rows.iloc[:, 1:].idxmax(axis=1).str[2:-1]
    assert [*rows.predicted] == [cells[name] for name in predicted]
    assert len({*predicted}) == 3  # the control: all of them are predicted


@pytest.mark.parametrize("text", ["+1+A2", "-A2", "-", "\t=1", "-inf", "+1e-3", "-.5", "A=1", " ="])
def test_numbers_and_texts_that_are_no_formulas_stay(text):
    is_number_or_text = text in ("+1e-3", "-.5", "A=1", " =")
    assert _no_formula(text) == (text if is_number_or_text else f"'{text}")


def test_classes_have_probabilities(tmp_path):
    run = trained(tmp_path, "town", "classification")
    found = predicted(run, houses()[:5][["price", "size"]], tmp_path)
    p = laplace_predictive(load_posterior(run))(rows("size", "price")).mean
    assert found[["p(A)", "p(B)"]].to_numpy() == pytest.approx(p.numpy(), rel=1e-5)
    assert found["predicted"].tolist() == ["AB"[int(k)] for k in p.argmax(1)]


def effects_by_hand(run, folder, target, new, curvature):
    """Scores of the function, for the run's rows, of which a tenth was held out: and these rows."""
    splits = hold_out(TableFile(folder / "houses.csv", target=target).load(), 0.1, 0)
    posterior, scale = load_posterior(run), splits.target_scale or (0.0, 1.0)
    (x, y), (x_held, y_held) = splits.train, splits.validation
    assert posterior.n_data == len(y) + len(y_held) > len(y)

    def log_odds_or_mean(f, _):
        if target == "price":
            return scale[1] * f[:, 0]
        top = f.topk(2, dim=1).values
        return top[:, 0] - top[:, 1]

    queries = [(new, y[:1].expand(len(new), *y.shape[1:]))]
    fitted = [(torch.cat([x, x_held]), torch.cat([y, y_held]))]
    scores = influence(
        posterior, queries, fitted, measurement=log_odds_or_mean, curvature=curvature
    )
    return -scores[:, : len(y)], splits.indices_in_source


@pytest.mark.parametrize(("target", "curvature"), [("price", "exact"), ("town", "ekfac")])
def test_training_examples_explain_predictions(target, curvature, tmp_path, capsys):
    run = trained(tmp_path, target, "regression" if target == "price" else "classification")
    houses()[:5].drop(columns=target).to_csv(tmp_path / "new.csv", index=False)
    arguments = ("predict", run, str(tmp_path / "new.csv"), "-o", str(tmp_path / "out.csv"))
    explain = ("--explain", "3", "--train", str(tmp_path / "houses.csv"))
    options = [] if curvature == "exact" else ["--curvature", curvature]
    assert main([*arguments, *explain, *options]) == 0
    found = pandas.read_csv(tmp_path / "out.csv")
    columns = ("size", "town_A", "town_B") if target == "price" else ("size", "price")
    expected, in_file = effects_by_hand(run, tmp_path, target, rows(*columns), curvature)
    most = expected.abs().argsort(1, descending=True)
    for k in range(3):
        effect = expected.gather(1, most[:, k : k + 1])[:, 0]
        assert found[f"effect_{k + 1}"].to_numpy() == pytest.approx(effect.numpy(), rel=1e-3)
        assert found[f"example_{k + 1}"].tolist() == in_file[most[:, k]].tolist()
    # The control: the largest effects are well above others, and the rows differ.
    assert (expected.abs().median(1).values < 0.8 * expected.abs().amax(1)).all()
    plain = [name for name in found if not name.startswith(("example", "effect"))]
    without = predicted(run, houses()[:5], tmp_path)
    pandas.testing.assert_frame_equal(found[plain], without)
    # Wrong uses end before any work.
    wrong = {
        ("--explain", "3"): "Pass both --explain 5 and --train FILE",
        explain[2:]: "Pass both --explain 5 and --train FILE",
        ("--explain", "-1", *explain[2:]): "explain=-1",
        ("--explain", "1000", *explain[2:]): "explain=1000 is too large: the run has 58",
        (*explain[:3], str(tmp_path / "new.csv")): "",
        (*explain[:3], str(tmp_path / "missing.csv")): "is not a file",
    }
    for use, message in wrong.items():
        assert message in refusal(capsys, *arguments, *use, "--overwrite")
    changed = houses()
    changed.loc[:5, "size"] += 1
    changed.to_csv(tmp_path / "houses.csv", index=False)
    said = refusal(capsys, *arguments, *explain, "--overwrite")
    assert "has other training examples" in said and "Pass the unchanged file" in said
