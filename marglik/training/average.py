"""Average θ̄ of the parameters over the steps of a training, with BatchNorm statistics for it.

The average is the polynomial-decay averaging of Shamir & Zhang 2013 (arXiv:1212.1824): θ̄ ← θ̄ +
(η+1)/(t+η) (θ − θ̄) after step t. It is a mean of all steps so far, in which step i has a weight of
about i^η. It does not need the number of steps in advance. The mean age of its steps is t/(η+2),
and their effective number is (2η+1) t/(η+1)².

The average cannot remove all noise of the steps. The loss is not quadratic, so steps without noise
would end at other parameters than the mean of noisy ones. If the targets of a regression have
little noise, the difference matters. `noise_of_steps` measures it before the last third of the
epochs. If it is large, `OnlineTraining` lets the rate fall in the last third. If the targets have
much noise, the rate stays constant, because the noise of the steps then keeps the network from
fitting the noise of the targets (`experiments.uci.likelihoods`).
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from kfac_backend.engine.batches import arguments, split_batch, to_device
from kfac_backend.engine.model_calls import forked_random_numbers, logits_of
from kfac_backend.engine.task import Task
from kfac_backend.likelihoods import Likelihood, likelihood_of, loss_sum
from kfac_backend.options import TargetOptions
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import is_sharded
from marglik.eval_mode import preserve_mode
from marglik.loaders import Loader, own_iteration
from marglik.random_state import random_numbers_restored
from marglik.training.problem import Problem, batch_norms
from marglik.training.samples import sampled
from marglik.training.state import LearnerState

_logger = logging.getLogger(__name__)

FEW_EXAMPLES = 2_560
"""Number of training examples from which BatchNorm's statistics are computed during a training."""
LARGEST_NOISE = 0.1
"""Noise of the steps (nats per target) above which the rate falls. Chosen on four UCI sets: red
wine has at most 0.08, and a falling rate raises its NLL. Energy, naval and yacht have at least
0.18."""


@torch.no_grad()
def renew_batch_norm(
    model: nn.Module,
    loader: Loader,
    options: TargetOptions,
    ranks: Ranks = Ranks(None),  # noqa: B008
    frozen: Collection[str] = (),
) -> None:
    """Set BatchNorm's running statistics to their means over the batches, at present parameters.

    Layers in ``frozen``, which the training ran in eval mode, keep their statistics.

    The statistics of the training belong to the parameters of the steps, not to their average. This
    function is like `torch.optim.swa_utils.update_bn`, for any kind of batch and for several ranks,
    of which some may have empty batches.
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
            norm.momentum = None  # torch's value for the mean over all batches
        try:
            latest: Any = None
            for batch in loader:
                x, y = split_batch(batch, options)
                num_batches += len(y) > 0
                if len(y) or is_sharded(model):  # the other ranks' batches need this rank's part
                    model.train(len(y) > 0)  # otherwise statistics are unchanged
                    for norm in unchanged:
                        norm.eval()
                    # Not every model can run without examples.
                    latest = x = x if len(y) or latest is None else latest
                    # A copy, because a model may change its input in place.
                    args, kwargs = arguments(model, deepcopy(to_device(x, device)))
                    model(*args, **kwargs)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    statistics: Any = [s for norm in norms for s in (norm.running_mean, norm.running_var)]
    if ranks.size > 1:
        torch._foreach_mul_(statistics, num_batches / sum(ranks.gather(num_batches)))
        ranks.sum_(statistics)


# --- the average so far, for a validation and at the training's end ---


def take_average(problem: Problem, state: LearnerState) -> None:
    """Set the network to the average of its steps, if there is one.

    A second call does nothing until there are further steps.
    """
    if state.averages[0].is_written or not state.has_average:
        return
    for average in state.averages:
        average.include_latest()
        average.write()
    state.steps_at_update = None
    with forked_random_numbers(problem.model):
        targets = problem.options.curvature
        renew_batch_norm(
            problem.model, problem.loader, targets, problem.ranks, state.measures.frozen_norms
        )
    for average in state.averages:
        average.is_written = True
    _logger.info("the parameters are now their average over %d steps", state.averages[-1].count)


@contextmanager
def averaged(problem: Problem, state: LearnerState) -> Iterator[nn.Module]:
    """Context manager in which the network has the average of its parameters so far.

    This is the network that `PriorLearner.finish` would return. Validation loss, early stopping and
    best checkpoints use the average instead of the last step's parameters. BatchNorm's statistics
    are computed again by a pass over the training data, or a sample of 2,560 examples if there are
    more (`finish` passes over all data). The context restores parameters and buffers, also after an
    error. It is collective with several ranks.
    """
    with ExitStack() as stack:
        first = state.averages[0]
        if state.has_average and not (first.is_written or first.is_temporary):
            for average in state.averages:
                average.include_latest()
                stack.enter_context(average.written())
            stack.enter_context(_preserved_buffers(problem.model))
            frozen = state.measures.frozen_norms
            data, targets = own_iteration(problem.loader), problem.options.curvature
            # The loop must draw the same numbers with and without a validation.
            with random_numbers_restored(problem.loader):
                if problem.num_data > FEW_EXAMPLES:
                    own = problem.num_data, problem.ranks, state.steps[-1]
                    data = sampled(problem.loader, FEW_EXAMPLES, *own)
                renew_batch_norm(problem.model, data, targets, problem.ranks, frozen)
        yield problem.model


@contextmanager
def _preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Context manager that restores all buffers, which calls in train mode may change."""
    # A module may change a buffer in place, or assign another tensor.
    before = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffers, name, buffer, value in before:
                if _is_writable(buffer):
                    buffer.copy_(value)
                buffers[name] = buffer


