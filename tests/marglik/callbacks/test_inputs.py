"""Passes get what the network gets: Lightning's training equals one explicit loop."""

import logging
import math
import re
import warnings

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from marglik import PriorLearner
from marglik.callbacks.lightning import MarginalLikelihood
from tests.marglik.callbacks.online import EPOCHS, LR, OPTIONS, N, dataset

pytestmark = pytest.mark.usefixtures("one_thread")


def batches(epoch=0):
    """The batches of an epoch, without a shuffle; each epoch may have data of its own."""
    x, y = dataset().tensors
    return DataLoader(TensorDataset(x + epoch, y), 8)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)
    return nn.Sequential(*layers).to(dtype)


class Module(L.LightningModule):
    """Trains ``net`` on what `given` makes of a batch's input."""

    def __init__(self):
        super().__init__()
        self.net = network()
        torch.manual_seed(1)
        self.encoder = nn.Linear(4, 4)

    def given(self, x):
        return x

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(self.given(batch[0])), batch[1])

    def validation_step(self, batch, index):
        self.net(self.given(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), LR, momentum=0.9)


def shifted(x):
    return 20 * x + 5


class InHook(Module):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return shifted(batch[0]) if self.trainer.training else batch[0], batch[1]


class ByEncoder(Module):
    """A trained module before the network, with what a step does before it calls the network."""

    def given(self, x):
        self.log("mean", x.mean())
        return self.encoder(x)


class InTraining(Module):
    def given(self, x):
        return shifted(x) if self.training else x


class Manual(ByEncoder):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, index))
        self.optimizers().step()


class Data(L.LightningDataModule):
    """Another data set in each epoch, and a hook of its own."""

    def train_dataloader(self):
        return batches(self.trainer.current_epoch)

    def val_dataloader(self):
        return batches()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return shifted(batch[0]), batch[1]


class Combined(Module):
    def training_step(self, batch, index):
        return super().training_step(batch["only"], index)


class Explicit:
    """The batches of the present epoch, as the network gets them."""

    def __init__(self, module, change, data, limit, dtype):
        self.module, self.change, self.data = module, change, data
        self.limit, self.dtype, self.epoch = limit, dtype, 0

    def raw(self):
        for x, y in [*self.data(self.epoch)][: self.limit]:
            yield self.change(x.to(self.dtype)), y

    def __len__(self):
        return len([*self.raw()])

    def __iter__(self):
        for x, y in self.raw():
            yield (self.module.encoder(x).detach() if self.module.has_encoder else x), y


def lightning(prior, **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        **{"callbacks": [prior], "max_epochs": EPOCHS, **options},
    )  # fmt: skip


def same(x):
    return x


# name: module, data, options of the trainer, what changes inputs, batches of an epoch
CASES = {
    "a hook of the module": (InHook, None, {}, shifted, None),
    "a trained module before the network": (ByEncoder, None, {}, same, None),
    "in training alone": (InTraining, None, {}, shifted, None),
    "manual steps": (Manual, None, {}, same, None),
    "a hook of the data, another loader in each epoch": (
        Module, Data, {"reload_dataloaders_every_n_epochs": 1}, shifted, None,
    ),
    "64-true": (InHook, None, {"precision": "64-true"}, shifted, None),
    "bf16-true": (ByEncoder, None, {"precision": "bf16-true"}, same, None),
    "bf16-mixed": (ByEncoder, None, {"precision": "bf16-mixed"}, same, None),
    "a limit": (ByEncoder, None, {"limit_train_batches": 2}, same, 2),
    "overfitting": (InHook, None, {"overfit_batches": 2}, shifted, 2),
    "a combined loader": (Combined, CombinedLoader, {}, same, None),
}  # fmt: skip
DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}


