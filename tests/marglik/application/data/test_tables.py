"""Rows of a file: what becomes of its columns, and a run on them from the command line."""

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from marglik import laplace_predictive, load_posterior
from marglik.application.cli import main
from marglik.application.data.record import as_trained, data_record, data_to_evaluate, num_seen
from marglik.application.data.splits import hold_out
from marglik.data import TableFile
from marglik.models import MLP, Standardised
from tests.marglik.application.runs.command_line import refusal

N = 60


def frame():
    random = np.random.default_rng(0)
    size, rooms = random.normal(100, 20, N), random.integers(1, 6, N)
    town = random.choice(["A", "B", "C"], N)
    price = 1000 * size + 50_000 * rooms + 100_000 * (town == "A")
    return pandas.DataFrame({"size": size, "rooms": rooms, "town": town, "price": price})


@pytest.fixture(params=["csv", "parquet"])
def file(request, tmp_path):
    path = tmp_path / f"houses.{request.param}"
    if request.param == "csv":
        frame().to_csv(path, index=False)
    else:
        pytest.importorskip(
            "pyarrow", reason="Parquet needs pyarrow: pip install 'marglik[tables]'"
        )
        frame().to_parquet(path)
    return path


def test_columns_become_numbers_and_targets_are_standardised(file):
    splits = TableFile(file, validation=0.25, seed=3).load()
    assert splits.table is not None
    columns = splits.table.columns
    assert columns == ("size", "rooms", "town_A", "town_B", "town_C")
    parts = [splits.train, splits.validation, splits.test]
    assert [len(y) for _, y in parts] == [36, 12, 12]
    assert splits.target_scale is not None
    mean, std = splits.target_scale
    y = splits.train[1].double()
    torch.testing.assert_close(y.mean(), torch.zeros(()).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.square().mean(), torch.ones(()).double())
    rows = torch.cat([torch.cat([x, y * std + mean], 1) for x, y in parts])
    table = pandas.get_dummies(frame(), dtype=float)
    table = torch.tensor(table[[*columns, "price"]].to_numpy()).float()
    ordered = rows[rows[:, 0].argsort()], table[table[:, 0].argsort()]
    torch.testing.assert_close(*ordered)  # each row once


@pytest.mark.parametrize("scale", [1e140, 1e-145])
def test_targets_of_any_size_are_standardised(scale, tmp_path):
    """As those of usual size; their squares are not in the range of float32."""
    usual, large = tmp_path / "usual.csv", tmp_path / "large.csv"
    frame().to_csv(usual, index=False)
    frame().assign(price=frame().price * scale).to_csv(large, index=False)
    a, b = TableFile(usual, validation=0.2).load(), TableFile(large, validation=0.2).load()
    assert a.target_scale is not None and a.validation is not None and b.validation is not None
    assert b.target_scale == pytest.approx([scale * one for one in a.target_scale], rel=1e-12)
    for of_a, of_b in ((a.train, b.train), (a.validation, b.validation), (a.test, b.test)):
        torch.testing.assert_close(of_a[1], of_b[1])
    # Other rows by this scale, as float32 alone would not do.
    record = json.loads(json.dumps(data_record(b)))
    others, alike = TableFile(large, seed=1).load(), TableFile(usual, seed=1).load()
    alike = as_trained(alike, json.loads(json.dumps(data_record(a))))
    torch.testing.assert_close(as_trained(others, record).train[1], alike.train[1])


def test_classes_are_text_or_integers_or_as_asked(tmp_path, capsys):
    frame().to_csv(tmp_path / "houses.csv", index=False)
    splits = TableFile(tmp_path / "houses.csv", target="town").load()
    assert splits.classes == ("A", "B", "C") and splits.target_scale is None
    assert splits.train[1].dtype == torch.int64
    assert TableFile(tmp_path / "houses.csv", target="rooms").load().classes == tuple("12345")
    numbers = TableFile(tmp_path / "houses.csv", target="rooms", classes=False).load()
    assert numbers.classes is None and numbers.train[1].shape == (48, 1)
    options = {"target": "rooms", "classes": False, "standardise": False}
    counts = TableFile(tmp_path / "houses.csv", **options).load()  # as poisson takes them
    assert counts.target_scale is None
    assert counts.train[1].unique().tolist() == [1, 2, 3, 4, 5]
    assert numbers.train[1].unique().tolist() != [1, 2, 3, 4, 5]  # the control
    file = ["--data", "TableFile", "--data.path", str(tmp_path / "houses.csv"), "--model", "MLP"]
    wrong = [*file, "--data.target", "rooms", "--likelihood", "regression"]
    message = refusal(capsys, "train", *wrong)
    assert "5 classes, but likelihood 'regression' needs numbers" in message


