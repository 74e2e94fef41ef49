"""The study of default options: a small network, and its table."""

from dataclasses import replace

from experiments.weight_decay import default_options as study


def test_a_small_run_and_its_table(monkeypatch):
    small = replace(study.PROBLEMS["MLP"], examples=60, epochs=2)
    monkeypatch.setitem(study.PROBLEMS, "MLP", small)
    monkeypatch.setattr(study, "GRID", (1e-3, 1e-1))
    found = [study.run(study.Config("MLP", 0.2, 0, part)) for part in ("default", "grid")]
    assert set(found[0]["results"]) == {"learned", "none", "none, cosine"}
    assert len(set(found[0]["results"]["learned"]["weight_decay"].values())) > 1
    row = study.table(found).splitlines()[2].split("|")[1:]
    of_grid = min(found[1]["results"].values(), key=lambda of: of["held_out_nll"])
    difference = found[0]["results"]["learned"]["nll"] - of_grid["nll"]
    assert (row[0].strip(), row[1].strip()) == ("MLP", "20%")
    assert row[5].strip() == f"{difference:+.3f}"


def test_worse_is_beyond_two_standard_errors():
    assert study.is_worse([0.2, 0.21, 0.22])
    assert not study.is_worse([0.2, -0.1, 0.1]) and not study.is_worse([-0.2, -0.21])
