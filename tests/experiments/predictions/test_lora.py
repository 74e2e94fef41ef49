"""The experiments with adapters: they run, small, and their tables are of what they found."""

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from experiments.predictions import lora  # noqa: E402
from experiments.predictions.lora import RATINGS, Config, Sentences  # noqa: E402
from experiments.speed import lora_memory  # noqa: E402

RESULTS = Path(__file__).parents[3] / "experiments/results/lora"
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A file in DART's form: restaurants with ratings, told twice each, and other facts."""
    entries = []
    for i in range(60):
        rating = RATINGS[i % 6]
        texts = [f"place {i} is rated {rating} .", f"{rating} is what guests of place {i} say ."]
        triples = [[f"place {i}", "customer rating", rating], [f"place {i}", "food", "fish"]]
        if i % 10 == 9:
            triples = [[f"place {i}", "food", "fish"]]
        notes = [{"source": "e2e", "text": text} for text in texts]
        entries.append({"tripleset": triples, "annotations": notes})
    with gzip.open(tmp_path / "dart-v1.1.1-full-dev.json.gz", "wt") as file:
        json.dump(entries, file)
    monkeypatch.setenv("MARGLIK_DATA", str(tmp_path))
    return Config(
        sizes=(12,), validation=12, test=18, context=12, width=16, depth=1, pretraining_steps=3,
        rank=2, epochs=1, dropout_samples=2, members=2, sketch_rank=3,
    )  # fmt: skip


def test_no_fact_lies_in_two_parts(small):
    sentences = Sentences.of(small)
    assert (len(sentences.train), len(sentences.validation), len(sentences.test)) == (12, 12, 18)
    held_out = {tuple(text) for text, _ in sentences.validation + sentences.test}
    assert not held_out & {tuple(text) for text in sentences.text}
    assert {tuple(text) for text, _ in sentences.train} <= {tuple(text) for text in sentences.text}


def test_every_method_is_measured(small, tmp_path):
    found = lora.run(small)
    rows = found["rows"]["12"]
    one = [f"{name}{more}" for name in ("MAP", "MC dropout", "ensemble")
           for more in ("", ", temperature")]  # fmt: skip
    modes = ("expand", "reduce", "expand, sketches")
    ours = [f"Laplace, {mode}{more}" for mode in modes for more in ("", ", calibrated")]
    assert set(rows) == {*one, *ours}
    assert all(0 < row["cls/NLL"] < 5 for row in rows.values())
    assert rows["Laplace, expand"]["evidence"] != rows["Laplace, reduce"]["evidence"]
    assert rows["Laplace, expand, sketches"]["largest_sketch_error"] >= 0
    (tmp_path / "ratings_0.json").write_text(json.dumps(found))
    assert f"| 12 | MAP | {rows['MAP']['cls/NLL']:.3f} |" in lora.table(tmp_path)


def test_memory_of_narrow_layers():
    config = lora_memory.Config(width=256, mlp=300, rank=2, positions=8)
    whole = lora_memory.measure(config)
    sketched = lora_memory.measure(lora_memory.Config(8, 256, 300, 2, positions=8))
    assert whole["factor_bytes"] > 4 * sketched["factor_bytes"]
    assert sketched["evidence"] < 0 < sketched["variance"]
    result = {"cases": [whole, sketched]}
    assert "| sketches, r = 8 |" in lora_memory.table(result)


@pytest.mark.parametrize("name", ["table.md", "memory.json"])
def test_quoted_tables_are_those_of_the_results(name):
    text = (RESULTS.parents[1] / "README.md").read_text()
    if name == "table.md":
        table = lora.table(RESULTS)
        assert (RESULTS / name).read_text() == table
    else:
        table = lora_memory.table(json.loads((RESULTS / name).read_text()))
    for row in table.splitlines():
        assert row in text, row
