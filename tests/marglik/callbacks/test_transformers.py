"""The callback in Hugging Face's own Trainer: an own loop's decays, logs, checkpoints."""

import itertools
import math
from dataclasses import fields
from io import BytesIO
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.testing import assert_close
from torch.utils.data import DataLoader

from kfac_backend import CurvatureOptions
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import gathered_state, is_sharded
from marglik import PriorLearner
from marglik.random_state import own_random_numbers
from tests.marglik.callbacks.online import (
    EPOCHS,
    OPTIONS,
    assert_fitted_where_the_network_is,
    dataset,
    in_an_own_loop,
    network,
    sgd,
)
from tests.marglik.plain_loop import learn

transformers = pytest.importorskip("transformers")

from accelerate import Accelerator, PartialState  # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402

from marglik.callbacks.transformers import MarginalLikelihood  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Classifier(nn.Module):
    """As Hugging Face's models: a loss if there are labels, and logits."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, labels=None):
        logits = self.net(x)
        output = {"logits": logits}
        if labels is not None:
            output = {"loss": F.cross_entropy(logits, labels), **output}
        return transformers.modeling_outputs.SequenceClassifierOutput(**output)


class InOrder(transformers.Trainer):
    """Without a shuffle, as in the loader of `OnlineTraining`."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Changing(InOrder):
    """Changes inputs where it moves them, and where it computes the loss: to 20 x + 5."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        return {**inputs, "x": 20 * inputs["x"]}

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, {**inputs, "x": inputs["x"] + 5}, *args, **kwargs)


class Sharding(InOrder):
    """Under accelerate's FSDP2, which runs on a CPU, too, but is not offered there."""

    def create_accelerator_and_postprocess(self):
        state = Accelerator(cpu=True).state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20
        )
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        super().create_accelerator_and_postprocess()

    def create_optimizer(self, model=None):
        self.optimizer = sgd(self.model)

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 1.0)


def trainer(tmp_path, model, epochs=EPOCHS, evaluated=None, kind=InOrder, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=epochs,
        use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        **{
            "save_strategy": "no", "max_grad_norm": 0.0, "per_device_train_batch_size": 8, **options
        },
    )  # fmt: skip
    examples = [{"x": x, "labels": y} for x, y in dataset()]
    optimizer = sgd(model)
    constant = LambdaLR(optimizer, lambda step: 1.0)
    return kind(
        model, arguments, train_dataset=examples, eval_dataset=evaluated,
        optimizers=(None, None) if kind is Sharding else (optimizer, constant),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "clip"), [(InOrder, math.inf), (InOrder, 0.05), (Changing, math.inf)]
)
def test_decays_are_those_of_an_own_loop_to_the_bit(kind, clip, tmp_path):
    """The trainer clips the gradient of the data, as that loop does.

    Where it changes inputs, the decays agree but for rounding, and the network to the bit.
    """
    model = Classifier()
    run = trainer(tmp_path, model, kind=kind, max_grad_norm=0.0 if clip == math.inf else clip)
    prior = MarginalLikelihood.attached(run, "classification", **OPTIONS)
    run.train()
    changed = [(20 * x + 5, y) for x, y in DataLoader(dataset(), 8)]
    other, expected = in_an_own_loop(clip, changed if kind is Changing else None)
    rtol = 1e-5 if kind is Changing else 0
    assert_close(prior.learner.weight_decays(), expected.weight_decays(), rtol=rtol, atol=0)
    for p, q in zip(model.net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert_close(prior.learner.evidences, expected.evidences, rtol=rtol, atol=0)
    assert prior.posterior.n_data == len(dataset())
    logged = [
        entry for entry in run.state.log_history if "prior/weight_decay/net.0.weight" in entry
    ]
    assert len(logged) == 3
    assert logged[-1]["prior/log_marginal_likelihood_per_example"] == pytest.approx(
        prior.learner.evidences[-1] / len(dataset())
    )


def test_samples_and_their_random_signs_are_those_of_an_own_loop(monkeypatch, tmp_path):
    monkeypatch.setattr("marglik.training.samples.FEWEST", 8)
    run, often = trainer(tmp_path, model := Classifier()), OPTIONS | {"every": 1}
    prior = MarginalLikelihood.attached(run, "classification", **often)
    run.train()
    other, expected = in_an_own_loop(math.inf, options=often)
    assert expected.state.measures.has_estimates
    assert prior.learner.evidences == expected.evidences
    assert all(map(torch.equal, model.net.parameters(), other.parameters()))


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}]
)
def test_resumes_with_a_shuffle_and_batch_norm(options, tmp_path):
    """In the middle of any epoch, and after the last step: its statistics depend on the batches."""
    ends, of_epoch = [], 2 if options else 4
    # After the second epoch's last step, before the update that follows it.
    steps = (of_epoch - 1, 2 * of_epoch, 3 * of_epoch - 1, 3 * of_epoch)
    for checkpoint in (None, *(str(tmp_path / f"checkpoint-{step}") for step in steps)):
        model = Classifier()
        model.net.insert(1, nn.BatchNorm1d(6))
        evaluated = [{"x": x, "labels": y} for x, y in dataset()]
        run = trainer(
            tmp_path, model, 3, evaluated, kind=transformers.Trainer, save_strategy="steps",
            save_steps=1, **options,
        )  # fmt: skip
        prior = MarginalLikelihood.attached(run, "classification", **OPTIONS)
        run.train(resume_from_checkpoint=checkpoint)
        ends.append((model.state_dict(), prior.learner.evidences, prior.learner.weight_decays()))
    for end in ends[1:]:
        assert_close(end, ends[0], rtol=0, atol=0)


