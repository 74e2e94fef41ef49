"""The callback in Lightning's own Trainer: an own loop's decays, logs, checkpoints, errors."""

import inspect
import itertools
import logging
import math
import warnings

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

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


def trainer(callback, epochs=EPOCHS, *others, **options):
    saves = any(isinstance(other, ModelCheckpoint) for other in others)
    return L.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, callbacks=[callback, *others],
        enable_checkpointing=saves, **{"logger": False, **options},
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


def test_samples_and_their_random_signs_are_those_of_an_own_loop(monkeypatch):
    monkeypatch.setattr("marglik.training.samples.FEWEST", 8)
    module, often = Classifier(), OPTIONS | {"every": 1}
    prior = MarginalLikelihood("classification", network="net", **often)
    trainer(prior).fit(module, loader())
    model, expected = in_an_own_loop(math.inf, options=often)
    assert expected.state.measures.has_estimates
    assert prior.learner.evidences == expected.evidences
    assert all(map(torch.equal, module.net.parameters(), model.parameters()))


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


class TwoSteps(Classifier):
    """Two steps a batch, in manual optimisation."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, index))
            self.optimizers().step()


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*dataset().tensors, strict=True)


@pytest.mark.parametrize(
    ("kind", "data", "options", "its_epochs", "steps_per_epoch"),
    [
        (TwoSteps, dataset, {}, EPOCHS, 8),
        (Classifier, Stream, {}, EPOCHS, 4),  # whose end the epochs show
        (Classifier, Stream, {"max_epochs": -1, "max_steps": 4 * EPOCHS}, None, None),
        (TwoSteps, dataset, {"max_epochs": -1, "max_steps": 32}, 4, 8),  # as it turns out
        (Classifier, dataset, {"accumulate_grad_batches": 4}, EPOCHS, 1),  # without an average
        # Eight steps are four epochs of two steps; by batches they would be two epochs.
        (Classifier, dataset, {"max_epochs": -1, "max_steps": 8,
                               "accumulate_grad_batches": 2}, 4, 2),
        (Classifier, Stream, {"max_epochs": -1, "max_steps": 2 * EPOCHS,
                              "accumulate_grad_batches": 2}, None, 2),
    ],
)  # fmt: skip
def test_other_epochs_are_those_of_an_own_loop(kind, data, options, its_epochs, steps_per_epoch):
    """Several steps a batch, and streams, whose updates follow rounds of steps."""
    prior, module = MarginalLikelihood("classification", network="net", **OPTIONS), kind()
    run = trainer(prior, options.pop("max_epochs", EPOCHS), **options)
    run.fit(module, DataLoader(data(), 8))
    own, other = network(), PriorLearner("classification", **OPTIONS)
    optimizer = sgd(own)
    stream = DataLoader(dataset() if steps_per_epoch else data(), 8)
    other.start(own, optimizer, stream, its_epochs, steps_per_epoch=steps_per_epoch)
    accumulated = options.get("accumulate_grad_batches", 1)
    epochs = its_epochs or EPOCHS
    for _ in range(epochs):
        for index, (x, y) in enumerate(stream, 1):
            for _ in range(2 if kind is TwoSteps else 1):
                (F.cross_entropy(own(x), y) / accumulated).backward()
                if index % accumulated == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    other.finish()
    assert prior.posterior.n_data == len(dataset()) and len(other.evidences) == (epochs + 1) // 2
    assert_close(prior.learner.evidences, other.evidences, rtol=1e-6, atol=0)
    for p, q in zip(module.net.parameters(), own.parameters(), strict=True):
        assert_close(p, q)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_stream_without_an_end_is_read_as_far_as_the_training_reads_it(accumulated):
    class Endless(IterableDataset):
        def __iter__(self):
            return itertools.cycle(Stream())

    prior = MarginalLikelihood("classification", network="net", **OPTIONS)
    run = trainer(prior, -1, max_steps=8, accumulate_grad_batches=accumulated)
    run.fit(Classifier(), DataLoader(Endless(), 8))
    assert prior.posterior.n_data == 8 * accumulated * 8
    prior = MarginalLikelihood("classification", network="net", **OPTIONS)
    with pytest.raises(ValueError, match=r"Pass Trainer\(max_steps=...\) or .*limit_train_batches"):
        trainer(prior, -1).fit(Classifier(), DataLoader(Endless(), 8))


def test_updates_of_a_stream_follow_rounds_of_steps(monkeypatch):
    """Rounds of ten examples, which are two steps; the stream itself ends after four."""
    monkeypatch.setattr("marglik.training.problem.FEWEST", 1)
    prior = MarginalLikelihood("classification", network="net", **OPTIONS)
    trainer(prior, -1, max_steps=8).fit(Classifier(), DataLoader(Stream(), 8))
    assert prior.learner.state.epoch == 4
    assert len(prior.learner.evidences) == 3  # after rounds 2 and 4, and of the average


def test_another_training_continues_or_says_that_it_starts_anew(tmp_path, recwarn):
    def words():
        messages = [
            str(w.message) for w in recwarn.list if "start from their initial" in str(w.message)
        ]
        recwarn.clear()
        return messages

    # The same trainer goes on.
    prior, module = MarginalLikelihood("classification", network="net", **OPTIONS), Classifier()
    run = trainer(prior, 3)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "with.ckpt")
    decays, num_updates = prior.learner.weight_decays(), len(prior.learner.evidences)
    run.fit_loop.max_epochs = 4
    run.fit(module, loader())
    assert len(prior.learner.evidences) > num_updates and not words()
    assert prior.learner.state.decay_history.keys() > {0, 2, 3}
    # Another trainer starts anew.
    trainer(prior, 1).fit(module, loader())
    (message,) = words()
    assert "trains the same network again. The weight decays start from" in message
    assert not torch.equal(prior.learner.weight_decays(), decays)
    # So does a checkpoint without the callback.
    plain = trainer(L.Callback(), 2)
    plain.fit(Classifier(), loader())
    plain.save_checkpoint(tmp_path / "without.ckpt")
    prior = MarginalLikelihood("classification", network="net", **OPTIONS)
    trainer(prior).fit(Classifier(), loader(), ckpt_path=tmp_path / "without.ckpt", **SAFELY)
    (message,) = words()
    assert "no state of MarginalLikelihood" in message and "in epoch 2" in message
    # Negative control: a checkpoint with it.
    prior = MarginalLikelihood("classification", network="net", **OPTIONS)
    trainer(prior).fit(Classifier(), loader(), ckpt_path=tmp_path / "with.ckpt", **SAFELY)
    assert not words()


class Killed(Exception):
    """In place of a kill."""


class Resumable:
    """Batches whose state is the position of the latest iterator.

    As torchdata's StatefulDataLoader without a shuffle.
    """

    def __init__(self):
        self.latest, self.start = None, 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.latest, self.start = Position(self.start), 0
        return self.latest

    def state_dict(self):
        return {"position": self.latest.position}

    def load_state_dict(self, state):
        self.start = state["position"] % len(self)


class Position:
    def __init__(self, position):
        self.batches, self.position = [*loader()], position

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == len(self.batches):
            raise StopIteration
        self.position += 1
        return self.batches[self.position - 1]


class WithNorm(Classifier):
    def __init__(self, kind="sgd"):
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(6))
        self.kind = kind
        self.automatic_optimization = kind != "manual"

    def training_step(self, batch, index):
        for _ in range(2 if self.kind == "manual" else 0):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, index))
            self.optimizers().step()
        return None if self.kind == "manual" else super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.log("loss", F.cross_entropy(self.net(batch[0]), (batch[1] + 1) % 3))

    def configure_optimizers(self):
        if self.kind == "adam":
            return torch.optim.Adam(self.net.parameters(), 0.02)
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("kind", "options", "saves"),
    [
        ("sgd", {}, {"every_n_train_steps": 1}),
        ("adam", {"accumulate_grad_batches": 2}, {"every_n_train_steps": 1}),
        ("sgd", {"val_check_interval": 3}, {"every_n_train_steps": 1}),
        ("sgd", {"val_check_interval": 3}, {"save_on_train_epoch_end": False}),
        ("manual", {}, {"every_n_train_steps": 3}),
    ],
)
def test_a_training_resumes_to_the_bit_in_the_middle_of_an_epoch(kind, options, saves, tmp_path):
    """From each checkpoint, as Lightning itself does with a loader that resumes, too."""

    def end(folder, has_prior, path=None):
        prior = MarginalLikelihood("classification", network="net", **OPTIONS)
        saver = ModelCheckpoint(folder, "{step}", monitor="loss" if "save" in [*saves][0] else None,
                                save_top_k=-1, **saves)  # fmt: skip
        module = WithNorm(kind)
        validates = {} if options.get("val_check_interval") else {"limit_val_batches": 0}
        run = trainer(prior if has_prior else L.Callback(), 3, saver, **options, **validates)
        run.fit(module, Resumable(), loader(), ckpt_path=path, **SAFELY)
        state = module.net.state_dict()
        if has_prior:
            state |= {"decays": prior.learner.weight_decays()}
            state |= {"evidences": torch.tensor(prior.learner.evidences)}
        return state

    for has_prior in (False, True):
        folder = tmp_path / str(has_prior)
        whole = end(folder, has_prior)
        files = sorted(folder.iterdir())
        assert len(files) > 2
        for file in files:
            assert_close(end(tmp_path / "again", has_prior, file), whole, rtol=0, atol=0)


class Validates(Classifier):
    """With the loss of the validation data, which are other labels of the training's."""

    def validation_step(self, batch, index):
        self.log("loss", F.cross_entropy(self.net(batch[0]), (batch[1] + 1) % 3))


