"""Lightning's and Hugging Face's trainers, with random options, against one explicit loop.

The loop has the batches that the network gets, as they are after all that the trainer does to them,
in a list. What the trainers do to batches and steps must make no other difference.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from marglik import Posterior, PriorLearner
from tests.fuzz.cases import Described, Impossible
from tests.fuzz.relations import RELATIONS, Relation, Violated, same
from tests.fuzz.strategies import one_of, yes_or_no

__all__ = ["RELATIONS", "Training"]

FEATURES, CLASSES, SIZE, EPOCHS = 3, 3, 8, 4
OPTIONS = {"weight_decay": 1e-2, "every": 2, "steps": 5}
SECONDS = 120
"""After which a training has stopped making progress."""


class Stream(IterableDataset[Any]):
    """A data set without a length, with the examples of these data sets."""

    def __init__(self, datasets: list[TensorDataset], mappings: bool):
        self.datasets, self.mappings = datasets, mappings

    def __iter__(self) -> Iterator[Any]:
        for dataset in self.datasets:
            for x, y in dataset:
                yield {"x": x, "labels": y} if self.mappings else (x, y)


@dataclass(frozen=True, repr=False)
class Training(Described):
    """A training by a trainer.

    Args:
        batches: of 8 examples, that the loader has.
        norm: whether the network has a BatchNorm.
        transfer: whether the trainer changes inputs on their way to the network.
        stem: whether the network is behind another trained module (Lightning).
        precision: of Lightning.
        limit: most batches of an epoch (Lightning); None for all.
        overfits: whether the limit is ``overfit_batches``.
        accumulates: batches of a step.
        manual: steps of each batch, by manual optimisation (Lightning); 0 for automatic.
        reloads: whether each epoch has a loader of its own, with other examples (Lightning).
        combined: whether the loader is in a CombinedLoader of one (Lightning).
        streams: whether the data set is iterable, without a length.
        once: whether a stream has the batches of all epochs, one after the other.
        adam: whether the optimiser is AdamW instead of SGD.
        by_steps: whether steps are limited instead of epochs.
        seed: of the data.
    """

    batches: int = 2
    norm: bool = False
    transfer: bool = False
    stem: bool = False
    precision: str = "32-true"
    limit: int | None = None
    overfits: bool = False
    accumulates: int = 1
    manual: int = 0
    reloads: bool = False
    combined: bool = False
    streams: bool = False
    once: bool = False
    adam: bool = False
    by_steps: bool = False
    seed: int = 0

    @property
    def used(self) -> int:
        """Batches of an epoch."""
        return self.batches if self.limit is None else min(self.limit, self.batches)

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.used * max(self.manual, 1) // self.accumulates

    def dataset(self, epoch: int = 0) -> TensorDataset:
        g = torch.Generator().manual_seed(self.seed + 100 * epoch * (self.reloads or self.once))
        x = torch.randn(self.batches * SIZE, FEATURES, generator=g)
        y = (x + 0.3 * torch.randn(x.shape, generator=g)).argmax(1)
        return TensorDataset(x, y)

    def stream(self, mappings: bool) -> Stream:
        epochs = range(EPOCHS if self.once else 1)
        return Stream([self.dataset(epoch) for epoch in epochs], mappings)

    def network(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        norm = nn.BatchNorm1d(4) if self.norm else nn.Identity()
        first = nn.Linear(
            FEATURES, 4, bias=not self.norm
        )  # Adam would scale its gradient's rounding
        return nn.Sequential(first, norm, nn.Tanh(), nn.Linear(4, CLASSES))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.0)
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def transferred(self, x: Tensor) -> Tensor:
        return 3 * x + 1 if self.transfer else x


class Whole(nn.Module):
    """A network, with another trained module before it."""

    def __init__(self, case: Training):
        super().__init__()
        self.net = case.network()
        bias = not case.norm  # as of the network's first layer
        self.stem = nn.Linear(FEATURES, FEATURES, bias) if case.stem else nn.Identity()


class Batches:
    """What the network gets in an epoch: of the present stem."""

    def __init__(self, case: Training, model: Whole, dtype: torch.dtype):
        self.case, self.model, self.dtype, self.epoch = case, model, dtype, 0

    def __len__(self) -> int:
        return self.case.used

    def raw(self) -> list[tuple[Tensor, Tensor]]:
        batches = list(DataLoader(self.case.dataset(self.epoch), SIZE))[: self.case.used]
        return [(self.case.transferred(x.to(self.dtype)), y) for x, y in batches]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        with torch.no_grad():
            for x, y in self.raw():
                yield self.model.stem(x), y


def explicit(case: Training) -> tuple[nn.Module, PriorLearner]:
    """A network and its learner, after the explicit loop."""
    model = Whole(case)
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(case.precision)
    batches = Batches(case, model.to(dtype or torch.float32), dtype or torch.float32)
    optimizer, learner = case.optimizer(model), PriorLearner("classification", **OPTIONS)
    learner.start(model.net, optimizer, batches, EPOCHS, steps_per_epoch=case.steps)
    for batches.epoch in range(EPOCHS):
        model.train()
        for i, (x, y) in enumerate(batches.raw(), 1):
            for _ in range(max(case.manual, 1)):
                loss = F.cross_entropy(model.net(model.stem(x)), y) / case.accumulates
                loss.backward()
                if i % case.accumulates == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    learner.finish()
    return model.net, learner


def in_lightning(case: Training) -> tuple[Any, Any]:
    """The module with the network, and the callback, after Lightning's training."""
    import lightning.pytorch as L
    from lightning.pytorch.utilities import CombinedLoader

    from marglik.callbacks.lightning import MarginalLikelihood

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.stem = Whole(case).net, Whole(case).stem
            self.load_state_dict(Whole(case).state_dict())
            self.automatic_optimization = not case.manual

        def train_dataloader(self) -> Any:
            dataset: Any = case.dataset(self.trainer.current_epoch)
            loader = DataLoader(case.stream(False) if case.streams else dataset, SIZE)
            return CombinedLoader([loader]) if case.combined else loader

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch[0] if case.combined else batch
            batch = case.transferred(x), y
            return [batch] if case.combined else batch

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch[0] if case.combined else batch
            for _ in range(case.manual):
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self.net(self.stem(x)), y))
                optimizer.step()
            return None if case.manual else F.cross_entropy(self.net(self.stem(x)), y)

        def configure_optimizers(self) -> Any:
            return case.optimizer(self)

    options: Any = {"max_epochs": EPOCHS, "precision": case.precision}
    if case.by_steps:
        options |= {"max_epochs": -1, "max_steps": EPOCHS * case.steps}
    if case.limit is not None:
        options["overfit_batches" if case.overfits else "limit_train_batches"] = case.limit
    prior = MarginalLikelihood("classification", network="net", **OPTIONS)
    module = Module()
    L.Trainer(
        accelerator="cpu", devices=1, callbacks=[prior], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=case.accumulates,
        reload_dataloaders_every_n_epochs=int(case.reloads), **options,
    ).fit(module)  # fmt: skip
    return module, prior


