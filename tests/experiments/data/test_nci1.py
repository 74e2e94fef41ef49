"""NCI1's graphs as the archive has them, in stratified splits; bad archives named."""

import os
from pathlib import Path

import pytest
import torch

from experiments.data.nci1 import NCI1
from marglik.graphs import Graphs
from tests.experiments.data.text_and_graphs import TYPES, nci1_texts, write_nci1

NUMBER = 40


@pytest.fixture
def path(tmp_path):
    return write_nci1(tmp_path / "graphs.tar.gz", nci1_texts(NUMBER))


def expected_graphs():
    """For each graph its kinds of nodes, its edges as (from, to) within it, and its label."""
    texts = {part: text.splitlines() for part, text in nci1_texts(NUMBER).items()}
    owner = [int(line) - 1 for line in texts["graph_indicator"]]
    edges = [tuple(int(n) - 1 for n in line.split(",")) for line in texts["A"]]
    found = []
    for graph, label in enumerate(texts["graph_labels"]):
        nodes = [v for v, g in enumerate(owner) if g == graph]
        kinds = tuple(int(texts["node_labels"][v]) for v in nodes)
        own = tuple(sorted((s - nodes[0], r - nodes[0]) for s, r in edges if s in nodes))
        found.append((kinds, own, int(label)))
    return found


def graphs_of(x, y):
    for i in range(len(x)):
        one = x[i : i + 1]
        assert one.nodes.sum(1).eq(1).all() and one.edges.eq(1).all()
        edges = zip(one.senders.tolist(), one.receivers.tolist(), strict=True)
        yield tuple(one.nodes.argmax(1).tolist()), tuple(sorted(edges)), int(y[i])


def test_graphs_are_those_of_the_archive(path):
    splits = NCI1(path).load()
    x, y = splits.train
    assert isinstance(x, Graphs) and x.nodes.dtype == x.edges.dtype == torch.float32
    assert (x.nodes.shape[1], x.edges.shape[1]) == (TYPES, 1)
    assert (splits.name, splits.classes, splits.ignore_index) == ("NCI1", ("0", "1"), None)
    assert y.dtype == torch.int64
    found = [*graphs_of(*splits.train), *graphs_of(*splits.test)]
    assert sorted(found) == sorted(expected_graphs())
    assert splits.num_terms == len(splits.test[1]) == 8


def test_edges_in_another_order(tmp_path, path):
    texts = nci1_texts(NUMBER)
    texts["A"] = "".join(f"{line}\n" for line in reversed(texts["A"].splitlines()))
    other = NCI1(write_nci1(tmp_path / "other.tar.gz", texts)).load()
    assert list(graphs_of(*other.train)) == list(graphs_of(*NCI1(path).load().train))


def test_splits_are_stratified(path):
    splits = NCI1(path, test=0.5, validation=0.5).load()
    sizes = [len(pair[1]) for pair in (splits.train, splits.validation, splits.test)]
    assert sizes == [10, 10, 20]
    labels = torch.cat([splits.train[1], splits.validation[1], splits.test[1]])
    share = labels.double().mean()
    for _, y in (splits.train, splits.validation, splits.test):
        assert abs(y.double().mean() - share) < 0.06


def test_sizes_and_seeds(path):
    assert len(NCI1(path, num_train=20).load().train[1]) == 20
    assert len(NCI1(path, num_train=32).load().train[1]) == 32  # all that are left
    first, again, other = (list(graphs_of(*NCI1(path, seed=s).load().test)) for s in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": 0.0}, "test=0.0: must be a fraction between 0 and 1"),
        ({"validation": 1.0}, "validation=1.0: must be a fraction"),
        ({"seed": -1}, "seed=-1"),
        ({"num_train": 0}, "num_train=0: must be at least 1"),
        ({"num_train": 33}, "num_train=33: 32 examples would be divided into 33 and -1"),
        ({"test": 0.01}, "test=0.01: 40 examples would be divided into 0 and 40"),
        ({"validation": 0.99}, "validation=0.99: 32 examples would be divided into 32 and 0"),
    ],
)
def test_impossible_sizes(path, options, message):
    with pytest.raises(ValueError, match=message):
        NCI1(path, **options).load()


def changed(part, text):
    return lambda texts: texts | {part: text}


KINDS = "".join(f"{kind}\n" for kind in range(30_000))
BROKEN = {
    "a part missing": (lambda texts: {p: t for p, t in texts.items() if p != "A"}, "lacks .*A.txt"),
    "no numbers": (changed("graph_labels", "1\ntwo\n"), "invalid literal.*two"),
    "numbers of 30 digits": (changed("graph_labels", f"1\n{10**30}\n"), "too large"),
    "fewer labels": (changed("graph_labels", "1\n0\n"), "from 1 to the 2 graphs of graph_labels"),
    "fewer kinds": (changed("node_labels", "1\n0\n"), "node_labels 2, which should be equal"),
    "half an edge": (changed("A", "1, 2, 3"), "A has 3 numbers, which should be even"),
    "no such node": (changed("A", "1, 9999"), "A has nodes that are not 1 to"),
    "node zero": (changed("A", "0, 1"), "A has nodes that are not 1 to"),
    "across graphs": (changed("A", "1, 30"), "do not fit together: .*graph"),
    "a billion graphs": (
        lambda texts: texts | {"graph_indicator": texts["graph_indicator"][:-3] + f"{10**9}\n"},
        "must ascend from 1 to the 40 graphs",
    ),
    "graphs mixed": (
        lambda texts: texts | {"graph_indicator": "2\n" + texts["graph_indicator"][2:]},
        "graph_indicator must ascend",
    ),
    # 180 KB, whose one-hot features would take 3.4 GiB.
    "30,000 kinds of nodes": (
        lambda _: {
            "A": "1, 2\n", "graph_indicator": "1\n" * 30_000, "graph_labels": "1\n",
            "node_labels": KINDS,
        },
        "there are 30000 kinds of nodes .* at most 1000",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_do_not_fit(case, tmp_path):
    change, message = BROKEN[case]
    path = write_nci1(tmp_path / "graphs.tar.gz", change(nci1_texts(NUMBER)))
    with pytest.raises(ValueError, match=f"graphs.tar.gz' ?.*{message}"):
        NCI1(path).load()


def test_the_real_archive():
    default = Path(__file__).parents[3] / "../shared/data"
    place = Path(os.environ.get("MARGLIK_DATA", default)) / "NCI1.tar.gz"
    if not place.is_file():
        pytest.skip(f"no {place}: put NCI1 of the TUDataset collection there, or set MARGLIK_DATA")
    splits = NCI1(place).load()
    (x, y), (x_test, y_test) = splits.train, splits.test
    assert len(y) + len(y_test) == 4110 and int(y.sum() + y_test.sum()) == 2057
    assert x.nodes.shape[1] == 37
    assert len(x.nodes) + len(x_test.nodes) == 122_747
    assert len(x.edges) + len(x_test.edges) == 2 * 132_753
