"""What ranks do in tests of predictives: called in each, see `tests.worlds`."""

from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from kfac_backend.blocks import block
from kfac_backend.ranks import Ranks
from marglik import KronLaplace, PredictiveConfig, laplace_predictive
from tests.kfac_backend.networks import data, network


def predicted(config: PredictiveConfig, shares: bool) -> tuple[list[str], dict[str, Tensor]]:
    """Which factors this rank has decomposed; eigenvectors, and predictions for the same inputs.

    The posterior is fitted on unequal shards of nine examples.
    """
    ranks, (x, y) = Ranks(), data(9)
    own = torch.arange(9) % (ranks.size + 1) % ranks.size == ranks.rank
    posterior = KronLaplace(network(), "classification", prior_precision=0.7)
    posterior.fit([(x[own], y[own])])
    solved: list[str] = []
    real = block.eigh

    def noted(matrix: Tensor, name: str):
        solved.append(name)
        return real(matrix, name)

    generator = torch.Generator().manual_seed(0)
    with patch.object(block, "eigh", noted):
        together = ranks if shares else Ranks(None)
        prediction = laplace_predictive(posterior, config, generator, ranks=together)(x[:4])
        again = replace(config, layers="last") if config.method != "linearised" else config
        laplace_predictive(posterior, again, generator, ranks=together)(x[:2])  # they are kept
    found = {"mean": prediction.mean, "epistemic": prediction.epistemic}
    for name, (eigen, spectrum) in posterior.precision_blocks().items():
        found |= {
            f"{name}, {part}": value for part, value in vars(eigen).items() if value is not None
        }
        found[f"{name}, spectrum"] = spectrum
    return solved, found
