"""What an update of the prior sees: all data or a sample, by exact vectors or by random ones.

Updates see a sample, so that they cost a tenth of the steps between them. A of M examples is an
unbiased mean and (N/M) · B an unbiased sum: the evidence of a sample is an estimate of all data's.
Directions that M rows do not reach are lost: where a network determines nearly as many, samples are
larger (`examples_for_gamma`). What default updates change beside exact ones of all data is measured
in `experiments.weight_decay.sampled_updates`: decays by a factor of 1.02 to 1.64 (median over
tensors; fewer updates count in it, too), the test NLL by -.009 to +.016, and not upwards by more
than two standard errors.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from kfac_backend.engine.batches import length
from kfac_backend.options import CurvatureOptions
from kfac_backend.ranks import Ranks
from marglik.loaders import EpochBatches, Loader, own_iteration
from marglik.posterior.posterior import Posterior
from marglik.training.random_state import random_numbers_restored

if TYPE_CHECKING:
    from marglik.training.state import LearnerOptions, LearnerState, Problem

SHARE = 0.1
"""Of the cost of the steps since the last update, in passes over one example."""
FEWEST = 256
"""Examples of a sample, at least."""
BATCH_SIZE = 256
"""Examples of its batches: large ones take a fraction of the time of many small ones."""
LARGEST_GAMMA = 0.1
"""Of the directions of a weight that a sample can show: γ, the number of those that the data
determines, may be this share of them. With 0.8 (400 rows, γ = 3,200 of a head with ten
outputs) the head's decay was .6 of that of all data, and the NLL 0.06 higher; with 0.2 it was 0.01
higher (4,000 images of CIFAR-10)."""
FEW_VECTORS = 3_000
"""Backward passes of one example each, of a last update that takes no time to speak of."""


class CurvaturePlan(NamedTuple):
    """What the curvature pass of an update sees."""

    num_examples: int
    """M; a random sample of the N examples if it is smaller."""
    fisher: str
    """The one asked for, or "random_signs" in place of "exact"."""


def curvature_plan(problem: "Problem", state: "LearnerState", is_last: bool) -> CurvaturePlan:
    """What an update that follows now sees.

    In passes over one example: a training step is a forward pass and a backward pass of twice its
    cost; an exact pass is a forward pass and V backward passes. Updates estimate the curvature by
    one random vector for each example where exact passes would take longer than the training.

    The last update is exact and sees all data unless that alone would take longer than a tenth of
    the training. Then it is such an estimate, of all data if that is short enough: closer in
    predictions and evidence than a sample's exact curvature.
    """
    options, schedule = problem.options, problem.options.schedule
    fisher, N, V = options.curvature.fisher, problem.num_data, problem.vectors
    if takes_all(options) or not state.steps[-1]:
        return CurvaturePlan(N, fisher)
    is_exact, num_seen = fisher == "exact", float(problem.examples_per_epoch * state.epoch)
    estimates = is_exact and V > 1
    if is_last:
        if is_exact and (V * N <= FEW_VECTORS or sample_size(N, num_seen, V) == N):
            return CurvaturePlan(N, fisher)
    else:
        if state.steps_at_update:
            num_seen *= 1 - state.steps_at_update / state.steps[-1]
        between = num_seen  # examples of the steps between updates, on average if that is known
        if schedule.epochs is not None:
            num_updates = schedule.updates
            if schedule.every is not None:
                num_updates = schedule.epochs // schedule.every
            between = N * schedule.epochs / max(num_updates, 1)
        estimates &= N * (1 + 2 * V) > 3 * between
    number = sample_size(N, num_seen, 1 if estimates else V)
    if not is_last:
        number = min(N, max(number, state.measures.examples_for_gamma))
    return CurvaturePlan(number, "random_signs" if estimates else fisher)


def takes_all(options: "LearnerOptions") -> bool:
    """Whether all updates pass over all data, in the loader's batches, as the curvature says."""
    # With keep="best", noise would choose among the evidences. Jacobians cost the same for random
    # vectors.
    is_for_samples = options.curvature_from == "auto" and options.hessian_structure == "kron"
    return not is_for_samples or options.schedule.keep == "best"


def pass_of_update(
    problem: "Problem", state: "LearnerState", plan: CurvaturePlan, is_last: bool
) -> tuple[CurvatureOptions, Iterable[Any]]:
    """The options and the batches of a plan.

    Of a plain DataLoader these are large batches, see `sampled`, unless ``curvature_from`` and
    ``keep`` ask for the loader's own.
    """
    curvature, number, N = problem.options.curvature, plan.num_examples, problem.num_data
    if plan.fisher != curvature.fisher:
        curvature = curvature.replace(fisher=plan.fisher, mc_samples=1)
    if state.kfac_approx is not None and number < N and not is_last:
        curvature = curvature.replace(kfac_approx=state.kfac_approx)  # what the first one chose
    if takes_all(problem.options):
        return curvature, own_iteration(problem.loader)
    return curvature, sampled(problem.loader, number, N, problem.ranks, state.epoch)