def in_hugging_face(case: Training) -> tuple[Any, Any]:
    """The model with the network, and the callback, after Hugging Face's training."""
    import transformers
    from torch.optim.lr_scheduler import LambdaLR
    from transformers.modeling_outputs import SequenceClassifierOutput

    from marglik.callbacks.transformers import MarginalLikelihood

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.stem = case.network(), nn.Identity()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            logits = self.net(x)
            output: Any = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
            return SequenceClassifierOutput(**output, logits=logits)

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # pyright: ignore

        def _prepare_inputs(self, inputs: Any) -> Any:
            inputs = super()._prepare_inputs(inputs)
            return {**inputs, "x": case.transferred(inputs["x"])}

    stream = case.stream(True)
    model = Model()
    optimizer = case.optimizer(model)
    by_steps = case.streams or case.by_steps
    steps: Any = {"max_steps": EPOCHS * case.steps} if by_steps else {}
    with TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, num_train_epochs=EPOCHS, use_cpu=True, report_to=[],
            disable_tqdm=True, logging_strategy="no", save_strategy="no", max_grad_norm=0.0,
            per_device_train_batch_size=SIZE, gradient_accumulation_steps=case.accumulates, **steps,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=stream if case.streams else list(stream),  # pyright: ignore
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        prior = MarginalLikelihood.attached(trainer, "classification", **OPTIONS)
        trainer.train()
    return model, prior


