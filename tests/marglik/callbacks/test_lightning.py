"""The callback in Lightning's own Trainer: an own loop's decays, logs, checkpoints, errors."""

import inspect
import logging
import math
import warnings

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

from kfac_backend.ranks import Ranks
from marglik import PriorLearner
from marglik.callbacks.lightning import STEPS, MarginalLikelihood
from tests.marglik.callbacks.online import (
    EPOCHS,
    LR,
    OPTIONS,
    assert_fitted_where_the_network_is,
    dataset,
    in_an_own_loop,
    loader,
    network,
    sgd,
)
from tests.marglik.plain_loop import learn

KNOWS = "weights_only" in inspect.signature(L.Trainer.fit).parameters  # since Lightning 2.6
SAFELY = {"weights_only": True} if KNOWS else {}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


class Classifier(L.LightningModule):
    def __init__(self, optimizers=1):
        super().__init__()
        self.net = network()
        self.number = optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        made = [
            torch.optim.SGD(self.net.parameters(), LR, momentum=0.9) for _ in range(self.number)
        ]
        return made if self.number > 1 else made[0]


def trainer(callback, epochs=EPOCHS, **options):
    return L.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, callbacks=[callback],
        **{"logger": False, "enable_checkpointing": False, **options},
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


class Whole(Classifier):
    """The module itself returns logits."""

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize(("whole", "clip"), [(False, math.inf), (True, math.inf), (False, 0.05)])
def test_decays_are_those_of_an_own_loop_to_the_bit(whole, clip):
    """Lightning clips the gradient of the data, as that loop does."""
    own, module = (None, Whole()) if whole else ("net", Classifier())
    prior = MarginalLikelihood("classification", network=own, **OPTIONS)
    trainer(prior, gradient_clip_val=None if clip == math.inf else clip).fit(module, loader())
    model, expected = in_an_own_loop(clip)
    decays = expected.weight_decays()
    assert torch.equal(prior.learner.weight_decays(), decays)
    for p, q in zip(module.net.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert prior.learner.evidences == expected.evidences and len(expected.evidences) == 3
    # Negative controls: they were learned, and the network has felt it.
    assert len(set(decays.tolist())) == 4
    plain = Classifier()
    L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(plain, loader())  # fmt: skip
    assert not torch.equal(plain.net[0].weight, model[0].weight)


def test_label_noise_is_learned_from_held_out_labels():
    """As in an own loop, to the bit, whose loss is that of the likelihood of each step."""
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(2))
    y = in_an_own_loop(math.inf)[0](x).argmax(1)  # what is learned soon, and a part of it wrong
    drawn = torch.randint(3, (300,), generator=torch.Generator().manual_seed(3))
    held_out = [(x, torch.where(torch.arange(300) % 4 == 0, drawn, y))]
    prior = MarginalLikelihood("noisy_classification", network="net", held_out=held_out, **OPTIONS)
    noises = []

    class Noisy(Classifier):
        def training_step(self, batch, index):
            noises.append(float(prior.learner.likelihood.parameters["noise"]))
            return prior.learner.likelihood.loss(self.net(batch[0]), batch[1]) / len(batch[0])

    module, own, other = Noisy(), network(), PriorLearner("noisy_classification", **OPTIONS)
    trainer(prior).fit(module, loader())

    def loss(f, y):
        return other.likelihood.loss(f, y) / len(f)

    learn(own, sgd(own), other, loader(), EPOCHS, loss=loss, held_out=held_out)
    assert prior.learner.likelihood == other.likelihood
    for p, q in zip(module.net.parameters(), own.parameters(), strict=True):
        assert torch.equal(p, q)
    assert noises[0] == 0 < noises[-1] and prior.posterior.likelihood == other.likelihood


class Stop(L.Callback):
    """Early stopping after an epoch."""

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = trainer.current_epoch + 1 == 3


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({"max_steps": 10}, 2),  # of 4 an epoch: one after epoch 2, one within the third
        ({"max_steps": 10, "epochs": -1}, 2),
        ({"max_steps": 8}, 1),  # at its end: not twice
        ({"max_steps": 2}, 1),  # within the first
        ({"stop": True}, 2),
    ],
)
def test_ends_with_an_update_wherever_it_ends(options, updates):
    prior, module = MarginalLikelihood("classification", network="net", **OPTIONS), Classifier()
    run = trainer(prior, **{key: value for key, value in options.items() if key != "stop"})
    if "stop" in options:
        run.callbacks.append(Stop())
    run.fit(module, loader())
    assert_fitted_where_the_network_is(prior, module.net, updates)
    decays = prior.learner.weight_decays()
    assert len(set(decays.tolist())) == 4  # learned


def test_logs_to_the_users_loggers(tmp_path):
    prior = MarginalLikelihood("classification", network="net", **OPTIONS)
    logger = CSVLogger(tmp_path)
    trainer(prior, logger=logger).fit(Classifier(), loader())
    logger.save()
    header, *rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    for name in ("prior/log_marginal_likelihood_per_example", "prior/weight_decay/0.weight"):
        assert name in header.split(",")
    assert len(rows) == 3


class Killed(Exception):
    """In place of a kill."""