def sample_size(num_data: int, num_seen: float, vectors: int) -> int:
    """M, the number of examples of an update; N if that is all.

    By counts and not by clocks, since a run must repeat to the bit.

    Args:
        num_data: N.
        num_seen: examples of the training steps since the last update.
        vectors: backward passes per example of the update. One takes twice a forward pass.
    """
    return min(num_data, max(FEWEST, round(SHARE * num_seen * 3 / (1 + 2 * vectors))))


def examples_for_gamma(posterior: Posterior, gamma: Mapping[str, float]) -> int:
    """The M at which γ of each weight is at most `LARGEST_GAMMA` of what M examples can show.

    Under reduce with one vector for each loss term both factors have a rank of M terms at most, and
    with it the block has at most M · min(d_out, d_in) directions, in each group of a grouped layer.
    Where γ comes near that, samples underrate γ and with it the decay. Under expand, or with more
    vectors, an example shows more, and M is larger than it need be.

    Args:
        posterior: fitted.
        gamma: by the name of each tensor.
    """
    factors = posterior.factors
    if factors is None:
        return 0
    shares = [0.0]
    for name, block in factors.blocks.items():
        if "A" in block.factors:
            of_B, of_A = block.factors["B"].shape, block.factors["A"].shape
            directions = of_B[:-2].numel() * min(of_B[-1], of_A[-1])  # of one loss term
            shares.append(gamma[name] / directions)
    terms_per_example = factors.num_loss_terms / factors.num_data
    return math.ceil(max(shares) / (LARGEST_GAMMA * terms_per_example))


def sampled(
    loader: Loader,
    number: int,
    num_data: int,
    ranks: Ranks,
    seed: int,
    limit: int | None = None,
) -> Iterable[Any]:
    """Batches of about ``number`` random examples of a loader's, without replacement.

    The loader's iterator, which a training loop may be using, is not touched, nor are the random
    numbers that it would draw.

    Args:
        loader: a loader with a method ``sample``, as `marglik.data.Batches`; a plain DataLoader of
            a map-style dataset, of whose sampler's examples these are some, collated anew; or any
            other with a length, of which these are whole batches. Data without a length is returned
            as it is, and so is the latter if all of it is asked for. Of `EpochBatches` the function
            is applied to these batches.
        number: M, of all ranks together.
        num_data: N, of all ranks together.
        ranks: each samples its own shard.
        seed: of the choice; the same on all ranks.
        limit: number of the loader's batches in an epoch; None if an epoch reads all.
    """
    if isinstance(loader, EpochBatches):
        batches = sampled(loader.get_loader(), number, num_data, ranks, seed, loader.limit)
        return replace(loader, get_loader=lambda: batches, limit=None)
    generator = torch.Generator().manual_seed(seed)
    if hasattr(loader, "sample"):
        return _Again(partial(loader.sample, number, BATCH_SIZE), seed)  # pyright: ignore
    if _is_of_examples(loader):
        batches = loader.batch_sampler  # pyright: ignore[reportAttributeAccessIssue]
        with random_numbers_restored(loader):
            indices = sorted(
                i for batch in islice(batches, limit) for i in batch
            )  # in whatever order they came
        M = max(1, min(len(indices), round(number * len(indices) / num_data)))
        chosen = [indices[i] for i in torch.randperm(len(indices), generator=generator)[:M]]
        starts = range(0, M, BATCH_SIZE)
        parts = [chosen[i : i + BATCH_SIZE] for i in starts]
        return _with_batches(loader, parts, generator)  # pyright: ignore[reportArgumentType]
    total = length(loader)
    if limit is None and (total is None or number >= num_data):
        return own_iteration(loader)
    if total is None or number >= num_data:  # of a stream the first ones: it may have no end
        numbers = range(limit or 0)
    else:
        numbers = torch.randperm(min(total, limit or total), generator=generator).tolist()
    M = max(1, math.ceil(len(numbers) * min(1, number / num_data)))
    return _Some(own_iteration(loader), {*numbers[:M]})


def _is_of_examples(loader: Loader) -> bool:
    """Whether batches of any examples may take the place of the loader's own.

    A sampler of batches of the user's may group examples that fit together, and an ``__iter__`` may
    change them: of such loaders whole batches are taken.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    origins = (type(loader).__iter__.__module__, type(loader.batch_sampler).__module__)
    return all(origin.split(".")[0] in ("torch", "torchdata", "accelerate") for origin in origins)


def _with_batches(
    loader: DataLoader[Any], batches: list[list[Any]], generator: torch.Generator
) -> DataLoader[Any]:
    """A DataLoader of the same dataset, which yields these batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=generator,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )


class _Again:
    """What a function makes of a generator, the same in each iteration."""

    def __init__(self, make: Callable[[torch.Generator], Iterable[Any]], seed: int) -> None:
        self._make, self._seed = make, seed

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make(torch.Generator().manual_seed(self._seed)))


class _Some:
    """Batches of a loader by their numbers; it is read up to the last of them."""

    def __init__(self, loader: Loader, numbers: set[int]) -> None:
        self._loader, self._numbers = loader, numbers

    def get_loader(self) -> Loader:
        """The loader that is read."""
        return self._loader

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        last = max(self._numbers)
        for number, batch in enumerate(self._loader):
            if number in self._numbers:
                yield batch
            if number == last:
                return