class Stream(torch.utils.data.IterableDataset):
    """Once, or without an end."""

    def __init__(self, is_endless=False):
        self.is_endless = is_endless

    def __iter__(self):
        examples = [{"x": x, "labels": y} for x, y in dataset()]
        return itertools.cycle(examples) if self.is_endless else iter(examples)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.0)


@pytest.mark.parametrize(("optimizer", "accumulated"), [(sgd, 1), (adamw, 1), (sgd, 2)])
def test_updates_of_a_stream_are_those_of_an_own_loop(optimizer, accumulated, tmp_path):
    model, own = Classifier(), network()
    options = {"max_steps": 4 * EPOCHS // accumulated, "gradient_accumulation_steps": accumulated}
    run = trainer(tmp_path, model, **options)
    run.train_dataset = Stream()
    run.optimizer = optimizer(model)
    run.lr_scheduler = LambdaLR(run.optimizer, lambda step: 1.0)
    prior = MarginalLikelihood.attached(run, "classification", steps=5)
    run.train()
    stream = DataLoader(Stream(), 8)
    other = PriorLearner("classification", steps=5, dict_key_x="x")
    its_optimizer = optimizer(own)
    steps = None if accumulated == 1 else 4 // accumulated
    other.start(own, its_optimizer, stream, steps_per_epoch=steps)
    for _ in range(EPOCHS):
        for index, batch in enumerate(stream, 1):
            (F.cross_entropy(own(batch["x"]), batch["labels"]) / accumulated).backward()
            if index % accumulated == 0:
                its_optimizer.step()
                its_optimizer.zero_grad()
    other.finish()
    assert len(prior.learner.evidences) == len(other.evidences) == EPOCHS + 1
    assert prior.posterior.n_data == len(dataset())
    assert_close(prior.learner.evidences, other.evidences, rtol=1e-5, atol=0)
    for p, q in zip(model.net.parameters(), own.parameters(), strict=True):
        assert_close(p, q)
    logged = [
        entry for entry in run.state.log_history if "prior/weight_decay/net.0.weight" in entry
    ]
    assert len(logged) == EPOCHS + 1


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_stream_without_an_end_is_read_as_far_as_the_training_reads_it(accumulated, tmp_path):
    run = trainer(tmp_path, Classifier(), max_steps=6, gradient_accumulation_steps=accumulated)
    run.train_dataset = Stream(is_endless=True)
    prior = MarginalLikelihood.attached(run, "classification", **OPTIONS)
    run.train()
    assert prior.posterior.n_data == 6 * accumulated * 8


def test_updates_of_a_stream_follow_rounds_of_steps(monkeypatch, tmp_path):
    """Rounds of ten examples, which are two steps; the stream itself ends after four."""
    monkeypatch.setattr("marglik.training.problem.FEWEST", 1)
    run = trainer(tmp_path, Classifier(), max_steps=8)
    run.train_dataset = Stream()
    prior = MarginalLikelihood.attached(run, "classification", **OPTIONS)
    run.train()
    assert prior.learner.state.epoch == 4
    assert len(prior.learner.evidences) == 3  # after rounds 2 and 4, and of the average


class Regressor(nn.Module):
    """As Hugging Face's models with num_labels=1: labels (N,), and the squared error's mean."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x, labels=None):
        logits = self.net(x)
        loss = None if labels is None else F.mse_loss(logits.squeeze(), labels.squeeze())
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


@pytest.mark.parametrize("loss_scale", [2.0, 1.0])
def test_regression_on_labels_without_an_axis(loss_scale, tmp_path, recwarn):
    """The trainer's loss is twice −log p at σ = 1, which is said if it is not named."""
    model, options = Regressor(), {**OPTIONS, "loss_scale": loss_scale}
    run = trainer(tmp_path, model)
    run.train_dataset = [{"x": x, "labels": x.sum()} for x, _ in dataset()]
    prior = MarginalLikelihood.attached(run, "regression", **options)
    run.train()
    own, other = Regressor().net, PriorLearner("regression", **options)
    data = [(b, b.sum(1, keepdim=True)) for b in dataset().tensors[0].split(8)]
    learn(own, sgd(own), other, data, EPOCHS, loss=F.mse_loss)
    assert_close(prior.learner.evidences, other.evidences, rtol=1e-5, atol=0)
    for p, q in zip(model.net.parameters(), own.parameters(), strict=True):
        assert_close(p, q)
    messages = [str(w.message) for w in recwarn if "loop's loss" in str(w.message)]
    assert len(messages) == (loss_scale == 1)
    assert all("is 2 times" in m and "loss_scale=2 to" in m for m in messages)


def test_the_prior_of_another_runs_checkpoint_is_refused(tmp_path):
    for name, seed in (("mine", 0), ("other", 1)):
        model = Classifier()
        model.net = network(seed)
        run = trainer(tmp_path / name, model, save_strategy="steps", save_steps=4)
        MarginalLikelihood.attached(run, "classification", **OPTIONS)
        run.train()
    model = Classifier()
    run = trainer(tmp_path / "other", model, save_strategy="steps", save_steps=4)
    MarginalLikelihood.attached(run, "classification", **OPTIONS)
    with pytest.raises(ValueError, match="it was saved with other parameters.*output_dir"):
        run.train(resume_from_checkpoint=str(tmp_path / "mine" / "checkpoint-8"))


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({"max_steps": 8}, 1),  # of 4 an epoch, at the end of epoch 2: not twice
        ({"max_steps": 2}, 1),  # within the first
        ({"epochs": 2.5}, 2),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch",
             "evaluated": [{"x": x, "labels": (y + 1) % 3} for x, y in dataset()]},
            3,  # after epochs 2 and 4, and at the parameters of an earlier one
        ),
    ],
)  # fmt: skip
def test_ends_with_an_update_wherever_it_ends(options, updates, tmp_path):
    model = Classifier()
    run = trainer(tmp_path, model, **options)
    prior = MarginalLikelihood.attached(run, "classification", **OPTIONS)
    run.train()
    assert_fitted_where_the_network_is(prior, model, updates)
    assert len(set(prior.learner.weight_decays().tolist())) == 4  # learned


