"""The data of an update: all data or a sample, with exact vectors or random ones.

Updates use a sample, so that they cost a tenth of the steps between them. A of M examples is an
unbiased mean, and (N/M) · B an unbiased sum. The evidence of a sample is therefore an estimate of
the evidence of all data. Directions outside the span of the M rows are lost. If a network has
many effective parameters γ, the samples are larger (`examples_for_gamma`). If they would be too
large, the update corrects γ instead (`SampleCorrection`), and the updates are rarer
(`is_too_large`).
`experiments.weight_decay.sampled_updates` compares default updates with exact updates of all data.
Weight decays differ by a factor of 1.01 to 2.00 (median over tensors; this includes the effect of
fewer updates). The test NLL differs by -.000 ± .001 with correct labels and by +.001 ± .004
with 40 % wrong labels (means over 14 rows). It is higher by more than two standard errors in four
of these 28 cases, by .003 to .020, and lower in three.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from kfac_backend.engine.batches import length
from kfac_backend.options import CurvatureOptions
from kfac_backend.ranks import Ranks
from marglik.loaders import EpochBatches, Loader, own_iteration
from marglik.posterior.posterior import Posterior
from marglik.random_state import random_numbers_restored
from marglik.training.options import LearnerOptions
from marglik.training.problem import FEWEST, SHARE, Problem
from marglik.training.state import LearnerState

BATCH_SIZE = 256
"""Number of examples in its batches. Large batches take a fraction of the time of many small
ones."""
LARGEST_GAMMA = 0.3
"""Largest ratio of a weight's effective parameters γ to the rank that the sample can have. With 0.5
the NLL was 0.018 higher in one of two trainings, and equal in the other (4,000 images of
CIFAR-10)."""
LARGEST_UNCORRECTED = 0.1
"""Ratio of γ to the rank of the sample above which an update corrects γ, see `SampleCorrection`.
Without a correction, with 0.8 (400 rows, γ = 3,200 of a head with ten outputs) the head's weight
decay was .6 of its value with all data, and the NLL 0.06 higher. With 0.2 the NLL was 0.01 higher
(4,000 images of CIFAR-10)."""
LARGEST_RATIO = 1.5
"""Largest ratio of a sample that γ requires to a sample that takes a tenth of the time of the
steps since the last update. For a larger one, γ is corrected instead. If even the correction needs
a larger one, the update waits for more steps. On 4,000 images of CIFAR-10, learning without this
limit took 2.4 times as long as a plain training. With it and the correction, it takes 1.3 times as
long. The NLL differs by +.0005 ± .0019 (nine seeds), and by -.0007 ± .0014 with 40 % wrong labels
(eight seeds, see `experiments.weight_decay.waiting_updates`)."""
LARGEST_CHANGE = 0.5
"""Largest mean change of the log weight decays in the last update with which an update may wait. If
updates waited while the weight decays still change, the NLL would be higher in short trainings: by
0.205 with 6 epochs and by 0.059 with 9 (an MLP of 3,000 vectors, means over three seeds)."""
FEW_VECTORS = 3_000
"""Number of backward passes of one example for which a last update takes negligible time."""


class CurvaturePlan(NamedTuple):
    """The data and the Fisher of an update's curvature pass."""

    num_examples: int
    """M; if it is smaller than N, the pass uses a random sample."""
    fisher: str
    """The requested Fisher, or "random_signs" instead of "exact"."""
    corrects_gamma: bool = False
    """Whether the update estimates γ of all data from its sample, whose own γ is too small. The
    recorded evidence and γ are then the corrected ones."""


