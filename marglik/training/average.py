"""The average θ̄ of the parameters over the steps of a training, and BatchNorm's statistics at it.

That of Izmailov et al. 2018 (arXiv:1803.05407), algorithm 1; torch.optim.swa_utils does the sums.
"""

import logging
import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_swa_multi_avg_fn

from kfac_backend.engine.batches import arguments, split_batch, to_device
from kfac_backend.engine.model_calls import forked_random_numbers
from kfac_backend.options import TargetOptions
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import (
    is_part,
    is_sharded,
    local_part,
    local_parts,
    part_of_whole,
    with_local_parts,
)
from marglik.eval_mode import preserve_mode
from marglik.training.loaders import Loader, own_iteration
from marglik.training.random_state import random_numbers_restored

if TYPE_CHECKING:
    from marglik.training.state import LearnerState, Problem

_logger = logging.getLogger(__name__)


_update_means: Any = get_swa_multi_avg_fn()


class WeightAverage:
    """The mean of parameters over steps, as it runs.

    Args:
        parameters: whose values are averaged.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._values: list[Tensor] = []
        self.count = 0
        """Number of steps that are averaged."""
        self.is_written = False
        """Whether the parameters have their averages since the training's end."""
        self.is_temporary = False
        """Whether they have them for now, within `written`."""

    @torch.no_grad()
    def add(self) -> None:
        """Include the present values."""
        if self.is_temporary:
            raise RuntimeError(
                "The optimiser stepped within averaged(), at whose end the parameters go back to "
                "what they were before. Train outside of it."
            )
        if not self.count:
            self._values = [part.clone() for part in local_parts(self._parameters)]
        else:
            _update_means(self._values, local_parts(self._parameters), self.count)
        self.count += 1
        self.is_written = False

    def clear(self) -> None:
        """Begin anew with the next values."""
        self._values, self.count = [], 0

    @torch.no_grad()
    def write(self) -> None:
        """Give the parameters their averages."""
        torch._foreach_copy_(local_parts(self._parameters), self._values)

    @contextmanager
    def written(self) -> Iterator[None]:
        """A context in which the parameters have their averages, with the present values."""
        present = [part.clone() for part in local_parts(self._parameters)]
        with_present = WeightAverage(self._parameters)
        with_present.load_state_dict(self.state_dict())
        with_present.add()
        with_present.write()
        self.is_temporary = True
        try:
            yield
        finally:
            self.is_temporary = False
            with torch.no_grad():
                torch._foreach_copy_(local_parts(self._parameters), present)

    def state_dict(self) -> dict[str, Any]:
        """The averages and the number of steps; of sharded parameters they are sharded, too."""
        parameters = self._parameters if self.count else []
        values = with_local_parts(parameters, [value.clone() for value in self._values])
        return {"values": values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on the parameters' devices.

        Of sharded parameters the state may be sharded alike, or whole (`gathered_state`).

        Raises:
            ValueError: a state whose numbers were cast.
        """
        values = [*zip(state["values"], self._parameters)]  # noqa: B905  # none before it begins
        for value, p in values:
            if value.dtype != p.dtype:
                raise ValueError(
                    f"The state's averages are in {value.dtype}, and the parameters in {p.dtype}. "
                    "Load the state as it was saved, with the same model and dtype."
                )
        self.count = state["count"]
        self._values = [
            local_part(value).to(local_part(p), copy=True)
            if is_part(value) or not is_part(p)
            else part_of_whole(value.to(p.device), p).clone()
            for value, p in values
        ]


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The layers with running statistics, by name."""
    norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    return {name: norm for name, norm in norms.items() if norm.running_mean is not None}


@torch.no_grad()
def renew_batch_norm(
    model: nn.Module,
    loader: Loader,
    options: TargetOptions,
    ranks: Ranks = Ranks(None),  # noqa: B008
    frozen: Collection[str] = (),
) -> None:
    """Set BatchNorm's running statistics to their means over the batches, at present parameters.

    Those of ``frozen``, which the training ran in eval mode, stay as they are.

    The statistics that training collected belong to the parameters of the steps, not to their
    average. As `torch.optim.swa_utils.update_bn`, for any kind of batch and for several ranks, some
    of whose batches may be empty.
    """
    unchanged = [norm for name, norm in batch_norms(model).items() if name in frozen]
    norms = [norm for name, norm in batch_norms(model).items() if name not in frozen]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    device, num_batches = next(model.parameters()).device, 0
    with preserve_mode(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch's way to ask for the mean over all batches
        try:
            latest: Any = None
            for batch in loader:
                x, y = split_batch(batch, options)
                num_batches += len(y) > 0
                if len(y) or is_sharded(model):  # the other ranks' batches need this one's part
                    model.train(len(y) > 0)  # otherwise statistics stay as they are
                    for norm in unchanged:
                        norm.eval()
                    # Not every model can run without examples.
                    latest = x = x if len(y) or latest is None else latest
                    # A copy, since a model may change its input in place.
                    args, kwargs = arguments(model, deepcopy(to_device(x, device)))
                    model(*args, **kwargs)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    statistics: Any = [s for norm in norms for s in (norm.running_mean, norm.running_var)]
    if ranks.size > 1:
        torch._foreach_mul_(statistics, num_batches / sum(ranks.gather(num_batches)))
        ranks.sum_(statistics)


# --- the average, as the training's end takes it ---


def take_average(problem: "Problem", state: "LearnerState") -> None:
    """Give the network the mean over about the last third of the steps, if there is one.

    Again it does nothing, until there are further steps.
    """
    if state.averages[0].is_written:
        return
    schedule = problem.options.schedule
    made, averaged_steps = state.steps[-1], state.averages[-1].count
    if state.has_average:
        for average in state.averages:
            average.add()
            average.write()
        state.steps_at_update = None
        with forked_random_numbers(problem.model):
            targets = problem.options.curvature
            renew_batch_norm(
                problem.model, problem.loader, targets, problem.ranks, state.measures.frozen_norms
            )
        for average in state.averages:
            average.is_written = True
        _logger.info("parameters are their mean over the last %d of %d steps", averaged_steps, made)
    elif schedule.averages and made and state.epoch < (schedule.epochs or 0):
        warnings.warn(
            f"The training ended after {made} steps, in epoch {state.epoch} of "
            f"{schedule.epochs}: the parameters are those of the last step, not the mean over "
            "the last third of the steps. If gradients are accumulated, pass start(..., "
            "steps_per_epoch=...).",
            RuntimeWarning,
            stacklevel=4,
        )


@contextmanager
def averaged(problem: "Problem", state: "LearnerState") -> Iterator[nn.Module]:
    """A context in which the network has the average of its parameters so far.

    It is the network that `PriorLearner.finish` would leave: the validation loss, early stopping
    and "keep the best" are about the average, and not about the last step's parameters. Its
    BatchNorm statistics are renewed by a pass over the training data. Afterwards, also after an
    error, parameters and statistics are what they were. As long as fewer than a sixth of the steps
    are averaged, `finish` takes no average, and this changes nothing. With several ranks it is
    collective.
    """
    with ExitStack() as stack:
        first = state.averages[0]
        if state.has_average and not (first.is_written or first.is_temporary):
            for average in state.averages:
                stack.enter_context(average.written())
            norms, frozen = batch_norms(problem.model).values(), state.measures.frozen_norms
            statistics = [(buffer, buffer.clone()) for n in norms for buffer in n.buffers()]
            stack.callback(lambda: [buffer.copy_(value) for buffer, value in statistics])
            data, targets = own_iteration(problem.loader), problem.options.curvature
            # The loop must draw the same numbers whether it validates or not.
            with random_numbers_restored(problem.loader):
                renew_batch_norm(problem.model, data, targets, problem.ranks, frozen)
        yield problem.model
