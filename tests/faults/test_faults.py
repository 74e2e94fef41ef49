"""A few cases of each family of faults; `python -m tests.faults` has them all."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.__main__ import FAMILIES
from tests.faults.families import Case, Outcome, survived, tally
from tests.faults.outside import INPUTS
from tests.marglik.commands.dead_ranks import dead_rank, undisturbed

ROOT = Path(__file__).parents[2]
WITHOUT_REPLACING = """
from pathlib import Path
from kfac_backend import files

def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        files.os.fsync(file.fileno())
    return files.sha256(content)

files.write_file = write
for name in ("marglik.storage.run_folder", "marglik.storage.record_file"):
    __import__(name)
    import sys
    sys.modules[name].write_file = write
"""


def harness(*arguments, first=""):
    """The harness in a new process: this one has threads, which copies would lack."""
    code = (
        f"{first}\nimport sys\nfrom tests.faults.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


ALONE = [name for name in FAMILIES if name != "dead ranks"]


def test_one_of_each_family_survives(worlds, tmp_path):
    """In a process that has imported everything, and has one thread."""
    arguments = ["--only", *ALONE, "--cases", "1", "--json", str(tmp_path / "faults.json")]
    assert worlds.all(1, "tests.faults.__main__:main", arguments) == [0]
    found = json.loads((tmp_path / "faults.json").read_text())["families"]
    assert [(f["family"], f["survived"], f["all"]) for f in found] == [(n, 1, 1) for n in ALONE]


def test_a_dead_rank_is_survived(worlds, tmp_path):
    outcome = dead_rank(worlds, tmp_path, undisturbed(worlds, tmp_path), seed=2)
    assert outcome.survived, outcome.what
    assert "the run was over before" not in outcome.what


@pytest.mark.slow
def test_many_of_each_family_survive(tmp_path):
    done = harness("--cases", 24, "--json", tmp_path / "faults.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "faults.json").read_text())
    assert len(found["families"]) == len(FAMILIES)
    for family in found["families"]:
        assert family["survived"] == family["all"] > 0, family
        # Not all of them are possible everywhere, such as a mount without root's rights.
        assert family["all"] + len(family["skipped"]) >= 20, family


@pytest.mark.slow  # the test before has some of them
def test_all_bad_inputs_are_only_data():
    done = harness("--only", "outside")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"bad inputs from outside: {len(INPUTS)} of {len(INPUTS)}" in done.stdout


@pytest.mark.slow
def test_the_harness_sees_files_that_are_written_in_place():
    """Negative control: a kill leaves half of a file under its name."""
    done = harness("--only", "every write", "--cases", 12, first=WITHOUT_REPLACING)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]


def test_an_outcome_has_ways_and_failures(tmp_path):
    def fails(_):
        raise AssertionError("another results.json")

    def breaks(_):
        raise KeyError("results.json")

    outcome = Outcome("kills")
    for name, run in {"a": lambda _: "identical", "b": fails, "c": breaks}.items():
        survived(Case(name, run), outcome, tmp_path)
    survived(Case("d", lambda folder: f"refused: {folder.name}"), outcome, tmp_path)
    assert outcome.ways == Counter({"identical": 1, "refused": 1}) and outcome.all == 4
    assert "another results.json" in outcome.failures["b"] and "KeyError" in outcome.failures["c"]
    assert "| kills | 2 / 4 | 1 identical, 1 refused |" in tally([outcome])
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_bad_inputs_is_long_enough():
    assert len(INPUTS) >= 50
