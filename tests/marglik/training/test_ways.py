"""All ways of training learn the same decays and open numbers by default, and keep them."""

import logging
import warnings
from functools import partial
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend.likelihoods import likelihood_of
from marglik import (
    KronLaplace,
    MarglikClassifier,
    MarglikRegressor,
    OnlineTraining,
    Posterior,
    PriorLearner,
    load_posterior,
    marglik_training,
    maximize_evidence,
    save_posterior,
)
from marglik.application.runs import trainings
from marglik.application.runs.config import RunConfig
from marglik.application.runs.optimizers import OptimizerConfig
from marglik.application.runs.setup import Setup
from marglik.application.runs.trainings import Training
from marglik.callbacks.lightning import MarginalLikelihood
from marglik.data import Splits
from marglik.storage.checkpoint import Checkpoints
from tests.marglik.plain_loop import learn

pytestmark = pytest.mark.usefixtures("one_thread")

N, D, EPOCHS = 24, 3, 2
SGD = {"lr": 0.01, "momentum": 0.9, "nesterov": True}
OUTPUTS = {
    "classification": 3,
    "noisy_classification(noise=0.2)": 3,
    "ordinal(cuts=[-0.5, 0.5])": 1,
    "bernoulli": 2,
    "regression": 2,
    "regression_per_output": 2,
    "known_noise": 1,
    "heteroscedastic": 2,
    "poisson": 1,
    "negative_binomial": 1,
    "student_t": 2,
    "student_t(df=5)": 1,
    "weibull": 1,
    "weighted(of='student_t')": 1,
}
"""Likelihood -> C; all that there are."""


def data(text):
    """Of a noise that no likelihood begins with."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    z = x[:, :2] + torch.tensor([0.3, 0.05]) * noise
    counts = torch.poisson((1 + z[:, :1]).exp(), generator=generator)
    targets = {
        "classification": x.argmax(1),
        "noisy_classification": x.argmax(1),
        "ordinal": torch.bucketize(z[:, 0], torch.tensor([-0.5, 0.5]).double()),
        "bernoulli": (z > 0).double(),
        "known_noise": torch.cat([z[:, :1], torch.full_like(z[:, :1], 0.3)], 1),
        "heteroscedastic": z[:, :1],
        "poisson": counts,
        "negative_binomial": counts,
        "weibull": torch.cat([z[:, :1].exp(), (noise[:, :1] < 1).double()], 1),
        "weighted": torch.cat([z[:, :1], noise[:, :1].abs()], 1),
    }
    return x, targets.get(text.partition("(")[0], z[:, : OUTPUTS[text]])


def network(text):
    """At the truth, so that what is left is noise."""
    model = nn.Linear(D, OUTPUTS[text]).double()
    nn.init.eye_(model.weight)
    nn.init.constant_(model.bias, float(text in ("poisson", "negative_binomial")))
    if text == "heteroscedastic":
        nn.init.zeros_(model.weight[1])
    return model


def batches(text):
    return DataLoader(TensorDataset(*data(text)), 8)


def sgd(model):
    return torch.optim.SGD(model.parameters(), **SGD)


def in_a_plain_loop(text, folder):
    model, prior = network(text), PriorLearner(text)

    def loss(f, y):
        return prior.likelihood.loss(f, y) / len(f)

    return learn(model, sgd(model), prior, batches(text), EPOCHS, loss=loss).posterior


def with_online_training(text, folder):
    model = network(text)
    learner = PriorLearner(text, epochs=EPOCHS)
    return OnlineTraining(model, sgd(model), batches(text), learner).run().laplace


def resumed(text, folder):
    """After the second epoch, from a checkpoint."""

    def stop(record):
        if record["kind"] == "epoch" and record["epoch"] == 2:
            raise KeyboardInterrupt

    for on_record in (stop, None):
        model = network(text)
        learner = PriorLearner(text, epochs=EPOCHS)
        training = OnlineTraining(model, sgd(model), batches(text), learner, on_record=on_record)
        try:
            return training.run(Checkpoints(folder / "checkpoints", minutes=0)).laplace
        except KeyboardInterrupt:
            pass


def with_marglik_training(text, folder):
    return marglik_training(
        network(text), batches(text), text, optimizer_cls=torch.optim.SGD, optimizer_kwargs=SGD,
        n_epochs=EPOCHS,
    )[0]  # fmt: skip


def with_the_command(text, folder):
    x, y = data(text)
    model = network(text)
    setup = Setup(
        splits=Splits((x, y), None, (x, y), "made"),
        model=model, optimizer=OptimizerConfig(lr=SGD["lr"]),
        run=RunConfig(epochs=EPOCHS, batch_size=8, progress=False),
        fabric=Fabric(accelerator="cpu", devices=1), likelihood=likelihood_of(text),
    )  # fmt: skip
    learned = Training("learned", lambda: model, 0, Checkpoints(folder / "checkpoints"))
    with patch.object(trainings, "_batches", lambda *_: batches(text)):  # without its shuffle
        return trainings.train_network(setup, learned)[1].laplace


def with_lightning(text, folder):
    prior = MarginalLikelihood(text, network="net")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network(text)

        def training_step(self, batch, index):
            x, y = batch
            return prior.learner.likelihood.loss(self.net(x), y) / len(x)

        def configure_optimizers(self):
            return sgd(self)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[prior],
    ).fit(Module(), batches(text))  # fmt: skip
    return prior.posterior


def with_hugging_face(text, folder):
    transformers = pytest.importorskip("transformers")
    from marglik.callbacks.transformers import MarginalLikelihood

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network(text)

        def forward(self, x, labels=None):
            return {"logits": self.net(x)}

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            f, y = model(inputs["x"])["logits"], inputs["labels"]
            return prior.learner.likelihood.loss(f, y) / len(f)

    model, examples = Model(), zip(*data(text), strict=True)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=8,
        use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no", save_strategy="no",
        remove_unused_columns=False, max_grad_norm=0.0,
    )  # fmt: skip
    optimizer = sgd(model)
    trainer = Trainer(
        model, arguments, train_dataset=[{"x": x, "labels": y} for x, y in examples],
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
    )  # fmt: skip
    prior = MarginalLikelihood.attached(trainer, text)
    trainer.train()
    return prior.posterior


def with_estimators(text, folder):
    """Scikit-learn's interface."""
    x, y = data(text)
    estimator = ESTIMATORS[text](
        lambda columns, outputs: nn.Linear(columns, outputs).double(),
        epochs=EPOCHS, held_out=0, random_state=0,
    )  # fmt: skip
    estimator.fit(x.numpy(), (y if text == "classification" else y[:, 0]).numpy())
    return estimator.posterior_