@pytest.mark.parametrize("keeps_best", [True, False])
def test_what_is_evaluated_is_the_average(keeps_best, tmp_path):
    """The best one is then what the training ends with; here the labels make that the fourth.

    Also with several data sets, whose losses are evaluated together and one by one.
    """
    model = Classifier()
    labels = [{"x": x, "labels": y} for x, y in dataset()]
    run = trainer(
        tmp_path, model, 6, labels if keeps_best else {"one": labels, "two": labels},
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=keeps_best,
    )  # fmt: skip
    prior = MarginalLikelihood.attached(run, "classification", **OPTIONS)
    evaluated, own = [], prior._evaluate

    def evaluate(*args, **kwargs):
        evaluated.append([p.detach().clone() for p in model.parameters()])
        return own(*args, **kwargs)

    prior._evaluate = evaluate
    run.train()
    losses = [row["eval_loss"] for row in run.state.log_history if "eval_loss" in row]
    best = evaluated[losses.index(min(losses)) if keeps_best else -1]
    for p, q in zip(model.parameters(), best, strict=True):
        assert torch.equal(p, q)
    prior.posterior.check_weights()
    # Negative control: the last checkpoint has the parameters of the steps.
    last = load_file(tmp_path / "checkpoint-24" / "model.safetensors")["net.0.weight"]
    assert not torch.equal(last, evaluated[-1][0])


