"""Lightning's Trainer on several ranks: called in each of them, see `tests.worlds`."""

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, DistributedSampler

from kfac_backend.ranks import Ranks
from marglik.callbacks.lightning import MarginalLikelihood
from tests.marglik.callbacks.online import EPOCHS, OPTIONS, dataset, network, sgd


class Module(L.LightningModule):
    """A classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return sgd(self)


def trained(repeats: bool = False) -> tuple[list[float], float]:
    """Prior precisions and evidence; ``repeats`` leaves the sampler to Lightning."""
    ranks = Ranks()
    sampler = DistributedSampler(
        dataset(), ranks.size, ranks.rank, shuffle=False, drop_last=True
    )  # each n-th example: batches of one process's
    loader = DataLoader(dataset(), 6 // ranks.size, sampler=None if repeats else sampler)
    prior = MarginalLikelihood("classification", network="net", **OPTIONS)
    trainer = L.Trainer(
        max_epochs=EPOCHS, callbacks=[prior], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        devices=ranks.size, strategy="auto" if ranks.size == 1 else "ddp",
        use_distributed_sampler=repeats,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    assert prior.posterior is not None
    return prior.posterior.prior_precision.tolist(), prior.learner.evidences[-1]