def test_all_of_other_data_is_evaluated(tmp_path):
    """Also where it is a few rows; of the training data, its test part."""
    frame().to_csv(tmp_path / "houses.csv", index=False)
    trained = TableFile(tmp_path / "houses.csv").load()
    record = json.loads(json.dumps(data_record(trained)))

    def given(path, **options):
        return data_to_evaluate(TableFile(tmp_path / path, **options), record)

    assert torch.equal(given("houses.csv").test[0], trained.test[0])
    assert len(data_to_evaluate(TableFile(tmp_path / "houses.csv", seed=5), None).test[1]) == 12
    by_other_rows = given("houses.csv", seed=5)
    assert len(by_other_rows.test[1]) == 60 and num_seen(by_other_rows, record) == 48
    frame()[:4].assign(size=[1.0, 2.0, 3.0, 4.0]).to_csv(tmp_path / "new.csv", index=False)
    new = given("new.csv")
    assert len(new.test[1]) == 4 and num_seen(new, record) == 0
    frame()[:1].to_csv(tmp_path / "one.csv", index=False)
    assert len(given("one.csv").test[1]) == 1
    with pytest.raises(ValueError, match="splits 1 examples into 0 and 1"):
        data_to_evaluate(TableFile(tmp_path / "one.csv"), None)
    # What a network on targets as they are takes, whatever the options say.
    for options in ({"standardise": False}, {}):
        path = TableFile(tmp_path / "houses.csv", seed=5, **options)
        for scale in (trained.target_scale, None):
            again = as_trained(path.load_undivided(), record | {"target_scale": scale})
            y = torch.tensor(frame()["price"].to_numpy())
            mean, std = scale or (0.0, 1.0)
            torch.testing.assert_close(again.test[1][:, 0], ((y - mean) / std).float())


def test_other_rows_are_encoded_and_scaled_as_the_training_part(tmp_path):
    """Columns by their names, texts and classes by those of the training file, and its scale."""
    frame().to_csv(tmp_path / "houses.csv", index=False)
    trained = TableFile(tmp_path / "houses.csv").load()
    record = json.loads(json.dumps(data_record(trained)))
    assert as_trained(trained, record) is trained

    def other(rows, **options):
        rows.to_csv(tmp_path / "other.csv", index=False)
        source = TableFile(tmp_path / "other.csv", **options)
        return as_trained(data_to_evaluate(source, record), record)

    rows = frame()[frame().town != "B"].assign(price=frame().price * 3)
    splits = other(rows[["price", "town", "rooms", "size"]].assign(id=1))
    assert splits.target_scale == trained.target_scale
    mean, std = splits.target_scale
    expected = [rows["size"], rows["rooms"], *(rows.town == town for town in "ABC")]
    x = torch.from_numpy(np.column_stack(expected).astype("float32"))
    torch.testing.assert_close(splits.test[0], x)
    y = (torch.tensor(rows.price.to_numpy()) - mean) / std
    torch.testing.assert_close(splits.test[1][:, 0], y.float())
    for rows, message in (
        (frame().replace({"town": {"C": "D"}}), r"column 'town' has 'D' \(in \d+ row.*A, B, C"),
        (frame().drop(columns="rooms"), r"lacks .* rooms. .* trained on size, rooms, town"),
        (frame().assign(size="large"), r"column 'size' has 'large' \(in 60.*a number"),
        (frame().assign(size=math.nan), r"60 row\(s\) lack column 'size', which all rows"),
    ):
        with pytest.raises(ValueError, match=message):
            other(rows)
    towns = {"target": "town"}
    record = json.loads(json.dumps(data_record(TableFile(tmp_path / "houses.csv", **towns).load())))
    fewer = other(frame()[frame().town != "A"], **towns)  # whose classes keep their numbers
    assert fewer.classes == ("A", "B", "C") and fewer.test[1].unique().tolist() == [1, 2]
    with pytest.raises(ValueError, match="'town' is 'D' in .* classes A, B, C"):
        other(frame().replace({"town": {"C": "D"}}), **towns)