def curvature_plan(problem: Problem, state: LearnerState, is_last: bool) -> CurvaturePlan:
    """Return the plan of an update that follows now.

    Costs are counted in passes over one example. A training step is a forward pass and a backward
    pass of twice its cost. An exact pass is a forward pass and V backward passes. If exact passes
    would take longer than the training, updates estimate the curvature with one random vector per
    example.

    The last update is exact and uses all data, unless this alone would take longer than a tenth of
    the training. Otherwise it is an estimate with random vectors, from all data if this is short
    enough. Its predictions and evidence are closer to the exact ones than with a sample's exact
    curvature.
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
        num_seen = num_seen_since_update(problem, state)
        between = num_seen  # examples of the steps between updates, or their average if known
        if schedule.epochs is not None:
            num_updates = schedule.updates
            if schedule.every is not None:
                num_updates = schedule.epochs // schedule.every
            between = problem.examples_per_epoch * max(schedule.epochs / max(num_updates, 1), 1)
        estimates &= N * (1 + 2 * V) > 3 * between
        num_seen = min(num_seen, between)  # skipped updates do not make the next one larger
    number = sample_size(N, num_seen, 1 if estimates else V)
    corrects = False
    if not is_last:
        # Take the sample that needs no correction, if it is not too large, or what a correction
        # needs.
        needed = state.measures.examples_for_gamma
        uncorrected = math.ceil(needed * LARGEST_GAMMA / LARGEST_UNCORRECTED)
        not_too_large = math.floor(min(uncorrected, LARGEST_RATIO * number))
        number = min(N, max(number, needed, not_too_large))
        corrects = _has_counts_of_rows(options.curvature) and number < min(N, uncorrected)
    return CurvaturePlan(number, "random_signs" if estimates else fisher, corrects)


def num_seen_since_update(problem: Problem, state: LearnerState) -> float:
    """Return the number of examples of the training steps since the last update."""
    share = 1 - state.steps_at_update / state.steps[-1] if state.steps_at_update else 1.0
    return problem.examples_per_epoch * state.epoch * share


def is_too_large(problem: Problem, state: LearnerState) -> bool:
    """Return whether γ needs such a large sample that an update must wait for more steps.

    Otherwise the updates of a network with many effective parameters take as long as its training.
    Such an update also needs as many steps after it, on which its weight decays act. No update
    waits while the weight decays still change.
    """
    changes = [abs(change) for change in state.measures.last_changes]
    if takes_all(problem.options) or not changes or fmean(changes) > LARGEST_CHANGE:
        return False
    number, fisher, _ = curvature_plan(problem, state, is_last=False)
    vectors = problem.vectors if fisher == problem.options.curvature.fisher else 1
    num_seen, epochs = num_seen_since_update(problem, state), problem.options.schedule.epochs
    if epochs is not None and state.epoch < epochs:
        num_seen = min(num_seen, problem.examples_per_epoch * (epochs - state.epoch))
    is_for_gamma = number <= state.measures.examples_for_gamma
    usual = sample_size(problem.num_data, num_seen, vectors)
    return is_for_gamma and number > LARGEST_RATIO * usual


def takes_all(options: LearnerOptions) -> bool:
    """Return whether all updates pass over all data in the loader's batches."""
    # With keep="best", noise would choose among the evidences. Jacobians cost the same for random
    # vectors.
    is_for_samples = options.curvature_from == "auto" and options.hessian_structure == "kron"
    return not is_for_samples or options.schedule.keep == "best"


def pass_of_update(
    problem: Problem, state: LearnerState, plan: CurvaturePlan, is_last: bool
) -> tuple[CurvatureOptions, Iterable[Any]]:
    """Return the options and the batches of a plan.

    For a plain DataLoader these are large batches, see `sampled`, unless ``curvature_from`` and
    ``keep`` require the loader's own batches.
    """
    curvature, number, N = problem.options.curvature, plan.num_examples, problem.num_data
    if plan.fisher != curvature.fisher:
        curvature = curvature.replace(fisher=plan.fisher, mc_samples=1)
    if state.kfac_approx is not None and number < N and not is_last:
        curvature = curvature.replace(kfac_approx=state.kfac_approx)  # as the first update chose
    if takes_all(problem.options):
        return curvature, own_iteration(problem.loader)
    return curvature, sampled(problem.loader, number, N, problem.ranks, state.epoch)


def sample_size(num_data: int, num_seen: float, vectors: int) -> int:
    """Return M, the number of examples of an update; N for all data.

    It uses counts instead of clocks, so that a run can be repeated exactly.

    Args:
        num_data: N.
        num_seen: examples of the training steps between two updates.
        vectors: backward passes per example of the update. One takes twice a forward pass.
    """
    return min(num_data, max(FEWEST, round(SHARE * num_seen * 3 / (1 + 2 * vectors))))


def examples_for_gamma(posterior: Posterior, gamma: Mapping[str, float]) -> int:
    """Return M for which γ of each weight is at most `LARGEST_GAMMA` of the sample's rank.

    The limit is `LARGEST_UNCORRECTED` for a tensor that is used in two ways, and with
    expand_scaling="examples". Their γ has no correction.

    Under reduce with one vector for each loss term both factors have a rank of at most M terms. The
    block then has at most M · min(d_out, d_in) directions, in each group of a grouped layer. If γ
    is close to this number, samples underestimate γ and with it the weight decay. Under expand, or
    with more vectors, an example contributes more directions, and M is larger than necessary.

    Args:
        posterior: a fitted posterior.
        gamma: γ by the name of each tensor.
    """
    factors = posterior.factors
    if factors is None:
        return 0
    needed = [0.0]
    for name, block in factors.blocks.items():
        if "A" in block.factors:
            of_B, of_A = block.factors["B"].shape, block.factors["A"].shape
            directions = of_B[:-2].numel() * min(of_B[-1], of_A[-1])  # of one loss term
            has_correction = block.num_terms and _has_counts_of_rows(factors.options)
            largest = LARGEST_GAMMA if has_correction else LARGEST_UNCORRECTED
            needed.append(gamma[name] / directions / largest)
    terms_per_example = factors.num_loss_terms / factors.num_data
    return math.ceil(max(needed) / terms_per_example)


def _has_counts_of_rows(options: CurvatureOptions) -> bool:
    """Return whether `KroneckerBlock.num_terms` is the number of A's rows."""
    return options.expand_scaling == "positions"