def test_an_exception_leaves_the_trainers_own_evaluation_and_no_hook(tmp_path):
    class Stops(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise KeyError

    run = trainer(tmp_path, Classifier())
    MarginalLikelihood.attached(run, "classification", **OPTIONS)
    run.add_callback(Stops)
    own = run.evaluate
    with pytest.raises(KeyError):
        run.train()
    assert run.evaluate == own
    assert not run.optimizer.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("likelihood", ["classification", "noisy_classification(noise=0.2)"])
def test_a_small_language_model(likelihood, tmp_path, recwarn):
    """GPT-2 with Hugging Face's own loss: shifted labels, a mean over the terms that count.

    With label noise the trainer computes the likelihood's loss of the same terms.
    """
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=False,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(11, (12, 6), generator=torch.Generator().manual_seed(0))
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4,
        use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", learning_rate=1e-2,
    )  # fmt: skip
    run = transformers.Trainer(model, arguments, train_dataset=examples)
    prior = MarginalLikelihood.attached(
        run, likelihood, CurvatureOptions(fisher="mc", ignore_index=-100),
        loss_mean_over="terms", every=1, steps=3,
    )  # fmt: skip
    run.train()
    assert prior.posterior.factors.num_loss_terms == 12 * 5
    assert len(prior.learner.evidences) == 2
    batch = {"input_ids": tokens, "labels": tokens}
    found = run.compute_loss(model, dict(batch)).item()
    log_p = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    noise = 0.2 * (likelihood != "classification")
    assert found == pytest.approx(-((1 - noise) * log_p.exp() + noise / 11).log().mean().item())
    # The trainer divides by the six labels of each sequence, and the model has five terms.
    (message,) = [str(w.message) for w in recwarn if "loop's loss" in str(w.message)]
    assert "is 0.8333 times" in message and "before their shift, 24" in message


def training(folder, kind, examples=24, resumes=None, save_strategy="no", **options):
    """Called in each rank: what a training learns, or the rest of one."""
    labelled = [{"x": x.double(), "labels": y} for x, y in dataset()][:examples]
    size = Ranks().size
    if size > 1:
        options["ddp_backend"] = "gloo"
    # Labels that are wrong to evaluate, so that the first average is the best.
    wrong = [e | {"labels": (e["labels"] + 1) % 3} for e in labelled]
    run = trainer(
        folder, Classifier().double(), kind=KINDS[kind], evaluated=wrong,
        per_device_train_batch_size=8 // size, save_strategy=save_strategy, **options,
    )  # fmt: skip
    run.train_dataset = labelled
    prior = MarginalLikelihood.attached(run, "classification", **OPTIONS)
    run.train(resume_from_checkpoint=None if resumes is None else str(folder / resumes))
    assert is_sharded(run.model) == (kind == "FSDP2")
    numbers = gathered_state({n: p.detach() for n, p in run.model.named_parameters()})
    numbers["decays"] = prior.learner.weight_decays()
    numbers["evidences"] = torch.tensor(prior.learner.evidences).double()
    return numbers