@pytest.mark.parametrize("at_epochs_end", [False, True])
def test_early_stopping_ends_at_the_best_average(at_epochs_end, tmp_path):
    """With checkpoints of the weights alone, which hold what was validated."""
    prior, module = MarginalLikelihood("classification", network="net", **OPTIONS), Validates()
    saves = ModelCheckpoint(
        tmp_path, "{epoch}-{loss:.6f}", monitor="loss", save_top_k=-1, save_weights_only=True,
        save_on_train_epoch_end=at_epochs_end,
    )  # fmt: skip
    run = trainer(prior, 10, EarlyStopping("loss", patience=8), saves)
    run.fit(module, loader(), loader())
    assert run.current_epoch == 9  # it has stopped, since the labels are wrong
    x, y = dataset().tensors
    assert len(saves.best_k_models) == 9
    for file, loss in saves.best_k_models.items():
        module.load_state_dict(torch.load(file, weights_only=True)["state_dict"])
        assert_close(F.cross_entropy(module.net(x), (y + 1) % 3), loss, rtol=1e-5, atol=0)
    best = torch.load(saves.best_model_path, weights_only=True)["state_dict"]
    module.load_state_dict(best)
    prior.learner.finish()
    assert torch.equal(module.net[0].weight, best["net.0.weight"])
    prior.posterior.check_weights()
    weights = torch.cat([p.detach().flatten() for p in module.net.parameters()])
    assert torch.equal(prior.posterior.mean, weights)


def test_a_training_after_one_that_failed_saves_its_own_network(tmp_path):
    """It validates nothing, and its checkpoint is of the step that the failed one validated."""
    prior, module = MarginalLikelihood("classification", network="net", **OPTIONS), Validates()

    class Stops(L.Callback):
        def on_validation_end(self, trainer, *_):
            if trainer.current_epoch == 4:
                raise Killed

    first = trainer(prior, 6, Stops(), ModelCheckpoint(tmp_path, "first"))
    with pytest.raises(Killed):
        first.fit(module, loader(), loader(), **SAFELY)
    second = trainer(prior, 6, ModelCheckpoint(tmp_path, "second"), max_steps=20)
    second.fit(Validates(), loader(), **SAFELY)
    assert STEPS not in torch.load(tmp_path / "second.ckpt", weights_only=True)


def test_what_it_cannot_work_with_is_named():
    def fit(module, loaders=None, **options):
        prior = MarginalLikelihood("classification", **{"network": "net", **options})
        trainer(prior).fit(module, loaders or loader())

    with pytest.raises(ValueError, match="has 2 optimisers"):
        fit(Classifier(optimizers=2))
    with pytest.raises(ValueError, match=r"network='nett' is not a module .* modules are net"):
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
