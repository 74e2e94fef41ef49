"""DART: sentences about triples of data, as sequences of bytes for language models."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.data.archives import unpacked
from kfac_backend.files import parse_json
from marglik.data.source import DataSource
from marglik.data.splits import check_fraction, check_seed
from marglik.data.tensors import TensorSplits
from marglik.sizes import check_sizes

__all__ = ["DART"]

FILE = "dart-v1.1.1-full-dev.json.gz"
ORIGIN = "DART v1.1.1 by Nan et al. 2021, github.com/Yale-LILY/dart, compressed by gzip"
IGNORED = -100
"""The label of targets that do not count."""
PADDING = 0
"""The byte that fills up short texts; no text contains it."""
BYTES = tuple(repr(bytes([byte]))[2:-1] for byte in range(256))
"""The names of all bytes; printable ones are their own names."""


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

    Raises:
        ValueError: if a number is below 1, or the fraction or the seed is out of range.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        context: int = 64,
        num_train: int | None = None,
        num_test: int = 1000,
        seed: int = 0,
        validation: float = 0.0,
    ) -> None:
        check_sizes(context=context, num_train=num_train, num_test=num_test)
        check_fraction("validation", validation)
        check_seed(seed)
        self.path = path
        self.context = context
        self.num_train = num_train
        self.num_test = num_test
        self.seed = seed
        self.validation = validation

    def load(self) -> TensorSplits:
        """Return the windows.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is damaged or of another form, or has too few windows.
        """
        groups = list(_texts_by_triples(*unpacked(self.path, FILE, ORIGIN)))
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(self.seed))
        shuffled = iter([groups[i] for i in order.tolist()])
        test = self._take(shuffled, self.num_test, "num_test")
        if self.num_train is None:
            shuffled = list(shuffled)
            number = sum(1 for _ in self._windows(shuffled))
        else:
            number = self.num_train
        shuffled, num_validation = iter(shuffled), round(self.validation * number)
        validation = None
        if self.validation:
            if not 0 < num_validation < number:
                raise ValueError(
                    f"validation={self.validation}: {number} training windows would be divided "
                    f"into {number - num_validation} and {num_validation}; both parts need one. "
                    "Choose another fraction, or take more windows."
                )
            validation = self._take(shuffled, num_validation, "validation")
        size = None if self.num_train is None else number - num_validation
        train = self._take(shuffled, size, "num_train")
        return TensorSplits(train, validation, test, "DART", BYTES, IGNORED)

    def _take(
        self, groups: Iterator[list[bytes]], number: int | None, argument: str
    ) -> tuple[Tensor, Tensor]:
        """``number`` windows, or all; removes the groups that they come from."""
        windows = list(islice(self._windows(groups), number))
        if not windows or (number is not None and len(windows) < number):
            wanted = "at least 1" if number is None else number
            raise ValueError(
                f"{argument}: there are {len(windows)} windows of {self.context} bytes left for "
                f"it, not {wanted}; use fewer, or shorter ones (context)."
            )
        x, y = zip(*windows, strict=True)
        return torch.tensor(x), torch.tensor(y)

    def _windows(self, groups: Iterable[list[bytes]]) -> Iterator[tuple[list[int], list[int]]]:
        """Inputs and targets of each window, in the order of the texts."""
        R = self.context
        for group in groups:
            for text in group:
                for start in range(0, len(text) - 1, R):
                    first = max(0, min(start, len(text) - R - 1))
                    part = list(text[first : first + R + 1])
                    twice, missing = start - first, R + 1 - len(part)
                    y = twice * [IGNORED] + part[1 + twice :] + missing * [IGNORED]
                    yield part[:-1] + missing * [PADDING], y


def _texts_by_triples(path: Path, content: bytes) -> Iterator[list[bytes]]:
    """Groups of texts whose entries have the same triples, in the file's order."""
    groups: dict[frozenset, list[bytes]] = {}
    for number, entry in enumerate(_entries(path, content)):
        try:
            triples = [tuple(_line(part) for part in triple) for triple in entry["tripleset"]]
            sentence = _line(entry["annotations"][0]["text"])
            subject = " && ".join(" | ".join(triple) for triple in triples)
            text = f"\n{subject} => {sentence}\n".encode()
        except (KeyError, IndexError, TypeError, AttributeError, UnicodeEncodeError) as error:
            raise ValueError(
                f"Entry {number} of '{path}' has no triples or no annotation in DART's form "
                f"({type(error).__name__}: {error}). Use the JSON files of DART v1.1.1."
            ) from error
        groups.setdefault(frozenset(triples), []).append(text)
    yield from groups.values()


def _entries(path: Path, content: bytes) -> list[Any]:
    try:
        entries = parse_json(content)
        if not isinstance(entries, list):
            raise ValueError(f"it holds {type(entries).__name__}, not a list of entries")
    except ValueError as error:  # of JSON or UTF-8
        raise ValueError(f"'{path}' is no JSON of DART ({error}). Fetch it again.") from error
    return entries


def _line(text: str) -> str:
    """The text with single spaces, and without the byte used for padding."""
    return " ".join(text.replace("\0", " ").split())
