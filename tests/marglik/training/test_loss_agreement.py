"""A loop whose loss is not that of its likelihood is told so, with the likely cause."""

import logging
import re
import warnings

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from marglik import PriorLearner
from marglik.callbacks.lightning import MarginalLikelihood
from tests.marglik.callbacks.online import LR, dataset, loader, network, sgd

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = torch.tensor([0.5, 3.0, 1.0])


def told(call):
    """What the warnings of a call say about losses."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in found if "The loop's loss differs" in str(w.message)]


def weighted_mean(f, y):
    return F.cross_entropy(f, y, WEIGHTS.to(f), reduction="none").mean()


def of_terms(f, y):
    return F.cross_entropy(f.flatten(0, 1), y.flatten())


# Name -> likelihood, loss, options of the learner, and what is said; None for losses that agree.
CASES = {
    "mean": ("classification", F.cross_entropy, {}, None),
    "sum": (
        "classification", lambda f, y: F.cross_entropy(f, y, reduction="sum"), {},
        'is 8 times the gradient .*reduction="sum". Take the mean',
    ),
    "smoothing": (
        "classification", lambda f, y: F.cross_entropy(f, y, label_smoothing=0.1), {},
        r"labels with a smoothing of 0.1. Pass the likelihood 'classification\(smoothing=0.1\)'",
    ),
    "smoothing that is named": (
        "classification(smoothing=0.1)",
        lambda f, y: F.cross_entropy(f, y, label_smoothing=0.1), {}, None,
    ),
    "class weights": (
        "classification", weighted_mean, {}, r"larger weights for some classes.*weights=\[1, 2\]",
    ),
    "class weights that are named": (
        f"classification(weights={WEIGHTS.tolist()})", weighted_mean, {}, None,
    ),
    "another term": (
        "classification", lambda f, y: F.cross_entropy(f, y) + 0.1 * f.square().mean(), {},
        "has another direction. Possible reasons are label smoothing, class weights",
    ),
    "a constant": ("classification", lambda f, y: F.cross_entropy(f, y) + 3.0, {}, None),
    "sum of squares": (
        "regression", lambda f, y: F.mse_loss(f, y, reduction="sum"), {}, 'is 16 times.*"sum"',
    ),
    "squared error": ("regression", F.mse_loss, {}, "is 0.6667 times.*loss_scale=0.666667"),
    "squared error, scaled": ("regression", F.mse_loss, {"loss_scale": 2 / 3}, None),
    "another loss of one output": (
        "regression of one", lambda f, y: F.huber_loss(f, y, delta=0.1), {}, "another direction",
    ),
    "counts without log y!": (
        "poisson", lambda f, y: F.poisson_nll_loss(f, y, reduction="sum") / len(f), {}, None,
    ),
    "mean over outputs": (
        "bernoulli", F.binary_cross_entropy_with_logits, {},
        "is 0.3333 times.*mean over outputs.*loss_scale=0.333333",
    ),
    "terms": ("classification of terms", of_terms, {"loss_mean_over": "terms"}, None),
    "a sum of terms": (
        "classification of terms", lambda f, y: 10 * of_terms(f, y), {"loss_mean_over": "terms"},
        "is 10 times.*loss_scale=10 to",
    ),
}  # fmt: skip


SHOWN = "classification", "bernoulli"
"""Likelihoods whose targets the gradient shows."""


def loss_of_a_step(prior, model, data, loss, scaler=1.0, accumulated=1):
    """An own loop without loss=: the first step, by a scaler and accumulated batches."""
    optimizer = sgd(model)
    prior.start(model, optimizer, data, 2)
    for _, (x, y) in zip(range(accumulated), data, strict=False):
        (loss(model(x), y) * scaler / accumulated).backward()
    for p in model.parameters():
        p.grad /= scaler
    optimizer.step()
    prior.detach()
    assert not model._forward_hooks


@pytest.mark.parametrize("way", ["loss=", "a step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_a_function_is_compared_on_the_first_batch(name, dtype, way):
    likelihood, loss, options, expected = CASES[name]
    likelihood, _, kind = likelihood.partition(" of ")
    x, y = dataset().tensors
    targets = {"regression": x[:, :3], "poisson": y[:, None].expand(-1, 3).to(dtype)}
    targets["bernoulli"] = (x[:, :3] > 0).to(dtype)
    y = targets.get(likelihood, y)
    y = y.to(dtype) if y.is_floating_point() else y
    x = x.to(dtype)
    model = network().to(dtype)
    if kind == "one":
        model, y = nn.Linear(4, 1, dtype=dtype), y[:, :1]
    if kind == "terms":
        x, y = x[:, None].expand(-1, 2, -1), torch.stack([y, (y + 1) % 3], 1)
    prior = PriorLearner(likelihood, **options)
    data = DataLoader(TensorDataset(x, y), 8)
    if way == "loss=":
        found = told(lambda: prior.start(model, sgd(model), data, 2, loss=loss))
    else:
        found = told(lambda: loss_of_a_step(prior, model, data, loss))
        expected = expected if likelihood.partition("(")[0] in SHOWN else None
    assert len(found) == (expected is not None)
    assert all(re.search(expected, message) for message in found), found


@pytest.mark.parametrize(
    ("options", "scaler", "accumulated", "expected"),
    [
        ({}, 1.0, 1, None),
        ({}, 1.0, 3, None),
        ({}, 2.0**16, 1, None),  # of a gradient scaler
        ({}, 0.1, 1, "is 0.1 times"),
        ({"reduction": "sum"}, 1.0, 3, "is 8 times.*sum"),
        ({"label_smoothing": 0.1}, 2.0**16, 3, "smoothing of 0.1"),
    ],
)
@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_step_shows_its_loss(options, scaler, accumulated, expected, num_classes):
    """Also of a network without a preference, whose smoothed loss has a gradient .9 times ours."""
    x, y = dataset().tensors
    data = DataLoader(TensorDataset(x, y % num_classes), 8)
    model = nn.Linear(4, num_classes)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)

    def loss(f, y):
        return F.cross_entropy(f, y, **options)

    prior = PriorLearner("classification")
    found = told(lambda: loss_of_a_step(prior, model, data, loss, scaler, accumulated))
    assert len(found) == (expected is not None)
    assert all(re.search(expected, message) for message in found), found


def test_two_outputs_of_one_loss_are_not_compared():
    """As of two views of each example, whose mean is taken; each alone is half of the loss."""
    model, prior = network(), PriorLearner("classification")
    optimizer, data = sgd(model), loader()
    prior.start(model, optimizer, data, 2)
    x, y = next(iter(data))

    def step():
        (F.cross_entropy(model(x), y) / 2 + F.cross_entropy(model(-x), y) / 2).backward()
        optimizer.step()

    assert not told(step)


class Classifier(L.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.net, self.dropout, self.options = network(), nn.Dropout(0.5), options

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(self.dropout(x)), y, **self.options)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), LR)


class Manual(Classifier):
    def __init__(self, accumulated, **options):
        super().__init__(**options)
        self.automatic_optimization, self.accumulated = False, accumulated

    def training_step(self, batch, index):
        self.manual_backward(super().training_step(batch, index) / self.accumulated)
        if (index + 1) % self.accumulated == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


def trainer(**options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    prior = MarginalLikelihood("classification", network="net", every=1, steps=1)
    return L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[prior], **options,
    )  # fmt: skip


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, None), ({"label_smoothing": 0.2}, "smoothing of 0.2"), ({"reduction": "sum"}, "8 times")],
)
@pytest.mark.parametrize("is_manual", [False, True])
def test_lightnings_callback_compares_the_first_batch(options, accumulated, expected, is_manual):
    """Of the steps themselves, with their dropout; one warning."""
    module = Manual(accumulated, **options) if is_manual else Classifier(**options)
    run = trainer(**({} if is_manual else {"accumulate_grad_batches": accumulated}))
    found = told(lambda: run.fit(module, loader()))
    assert len(found) == (expected is not None)
    assert all(expected in message for message in found)
    assert not module.net._forward_hooks


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("plain", None),
        ("smoothing", "smoothing of 0.1"),
        ("weights", "larger weights for some classes"),
    ],
)
def test_hugging_faces_callback_compares_the_trainers_loss(kind, expected, tmp_path):
    transformers = pytest.importorskip("transformers")
    from marglik.callbacks.transformers import MarginalLikelihood as Callback

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.config = transformers.PretrainedConfig()

        def forward(self, x, labels=None):
            logits = self.net(x)
            loss = None if labels is None else F.cross_entropy(logits, labels)
            return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)

    class Weighted(transformers.Trainer):
        """As Hugging Face's documentation shows it."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = weighted_mean(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    model = Model()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
        label_smoothing_factor=0.1 if kind == "smoothing" else 0.0,
    )  # fmt: skip
    trainer = (Weighted if kind == "weights" else transformers.Trainer)(
        model, arguments, train_dataset=[{"x": x, "labels": y} for x, y in dataset()],
        optimizers=(sgd(model), None),
    )  # fmt: skip
    Callback.attached(trainer, "classification", steps=1)
    found = told(trainer.train)
    assert len(found) == (expected is not None)
    assert all(expected in message for message in found)
    assert not model._forward_hooks
