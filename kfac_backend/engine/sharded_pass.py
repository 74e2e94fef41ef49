"""Run a pass on ranks that share one model under `fully_shard`.

FSDP gathers the parameters of a module from all ranks each time that it runs. So all ranks must run
the model equally often: for each batch, each vector, and each step of the proof. A rank without
further batches runs along. The ranks prepare on common examples, a few of each rank with something
left to prove.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from kfac_backend.engine.batches import detached, examples, splits_by_example
from kfac_backend.engine.candidates import MOST_EXAMPLES
from kfac_backend.engine.capture import Capture
from kfac_backend.engine.rule_assignment import TrackedLayer
from kfac_backend.likelihoods import counted_terms
from kfac_backend.precision import full_float32
from kfac_backend.sharding import ranks_of_model, resharded


class ShardedPass:
    """Collective steps of the drivers whose ranks share a model; ``driver`` is this rank's."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver  # a `Driver`, which imports this module
        # Common input and targets, for ranks without a batch.
        self._common: tuple[Any, Any] | None = None

    def check_ranks(self) -> None:
        """Raise an error unless exactly the ranks of the model run the pass."""
        if not dist.is_initialized():
            raise RuntimeError(
                "The process group of the ranks that share the model has ended "
                "(destroy_process_group), so no rank can gather its parameters. Run the pass "
                "before the group ends, or gather a whole model then "
                "(torch.distributed.checkpoint.state_dict.get_model_state_dict with "
                "full_state_dict=True)."
            )
        number, size = ranks_of_model(self._driver.model), self._driver.ranks.size
        if number != size:
            raise ValueError(
                f"The model is sharded over {number} ranks, but {size} of them run the pass. All "
                "must run it: pass process_group='default'."
            )

    def with_other_ranks(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return this rank's batches. In between, run along with the others' batches."""
        for batch in self._driver.ranks.in_step(batches, self._driver.device):
            if batch is None:
                self._run_along()
            else:
                yield batch

    def vectors(self, vectors: Iterable[Tensor], f: Tensor) -> Iterator[Tensor]:
        """Return equally many vectors on all ranks, with zeros for missing ones."""
        for vector in self._driver.ranks.in_step(vectors, self._driver.device):
            yield torch.zeros_like(f) if vector is None else vector

    def any(self, is_so: bool) -> bool:
        """Return whether the condition holds on any rank."""
        return self._driver.ranks.any(is_so, self._driver.device)

    def prepare(self, x: Any, y: Any, mask: Tensor | None) -> Any:
        """Return the targets, after `Driver.prepare` on common examples of ranks that need it."""
        self._prepare(x, y, mask)
        return self._driver.task.targets(None, x, y, mask)

    def _prepare(self, x: Any = None, y: Any = None, mask: Tensor | None = None) -> None:
        """Call `Driver.prepare` on the common examples, equally often on all ranks.

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
                f"Parameter '{proof.assignment.diagonal[0]}' has no K-FAC rule. The exact "
                "diagonal of its block (unsupported='diagonal') needs a whole model, but this one "
                "is under fully_shard. Freeze it (requires_grad_(False)), or use "
                "DistributedDataParallel."
            )

    def examples_of_ranks(self, batch: tuple[Any, Any, Tensor | None] | None) -> list[Any]:
        """Return a few examples of each rank's batch to all ranks, the largest sets first."""
        driver, some = self._driver, None
        if batch is not None:
            x, y, mask = batch
            if splits_by_example(x, y):
                # An example with a hidden position, if any; examples whose labels show if the model
                # shifts them; and the first ones.
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
        """Prove that masks are harmless in layers with rows that they hide, unless it is proved."""
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
        with full_float32(), resharded(driver.model):  # as for added batches
            self._prepare()
            assert self._common is not None
            x, y = self._common
            with Capture(driver.model, driver.proof.assignment) as capture:
                f = capture.forward(x)
                capture.backward(f, self.vectors((), f))
            self.prove_masked(set(), x, y, None)