def test_missing_values_have_an_indicator_and_the_training_median(tmp_path):
    random = np.random.default_rng(1)
    table = frame().assign(size=frame()["size"].where(random.random(N) > 0.3))
    table = table.assign(town=table.town.where(random.random(N) > 0.2))
    table.to_csv(tmp_path / "houses.csv", index=False)
    with pytest.warns(UserWarning, match=r"lack column 'size', \d+ row\(s\) lack column 'town'"):
        splits = TableFile(tmp_path / "houses.csv", validation=0.25).load()
    assert splits.table is not None and splits.validation is not None
    columns = splits.table.columns
    assert columns[2:] == ("town_A", "town_B", "town_C", "size is missing", "town is missing")
    size, is_missing = splits.train[0][:, 0], splits.train[0][:, 5] == 1
    median = float(np.median(size[~is_missing].numpy()))
    assert median != pytest.approx(table["size"].median())  # of all rows: the control
    parts = [splits.train[0], splits.validation[0], splits.test[0]]
    for x in parts:
        assert (x[x[:, 5] == 1, 0] == median).all() and (x[:, 2:5].sum(1) == 1 - x[:, 6]).all()
    rows = torch.cat(parts)
    assert int((rows[:, 5] == 1).sum()) == table["size"].isna().sum() > 0
    assert int(rows[:, 6].sum()) == table.town.isna().sum() > 0
    # Other rows get the same median, and no warning: their encoding is the network's.
    record = json.loads(json.dumps(data_record(splits)))
    again = data_to_evaluate(TableFile(tmp_path / "houses.csv", validation=0.25), record)
    assert torch.equal(again.test[0], splits.test[0]) and num_seen(again, record) == 0
    # The command, which also asks for the sizes of the data, warns once.
    data = ["--data", "TableFile", "--data.path", str(tmp_path / "houses.csv"), "--model", "MLP"]
    short = ["--epochs", "1", "--likelihood", "regression", "--no_baseline", "--no_progress"]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert main(["train", *data, *short, "--output", str(tmp_path / "run")]) == 0
    assert sum("lack column" in str(warning.message) for warning in found) == 1


def test_copies_of_training_rows_are_counted_once(tmp_path, recwarn):
    rows = pandas.concat([frame(), frame()[:20]])
    rows.to_csv(tmp_path / "houses.csv", index=False)
    splits = TableFile(tmp_path / "houses.csv").load()
    of_train = {tuple(row) for row in torch.cat(splits.train, 1).tolist()}
    copies = sum(tuple(row) in of_train for row in torch.cat(splits.test, 1).tolist())
    (warning,) = recwarn
    said = f"{copies} of the 16 test rows equal a training row"
    assert copies > 2 and said in str(warning.message)
    record = json.loads(json.dumps(data_record(splits)))
    data_to_evaluate(TableFile(tmp_path / "houses.csv"), record)
    frame().to_csv(tmp_path / "once.csv", index=False)
    TableFile(tmp_path / "once.csv").load()
    assert len(recwarn) == 1


def test_indices_are_rows_of_the_file(tmp_path):
    frame().to_csv(tmp_path / "houses.csv", index=False)
    splits = hold_out(TableFile(tmp_path / "houses.csv", validation=0.25).load(), 0.5, seed=1)
    sizes = frame()["size"].to_numpy("float32")[splits.indices_in_source]
    assert splits.train[0][:, 0].tolist() == sizes.tolist() and len(sizes) == 18