ESTIMATORS = {
    "classification": MarglikClassifier,
    "regression": MarglikRegressor,
    "heteroscedastic": partial(MarglikRegressor, likelihood="heteroscedastic"),
}


def after_training(text, folder):
    """A posterior of the learned likelihood, whose prior is found afterwards."""
    learned = in_a_plain_loop(text, folder)
    posterior = Posterior(learned.model, learned.likelihood, sigma_noise=learned.sigma_noise)
    posterior.fit(batches(text))
    maximize_evidence(posterior)
    return posterior


TRAININGS = [
    with_online_training, resumed, with_marglik_training, with_the_command,
    with_lightning, with_hugging_face,
]  # fmt: skip
# Each likelihood in one way; in each other way one of classes, one with σ, one with two numbers.
CASES = [(text, in_a_plain_loop) for text in OUTPUTS]
CASES += [(text, way) for text in ("classification", "regression", "student_t")
          for way in [*TRAININGS, after_training]]  # fmt: skip
CASES += [(text, with_estimators) for text in ESTIMATORS]


@pytest.mark.parametrize(("text", "way"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_what_is_learned_is_the_same_and_kept(text, way, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = way(text, tmp_path)
        plain = in_a_plain_loop(text, tmp_path) if way in TRAININGS else None
    if plain is not None:
        # Callbacks read the loader's own batches, for which the signs of estimates are others.
        rtol = 1e-4 if way in (with_lightning, with_hugging_face) else 1e-6
        assert_close(posterior.mean, plain.mean, rtol=1e-7, atol=1e-9)
        found, expected = posterior.prior_precision.double(), plain.prior_precision.double()
        assert_close(found, expected, rtol=rtol, atol=0)
        assert found[0] != found[1]  # learned
    likelihood, given = posterior.likelihood, likelihood_of(text)
    # What was left open has moved, and what was given has not.
    start, moves = given.to_learn(), [0.0]
    for name, number in likelihood.parameters.items():
        if name in start:
            moves.append(float((number.log() - torch.tensor(start[name]).log()).abs().max()))
        else:
            assert_close(number, given.parameters[name])
    assert (max(moves) > 0.05) == bool(start)
    assert (float(posterior.sigma_noise) != 1) == given.has_sigma
    # The posterior is that of these numbers: a new fit has the same evidence. Not of the others.
    evidence = float(posterior.log_marginal_likelihood())

    def of(likelihood):
        again = Posterior(
            posterior.model, likelihood, posterior.options,
            prior_precision=posterior.prior_precision, sigma_noise=posterior.sigma_noise,
        )  # fmt: skip
        x, y = data(text)
        if way is with_estimators:
            x = (x - x.mean(0)) / x.std(0, correction=0)
            if not given.has_labels:
                y = (y[:, :1] - y[:, 0].mean()) / y[:, 0].std(correction=0)
        again.fit([(x, y)])
        return float(again.log_marginal_likelihood())

    assert evidence == pytest.approx(of(likelihood), rel=1e-6)
    if start:
        assert abs(evidence - of(given.replace(**start))) > 0.1
    # Saved and loaded.
    save_posterior(posterior, tmp_path / "saved")
    loaded = load_posterior(tmp_path / "saved", posterior.model)
    assert loaded.likelihood == likelihood and loaded.sigma_noise == posterior.sigma_noise
    assert float(loaded.log_marginal_likelihood()) == evidence
    if isinstance(posterior, KronLaplace):
        la = KronLaplace(posterior.model, text)
        la.load_state_dict(posterior.state_dict())
        assert la.likelihood == likelihood
        assert float(la.log_marginal_likelihood()) == evidence
