"""Small files in the form of DART, of NCI1 and of the UCI archive."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.marglik.application.data.image_helpers import write_archive

TYPES = 3
"""Kinds of nodes in the archives."""


def dart_entries(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Entries with one to three triples; every fifth is about the same as the one before it."""
    rng = np.random.default_rng(seed)
    entries: list[dict[str, Any]] = []
    for i in range(number):
        triples = [
            [f"subject {i}", f"REL_{rng.integers(9)}", f"object {rng.integers(99)}"]
            for _ in range(rng.integers(1, 4))
        ]
        if i % 5 == 4:
            triples = entries[-1]["tripleset"][::-1]
        sentences = [f"The sentence {k} about {i} is “short”." for k in range(rng.integers(1, 3))]
        annotations = [{"source": "test", "text": text} for text in sentences]
        entries.append({"tripleset": triples, "annotations": annotations})
    return entries


def write_dart(path: Path, entries: Any) -> Path:
    """The entries as DART's file has them."""
    path.write_bytes(gzip.compress(json.dumps(entries).encode()))
    return path


def nci1_texts(number: int, seed: int = 0) -> dict[str, str]:
    """Name of a part -> its text: chains of 2 to 5 nodes, with their first node's kind as label."""
    rng = np.random.default_rng(seed)
    edges, owners, kinds, labels = [], [], [], []
    for graph in range(1, number + 1):
        first, size = len(owners) + 1, int(rng.integers(2, 6))
        for node in range(first, first + size - 1):
            edges += [f"{node}, {node + 1}", f"{node + 1}, {node}"]
        of_nodes = rng.integers(0, TYPES, size).tolist()
        owners += [graph] * size
        kinds += of_nodes
        labels.append(int(of_nodes[0] == 0))
    lines = {
        "A": edges, "graph_indicator": owners, "graph_labels": labels, "node_labels": kinds,
    }  # fmt: skip
    return {part: "".join(f"{line}\n" for line in values) for part, values in lines.items()}


def write_nci1(path: Path, texts: dict[str, str]) -> Path:
    """The parts as NCI1's archive has them."""
    return write_archive(path, {f"./NCI1_{k}.txt": v.encode() for k, v in texts.items()})


def write_uci(path: Path, name: str, texts: dict[str, str]) -> Path:
    """The parts of one data set as the UCI archive has them."""
    return write_archive(path, {f"uci/{name}/{k}.txt": v.encode() for k, v in texts.items()})
