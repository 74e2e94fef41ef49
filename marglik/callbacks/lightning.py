"""A callback for Lightning's Trainer.

```python
prior = MarginalLikelihood("classification", network="net")
trainer = L.Trainer(max_epochs=20, callbacks=[prior])
trainer.fit(module, loader)
prior.posterior  # fitted, with the learned weight decays
```
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from kfac_backend.engine.batches import split_batch
from kfac_backend.engine.task import Task
from kfac_backend.extras import extra
from kfac_backend.likelihoods import Likelihood
from kfac_backend.options import CurvatureOptions
from kfac_backend.sharding import gathered_state, is_sharded
from marglik.posterior.posterior import Posterior
from marglik.training.algorithm import end_of_epoch
from marglik.training.learner import PriorLearner
from marglik.training.loss_agreement import OutputOf, warn_of_another_loss

with extra("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["MarginalLikelihood"]

STEPS = "marglik_parameters_of_the_steps"
"""Where a checkpoint has the module's state that training goes on from."""


class MarginalLikelihood(Callback):
    """Learns a weight decay per parameter tensor while Lightning's Trainer trains.

    After some epochs, and at the end, it updates the prior by the evidence on the training
    dataloader, and logs the evidence and the new weight decays to the trainer's loggers. When the
    training ends, the module holds the average of its parameters over the steps. The average so far
    is what is validated, and what checkpoints that are written after a validation hold, so that
    early stopping and the best checkpoint are of the average; training resumes from the parameters
    of the steps, which they hold, too, with the callback's state. The module's optimiser must have
    no weight decay.
    ``gradient_clip_val`` clips the gradient of the data; the prior's is added after it. A warning
    says if the loss of the first batch is not that of the likelihood.

    Args:
        likelihood: likelihood of the module's loss: "classification", "regression" or "bernoulli".
        curvature: all options of the curvature pass.
        network: the module's attribute that holds the network, "net" for ``self.net``; None if the
            module itself returns logits. The dataloader's batches must be (x, y), or mappings.
        held_out: batches that the network is not trained on, from which "noisy_classification"
            learns the share of wrong labels; None looks for it in the training labels.
        options: further arguments of `PriorLearner`.

    Raises:
        ValueError: an option that is not supported; when training starts, several optimisers, an
            optimiser with a weight decay, or several training dataloaders.
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
        """Holds the hyperparameters and the evidences."""
        self._network, self._held_out = network, held_out
        self._output: OutputOf | None = None  # in the first batch alone, as the batch itself
        self._batch: Any = None
        self._averaged: ExitStack | None = None  # while the average is validated
        self._validated: tuple[int, dict[str, Tensor]] = -1, {}

    @property
    def posterior(self) -> Posterior | None:
        """The posterior of the latest update, finally that of the end; None before the first."""
        return self.learner.posterior

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the data, and make the hyperparameters."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"The module has {len(trainer.optimizers)} optimisers; MarginalLikelihood supports "
                "one, whose step needs the gradients of all parameters."
            )
        loader: Any = trainer.train_dataloader
        if isinstance(loader, dict | list | tuple):
            raise ValueError(
                f"There are {len(loader)} training dataloaders; MarginalLikelihood needs one."
            )
        network = pl_module if self._network is None else getattr(pl_module, self._network, None)
        if not isinstance(network, nn.Module):
            raise ValueError(
                f"network={self._network!r} is not a module of {type(pl_module).__name__}; it has "
                f"{', '.join(name for name, _ in pl_module.named_children())}."
            )
        if is_sharded(network) and trainer.checkpoint_callbacks:
            raise NotImplementedError(
                "Checkpoints of a network under ModelParallelStrategy do not hold its average. "
                "Train it with Trainer(enable_checkpointing=False), or save in a loop of your own "
                "with PriorLearner (kfac_backend.sharding.gathered_state)."
            )
        steps = trainer.estimated_stepping_batches  # infinite where a number of hours is given
        per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        is_known = 0 < steps < math.inf and per_epoch < math.inf
        per_epoch = math.ceil(per_epoch) if is_known else 1
        epochs = math.ceil(steps / per_epoch) if is_known else None
        # Lightning clips gradients after its own hook for callbacks, but before the optimiser's.
        self.learner.start(
            network, trainer.optimizers[0], loader, epochs,
            held_out=self._held_out, hooks="gradients",
        )  # fmt: skip
        self._output = OutputOf(network)
        self._validated = -1, {}  # of an earlier run, which an exception may have ended
        # A checkpoint that was written at an epoch's last step is of before the epoch's update.
        if is_known and trainer.global_step % per_epoch == 0:
            self._end_epoch(trainer, trainer.global_step // per_epoch)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the batch that the loss is of."""
        self._batch = batch if self._output is not None else None

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Compare the first batch's loss with the likelihood's."""
        if self._output is None:
            return
        f, network, batch = self._output.only, self._output.model, self._batch
        self._forget_outputs()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = (scaler.get_scale() if scaler is not None else 1) / trainer.accumulate_grad_batches
        if f is not None and trainer.lightning_module.automatic_optimization:
            task = Task(self.learner.likelihood, self.learner.options.curvature)
            x, y = split_batch(batch, task.options)
            y = task.targets(network, x, y)
            learner = self.learner
            warn_of_another_loss(loss / scale, f, y, learner.likelihood, learner.options)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the network its average so far, which is then validated."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._averaged = ExitStack()
            self._averaged.enter_context(self.learner.averaged())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember what was validated, and give the network the parameters of the steps again."""
        if self._averaged is not None:
            if trainer.checkpoint_callbacks and self.learner.state.has_average:
                state = {name: t.detach().clone() for name, t in pl_module.state_dict().items()}
                self._validated = trainer.global_step, state
            self._close_average()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the network that was validated at this step in the place of that of the steps."""
        step, state = self._validated
        if step == trainer.global_step and STEPS not in checkpoint:
            checkpoint[STEPS], checkpoint["state_dict"] = checkpoint["state_dict"], state

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on training from the parameters of the steps; all else takes the validated ones."""
        if trainer.state.fn == "fit" and STEPS in checkpoint:
            pl_module.load_state_dict(checkpoint[STEPS])

    def _close_average(self) -> None:
        if self._averaged is not None:
            self._averaged.close()
        self._averaged = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove all hooks, and restore the parameters of the steps."""
        self._close_average()
        self._forget_outputs()
        self.learner.detach()

    def _forget_outputs(self) -> None:
        if self._output is not None:
            self._output.close()
        self._output = self._batch = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the prior if an update is due, and log."""
        self._end_epoch(trainer, trainer.current_epoch + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the prior if the latest update was not at the final parameters, and log."""
        self._forget_outputs()
        self._validated = -1, {}
        self._log(trainer, self.learner.finish())

    def _end_epoch(self, trainer: Trainer, epoch: int) -> None:
        self._log(trainer, end_of_epoch(self.learner.problem, self.learner.state, epoch))

    def _log(self, trainer: Trainer, numbers: dict[str, float]) -> None:
        if numbers:
            for logger in trainer.loggers:
                logger.log_metrics(
                    {f"prior/{name}": value for name, value in numbers.items()}, trainer.global_step
                )

    def state_dict(self) -> dict[str, Any]:
        """The state for the trainer's checkpoints; empty before training has started."""
        return gathered_state(self.learner.state_dict())  # of a sharded network: collective

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from one of the trainer's checkpoints."""
        if state_dict:
            self.learner.load_state_dict(state_dict)