WRONG = {
    "column": ({"target": "rent"}, "target='rent' is not .* columns size, rooms, town, price"),
    "missing target": ({"price": [None] + [1.5] * (N - 1)}, r"1 row\(s\) lack the target 'price'"),
    "missing values": (
        {"size": [None] + [1.5] * (N - 1), "town": [None] + ["A"] * (N - 1), "missing": "error"},
        r"1 row\(s\) lack column 'size', 1 row\(s\) lack column 'town'; .*missing indicator",
    ),
    "no values": ({"size": [None] * N}, "'size' has no values"),
    "infinite number": (
        {"size": [math.inf] + [1.5] * (N - 1)},
        r"'size' has 1 infinite value\(s\)",
    ),
    "many classes": ({"price": range(N)}, "'price' has 60 different integers.*classes false"),
    "one row of a class": ({"price": ["x"] + ["y"] * (N - 1)}, "class 'x' has 1 example"),
    "large numbers": (
        {"size": [1e160, *range(1, N)]},
        r"'size' has values from 1 to 1e\+16",
    ),
    "small numbers": (
        {"size": [1e-170 * i for i in range(N)]},
        "'size' has values .*[Dd]ivide",
    ),
    "close numbers": (
        {"size": [1.7e9 + i for i in range(N)]},
        "'size' .*deviation of 17.3.*Subtract",
    ),
    "numbers that are nearly none": (
        {"price": [5e-324 * (i % 2) for i in range(N)]},
        "target has values .*cannot standardise",
    ),
    "numbers whose squares overflow": (
        {"price": [1e160 * (i % 2) for i in range(N)]},
        "target has values .*cannot standardise.*divide",
    ),
    "decimal commas": (
        {"size": [f"{i},5" for i in range(N - 1)] + ["unknown"]},
        "'size' has numbers with a comma, such as '0,5'.*decimal points",
    ),
    "decimal commas of the target": (
        {"price": [f"{i % 5},5" for i in range(N)]},
        "'price' has numbers with a comma",
    ),
    "texts": ({"town": [f"{i} Long Street" for i in range(N)]}, "'town' has 60 different texts"),
    "several columns": (
        {
            "id": [f"h{i}" for i in range(N)],
            "empty": None,
            "rooms": [None] + [1.5] * (N - 1),
            "price": [None] + [1.5] * (N - 1),
            "target": "price",
            "missing": "error",
        },
        r"1 row\(s\) lack the target 'price'.*Column 'id' has 60 .*Column 'empty' has no values.*"
        r'--data.drop "\[id, empty\]" .*1 row\(s\) lack column \'rooms\'',
    ),
    "dropped column": (
        {"drop": ["town", "rent"]},
        r"no column\(s\) rent to drop. Its columns are size, rooms",
    ),
    "dropped target": (
        {"drop": "price", "target": "price"},
        r"drop=\['price'\] includes the target",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tables_are_named(case, tmp_path, monkeypatch):
    monkeypatch.setattr("marglik.application.data.tables.MOST_CATEGORIES", 10)
    changes, message = WRONG[case]
    options = {key: changes[key] for key in ("target", "missing", "drop") if key in changes}
    columns = {key: value for key, value in changes.items() if key not in options}
    frame().assign(**columns).to_csv(tmp_path / "houses.csv", index=False)
    with pytest.raises(ValueError, match=message):
        TableFile(tmp_path / "houses.csv", **options).load()


def test_what_only_seems_to_be_wrong_is_read(tmp_path):
    """The controls of the test above."""
    fine = {
        "size": [3e30 * i for i in range(N)],
        "rooms": 0.1,
        "price": [1e17 + 32 * i for i in range(N)],
    }
    frame().assign(**fine).to_csv(tmp_path / "fine.csv", index=False)
    assert TableFile(tmp_path / "fine.csv", classes=False).load().train[1].std() > 0.9
    # Texts with commas are texts.
    frame().assign(town=[f"{i % 3}, 5th" for i in range(N)]).to_csv(tmp_path / "fine.csv")
    assert TableFile(tmp_path / "fine.csv").load().train[0].shape == (48, 6)


def test_files_that_are_no_tables_are_named():
    for separator, printed in (("\t", r"'\\t'"), (";", "';'")):
        frame().to_csv("other.csv", index=False, sep=separator, decimal=",")
        with pytest.raises(ValueError, match=f"separated by {printed} instead"):
            TableFile("other.csv").load()
    Path("bad.csv").write_text('a,b\n1,"2')
    with pytest.raises(ValueError, match="cannot be read as CSV .*EOF"):
        TableFile("bad.csv").load()
    Path("bad.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(ValueError, match="several columns have the name 'a'"):
        TableFile("bad.csv").load()
    Path("bad.csv").write_text("a,b\n1,2,\n1,2,3\n")
    with pytest.raises(ValueError, match="cannot be read as CSV .Length of header"):
        TableFile("bad.csv").load()


@pytest.mark.parametrize(("first", "comma"), [(0, ","), (0, ",,"), (1, ",")])
def test_commas_at_the_ends_of_lines_add_no_column(first, comma, tmp_path):
    """Neither of all lines nor of those after the first, by which pandas shifts all columns."""
    frame().to_csv(tmp_path / "houses.csv", index=False)
    lines = (tmp_path / "houses.csv").read_text().splitlines()
    lines = [line + comma * (number >= first) for number, line in enumerate(lines)]
    (tmp_path / "commas.csv").write_text("\n".join(lines))
    expected, found = (TableFile(tmp_path / f"{name}.csv").load() for name in ("houses", "commas"))
    assert found.table == expected.table
    for part in ("train", "test"):
        assert all(map(torch.equal, getattr(found, part), getattr(expected, part)))
    if first:  # the control: the values of a column come from its right neighbour
        assert pandas.read_csv(tmp_path / "commas.csv").price.isna().all()


def test_encoded_columns_of_equal_names_are_apart(tmp_path):
    """Those of a = "b_c" and a_b = "c", and a column with the name of an indicator."""
    random = np.random.default_rng(2)
    table = pandas.DataFrame({
        "a": random.choice(["b_c", "d"], N), "a_b": random.choice(["c", "d"], N),
        "a_d": random.normal(size=N), "x": random.normal(size=N),
        "x is missing": random.normal(size=N), "y": random.normal(size=N),
    })  # fmt: skip
    table.loc[::7, "x"] = None
    table.to_csv(tmp_path / "table.csv", index=False)
    with pytest.warns(UserWarning, match="lack column 'x'"):
        splits = TableFile(tmp_path / "table.csv").load()
    assert splits.table is not None
    x = torch.cat([splits.train[0], splits.test[0]])
    train = splits.indices_in_source.tolist()
    ordered = table.iloc[[*train, *sorted({*range(N)} - {*train})]]
    training = ordered["x"][: len(train)]
    expected = [
        ordered.a_d, ordered.x.fillna(np.median(training.dropna())), ordered["x is missing"],
        ordered.a == "b_c", ordered.a == "d", ordered.a_b == "c", ordered.a_b == "d",
        ordered.x.isna(),
    ]  # fmt: skip
    torch.testing.assert_close(x, torch.from_numpy(np.column_stack(expected).astype("float32")))
    # The control: the names alone do not tell these columns apart.
    names = splits.table.columns
    assert names.count("a_b_c") == names.count("x is missing") == names.count("a_d") == 2


def test_dropped_columns_are_no_inputs(tmp_path):
    dates = pandas.date_range("2020-01-01", periods=N).astype(str)
    frame().assign(id=[f"h{i}" for i in range(N)], date=dates).to_csv("rows.csv", index=False)
    frame().to_csv("without.csv", index=False)
    splits, expected = (
        TableFile("rows.csv", drop=["id", "date"]).load(),
        TableFile("without.csv").load(),
    )
    assert splits.table == expected.table and torch.equal(splits.train[0], expected.train[0])
    record = json.loads(json.dumps(data_record(splits)))  # other rows need not have these columns
    again = data_to_evaluate(TableFile("without.csv", drop=["id", "date"]), record)
    assert torch.equal(again.test[0], splits.test[0])
    data = ["--data", "TableFile", "--data.path", "rows.csv", "--data.drop", "[id, date]"]
    options = ["--likelihood", "regression", "--epochs", "1", "--no_baseline", "--no_progress"]
    assert (
        main(["train", "--model", "MLP", *data, *options, "--output", str(tmp_path / "run")]) == 0
    )
    assert load_posterior(tmp_path / "run").model.mean.numel() == 5


def test_train_infers_sizes_and_saves_a_network_that_takes_rows(tmp_path):
    frame().to_csv(tmp_path / "houses.csv", index=False)
    data = ["--data", "TableFile", "--data.path", str(tmp_path / "houses.csv")]
    options = ["--likelihood", "regression", "--epochs", "2", "--held_out", "0", "--no_progress"]
    run = ["--output", str(tmp_path / "run")]
    model = ["--model", "MLP", "--model.hidden", "[4]"]
    assert main(["train", *model, *data, *options, *run]) == 0
    # The network's class is named, as if it was one's own: it is inside the one that was saved.
    name = ["--model", "marglik.models.MLP", "--no_progress"]
    assert main(["evaluate", str(tmp_path / "run"), *name, *data]) == 0
    x = TableFile(tmp_path / "houses.csv").load().train[0]
    network = Standardised(MLP(5, (4,), 1), [0.0] * 5, [1.0] * 5)
    posterior = load_posterior(tmp_path / "run", network)
    torch.testing.assert_close(network.mean, x.mean(0))
    torch.testing.assert_close(network.std, x.std(0, correction=0))
    means = laplace_predictive(posterior)(x).mean
    torch.testing.assert_close(means, network.model((x - x.mean(0)) / x.std(0, correction=0)))
    assert not torch.allclose(means, network.model(x), rtol=0.1)  # the control
