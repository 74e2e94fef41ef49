"""NCI1: molecules that are active or inactive against lung cancer cells, as graphs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from marglik.data.archives import BROKEN_ARCHIVE, open_archive, read_member, whole_members
from marglik.data.source import DataSource, local_file
from marglik.data.splits import check_fraction, check_seed, stratified
from marglik.data.tensors import TensorSplits
from marglik.graphs import Graphs
from marglik.sizes import check_sizes

__all__ = ["NCI1"]

FILE = "NCI1.tar.gz"
ORIGIN = "from the TUDataset collection, chrsmrrs.github.io/datasets, as a tar archive"
PARTS = ("A", "graph_indicator", "graph_labels", "node_labels")


class NCI1(DataSource):
    """4,110 molecules of the NCI1 screen, in the text files of the TUDataset collection.

    Nodes are atoms, with one-hot features of 37 kinds; edges are bonds, each in both directions,
    with a single feature of value 1. Source: Wale, Watson & Karypis 2008; Morris et al. 2020
    (arXiv:2007.08663). The data has no test set, so a stratified part becomes the test set.

    Args:
        path: the tar archive with NCI1_A.txt, NCI1_graph_indicator.txt, NCI1_graph_labels.txt and
            NCI1_node_labels.txt; if not given, NCI1.tar.gz in the folder that the environment
            variable MARGLIK_DATA names.
        test: share of all graphs that become the test set, in (0, 1).
        validation: share of the training graphs that become the validation set, in [0, 1).
        num_train: number of training graphs to use, including validation; all if not given.
        seed: seed of the choice of graphs.

    Raises:
        ValueError: if a fraction, the number or the seed is out of range.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        test: float = 0.2,
        validation: float = 0.0,
        num_train: int | None = None,
        seed: int = 0,
    ) -> None:
        check_fraction("test", test, zero=False)
        check_fraction("validation", validation)
        check_seed(seed)
        check_sizes(num_train=num_train)
        self.path = path
        self.test = test
        self.validation = validation
        self.num_train = num_train
        self.seed = seed

    def load(self) -> TensorSplits:
        """Return the graphs.

        Raises:
            FileNotFoundError: if there is no such archive, or neither a path nor MARGLIK_DATA.
            ValueError: if it is damaged or lacks a file, if its files do not fit together, or a
                part would be too small or too large.
        """
        graphs, labels, classes = _read(local_file(self.path, FILE, ORIGIN))

        def divide(which: Tensor, size: int, cause: str) -> tuple[Tensor, Tensor]:
            if not len(classes) <= size <= len(which) - len(classes):
                raise ValueError(
                    f"{cause}: {len(which)} graphs would be divided into {size} and "
                    f"{len(which) - size}; both parts need a graph of each of {len(classes)} "
                    "classes. Choose another number."
                )
            parts = stratified(labels[which], size, classes, self.seed, cause, "graph")
            return which[parts[0]], which[parts[1]]

        def pair(which: Tensor) -> tuple[Graphs, Tensor]:
            return graphs[which], labels[which]

        every = torch.arange(len(labels))
        test, train = divide(every, round(self.test * len(every)), f"test={self.test}")
        if self.num_train not in (None, len(train)):
            train, _ = divide(train, self.num_train, f"num_train={self.num_train}")
        validation = None
        if self.validation:
            size = round(self.validation * len(train))
            validation, train = divide(train, size, f"validation={self.validation}")
        kept = None if validation is None else pair(validation)
        return TensorSplits(pair(train), kept, pair(test), "NCI1", classes)


@dataclass(frozen=True)
class _Files:
    """The numbers in the archive's files, which count nodes and graphs from 1."""

    A: np.ndarray
    graph_indicator: np.ndarray
    graph_labels: np.ndarray
    node_labels: np.ndarray


def _read(path: Path) -> tuple[Graphs, Tensor, tuple[str, ...]]:
    """Graphs, labels, class names."""
    files = _read_files(path)
    try:
        return _assembled(files)
    except (ValueError, IndexError, RuntimeError) as error:
        raise ValueError(f"The files in '{path}' do not fit together: {error}") from error


def _assembled(files: _Files) -> tuple[Graphs, Tensor, tuple[str, ...]]:
    owner = torch.from_numpy(files.graph_indicator) - 1  # (V,)
    if (owner.diff() < 0).any():
        raise ValueError("graph_indicator does not ascend.")
    if len(owner) and int(owner[0]) < 0:
        raise ValueError("graph_indicator has graph 0; graphs count from 1.")
    last = int(owner[-1]) + 1 if len(owner) else 0
    if last > len(files.graph_labels):  # checked before arrays of that size fill the memory
        raise ValueError(
            f"graph_indicator has {last} graphs, graph_labels {len(files.graph_labels)}."
        )
    if len(files.A) % 2 or len(owner) != len(files.node_labels):
        raise ValueError(
            f"A has {len(files.A)} numbers, which should be even; graph_indicator has {len(owner)} "
            f"and node_labels {len(files.node_labels)}, which should be equal."
        )
    kinds, codes = np.unique(files.node_labels, return_inverse=True)
    names, labels = np.unique(files.graph_labels, return_inverse=True)
    senders, receivers = (torch.from_numpy(files.A) - 1).view(-1, 2).unbind(1)
    if len(senders) and int(senders.min()) < 0:
        raise ValueError("A has node 0; nodes count from 1.")
    order = owner[senders].argsort(stable=True)  # `Graphs` needs edges in the order of graphs
    graphs = Graphs(
        one_hot(torch.from_numpy(codes), len(kinds)).float(),
        torch.ones(len(senders), 1),
        senders[order].contiguous(),
        receivers[order].contiguous(),
        owner.bincount(minlength=len(labels)),
        owner[senders].bincount(minlength=len(labels)),
    ).check()
    if len(graphs) != len(labels):
        raise ValueError(f"graph_indicator has {len(graphs)} graphs, graph_labels {len(labels)}.")
    return graphs, torch.from_numpy(labels), tuple(str(name) for name in names)


def _read_files(path: Path) -> _Files:
    texts: dict[str, bytes] = {}
    try:
        with open_archive(path) as archive:
            for member in whole_members(archive):
                part = Path(member.name).name.removeprefix("NCI1_").removesuffix(".txt")
                if member.isfile() and part in PARTS:
                    texts[part] = read_member(path, archive, member)
        missing = [f"NCI1_{part}.txt" for part in PARTS if part not in texts]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        numbers = {part: text.replace(b",", b" ").split() for part, text in texts.items()}
        return _Files(**{part: np.array(n).astype(np.int64) for part, n in numbers.items()})
    except (*BROKEN_ARCHIVE, ValueError) as error:
        raise ValueError(
            f"'{path}' is damaged, or no archive of NCI1's text files ({error}). Fetch it again."
        ) from error