@contextmanager
def limited() -> Iterator[None]:
    """A context that raises Violated where a training hangs."""

    def stop(*_: Any) -> None:
        raise Violated(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(case: Training, train: Any) -> None:
    """Raise Violated unless a trainer's network and decays are those of the explicit loop.

    Streams may have updates at other steps: there their number must be that of the rounds, and the
    posterior that of what the network has seen, at its parameters and with its decays.
    """
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with limited():
            model, prior = train(case)
    except ModuleNotFoundError as error:  # an extra
        raise Impossible from error
    expected, learner = explicit(case)
    net, posterior = model.net, prior.posterior
    N = SIZE * case.used * (EPOCHS if case.once else 1)
    if posterior.n_data != N:
        raise Violated(f"{posterior.n_data} examples, not {N}")
    found, updates = len(prior.learner.evidences), len(learner.evidences)
    if case.streams:
        if prior.learner.problem.has_rounds:  # of N examples each, the last one followed by the end
            steps_of_round = -(-N // (SIZE * case.accumulates))
            rounds = EPOCHS * case.steps // steps_of_round
            updates = rounds // 2 + (rounds % 2 or steps_of_round > 1)
        if found != updates:
            raise Violated(f"{found} updates, not {updates}")
        dtype = next(net.parameters()).dtype
        examples = DataLoader(case.stream(False), SIZE)  # pyright: ignore
        with torch.no_grad():
            seen = [(model.stem(case.transferred(x.to(dtype))), y) for x, y in examples]
        again = Posterior(net, "classification", prior_precision=posterior.prior_precision.double())
        again.fit(seen)
        evidences = (float(p.log_marginal_likelihood()) for p in (posterior, again))
        same("the evidence at the end", *evidences, rtol=1e-4)
        return
    if found != updates:
        raise Violated(f"{found} updates, not {updates}")
    tolerance = 0.05 if case.precision == "bf16-true" else 1e-4
    same("weight decays", prior.learner.weight_decays(), learner.weight_decays(), rtol=tolerance)
    for name, tensor in expected.state_dict().items():
        same(f"'{name}'", net.state_dict()[name], tensor, 1.0, rtol=tolerance)
    evidence = prior.learner.evidences[-1], learner.evidences[-1]
    same("the evidence", *evidence, rtol=tolerance)


def trains_in_lightning_as_in_a_loop(case: Training) -> None:
    """A training by Lightning's Trainer is that of the explicit loop."""
    check(case, in_lightning)


def trains_in_hugging_face_as_in_a_loop(case: Training) -> None:
    """A training by Hugging Face's Trainer is that of the explicit loop."""
    check(case, in_hugging_face)


@st.composite
def trainings(draw: Any, lightning: bool) -> Training:
    """A training with options that go together."""
    rarely = one_of(False, False, False, True)
    case = Training(
        batches=draw(one_of(2, 4, 6)), norm=draw(yes_or_no), transfer=draw(rarely),
        accumulates=draw(one_of(1, 1, 2)), adam=draw(yes_or_no), by_steps=draw(rarely),
        streams=draw(rarely), seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    if case.streams and draw(yes_or_no):
        case = replace(case, once=True, by_steps=True)
    if not lightning:
        return case
    case = replace(
        case, stem=draw(rarely), precision=draw(one_of(*["32-true"] * 3, "64-true", "bf16-true")),
        manual=draw(one_of(0, 0, 0, 1, 2)), combined=draw(rarely),
    )  # fmt: skip
    if case.manual:
        case = replace(case, accumulates=1)  # as Lightning asks for
    if not case.streams and draw(rarely):
        case = replace(case, limit=draw(one_of(2, 4)), overfits=draw(yes_or_no))
    elif not case.streams:
        case = replace(case, reloads=draw(rarely))
    return case


for relation, lightning, examples in (
    (trains_in_lightning_as_in_a_loop, True, 6),
    (trains_in_hugging_face_as_in_a_loop, False, 6),
):
    RELATIONS[relation.__name__] = Relation(relation, trainings(lightning), examples)