@pytest.mark.parametrize("step", [4, 8])
def test_resumes_from_a_checkpoint_of_an_epochs_last_step(step, tmp_path):
    """It is written before the epoch's update; steps 8 and 16 of four an epoch end epochs 2, 4."""
    whole, module = MarginalLikelihood("classification", network="net", **OPTIONS), Classifier()
    trainer(whole).fit(module, loader())

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == step:
                trainer.save_checkpoint(tmp_path / "last_step.ckpt")
                raise Killed

    cut_off = trainer(MarginalLikelihood("classification", network="net", **OPTIONS))
    cut_off.callbacks.append(Saves())
    with pytest.raises(Killed):
        cut_off.fit(Classifier(), loader())
    second, resumed = MarginalLikelihood("classification", network="net", **OPTIONS), Classifier()
    trainer(second).fit(resumed, loader(), ckpt_path=tmp_path / "last_step.ckpt", **SAFELY)
    assert second.learner.evidences == whole.learner.evidences
    assert torch.equal(second.learner.weight_decays(), whole.learner.weight_decays())
    for p, q in zip(module.net.parameters(), resumed.net.parameters(), strict=True):
        assert torch.equal(p, q)


class Validates(Classifier):
    """With the loss of the validation data, which are other labels of the training's."""

    def validation_step(self, batch, index):
        self.log("loss", F.cross_entropy(self.net(batch[0]), (batch[1] + 1) % 3))


def test_the_best_checkpoint_is_the_average_that_was_validated(tmp_path):
    """And training resumes from it as if it had not been interrupted."""
    ends, path = [], None
    for resumes in (False, True):
        prior, module = MarginalLikelihood("classification", network="net", **OPTIONS), Validates()
        saves = ModelCheckpoint(
            tmp_path, "{epoch}-{loss:.6f}", monitor="loss", save_top_k=-1, mode="min"
        )
        run = trainer(prior, 6, enable_checkpointing=True)
        run.callbacks.append(saves)
        run.fit(module, loader(), loader(), ckpt_path=path, **SAFELY)
        ends.append((prior.learner.weight_decays(), [*module.net.parameters()]))
        if resumes:
            break
        x, y = dataset().tensors
        for file, loss in saves.best_k_models.items():
            saved = Validates()
            checkpoint = torch.load(file, weights_only=True)
            saved.load_state_dict(state := checkpoint["state_dict"])
            assert_close(F.cross_entropy(saved.net(x), (y + 1) % 3), loss, rtol=1e-5, atol=0)
            steps = checkpoint[STEPS]
            assert not torch.equal(state["net.0.weight"], steps["net.0.weight"])
            if "epoch=4" in file:
                path = file
    assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_a_training_after_one_that_failed_saves_its_own_network(tmp_path):
    """It validates nothing, and its checkpoint is of the step that the failed one validated."""
    prior, module = MarginalLikelihood("classification", network="net", **OPTIONS), Validates()

    class Stops(L.Callback):
        def on_validation_end(self, trainer, *_):
            if trainer.current_epoch == 4:
                raise Killed

    first = trainer(prior, 6, enable_checkpointing=True)
    first.callbacks += [Stops(), ModelCheckpoint(tmp_path, "first")]
    with pytest.raises(Killed):
        first.fit(module, loader(), loader(), **SAFELY)
    second = trainer(prior, 6, max_steps=20, enable_checkpointing=True)
    second.callbacks.append(ModelCheckpoint(tmp_path, "second"))
    second.fit(Validates(), loader(), **SAFELY)
    assert STEPS not in torch.load(tmp_path / "second.ckpt", weights_only=True)


def test_what_it_cannot_work_with_is_named():
    def fit(module, loaders=None, **options):
        prior = MarginalLikelihood("classification", **{"network": "net", **options})
        trainer(prior).fit(module, loaders or loader())

    with pytest.raises(ValueError, match="has 2 optimisers"):
        fit(Classifier(optimizers=2))
    with pytest.raises(ValueError, match=r"network='nett' is not a module .*it has net"):
        fit(Classifier(), network="nett")
    with pytest.raises(ValueError, match="There are 2 training dataloaders"):
        fit(Classifier(), loaders=[loader(), loader()])


class Sharded(Classifier):
    """Under `fully_shard`, as ModelParallelStrategy asks for."""

    def configure_model(self):
        if Ranks().size > 1:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def on_ranks(is_sharded=False, **options):
    """Called in each rank: precisions and evidence."""
    ranks = Ranks()
    sampler = DistributedSampler(
        dataset(), ranks.size, ranks.rank, shuffle=False, drop_last=True
    )  # each n-th example: batches of one process's
    batches = DataLoader(dataset(), 6 // ranks.size, sampler=sampler)
    prior = MarginalLikelihood("classification", network="net", **OPTIONS)
    strategy = ModelParallelStrategy(ranks.size, 1) if is_sharded else "ddp"
    its_trainer = L.Trainer(
        max_epochs=EPOCHS, callbacks=[prior], logger=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        devices=ranks.size, strategy="auto" if ranks.size == 1 else strategy,
        use_distributed_sampler=False, **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    its_trainer.fit(Sharded() if is_sharded else Classifier(), batches)
    assert prior.posterior is not None
    return prior.posterior.prior_precision.tolist(), prior.learner.evidences[-1]


ON_RANKS = "tests.marglik.callbacks.test_lightning:on_ranks"


def test_ranks_learn_what_one_process_learns(worlds):
    ((precisions, evidence),) = worlds.all(1, ON_RANKS)
    for is_sharded in (False, True):
        first, second = worlds.all(2, ON_RANKS, is_sharded)
        assert first == second
        assert first[0] == pytest.approx(precisions, rel=1e-3)
        assert first[1] == pytest.approx(evidence, rel=1e-4)


def test_checkpoints_of_sharded_networks_are_refused_before_training(worlds):
    with pytest.raises(AssertionError, match="enable_checkpointing=False"):
        worlds.all(2, "tests.marglik.callbacks.test_lightning:with_checkpoints")


def with_checkpoints():
    """Called in each rank."""
    on_ranks(True, enable_checkpointing=True)
