"""A callback for Hugging Face's Trainer.

```python
trainer = Trainer(model, arguments, train_dataset=data)
prior = MarginalLikelihood.attached(trainer, "classification")
trainer.train()
prior.posterior  # fitted, with the learned weight decays
```
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from kfac_backend.atomic_files import sha256_of_tensors
from kfac_backend.engine.batches import length
from kfac_backend.engine.model_calls import forked_random_numbers, logits_of
from kfac_backend.engine.task import Task
from kfac_backend.extras import extra
from kfac_backend.likelihoods import Likelihood, loss_sum, num_counted_terms
from kfac_backend.options import CurvatureOptions
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import (
    check_sharding,
    gathered_state,
    is_part,
    local_part,
    part_of_whole,
    reshard,
)
from marglik.callbacks.batches import StepInputs
from marglik.eval_mode import eval_mode
from marglik.loaders import EpochBatches
from marglik.posterior.fitted_weights import running_statistics
from marglik.posterior.posterior import Posterior
from marglik.storage.checkpoint import Checkpoints
from marglik.training.algorithm import end_of_epoch
from marglik.training.learner import PriorLearner

with extra("transformers"):
    from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
    from transformers import Trainer, TrainerCallback

__all__ = ["MarginalLikelihood"]

FOLDER = "marglik_prior"
"""Folder of the prior's state, in each checkpoint of the trainer."""
MOST_LOGGED = 10
"""Maximum number of weight decays that are logged separately. The trainer prints the log."""
ROUNDING = 1e-6
"""Tolerance of the trainer's epoch, a float that may exceed a whole number by rounding."""


