"""A callback for Lightning's Trainer.

```python
prior = MarginalLikelihood("classification", network="net")
trainer = L.Trainer(max_epochs=20, callbacks=[prior])
trainer.fit(module, loader)
prior.posterior  # fitted, with the learned weight decays
```
"""

import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.task import Task
from kfac_backend.extras import extra
from kfac_backend.likelihoods import Likelihood
from kfac_backend.options import CurvatureOptions
from kfac_backend.sharding import gathered_state, is_sharded, local_parts
from marglik.callbacks.batches import StepInputs
from marglik.loaders import EpochBatches
from marglik.posterior.posterior import Posterior
from marglik.training.algorithm import end_of_epoch
from marglik.training.learner import PriorLearner

with extra("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.trainer.states import RunningStage

__all__ = ["MarginalLikelihood"]

STEPS = "marglik_parameters_of_the_steps"
"""Key of the parameters in a checkpoint from which training continues."""


class MarginalLikelihood(Callback):
    """Callback that learns a weight decay per parameter tensor while Lightning's Trainer trains.

    Every few epochs, and at the end, it updates the prior by the evidence on the training data. It
    logs the evidence and the new weight decays to the trainer's loggers. After the training, the
    parameters of the module are the average of its parameters over the steps.

    Validation uses the average so far. Checkpoints after a validation store this average, so early
    stopping and the best checkpoint refer to it. They also store the callback's state and the
    parameters of the steps, from which training resumes.

    The optimiser must have no weight decay. ``gradient_clip_val`` clips the gradient of the data.
    The callback adds the gradient of the prior afterwards. It warns if the loss of the first batch
    differs from the loss of the likelihood.

    Args:
        likelihood: likelihood of the module's loss: "classification", "regression" or "bernoulli".
        curvature: all options of the curvature pass.
        network: name of the module's attribute with the network, such as "net" for ``self.net``.
            None if the module itself returns logits. Batches must be (x, y), or mappings.
        held_out: held-out batches, which correct the weight decays of classifiers (`DecayPolicy`).
            "noisy_classification" learns the share of wrong labels from them; None estimates it
            from the training labels.
        options: further arguments of `PriorLearner`.

    Raises:
        ValueError: an option is not supported; or, when training starts, there are several
            optimisers or training dataloaders, or the optimiser has a weight decay.
    """

    def __init__(
        self,
        likelihood: Likelihood | str,
        curvature: CurvatureOptions = CurvatureOptions(),  # noqa: B008
        *,
        network: str | None = None,
        held_out: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        self.learner = PriorLearner(likelihood, curvature, **options)
        """The learner with hyperparameters and evidences."""
        self._network, self._held_out = network, held_out
        self._inputs: StepInputs | None = None  # set at the first batch of a training
        self._is_restored = False  # whether a checkpoint had this callback's state
        self._other: list[Tensor] = []  # parameters of the steps, in a validation

    @property
    def posterior(self) -> Posterior | None:
        """Posterior of the latest update, after training the final one; None before any update."""
        return self.learner.posterior

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the module, the optimiser and the dataloader."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"The module has {len(trainer.optimizers)} optimisers. MarginalLikelihood supports "
                "one optimiser, because its step needs the gradients of all parameters. Return one "
                "optimiser with several parameter groups from configure_optimizers."
            )
        network = self._network_of(pl_module)
        if not isinstance(network, nn.Module):
            raise ValueError(
                f"network={self._network!r} is not a module of {type(pl_module).__name__}. Its "
                f"modules are {', '.join((name for name, _ in pl_module.named_children()))}."
            )
        if is_sharded(network) and trainer.checkpoint_callbacks:
            raise NotImplementedError(
                "With ModelParallelStrategy, checkpoints do not contain the average of the "
                "parameters. Pass Trainer(enable_checkpointing=False). To save checkpoints, use "
                "PriorLearner in your own training loop (kfac_backend.sharding.gathered_state)."
            )
        _loader_and_keys(trainer)
        self._inputs, self._other = None, []  # discard the state of a run with an exception

    def _network_of(self, pl_module: LightningModule) -> Any:
        return pl_module if self._network is None else getattr(pl_module, self._network, None)

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the data and create the hyperparameters, after the module's own hooks."""
        if self._inputs is not None:
            return
        network, options = self._network_of(pl_module), self.learner.options
        batches, steps = trainer.num_training_batches, trainer.max_steps
        epochs = None if trainer.max_epochs in (None, -1) else trainer.max_epochs
        limit = None if batches == math.inf else int(batches)
        if limit is None and steps != -1:  # a stream may have no end: count steps, not epochs
            limit, epochs = steps * trainer.accumulate_grad_batches, None
        elif limit is None and epochs is None:
            raise ValueError(
                "The training dataloader has no length, and the numbers of epochs and steps are "
                "unknown. Pass Trainer(max_steps=...) or Trainer(limit_train_batches=...), the "
                "number of batches in an epoch."
            )
        elif steps != -1 and pl_module.automatic_optimization:
            of_steps = math.ceil(steps / math.ceil(batches / trainer.accumulate_grad_batches))
            epochs = of_steps if epochs is None else min(epochs, of_steps)
        self._inputs = StepInputs(
            network, pl_module, Task(options.likelihood, options.curvature),
            lambda batch: _prepared(trainer, pl_module, batch),
            lambda batch, number: _run_step(trainer, pl_module, batch, number),
        )  # fmt: skip
        data = EpochBatches(
            lambda: _loader_and_keys(trainer)[0], self._inputs.read, limit,
            trainer.accumulate_grad_batches,
        )  # fmt: skip
        self._continue(trainer, network)
        # Use hooks of the optimiser: Lightning clips gradients after its hook for callbacks.
        self.learner.start(
            network, trainer.optimizers[0], data, epochs, held_out=self._held_out,
            hooks="all" if batches == math.inf and epochs is None else "gradients",
        )  # fmt: skip
        # A checkpoint of an epoch's last step was written before the update of this epoch.
        self._end_epoch(trainer, trainer.current_epoch)

    def _continue(self, trainer: Trainer, network: nn.Module) -> None:
        """Continue from the learned state, or warn that weight decays start from initial values."""
        state, trained = self.learner.state_dict(), getattr(self.learner, "problem", None)
        if self._is_restored or not (trainer.global_step or trained):
            return
        if trained is not None and trained.model is network and trainer.current_epoch:
            self.learner.load_state_dict(state)
        elif trainer.global_step:
            warnings.warn(
                "The checkpoint contains no state of MarginalLikelihood. The weight decays start "
                f"from their initial values in epoch {trainer.current_epoch}. To continue them, "
                "resume from a checkpoint that was written with this callback.",
                RuntimeWarning,
                stacklevel=2,
            )
        elif trained is not None and trained.model is network:
            warnings.warn(
                "This call of fit() trains the same network again. The weight decays start from "
                "their initial values. To continue them, raise trainer.fit_loop.max_epochs of "
                "the first trainer, or pass ckpt_path.",
                RuntimeWarning,
                stacklevel=2,
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the network to the parameters of the steps. At the first batch, start the learner."""
        self._to_steps()
        is_first = self._inputs is None
        self._start(trainer, pl_module)
        assert self._inputs is not None
        if is_first:
            self._inputs.watch()
        if self.learner.loss_check is not None:  # until the first step
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            labelled = reduce(lambda part, key: part[key], _loader_and_keys(trainer)[1], batch)
            self.learner.loss_check.targets = self._inputs.split(labelled)[1]
            self.learner.loss_check.scale = 1.0 if scaler is None else scaler.get_scale()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check that the training step called the network, and log the latest update."""
        assert self._inputs is not None
        self._inputs.check_called("the module itself" if self._network is None else self._network)
        self._log(trainer, self.learner.latest_numbers())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the network to the average so far, until the next training batch."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._start(trainer, pl_module)
            self._to_steps()
            if self.learner.state.has_average:
                with self.learner.averaged():
                    self._other = [tensor.clone() for tensor in self._learned_tensors()]
                self._exchange()

    def _learned_tensors(self) -> list[Tensor]:
        problem = self.learner.problem
        buffers = [buffer for norm in problem.norms.values() for buffer in norm.buffers()]
        return [*local_parts(problem.named.values()), *buffers]

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the parameters of the steps for their average, or back."""
        for tensor, other in zip(self._learned_tensors(), self._other, strict=True):
            value = tensor.clone()
            tensor.copy_(other)
            other.copy_(value)

    def _to_steps(self) -> None:
        if self._other:
            self._exchange()
        self._other = []

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the parameters of the steps to a checkpoint that stores their average."""
        if self._other:
            self._exchange()
            state = pl_module.state_dict()
            checkpoint[STEPS] = {name: tensor.detach().clone() for name, tensor in state.items()}
            self._exchange()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the parameters of the steps if training continues, instead of the average."""
        if trainer.state.fn == "fit" and STEPS in checkpoint:
            pl_module.load_state_dict(checkpoint[STEPS])

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove all hooks, and restore the parameters of the steps."""
        self._to_steps()
        self._detach()

    def _detach(self) -> None:
        if self._inputs is not None:
            self._inputs.close()
        self.learner.detach()
        self._is_restored = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the prior if an update is due, and log it."""
        self._start(trainer, pl_module)  # resumed after the epoch's last batch
        is_averaged = bool(self._other)
        if is_averaged:
            self._exchange()
        try:
            self._end_epoch(trainer, trainer.current_epoch + 1)
        finally:
            if is_averaged:  # checkpoints of this epoch store the validated parameters
                self._exchange()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the prior, unless the last update used the final parameters, and log it."""
        self._to_steps()
        self._start(trainer, pl_module)
        self._log(trainer, self.learner.finish())
        self._detach()

    def _end_epoch(self, trainer: Trainer, epoch: int) -> None:
        problem, steps = self.learner.problem, trainer.max_steps
        if problem.has_rounds:
            return
        is_automatic = trainer.lightning_module.automatic_optimization
        if epoch and steps != -1 and not is_automatic:
            # The number of steps per batch is known now, and with it the last epoch.
            epochs, most = math.ceil(steps * epoch / trainer.global_step), trainer.max_epochs or -1
            epochs = epochs if most == -1 else min(epochs, most)
            schedule = replace(problem.options.schedule, epochs=epochs)
            problem.options = replace(problem.options, schedule=schedule)
        self._log(trainer, end_of_epoch(problem, self.learner.state, epoch))

    def _log(self, trainer: Trainer, numbers: dict[str, float]) -> None:
        if numbers:
            for logger in trainer.loggers:
                logger.log_metrics(
                    {f"prior/{name}": value for name, value in numbers.items()}, trainer.global_step
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the trainer's checkpoints; empty before training has started."""
        return gathered_state(self.learner.state_dict())  # collective for a sharded network

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from one of the trainer's checkpoints."""
        if state_dict:
            self.learner.load_state_dict(state_dict)
            self._is_restored = True


def _loader_and_keys(trainer: Trainer) -> tuple[Any, list[Any]]:
    """Return the current dataloader, and the keys of its batch in the batch of a training step."""
    loader, keys = trainer.train_dataloader, []
    while isinstance(loader, dict | list | tuple):
        if len(loader) != 1:
            raise ValueError(
                f"There are {len(loader)} training dataloaders. MarginalLikelihood needs one: join "
                "the data sets (torch.utils.data.ConcatDataset)."
            )
        keys.append(next(iter(loader)) if isinstance(loader, dict) else 0)
        loader = loader[keys[-1]]
    return loader, keys


def _prepared(trainer: Trainer, pl_module: LightningModule, batch: Any) -> tuple[Any, Any]:
    """Return a batch of a training step after the transfer hooks, and the dataloader's part."""
    keys = _loader_and_keys(trainer)[1]
    for key in reversed(keys):
        batch = [batch] if key == 0 else {key: batch}
    with _in_training(trainer):
        batch = trainer.precision_plugin.convert_input(batch)
        batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    return batch, reduce(lambda part, key: part[key], keys, batch)


def _run_step(trainer: Trainer, pl_module: LightningModule, batch: Any, number: int) -> None:
    precision = trainer.precision_plugin
    # Without autocast, because passes run in the dtype of the parameters.
    is_mixed = isinstance(precision, MixedPrecision)
    pl_module.__dict__["log"] = lambda *args, **kwargs: None  # curvature passes log nothing
    try:
        with _in_training(trainer), nullcontext() if is_mixed else precision.forward_context():
            arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, number)
            pl_module.training_step(*arguments.values())
    finally:
        del pl_module.__dict__["log"]


@contextmanager
def _in_training(trainer: Trainer) -> Iterator[None]:
    """Context manager in which ``trainer.training`` is true, as in a training step."""
    stage, trainer.state.stage = trainer.state.stage, RunningStage.TRAINING
    try:
        yield
    finally:
        trainer.state.stage = stage
