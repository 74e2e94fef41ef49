"""DART: sentences about triples of data, as sequences of bytes for language models."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from experiments.data.archives import unpacked
from kfac_backend.options import check_fraction, check_positive
from marglik.application.data.splits import DataSource, Splits

FILE = "dart-v1.1.1-full-dev.json.gz"
ORIGIN = "DART v1.1.1 by Nan et al. 2021, github.com/Yale-LILY/dart, compressed by gzip"
IGNORED = -100
"""The label of targets that do not count."""
PADDING = 0
"""The byte that fills up short texts; no text contains it."""
BYTES = tuple(repr(bytes([byte]))[2:-1] for byte in range(256))
"""The names of all bytes; printable ones are their own names."""


@dataclass(eq=False)
class DART(DataSource):
    r"""DART's triples and the sentences about them, as sequences of bytes.

    Each entry becomes one text, its triples in a line, then the first of its sentences::

        \nMars Hill College | JOINED | 1973 && Mars Hill College | LOCATION | ... => A school ...\n

    so that the first line break predicts the first byte, and the last one is predicted. Texts are
    in UTF-8, with white space reduced to single spaces. Each is cut into windows: inputs x
    (N, context) are bytes, and targets y (N, context) are the bytes that follow them. The last
    window of a text starts early enough to be full; targets that it shares with the window before
    it are -100, and so do not count. A text that is shorter than a window is filled up with zeros
    in x and -100 in y. Every byte of a text except the first is a target exactly once.

    Entries about the same triples are in the same split, so that no test text is about triples that
    were trained on. Source: Nan et al. 2021 (arXiv:2007.02871).

    Args:
        path: the JSON file, compressed by gzip; if not given, dart-v1.1.1-full-dev.json.gz in the
            folder of the data (the development split).
        context: R, number of positions in a window.
        num_train: number of training windows, including validation; all if not given.
        num_test: number of test windows.
        seed: seed of the choice of entries.
        validation: share of the training windows that become the validation set, in [0, 1).
    """

    path: str | Path | None = None
    context: int = 64
    num_train: int | None = None
    num_test: int = 1000
    seed: int = 0
    validation: float = 0.0

    def __post_init__(self) -> None:
        check_positive("context", self.context)
        check_positive("num_train", 1 if self.num_train is None else self.num_train)
        check_positive("num_test", self.num_test)
        check_fraction("validation", self.validation)

    def load(self) -> Splits:
        """Return the windows.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is damaged, or has too few windows.
        """
        groups = texts_by_triples(unpacked(self.path, FILE, ORIGIN))
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(self.seed))
        shuffled = [groups[i] for i in order.tolist()]
        left = iter(shuffled)
        # Each split takes the groups that its windows come from, so that no two share triples.
        test = self._take(left, self.num_test, "num_test")
        number = self.num_train
        if number is None:
            left = list(left)
            number = sum(1 for _ in self._windows(left))
            left = iter(left)
        held_out = round(self.validation * number)
        validation = self._take(left, held_out, "validation") if self.validation else None
        rest = None if self.num_train is None else number - held_out
        train = self._take(left, rest, "num_train")
        return Splits(train, validation, test, "DART", BYTES, IGNORED)

    def _take(
        self, groups: Iterator[list[bytes]], number: int | None, argument: str
    ) -> tuple[Tensor, Tensor]:
        """``number`` windows, or all; removes the groups that they come from."""
        windows = list(islice(self._windows(groups), number))
        if not windows or (number is not None and len(windows) < number):
            raise ValueError(
                f"{argument}: there are {len(windows)} windows of {self.context} bytes left for "
                f"it, not {number or 'at least 1'}; use fewer, or shorter ones (context)."
            )
        x, y = zip(*windows, strict=True)
        return torch.tensor(x), torch.tensor(y)

    def _windows(self, groups: Iterable[list[bytes]]) -> Iterator[tuple[list[int], list[int]]]:
        """Inputs and targets of each window, in the order of the texts."""
        R = self.context
        for text in (text for group in groups for text in group):
            for start in range(0, len(text) - 1, R):
                first = max(0, min(start, len(text) - R - 1))
                part = list(text[first : first + R + 1])
                twice, missing = start - first, R + 1 - len(part)
                y = twice * [IGNORED] + part[1 + twice :] + missing * [IGNORED]
                yield part[:-1] + missing * [PADDING], y


def texts_by_triples(content: bytes) -> list[list[bytes]]:
    """Groups of texts whose entries have the same triples, in the file's order."""
    groups: dict[frozenset, list[bytes]] = {}
    for entry in json.loads(content):
        triples = [tuple(_line(part) for part in triple) for triple in entry["tripleset"]]
        subject = " && ".join(" | ".join(triple) for triple in triples)
        text = f"\n{subject} => {_line(entry['annotations'][0]['text'])}\n".encode()
        groups.setdefault(frozenset(triples), []).append(text)
    return list(groups.values())


def _line(text: str) -> str:
    """The text with single spaces, and without the byte used for padding."""
    return " ".join(text.replace("\0", " ").split())