def _is_writable(tensor: torch.Tensor) -> bool:
    """Return False for tensors that torch does not change in place: inference or expanded ones."""
    if tensor.is_inference():
        return False
    if tensor.layout != torch.strided or tensor.is_nested:
        return True
    return all(
        stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def noise_of_steps(
    problem: Problem,
    state: LearnerState,
    losses: Sequence[float],
    loader: Loader | None = None,
    forward: Callable[..., Any] | None = None,
) -> float:
    """Return the nats per target that the noise of the steps costs; collective.

    L is the mean loss of the steps over the latest twentieth of the epochs, which is the time
    between two updates. L̄ is the loss of the average for the same batches, also in train mode. For
    a likelihood with σ, the noise is ½ log(L/L̄). Each loss then has its own best σ, because the
    learned σ includes the noise of the steps. For other likelihoods it is L − L̄, divided by the
    number of outputs. L̄ is then a mean over the same epochs, each with its likelihood, because an
    update may have changed the likelihood.

    Args:
        problem: the training problem.
        state: the state, with an average.
        losses: mean loss of an example at σ = 1 in each epoch so far, over all ranks.
        loader: this rank's training batches; the problem's loader if not given.
        forward: calls the model in the precision of the steps; the model itself if not given.
    """
    latest = losses[-max(1, round((problem.options.schedule.epochs or 0) / 20)) :]
    loss = math.fsum(latest) / len(latest)
    if not state.likelihood.has_sigma:
        first = len(losses) - len(latest) + 1
        texts = [likelihood_in(state, epoch) for epoch in range(first, len(losses) + 1)]
        of_average = {
            text: _losses_of_average(problem, state, loader, forward, likelihood_of(text))
            for text in dict.fromkeys(texts)
        }
        of_epochs = zip(*(of_average[text] for text in texts), strict=True)
        total, examples, outputs = map(math.fsum, of_epochs)
        return (loss * examples - total) / outputs
    of_average = loss_of_average(problem, state, loader, forward)
    if not of_average:
        return math.inf if loss else 0.0
    return 0.5 * math.log(loss / of_average) if loss else 0.0


def likelihood_in(state: LearnerState, epoch: int) -> str:
    """Return the likelihood of the steps of an epoch, from 1, as text."""
    return state.decay_history[max(e for e in state.decay_history if e < epoch)][2]


def loss_of_average(
    problem: Problem,
    state: LearnerState,
    loader: Loader | None = None,
    forward: Callable[..., Any] | None = None,
) -> float:
    """Return the training loss of an example at the average, in train mode; collective.

    See `noise_of_steps` for the arguments.
    """
    total, examples, _ = _losses_of_average(problem, state, loader, forward, state.likelihood)
    return total / max(examples, 1)


@torch.no_grad()
def _losses_of_average(
    problem: Problem,
    state: LearnerState,
    loader: Loader | None,
    forward: Callable[..., Any] | None,
    likelihood: Likelihood,
) -> list[float]:
    """Return the training loss at the average, and the numbers of examples and of outputs."""
    loader, task = loader or problem.loader, Task(likelihood, problem.options.curvature)
    totals = torch.zeros(3, dtype=torch.float64)
    buffers = _preserved_buffers(problem.model)
    with preserve_mode(problem.model), buffers, averaged(problem, state) as model:
        model.train()
        device = next(model.parameters()).device
        with random_numbers_restored(loader):
            for batch in own_iteration(loader):
                x, y = split_batch(batch, task.options)
                if not len(y):
                    continue
                # A copy, because a model may change its input in place.
                x, y = deepcopy(to_device(x, device)), to_device(y, device)
                args, kwargs = arguments(model, x)
                f = logits_of((forward or model)(*args, **kwargs))
                data_loss = loss_sum(f, task.targets(model, x, y), likelihood)
                numbers = [data_loss.item(), len(y), f.numel()]
                totals += torch.tensor(numbers, dtype=torch.float64)
    problem.ranks.sum_([totals])
    return totals.tolist()