@pytest.mark.parametrize("name", CASES)
def test_lightning_learns_what_an_explicit_loop_learns(name):
    """Weights, statistics of BatchNorm, N, evidences and decays, with validations in between."""
    kind, data, options, change, limit = CASES[name]
    dtype = DTYPES.get(name, torch.float32)
    prior = MarginalLikelihood("classification", network="net", **OPTIONS)
    trainer = lightning(prior, num_sanity_val_steps=0, **options)
    module = kind()
    loader = CombinedLoader({"only": batches()}) if data is CombinedLoader else batches()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The network's inputs|The training step|The loop's loss")
        if data is Data:
            trainer.fit(module, datamodule=Data())
        else:
            trainer.fit(module, loader, batches())

    other = kind().to(dtype)
    other.has_encoder = issubclass(kind, ByEncoder)
    own = Explicit(other, change, batches if data is Data else lambda _: batches(), limit, dtype)
    optimizer = torch.optim.SGD(other.parameters(), LR, momentum=0.9)
    expected = PriorLearner("classification", **OPTIONS)
    expected.start(other.net, optimizer, own, EPOCHS)
    for epoch in range(EPOCHS):
        own.epoch = epoch
        for x, y in own.raw():
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16-mixed"):
                x = other.encoder(x) if other.has_encoder else x
                loss = F.cross_entropy(other.net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    expected.finish()
    assert prior.posterior.n_data == (N if limit is None else 8 * limit)
    trained, state = module.net.state_dict(), other.net.state_dict()
    # Passes over samples have larger batches than the loop's: their sums are rounded otherwise.
    rounding = {"rtol": 16 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    assert_close(trained, state, **rounding)
    assert_close(prior.learner.evidences, expected.evidences, **rounding)
    assert_close(prior.learner.weight_decays(), expected.weight_decays(), **rounding)
    assert all(math.isfinite(evidence) for evidence in expected.evidences)


def test_statistics_of_a_norm_before_the_network_are_of_the_training_alone():
    module = ByEncoder()
    module.encoder = nn.BatchNorm1d(4)
    lightning(MarginalLikelihood("classification", network="net", **OPTIONS)).fit(module, batches())
    assert module.encoder.num_batches_tracked == EPOCHS * len(batches())


class Accumulating(Module):
    """Steps by hand after every second batch; zeros the gradients in place before the first."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        if index % 2 == 0:
            self.optimizers().zero_grad(set_to_none=False)
        self.manual_backward(super().training_step(batch, index) / 2)
        if index % 2 == 1:
            self.optimizers().step()

    def on_validation_model_zero_grad(self):
        """Keep the gradients of the first batch in a validation, which Lightning would drop."""


def test_a_pass_between_accumulated_batches_leaves_their_gradients():
    """A validation after each batch reads the data again, and with it runs the start of a step."""
    ends = []
    for options in ({"val_check_interval": 1}, {"limit_val_batches": 0}):
        prior = MarginalLikelihood("classification", network="net", **OPTIONS)
        module, trainer = Accumulating(), lightning(prior, num_sanity_val_steps=0, **options)
        trainer.fit(module, batches(), batches())
        ends.append(module.net.state_dict())
    assert_close(*ends, rtol=0, atol=0)


class Changes(L.Callback):
    """Changes a batch in place, behind the trainer's transfer hooks."""

    def on_train_batch_start(self, trainer, module, batch, index):
        batch[0].mul_(20)


class Elsewhere(Module):
    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize(
    ("kind", "network", "callback", "expected"),
    [
        (Module, "net", Changes, "inputs in the first training batch differ.*mean"),
        (Elsewhere, None, L.Callback, "The training step did not call the module itself"),
        (Module, "net", L.Callback, None),
        (ByEncoder, "net", L.Callback, None),
    ],
)
def test_inputs_that_cannot_be_matched_are_named(kind, network, callback, expected, recwarn):
    """Here the loader shuffles: other examples of the same kind do not count as other inputs."""
    prior = MarginalLikelihood("classification", network=network, **OPTIONS)
    data = DataLoader(batches().dataset, 8, shuffle=True)
    lightning(prior, max_epochs=1, callbacks=[prior, callback()]).fit(kind(), data)
    messages = [str(w.message) for w in recwarn]
    messages = [m for m in messages if "inputs in the first" in m or "training step did not" in m]
    assert len(messages) == (expected is not None)
    assert all(re.search(expected, message) for message in messages), messages
    assert not prior.learner.problem.model._forward_pre_hooks
