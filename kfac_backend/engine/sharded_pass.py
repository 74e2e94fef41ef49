"""A pass of ranks that share one model under `fully_shard`.

FSDP gathers the parameters of a module each time that it runs, from all ranks. So all must run the
model equally often: each batch, each vector, and each step of the proof. A rank that has no more
batches runs along. They prepare on the same examples, a few of each rank that misses something.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from kfac_backend.engine.batches import detached, examples, splits_by_example
from kfac_backend.engine.candidates import MOST_EXAMPLES
from kfac_backend.engine.capture import Capture
from kfac_backend.engine.proof import Proof
from kfac_backend.engine.rule_assignment import TrackedLayer
from kfac_backend.engine.task import Task
from kfac_backend.likelihoods import counted_terms
from kfac_backend.options import KfacApprox
from kfac_backend.precision import full_float32
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import ranks_of_model, resharded


class Preparing(Protocol):
    """A driver, as far as ranks prepare together."""

    model: nn.Module
    device: torch.device
    ranks: Ranks
    task: Task
    proof: Proof
    kfac_approx: KfacApprox

    def prepare(self, x: Any, y: Any, mask: Tensor | None) -> Any:
        """A batch's targets; the first batches make the proof, and decide the mode, for all."""


class ShardedPass:
    """What a driver does together with the ranks that share its model; all of it is collective.

    Args:
        driver: this rank's.
    """

    def __init__(self, driver: Preparing) -> None:
        self._driver = driver
        # An input and targets that all ranks have, for one without a batch.
        self._common: tuple[Any, Any] | None = None

    def check_ranks(self) -> None:
        """Raise an error unless the ranks of the model are those that pass over the data.

        Raises:
            RuntimeError: the ranks' process group has ended.
            ValueError: the pass is of other ranks.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "The process group of the ranks that share the model has ended "
                "(destroy_process_group), so that no rank can gather its parameters. Pass over the "
                "data before, or make a whole model of it while the group is there "
                "(torch.distributed.checkpoint.state_dict.get_model_state_dict with "
                "full_state_dict=True)."
            )
        number, size = ranks_of_model(self._driver.model), self._driver.ranks.size
        if number != size:
            raise ValueError(
                f"The model is sharded over {number} ranks, and {size} of them shall pass over the "
                "data. All run it together: pass process_group='default'."
            )

    def with_other_ranks(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This rank's batches; in between it runs along with the others' batches."""
        for batch in self._driver.ranks.in_step(batches, self._driver.device):
            if batch is None:
                self._run_along()
            else:
                yield batch

    def vectors(self, vectors: Iterable[Tensor], f: Tensor) -> Iterator[Tensor]:
        """Equally many vectors on all ranks; terms that count for no example have none."""
        for vector in self._driver.ranks.in_step(vectors, self._driver.device):
            yield torch.zeros_like(f) if vector is None else vector

    def any(self, is_so: bool) -> bool:
        """Whether it is so on any rank."""
        return self._driver.ranks.any(is_so, self._driver.device)

    def prepare(self, x: Any, y: Any, mask: Tensor | None) -> Any:
        """`Driver.prepare` on the same examples of the ranks that miss something; the targets."""
        self._prepare(x, y, mask)
        return self._driver.task.targets(None, x, y, mask)

    def _prepare(self, x: Any = None, y: Any = None, mask: Tensor | None = None) -> None:
        """The same; how often the model runs depends on what these examples show.

        A rank without a batch has neither x nor y.
        """
        driver, proof = self._driver, self._driver.proof
        N = len(y) if isinstance(y, Tensor) and y.dim() else None
        knows_all = (
            proof.is_made(N) and driver.task.shifts is not None and driver.kfac_approx != "auto"
        )
        misses = y is not None and not knows_all
        if not self.any(misses):
            return
        self._common = None
        for some, its_y in self.examples_of_ranks((x, y, mask) if misses else None):
            self._common = self._common or (some, its_y)
            driver.prepare(some, its_y, driver.task.mask(some))
        if proof.assignment.diagonal:
            raise NotImplementedError(
                f"Parameter '{proof.assignment.diagonal[0]}' has no K-FAC rule, and the exact "
                "diagonal of its block (unsupported='diagonal') needs whole models; this one is "
                "under fully_shard. Freeze it (requires_grad_(False)), or use "
                "DistributedDataParallel."
            )

    def examples_of_ranks(self, batch: tuple[Any, Any, Tensor | None] | None) -> list[Any]:
        """A few examples of each rank's batch, most first, for all ranks."""
        driver, some = self._driver, None
        if batch is not None:
            x, y, mask = batch
            if splits_by_example(x, y):
                # One whose positions a mask hides, if there are any, those whose labels tell if the
                # model shifts them, and the first ones.
                hiding = 0 if mask is None else int(torch.argmin(mask.all(1).int()))
                telling = driver.task.telling_examples(y).tolist()
                index = [hiding, *telling, *range(min(len(y), MOST_EXAMPLES))]
                index = torch.tensor(list(dict.fromkeys(index)), device=driver.device)
                x, y = examples(x, index), y[index]
            some = detached(x, torch.device("cpu")), detached(y, torch.device("cpu"))
        batches = [some for some in driver.ranks.gather(some) if some is not None]
        batches.sort(key=lambda some: -len(some[1]) if isinstance(some[1], Tensor) else 0)
        return [tuple(detached(value, driver.device) for value in some) for some in batches]

    def prove_masked(self, masked: set[TrackedLayer], x: Any, y: Any, mask: Tensor | None) -> None:
        """Prove that masks do no harm in layers some of whose rows they hide, unless it is."""
        driver = self._driver
        is_new = driver.proof.needs_mask(masked, mask)
        if not self.any(is_new):
            return
        for some, its_y in self.examples_of_ranks((x, y, mask) if is_new else None):
            counted = counted_terms(its_y, driver.task.likelihood)
            driver.proof.make_for_masks(some, driver.task.mask(some), counted)

    def _run_along(self) -> None:
        """Run the model on the common examples, as often as other ranks do on a batch."""
        driver = self._driver
        with full_float32(), resharded(driver.model):  # as where a batch is added
            self._prepare()
            assert self._common is not None
            x, y = self._common
            with Capture(driver.model, driver.proof.assignment) as capture:
                f = capture.forward(x)
                capture.backward(f, self.vectors((), f))
            self.prove_masked(set(), x, y, None)
