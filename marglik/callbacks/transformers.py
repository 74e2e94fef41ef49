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
"""Maximum number of weight decays that are logged separately, because the trainer prints its
log."""
ROUNDING = 1e-6
"""Tolerance of the trainer's epoch, a float that may exceed a whole number by rounding."""


class MarginalLikelihood(TrainerCallback):
    """Learns a weight decay per parameter tensor while Hugging Face's Trainer trains.

    After some epochs, and at the end, it updates the prior by the evidence on the training data. It
    logs the evidence and the new weight decays through ``trainer.log``. With more than ten groups
    it logs the smallest, the median and the largest (``learner.state.record`` has all). Each
    checkpoint of the trainer gets a folder with its state. Checkpoints contain the parameters of
    the steps.

    After the training, the model has the average of its parameters over the steps. Evaluation uses
    the average so far. Early stopping therefore refers to the average, and with
    ``load_best_model_at_end`` the training ends with the average that had the best evaluation.

    Processes started by torchrun train together, under DistributedDataParallel or FSDP2. Another
    number of processes may resume a checkpoint. Each step must be complete
    (``dataloader_drop_last``).

    ``TrainingArguments(weight_decay=0)``, the default, is required. Its ``max_grad_norm`` clips the
    gradient of the data; the gradient of the prior is added afterwards. A warning appears if the
    trainer's loss of the first batch differs from the likelihood's loss, as with
    ``label_smoothing_factor``.

    Args:
        trainer: the trainer, whose log is used.
        likelihood: likelihood of the model's loss: "classification" (also for language models),
            "regression" or "bernoulli".
        curvature: all options of the curvature pass. For language models use fisher="mc" and
            ignore_index=-100, see `TargetOptions` and docs/callbacks.md.
        held_out: held-out batches, from which "noisy_classification" learns the share of wrong
            labels; None estimates it from the training labels. The trainer must compute this
            likelihood's loss; `attached` sets it to `loss`. With ``policy=DecayPolicy.corrected()``
            the batches correct the weight decays of classifiers.
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
        self._inputs: StepInputs | None = None  # while it trains
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
        """Return the likelihood's loss (nats, a mean), for a trainer's ``compute_loss_func``.

        `attached` sets it if labels may be wrong, because the model computes another loss.
        """
        f, likelihood = logits_of(outputs), self.learner.likelihood
        labels = self._task.targets(None, {}, labels)  # of language models, shifted
        count = num_counted_terms(f, labels, likelihood)
        return loss_sum(f, labels, likelihood) / (num_items_in_batch or count)

    def _train_and_clean_up(self, *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's own training, then restore its evaluation and remove hooks."""
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
        """The posterior of the latest update, or after training the final one; None at first."""
        return self.learner.posterior

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the data and create the hyperparameters; a resumed run restores them.

        Raises:
            NotImplementedError: several processes whose dataloader does not shard a dataset with a
                length; FSDP1, or tensor parallelism.
            ValueError: the state in ``output_dir`` was not saved with the model's parameters, or
                dataloaders repeat examples to give each process the same number.
        """
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        check_sharding(model)
        if (size := Ranks().size) > 1:
            _check_shard(loader, size)
        # The trainer begins again if a batch did not fit in memory.
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
            self._task.targets(model, *next(iter(data)))  # whether the model shifts labels
        self.learner.start(
            model, kwargs["optimizer"], data,
            None if batches is None else math.ceil(state.num_train_epochs),
            held_out=self._held_out, hooks="gradients" if batches else "all",
        )  # fmt: skip
        self._trainer.evaluate = self._evaluate_average
        self._trainer.compute_loss = self._note_labels
        # A checkpoint that was written at an epoch's last step is of before the epoch's update.
        self._end_epoch(math.floor((state.epoch or 0) + ROUNDING))
        self._inputs.watch()

    def _prepared(self, batch: Any) -> tuple[Any, Any]:
        """Return a batch in the form of the trainer's step, and a copy for its labels."""
        batch = self._trainer._prepare_inputs(batch)
        return batch, dict(batch)

    def _run_step(self, model: nn.Module, batch: Any) -> None:
        with self._trainer.compute_loss_context_manager():
            self._compute_loss(model, batch)

    def _note_labels(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's own loss; compare the first step's with the likelihood's."""
        if self.learner.loss_check is not None and self._inputs is not None:
            self.learner.loss_check.targets = self._inputs.split(inputs)[1]
        return self._compute_loss(model, inputs, *args, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log an update that followed this step of a stream."""
        self._log(self.learner.latest_numbers())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the prior if an update is due, and log it."""
        # The trainer also calls this within an epoch, when the number of steps is reached: the
        # epoch is then a fraction.
        self._end_epoch(math.ceil((state.epoch or 0) - ROUNDING))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the prior if the parameters have changed since the latest update, and log it.

        With ``load_best_model_at_end`` these are the parameters with the best evaluation.
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
        """Write the prior's whole state into the trainer's checkpoint, also for a sharded model."""
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
    """Raise an error unless a prepared dataloader is a shard that has no example of another one."""
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
    """Give a model, which may be sharded, the parameters and buffers of these names."""
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
