"""NCI1: molecules that are active or inactive against lung cancer cells, as graphs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from experiments.data.archives import members
from kfac_backend.options import check_fraction
from marglik.application.data.splits import DataSource, Splits, stratified
from marglik.graphs import Graphs

FILE = "NCI1.tar.gz"
ORIGIN = "from the TUDataset collection, chrsmrrs.github.io/datasets, as a tar archive"
PARTS = ("A", "graph_indicator", "graph_labels", "node_labels")


@dataclass(eq=False)
class NCI1(DataSource):
    """4,110 molecules of the NCI1 screen, in the text files of the TUDataset collection.

    Nodes are atoms, with one-hot features of 37 kinds; edges are bonds, each in both directions,
    with a single feature of value 1. Source: Wale, Watson & Karypis 2008; Morris et al. 2020
    (arXiv:2007.08663). The data has no test set, so a stratified part becomes the test set.

    Args:
        path: the tar archive with NCI1_A.txt, NCI1_graph_indicator.txt, NCI1_graph_labels.txt and
            NCI1_node_labels.txt; if not given, NCI1.tar.gz in the folder of the data.
        test: share of all graphs that become the test set, in (0, 1).
        validation: share of the training graphs that become the validation set, in [0, 1).
        seed: seed of the choice of graphs.
    """

    path: str | Path | None = None
    test: float = 0.2
    validation: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fraction("test", self.test, zero=False)
        check_fraction("validation", self.validation)

    def load(self) -> Splits:
        """Return the graphs.

        Raises:
            FileNotFoundError: if there is no such archive.
            ValueError: if it is damaged, or a part would be too small or too large.
        """
        graphs, labels, classes = _read(members(self.path, FILE, ORIGIN))

        def divide(which: Tensor, size: int, cause: str) -> tuple[Tensor, Tensor]:
            chosen, rest = stratified(labels[which], size, classes, self.seed, cause)
            return which[chosen], which[rest]

        every = torch.arange(len(labels))
        test, train = divide(every, round(self.test * len(every)), f"test={self.test}")
        validation = None
        if self.validation:
            size = round(self.validation * len(train))
            chosen, train = divide(train, size, f"validation={self.validation}")
            validation = graphs[chosen], labels[chosen]
        pairs = [(graphs[which], labels[which]) for which in (train, test)]
        return Splits(pairs[0], validation, pairs[1], "NCI1", classes)


def _read(files: dict[str, bytes]) -> tuple[Graphs, Tensor, tuple[str, ...]]:
    """Graphs, labels, class names."""
    texts = {Path(name).name: text for name, text in files.items()}
    A, graph_indicator, graph_labels, node_labels = (
        np.array(texts[f"NCI1_{part}.txt"].replace(b",", b" ").split(), dtype=np.int64)
        for part in PARTS
    )
    # The files count nodes and graphs from 1.
    owner, G = torch.from_numpy(graph_indicator) - 1, len(graph_labels)  # (V,)
    kinds, codes = np.unique(node_labels, return_inverse=True)
    names, labels = np.unique(graph_labels, return_inverse=True)
    senders, receivers = (torch.from_numpy(A).view(-1, 2) - 1).unbind(1)
    order = owner[senders].argsort(stable=True)  # `Graphs` needs edges in the order of graphs
    graphs = Graphs(
        one_hot(torch.from_numpy(codes), len(kinds)).float(),
        torch.ones(len(senders), 1),
        senders[order].contiguous(),
        receivers[order].contiguous(),
        owner.bincount(minlength=G),
        owner[senders].bincount(minlength=G),
    ).check()
    return graphs, torch.from_numpy(labels), tuple(str(name) for name in names)