KINDS = {"DDP": InOrder, "FSDP2": Sharding}
KEEPS_BEST = {
    "load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch",
}  # fmt: skip


def ranks_resume():
    """Whether torch can load a tensor to "cpu:0", as ranks without a GPU do; 2.9 cannot."""
    saved = BytesIO()
    torch.save(torch.ones(1), saved)
    saved.seek(0)
    try:
        torch.load(saved, map_location="cpu:0", weights_only=True)
    except RuntimeError:
        return False
    return True


NO_RESUME = "this torch loads no tensor to 'cpu:0'"


def on_ranks(folder):
    """Called in each rank: a training, one that keeps the best average, refusals."""
    size = Ranks().size
    group = {"ddp_backend": "gloo"} if size > 1 else {}
    results = {
        "last": training(folder, "DDP"),
        "best": training(folder / f"best, {size}", ("DDP", "FSDP2")[size - 1], **KEEPS_BEST),
    }
    if size > 1:
        with pytest.raises(ValueError, match="30 examples .* multiple of the 8 examples"):
            training(folder, "DDP", examples=30)
        with pytest.raises(NotImplementedError, match="LengthGroupedSampler, draws from torch's"):
            lengths: Any = {"train_sampling_strategy": "group_by_length"}
            if lengths.keys().isdisjoint(f.name for f in fields(transformers.TrainingArguments)):
                lengths = {"group_by_length": True}  # its name in transformers 5.0
            run = trainer(
                folder, Classifier().double(), kind=transformers.Trainer, **group, **lengths
            )
            run.train_dataset = [{"x": x, "labels": y, "input_ids": [0]} for x, y in dataset()]
            MarginalLikelihood.attached(run, "classification", **OPTIONS)
            run.train()
        # Shuffled shards do not overlap where processes draw other numbers.
        run = trainer(folder, Classifier().double(), kind=transformers.Trainer, **group)
        loader = run.get_train_dataloader()
        with own_random_numbers(Ranks()):
            seen = torch.cat([batch["x"] for batch in loader])
        seen = torch.cat(Ranks().gather(seen))
        assert len(seen) == 32 and len(seen.unique(dim=0)) == len(dataset())  # two come again
    return results


HERE = "tests.marglik.callbacks.test_transformers"


def assert_same(numbers, expected):
    assert numbers.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(numbers[name], tensor, rtol=1e-10, atol=1e-12)


def test_ranks_learn_what_one_process_learns(worlds, tmp_path):
    """With whole models, and with a sharded one of which the best average is kept."""
    (alone,) = worlds.all(1, f"{HERE}:on_ranks", tmp_path)
    assert not torch.equal(alone["best"]["decays"], alone["last"]["decays"])
    for of_rank in worlds.all(2, f"{HERE}:on_ranks", tmp_path):
        for kind in ("last", "best"):
            assert_same(of_rank[kind], alone[kind])


@pytest.mark.skipif(not ranks_resume(), reason=NO_RESUME)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("DDP", (1,)),
        pytest.param("DDP", (2,), marks=pytest.mark.slow),
        pytest.param("FSDP2", (2, 4), marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_resumes(kind, sizes, worlds, tmp_path):
    """From a checkpoint of two; the fourth epoch is averaged, at whose last step it was saved."""
    whole, other = worlds.all(2, f"{HERE}:training", tmp_path, kind, 24, None, "epoch")
    (alone,) = worlds.all(1, f"{HERE}:training", tmp_path / "alone", "DDP")
    for size in sizes:
        resumed = worlds.all(size, f"{HERE}:training", tmp_path, kind, 24, "checkpoint-12")
        for numbers in (whole, other, *resumed):
            assert_same(numbers, alone)