class MarginalLikelihood(TrainerCallback):
    """Callback that learns a weight decay per parameter tensor while Hugging Face's Trainer trains.

    Every few epochs, and at the end, it updates the prior by the evidence on the training data. It
    logs the evidence and the new weight decays through ``trainer.log``. With more than ten weight
    decays it logs the smallest, the median and the largest; ``learner.state.record`` has all. Each
    checkpoint of the trainer gets a folder with the callback's state. The model in a checkpoint has
    the parameters of the steps.

    After the training, the parameters of the model are the average of its parameters over the
    steps. Evaluation uses the average so far. Early stopping therefore refers to the average, and
    with ``load_best_model_at_end`` the training ends with the average of the best evaluation.

    Processes started by torchrun train together, under DistributedDataParallel or FSDP2. A
    different number of processes may resume a checkpoint. Pass ``dataloader_drop_last=True``, so
    that each step is complete.

    ``TrainingArguments(weight_decay=0)``, the default, is required. ``max_grad_norm`` clips the
    gradient of the data. The callback adds the gradient of the prior afterwards. It warns if the
    trainer's loss of the first batch differs from the loss of the likelihood, for example with
    ``label_smoothing_factor``.

    Args:
        trainer: the trainer, which also logs.
        likelihood: likelihood of the model's loss: "classification" (also for language models),
            "regression" or "bernoulli".
        curvature: all options of the curvature pass. For language models use fisher="mc" and
            ignore_index=-100, see `TargetOptions` and docs/callbacks.md.
        held_out: held-out batches, which correct the weight decays of classifiers (`DecayPolicy`).
            "noisy_classification" learns the share of wrong labels from them; None estimates it
            from the training labels. The trainer must compute the likelihood's loss; `attached`
            sets it to `loss`.
        options: further arguments of `PriorLearner`; for language models use
            loss_mean_over="terms".

    Raises:
        ValueError: an option is not supported; or, when training starts, the optimiser has a weight
            decay.
    """

    def __init__(
        self,
        trainer: Trainer,
        likelihood: Likelihood | str,
        curvature: CurvatureOptions = CurvatureOptions(),  # noqa: B008
        *,
        held_out: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        self.learner = PriorLearner(likelihood, curvature, **options)
        """The learner with hyperparameters and evidences."""
        self._trainer, self._held_out = trainer, held_out
        self._task = Task(self.learner.likelihood, curvature)
        self._inputs: StepInputs | None = None  # set during the training
        self._train, self._evaluate = trainer.train, trainer.evaluate
        self._compute_loss = trainer.compute_loss
        trainer.train = self._train_and_clean_up

    @classmethod
    def attached(
        cls,
        trainer: Trainer,
        likelihood: Likelihood | str,
        curvature: CurvatureOptions = CurvatureOptions(),  # noqa: B008
        **options: Any,
    ) -> Self:
        """Create the callback, add it to the trainer and return it."""
        callback = cls(trainer, likelihood, curvature, **options)
        trainer.add_callback(callback)
        if callback.learner.likelihood.has_label_noise and trainer.compute_loss_func is None:
            trainer.compute_loss_func = callback.loss
        return callback

    def loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """Return the mean loss (nats) of the likelihood, for ``Trainer(compute_loss_func=...)``.

        `attached` passes it for "noisy_classification", because the model computes another loss.
        """
        f, likelihood = logits_of(outputs), self.learner.likelihood
        labels = self._task.targets(None, {}, labels)  # shifts labels of language models
        count = num_counted_terms(f, labels, likelihood)
        return loss_sum(f, labels, likelihood) / (num_items_in_batch or count)

    def _train_and_clean_up(self, *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's own training, then restore its methods and remove hooks."""
        try:
            return self._train(*args, **kwargs)
        finally:
            self._trainer.evaluate = self._evaluate
            self._trainer.compute_loss = self._compute_loss
            self.learner.detach()
            if self._inputs is not None:
                self._inputs.close()

    def _evaluate_average(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.learner.averaged():
            return self._evaluate(*args, **kwargs)

    @property
    def posterior(self) -> Posterior | None:
        """Posterior of the latest update, after training the final one; None before any update."""
        return self.learner.posterior

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the data and create the hyperparameters, or restore them in a resumed run.

        Raises:
            NotImplementedError: several processes train, and the dataloader does not shard a
                dataset with a length; or the model uses FSDP1 or tensor parallelism.
            ValueError: the state in ``output_dir`` was saved with other parameters of the model, or
                dataloaders repeat examples to give each process the same number.
        """
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        check_sharding(model)
        if (size := Ranks().size) > 1:
            _check_shard(loader, size)
        # The trainer starts again if a batch did not fit in memory.
        had_no_step = not (hasattr(self.learner, "state") and self.learner.state.steps[-1])
        self.learner.detach()
        if state.global_step:
            checkpoints = self._checkpoints(args, state)
            saved = checkpoints.load()
            if saved["parameters"] != _fingerprint(model):
                raise ValueError(
                    f"{checkpoints.folder} does not belong to the resumed checkpoint: it was saved "
                    "with other parameters. The state of the prior is read from output_dir. Set "
                    "output_dir to the folder of the resumed run, or copy its checkpoint there."
                )
            self.learner.load_state_dict(saved["prior"])
        elif not had_no_step and self.learner.problem.model is model:
            warnings.warn(
                "This call of train() trains the same model again. The weight decays start from "
                "their initial values. To continue them, train for more epochs with "
                "resume_from_checkpoint.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._inputs = StepInputs(
            model, model, self._task, self._prepared, lambda batch, _: self._run_step(model, batch)
        )
        batches, limit, of_step = length(loader), None, args.gradient_accumulation_steps
        if batches is None:  # a stream, which may have no end
            limit = state.max_steps * of_step
        data = EpochBatches(lambda: loader, self._inputs.read, limit, of_step)
        with forked_random_numbers(model), eval_mode(model):
            self._task.targets(model, *next(iter(data)))  # find out if the model shifts labels
        self.learner.start(
            model, kwargs["optimizer"], data,
            None if batches is None else math.ceil(state.num_train_epochs),
            held_out=self._held_out, hooks="gradients" if batches else "all",
        )  # fmt: skip
        self._trainer.evaluate = self._evaluate_average
        self._trainer.compute_loss = self._note_labels
        # A checkpoint of an epoch's last step was written before the update of this epoch.
        self._end_epoch(math.floor((state.epoch or 0) + ROUNDING))
        self._inputs.watch()

    def _prepared(self, batch: Any) -> tuple[Any, Any]:
        """Return a batch as the trainer's step gets it, and a copy that has the labels."""
        batch = self._trainer._prepare_inputs(batch)
        return batch, dict(batch)

    def _run_step(self, model: nn.Module, batch: Any) -> None:
        with self._trainer.compute_loss_context_manager():
            self._compute_loss(model, batch)

    def _note_labels(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's own loss; note the labels of the first step for its check."""
        if self.learner.loss_check is not None and self._inputs is not None:
            self.learner.loss_check.targets = self._inputs.split(inputs)[1]
        return self._compute_loss(model, inputs, *args, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the update after this step, if the data is a stream and an update was due."""
        self._log(self.learner.latest_numbers())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the prior if an update is due, and log it."""
        # The trainer also calls this within an epoch, when max_steps is reached. ``state.epoch`` is
        # then a fraction.
        self._end_epoch(math.ceil((state.epoch or 0) - ROUNDING))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the prior if the parameters have changed since the latest update, and log it.

        With ``load_best_model_at_end`` the update uses the parameters with the best evaluation.
        """
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is not None:  # the trainer has loaded the parameters of that step
            saved = Checkpoints(Path(best) / FOLDER, minutes=0, ranks=Ranks()).load()
            _load_average(kwargs["model"], saved["average"])
        self._log(self.learner.finish(average=best is None))

    def _end_epoch(self, epoch: int) -> None:
        if not self.learner.problem.has_rounds:
            self._log(end_of_epoch(self.learner.problem, self.learner.state, epoch))

    def _log(self, numbers: dict[str, float]) -> None:
        decays = {name: v for name, v in numbers.items() if name.startswith("weight_decay/")}
        if len(decays) > MOST_LOGGED:
            *_, largest = values = sorted(decays.values())
            summary = {"smallest": values[0], "median": median(values), "largest": largest}
            numbers = {name: v for name, v in numbers.items() if name not in decays}
            numbers |= {f"weight_decay/{name}": value for name, value in summary.items()}
        if numbers:
            self._trainer.log({f"prior/{name}": value for name, value in numbers.items()})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the whole state of the prior into the trainer's checkpoint."""
        state_of_prior = gathered_state(self.learner.state_dict())
        model: nn.Module = kwargs["model"]
        saved = {"prior": state_of_prior, "parameters": _fingerprint(model), "average": {}}
        if args.load_best_model_at_end:
            with self.learner.averaged():
                learned = {name for name, p in model.named_parameters() if p.requires_grad}
                learned |= running_statistics(model).keys()
                state_dict = gathered_state(model.state_dict()).items()
                saved["average"] = {n: t.detach().clone() for n, t in state_dict if n in learned}
        self._checkpoints(args, state).save(saved)

    def _checkpoints(self, args: Any, state: Any) -> Checkpoints:
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / FOLDER
        return Checkpoints(folder, minutes=0, ranks=Ranks())


def _check_shard(loader: Any, size: int) -> None:
    """Raise an error unless the dataloader is a shard without examples of other shards."""
    shard: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(shard, BatchSamplerShard) or shard.num_processes != size:
        raise NotImplementedError(
            f"The training dataloader, {type(loader).__name__}, does not split a dataset with a "
            f"length into {size} shards, one for each process. Use such a dataset, without "
            "dispatch_batches, batch_rebalance or parallelism within the model. Or train in one "
            "process."
        )
    sampler: Any = shard.batch_sampler.sampler
    in_common = isinstance(sampler, SequentialSampler | SeedableRandomSampler)
    if not in_common and getattr(sampler, "generator", None) is None:
        raise NotImplementedError(
            f"The sampler, {type(sampler).__name__}, draws from torch's global generator. During "
            "an update each process draws different numbers, so the shards would overlap. Do not "
            "group examples by length, or use a sampler with its own generator."
        )
    N = len(sampler)
    together = shard.batch_sampler.batch_size * (1 if shard.split_batches else size)
    if N % together and not shard.drop_last:
        raise ValueError(
            f"{N} examples are not a multiple of the {together} examples in a step of {size} "
            "processes. The dataloaders would repeat some examples, and these would count twice. "
            "Pass TrainingArguments(dataloader_drop_last=True) to omit the last incomplete step."
        )


def _load_average(model: nn.Module, average: Mapping[str, Tensor]) -> None:
    """Copy an average into the parameters and buffers of a model, which may be sharded."""
    tensors = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in average.items():
            value = value.to(tensors[name].device)
            is_spread = is_part(tensors[name])
            local_part(tensors[name]).copy_(
                part_of_whole(value, tensors[name]) if is_spread else value
            )


def _fingerprint(model: nn.Module) -> str:
    reshard(model)  # an evaluation may have left parameters gathered
    parameters = [p.detach() for p in model.parameters() if p.requires_grad]
    return sha256_of_tensors(gathered_state(parameters))