def sampled(
    loader: Loader,
    number: int,
    num_data: int,
    ranks: Ranks,
    seed: int,
    limit: int | None = None,
) -> Iterable[Any]:
    """Return batches of about ``number`` random examples of a loader, without replacement.

    The loader's iterator, which a training loop may be using, and its random numbers are not
    changed.

    Args:
        loader: a loader with a method ``sample``, such as `marglik.data.Batches`, unless the limit
            is smaller than its number of batches; a plain DataLoader of a map-style dataset, from
            whose sampler some examples are drawn and collated again; or any other loader with a
            length, from which whole batches are drawn.
            Data without a length is returned unchanged, and so is such a loader if all of it is
            requested. For `EpochBatches` the function is applied to these batches.
        number: M, of all ranks together.
        num_data: N, of all ranks together.
        ranks: each samples its own shard.
        seed: seed of the choice; the same on all ranks.
        limit: number of the loader's batches in an epoch; None if an epoch reads all.
    """
    if isinstance(loader, EpochBatches):
        batches = sampled(loader.get_loader(), number, num_data, ranks, seed, loader.limit)
        return replace(loader, get_loader=lambda: batches, limit=None)
    generator, total = torch.Generator().manual_seed(seed), length(loader)
    reads_all = limit is None or (total is not None and limit >= total)
    if hasattr(loader, "sample") and reads_all:
        return _Again(partial(loader.sample, number, BATCH_SIZE), seed)  # pyright: ignore
    if _is_of_examples(loader):
        batches = loader.batch_sampler  # pyright: ignore[reportAttributeAccessIssue]
        with random_numbers_restored(loader):
            indices = sorted(i for batch in islice(batches, limit) for i in batch)  # in any order
        M = max(1, min(len(indices), round(number * len(indices) / num_data)))
        chosen = [indices[i] for i in torch.randperm(len(indices), generator=generator)[:M]]
        starts = range(0, M, BATCH_SIZE)
        parts = [chosen[i : i + BATCH_SIZE] for i in starts]
        return _with_batches(loader, parts, generator)  # pyright: ignore[reportArgumentType]
    if limit is None and (total is None or number >= num_data):
        return own_iteration(loader)
    if total is None or number >= num_data:  # for a stream the first ones: it may be endless
        numbers = range(limit or 0)
    else:
        numbers = torch.randperm(min(total, limit or total), generator=generator).tolist()
    M = max(1, math.ceil(len(numbers) * min(1, number / num_data)))
    return _Some(own_iteration(loader), {*numbers[:M]})


def check_sample(batches: Iterable[Any], posterior: Posterior) -> None:
    """Raise a ValueError if a pass read another number of examples than were drawn; collective.

    N, for which the sample stands, is then wrong, too. The numbers of whole batches are not known.
    """
    loader = batches.get_loader() if isinstance(batches, EpochBatches) else batches
    chosen = getattr(loader, "batch_sampler", None)
    drawn = sum(map(len, chosen)) if isinstance(chosen, list) else math.nan
    drawn = sum(posterior.ranks.gather(drawn))
    if not math.isnan(drawn) and drawn != posterior.sample_size:
        raise ValueError(
            f"The curvature pass read {posterior.sample_size} examples of a sample of {drawn}. A "
            "collate_fn must neither omit nor repeat examples, because N, their number, comes from "
            "the sampler. Omit examples in the data set, for example by torch.utils.data.Subset."
        )


def _is_of_examples(loader: Loader) -> bool:
    """Return whether batches of any examples may replace the loader's own.

    A user's batch sampler may group examples that fit together, and an ``__iter__`` may change
    them. For such loaders whole batches are drawn.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    origins = (type(loader).__iter__.__module__, type(loader.batch_sampler).__module__)
    return all(origin.split(".")[0] in ("torch", "torchdata", "accelerate") for origin in origins)


def _with_batches(
    loader: DataLoader[Any], batches: list[list[Any]], generator: torch.Generator
) -> DataLoader[Any]:
    """Return a DataLoader of the same dataset, which yields these batches."""
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
    """Iterable over a function's generator, the same in each iteration."""

    def __init__(self, make: Callable[[torch.Generator], Iterable[Any]], seed: int) -> None:
        self._make, self._seed = make, seed

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make(torch.Generator().manual_seed(self._seed)))


class _Some:
    """Batches of a loader by their numbers. The loader is read up to the last of them."""

    def __init__(self, loader: Loader, numbers: set[int]) -> None:
        self._loader, self._numbers = loader, numbers

    def get_loader(self) -> Loader:
        """Return the underlying loader."""
        return self._loader

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        number, last = -1, max(self._numbers)
        for number, batch in enumerate(self._loader):
            if number in self._numbers:
                yield batch
            if number == last:
                return
        dataset = getattr(self._loader, "dataset", None)
        if isinstance(self._loader, DataLoader) and not isinstance(dataset, IterableDataset):
            raise ValueError(  # N, which comes from the sampler, is then wrong, too
                f"The loader yields {number + 1} batches, but its length promises at least "
                f"{last + 1}. Correct the lengths of its sampler and batch_sampler."
            )
